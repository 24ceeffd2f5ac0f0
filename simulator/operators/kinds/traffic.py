"""How many bytes each pass of an operator moves through memory, and in how many kernels.

Counted are reads and writes of whole tensors by the kernels that eager PyTorch launches. Tensors
count with the bytes of the training precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stratagem.simulator.base.arrays import Amounts
from stratagem.simulator.operators.operator import Layout, Operator, shape_of

Sizes = Mapping[str, int]

FLOAT32 = 4

_PUT_TOGETHER, _KERNELS_OF_DOUBLING = 12, 5
"""A doubling of a scan reads and writes so many scalars for each state, in so many kernels: two
products, a sum and two copies."""


@dataclass(frozen=True)
class Moved:
    """Bytes through memory and number of kernels of one pass: of a shard, or of many shards."""

    nbytes: Amounts
    kernels: Amounts


class KernelChoice(Protocol):
    """What decides which kernels run, and on what: `Training` is one."""

    @property
    def parameter_bytes(self) -> int:
        """Of a scalar."""
        ...

    @property
    def fused_elementwise(self) -> bool:
        """Whether a chain is one kernel."""
        ...

    @property
    def eager_loss(self) -> bool:
        """Whether the loss works on float32 copies of the logits."""
        ...


@runtime_checkable
class Traffic(Protocol):
    """What the passes of a kind of operator move."""

    @property
    def passes(self) -> float:
        """How often a forward pass moves all its tensors, for devices without constants."""
        ...

    def family(self, operator: Operator) -> str:
        """The kernels whose share of the bandwidth it has (`MemoryConstants.shares`)."""
        ...

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """What the forward pass moves."""
        ...

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """What the backward pass moves."""
        ...


@dataclass(frozen=True)
class EachTensorOnce:
    """Forward reads its inputs and writes its output; backward has a kernel for each input."""

    passes: float = 1.0

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        return "elementwise"

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        return Moved(1.0 * choice.parameter_bytes * _once(operator, sizes), 1)

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        nbytes = 1.0 * choice.parameter_bytes * _once(operator, sizes)
        return Moved(nbytes, len(operator.inputs))


@dataclass(frozen=True)
class LikeInput:
    """How often a kind's kernels read or write a tensor of the size of its input.

    Attributes:
        kernels_of: the family.
        reads: and writes of forward.
        back: those of backward.
        kernels: of forward.
        back_kernels: of backward.
        passes: see `Traffic`.
    """

    kernels_of: str
    reads: float
    back: float
    kernels: int = 1
    back_kernels: int = 1
    passes: float = 1.5

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        return self.kernels_of

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        return Moved(
            self.reads * choice.parameter_bytes * input_size(operator, sizes), self.kernels
        )

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        whole = choice.parameter_bytes * input_size(operator, sizes)
        return Moved(self.back * whole, self.back_kernels)


@dataclass(frozen=True)
class LikeOutput:
    """As often as its output is large; backward of a look-up has its table to write as well.

    Attributes:
        back: reads and writes of backward of a tensor of the size of the output.
        back_kernels: of backward.
        writes_table: whether backward zeroes the gradient of the first weight.
    """

    back: float
    back_kernels: int
    writes_table: bool = False
    passes: float = 1.0

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        return "elementwise"

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        return Moved(2.0 * choice.parameter_bytes * output_size(operator, sizes), 1)

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        table = num_elements(operator.weights[0].layout, sizes) if self.writes_table else 0
        scalars = table + self.back * output_size(operator, sizes)
        return Moved(choice.parameter_bytes * scalars, self.back_kernels)


@dataclass(frozen=True)
class OfLogits:
    """A cross-entropy, in one kernel a pass or on float32 copies of the logits.

    One kernel reads the logits, and in backward writes their gradient: beside them or over them.
    """

    passes: float = 2.0

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        return "elementwise"

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        item, logits = choice.parameter_bytes, input_size(operator, sizes)
        if not choice.eager_loss:
            return Moved(1.0 * item * logits, 1)
        # To float32 and back, where it is not already; logarithms of the softmax are written.
        widened = item + FLOAT32 if item < FLOAT32 else 0
        return Moved((widened + 2.0 * FLOAT32) * logits, 2 if item == FLOAT32 else 3)

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        item, logits = choice.parameter_bytes, input_size(operator, sizes)
        if not choice.eager_loss:
            return Moved(2.0 * item * logits, 1)
        # The gradient of the loss is spread over zeros, then that of the softmax is taken.
        narrowed = item + FLOAT32 if item < FLOAT32 else 0
        return Moved((4.0 * FLOAT32 + narrowed) * logits, 3 if item == FLOAT32 else 4)


@dataclass(frozen=True)
class OfScan:
    """A selective scan by chunks of time: its states are float32, and lie in memory by chunks.

    Attributes:
        chunk: steps of a chunk, which are put together in doubling distances.
        passes: see `Traffic`.
    """

    chunk: int
    passes: float = 2.0

    def family(self, operator: Operator) -> str:
        """See `Traffic`."""
        return "elementwise"

    def forward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        chunks, doublings = self._course(operator, sizes)
        # Of each state: decays and what is fed are made (5), put together, and read once more.
        scalars = (6 + _PUT_TOGETHER * doublings) * self._states(operator, sizes)
        return Moved(FLOAT32 * scalars, chunks * (8 + _KERNELS_OF_DOUBLING * doublings))

    def backward(self, operator: Operator, sizes: Sizes, choice: KernelChoice) -> Moved:
        """See `Traffic`."""
        chunks, doublings = self._course(operator, sizes)
        # States are made twice, what is asked of them once; five sums read them.
        scalars = (34 + 3 * _PUT_TOGETHER * doublings) * self._states(operator, sizes)
        return Moved(FLOAT32 * scalars, chunks * (40 + 3 * _KERNELS_OF_DOUBLING * doublings))

    def _course(self, operator: Operator, sizes: Sizes) -> tuple[int, int]:
        """Chunks, and how often the distance doubles in the longest."""
        (steps,) = shape_of(operator.inputs[0].layout[-1:], sizes)
        return math.ceil(steps / self.chunk), math.ceil(math.log2(min(steps, self.chunk)))

    def _states(self, operator: Operator, sizes: Sizes) -> float:
        return 1.0 * math.prod(sizes[dim.name] for dim in operator.dims)


def num_elements(layout: Layout, sizes: Sizes) -> int:
    """Scalars of a tensor with local sizes."""
    return math.prod(shape_of(layout, sizes))


def input_size(operator: Operator, sizes: Sizes) -> int:
    """Scalars of the first input."""
    return num_elements(operator.inputs[0].layout, sizes)


def output_size(operator: Operator, sizes: Sizes) -> int:
    """Scalars of the output."""
    return num_elements(operator.outputs[0].layout, sizes)


def _once(operator: Operator, sizes: Sizes) -> int:
    read = sum(num_elements(each.layout, sizes) for each in operator.inputs)
    return read + output_size(operator, sizes)
