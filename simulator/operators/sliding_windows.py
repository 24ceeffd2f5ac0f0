"""Windows that slide: which part of an input a part of a result needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.simulator.operators.operator import Operator, shape_of


@dataclass(frozen=True)
class Window:
    """Along one dim, result o is made of the inputs o·stride − padding + t·dilation, t < size.

    Example:
        >>> Window(3, 2, 1, 1, extent=8).reach(2, 4)
        (3, 8)

    `extent` is the number of inputs.
    """

    size: int
    stride: int
    padding: int
    dilation: int
    extent: int

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """The inputs that results from `start` to `stop` need, padding counted in."""
        first = start * self.stride - self.padding
        return first, first + (stop - start - 1) * self.stride + self.span

    def inside(self, start: int, stop: int) -> tuple[int, int]:
        """Those of them that are not padding."""
        first, last = (min(max(end, 0), self.extent) for end in self.reach(start, stop))
        return first, last

    @property
    def span(self) -> int:
        """From the first to the last input of a window."""
        return self.dilation * (self.size - 1) + 1

    @property
    def is_pointwise(self) -> bool:
        """Whether each result is made of the input at its own place."""
        return (self.size, self.stride, self.padding) == (1, 1, 0)

    def halo(self, results: int, ways: int) -> int:
        """The most inputs that one of `ways` shards of `results` needs from others.

        Example:
            >>> Window(3, 1, 1, 1, extent=9).halo(9, 3)
            2
        """
        most = 0
        for i in range(ways):
            first, last = self.inside(*shard_bounds(results, [ways], [i]))
            start, stop = shard_bounds(self.extent, [ways], [i])
            most = max(most, last - first - max(0, min(last, stop) - max(first, start)))
        return most


def window_of(operator: Operator, loop: str) -> Window:
    """The window that slides along dim `loop` of the result of a convolution or a pooling."""
    place = window_place(operator, loop)
    given = operator.attributes
    kernel = given.get("kernel") or kernel_sizes(operator)
    return Window(
        size=kernel[place],
        stride=given["stride"][place],
        padding=given["padding"][place],
        dilation=given["dilation"][place] if "dilation" in given else 1,
        extent=operator.sizes[operator.windows[loop]],
    )


def window_place(operator: Operator, loop: str) -> int:
    """The place of a dim of the result among those that windows slide along, 0 for the first."""
    layout = operator.outputs[0].layout
    return layout.index((loop,)) - len(layout) + num_sliding(operator)


def kernel_sizes(operator: Operator) -> tuple[int, ...]:
    """The sizes of the windows of a convolution, whose weights are stored or computed."""
    computed = [each.layout for each in operator.inputs[1:]]
    stored = [each.layout for each in operator.weights]
    return shape_of([*computed, *stored][0][-num_sliding(operator) :], operator.sizes)


def num_sliding(operator: Operator) -> int:
    """Along how many dims, the last ones, the windows of an operator slide."""
    return len(operator.attributes["stride"])


def shard_bounds(size: int, splits: Sequence[int], coordinates: Sequence[int]) -> tuple[int, int]:
    """Start and stop of one shard: ceil-division, axis after axis.

    Example:
        >>> shard_bounds(10, [4], [3])
        (9, 10)
    """
    start, stop = 0, size
    for ways, index in zip(splits, coordinates, strict=True):
        chunk = -(-(stop - start) // ways)
        start, stop = min(start + index * chunk, stop), min(start + (index + 1) * chunk, stop)
    return start, stop
