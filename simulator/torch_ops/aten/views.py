"""aten views: they move factors about and make no operator, but for slices of unequal parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    expand,
    part,
    permute,
    reshape,
    select,
)
from stratagem.simulator.torch_ops.aten.arguments import ReadingFunction, reads
from stratagem.simulator.torch_ops.aten.calls import AtenCall
from stratagem.simulator.torch_ops.aten.sources import dims_order, slice_bounds


def _same(call: AtenCall) -> Any:
    return call.given("self")


def _view(call: AtenCall) -> DraftTensor:
    return reshape(call.tensor("self"), call.shape)


def _expand(call: AtenCall) -> DraftTensor:
    return expand(call.tensor("self"), call.shape)


def _repeat(call: AtenCall) -> DraftTensor:
    """Elements again and again: what has one along a dim is expanded."""
    x, counts = call.tensor("self"), list(call.given("repeats"))
    shape = [1] * (len(counts) - len(x.dims)) + list(x.shape)
    apart = [size for pair in zip([1] * len(shape), shape, strict=True) for size in pair]
    again = [size for pair in zip(counts, shape, strict=True) for size in pair]
    if all(count == 1 or size == 1 for count, size in zip(counts, shape, strict=True)):
        return expand(reshape(x, shape), call.shape)
    return reshape(expand(reshape(x, apart), again), call.shape)


def _broadcast_tensors(call: AtenCall) -> list[DraftTensor]:
    tensors = [call.handle(each, broadcast=True) for each in call.given("tensors")]
    return [expand(each, call.shape) for each in tensors]


def _permute(call: AtenCall) -> DraftTensor:
    x = call.tensor("self")
    return permute(x, dims_order(call.operator, call.arguments, len(x.dims)))


def _select(call: AtenCall) -> DraftTensor:
    x, dim = call.whole("self"), call.given("dim")
    return select(x, dim, call.given("index") % x.shape[dim])


def _cut(call: AtenCall, x: DraftTensor, dim: int, start: int, length: int) -> DraftTensor:
    """A slice of a dim: one of equal parts where it is one (a view), else a narrow operator."""
    size = x.shape[dim]
    if length == size:
        return x
    if size % length == 0 and start % length == 0 and not x.is_broadcast:
        try:
            return part(x, dim, start // length, size // length)
        except ValueError:
            pass
    label = call.label("narrow")
    return call.builder.narrow(x, dim=dim, start=start, length=length, name=label)


def _slice(call: AtenCall) -> DraftTensor:
    x, dim = call.whole("self"), call.given("dim")
    call.refuse_unless(call.given("step") == 1, f"step {call.given('step')}")
    start, stop = slice_bounds(call.arguments, x.shape)
    return _cut(call, x, dim, start, stop - start)


def _split(call: AtenCall) -> list[DraftTensor]:
    x, dim = call.whole("self"), call.given("dim")
    size = x.shape[dim]
    if "chunks" in call.arguments:
        length = -(-size // call.given("chunks"))
        lengths = [length] * (size // length) + [size % length] * (size % length > 0)
    elif isinstance(
        sizes := call.arguments.get("split_size", call.arguments.get("split_sizes")), int
    ):
        lengths = [min(sizes, size - start) for start in range(0, size, sizes)]
    else:
        lengths = list(sizes or ())
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [_cut(call, x, dim, *bounds) for bounds in zip(starts, lengths, strict=True)]


def _unbind(call: AtenCall) -> list[DraftTensor]:
    x, dim = call.whole("self"), call.given("dim")
    return [select(x, dim, index) for index in range(x.shape[dim])]


_SHAPED = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze")

VIEW_HANDLERS: dict[str, ReadingFunction[Callable[[AtenCall], Any]]] = {
    **dict.fromkeys(("alias", "contiguous"), reads("self")(_same)),
    **dict.fromkeys((*_SHAPED, "view_as", "reshape_as", "ravel"), reads("self")(_view)),
    **dict.fromkeys(("expand", "expand_as"), reads("self")(_expand)),
    "broadcast_tensors": reads("tensors")(_broadcast_tensors),
    "repeat": reads("self", "repeats")(_repeat),
    "permute": reads("self", "dims")(_permute),
    "transpose": reads("self", "dim0", "dim1")(_permute),
    **dict.fromkeys(("t", "numpy_T", "mT"), reads("self")(_permute)),
    "select": reads("self", "dim", "index")(_select),
    "slice": reads("self", "dim", "start", "end", "step")(_slice),
    "split": reads("self", "split_size", "dim")(_split),
    "split_with_sizes": reads("self", "split_sizes", "dim")(_split),
    "chunk": reads("self", "chunks", "dim")(_split),
    "unbind": reads("self", "dim")(_unbind),
}
"""aten name → handler and the arguments that it reads, for results that share memory with one."""
