"""What a pass of calls costs: counted on tensors that have shapes and no numbers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stratagem.simulator.operators.kinds.generics import Work
from stratagem.simulator.torch_ops.generic.calls import Call, run_calls
from stratagem.simulator.torch_ops.generic.own_backwards import behind
from stratagem.simulator.torch_ops.generic.trials import OperandShape

_MATRICES = ("mm", "bmm", "addmm", "baddbmm")


@dataclass(frozen=True)
class Counts:
    """The work of whole operands, whether the result has a gradient, and operands written to.

    Schemas do not say all of these: ``aten::instance_norm`` is said to write to nothing.
    """

    work: Work
    differentiable: bool
    written: tuple[int, ...] = ()


def count_work(
    calls: Sequence[Call], operands: Sequence[OperandShape], shape: Sequence[int]
) -> Counts:
    """Count both passes of calls on operands of such shapes.

    Example:
        >>> flip = [["aten::flip.default", [["in", 0], [1]], {}]]
        >>> count_work(flip, [OperandShape(((8,), (3,)), "float32")], (8, 3)).work.moved
        48.0
    """
    return _counted(json.dumps(list(calls)), tuple(operands), tuple(shape))


@functools.lru_cache(4096)
def _counted(written: str, operands: tuple[OperandShape, ...], shape: tuple[int, ...]) -> Counts:
    calls: list[Call] = json.loads(written)
    given = [
        torch.empty(
            [math.prod(dim) for dim in each.dims],
            dtype=getattr(torch, each.dtype),
            device="meta",
            requires_grad=each.has_gradient,
        )
        for each in operands
    ]
    forward, backward, saved = _Counter(), _Counter(), _Saved()
    versions = [each._version for each in given]
    try:
        hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, _unchanged)
        with torch.enable_grad(), hooks, forward:
            made = run_calls(calls, given, (), shape, torch.device("meta"))
        changed = tuple(k for k, each in enumerate(given) if each._version != versions[k])
        leaves = [each for each in given if each.requires_grad]
        if made.requires_grad:
            with backward:
                torch.autograd.grad(made, leaves, torch.ones_like(made), allow_unused=True)
    except Exception:  # torch has no shapes for it: what it reads and makes is all that is known
        return Counts(_least(operands, shape), any(each.has_gradient for each in operands))
    product = forward.product
    return Counts(
        Work(
            flops=forward.multiplied if product else forward.flops,
            moved=forward.moved,
            kernels=max(1, forward.kernels),
            backward_moved=backward.moved,
            backward_kernels=backward.kernels,
            product=product,
            saved=saved.slots(given),
            saves_output=saved.holds(made),
            inside=saved.inside([*given, made]),
        ),
        bool(made.requires_grad),
        changed,
    )


def _least(operands: Sequence[OperandShape], shape: Sequence[int]) -> Work:
    read = sum(math.prod(math.prod(dim) for dim in each.dims) for each in operands)
    made = math.prod(shape)
    slots = tuple(range(len(operands)))
    return Work(float(made), float(read + made), 1, float(read + made), 1, None, slots, False, 0.0)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts kernels, the scalars that they read and write, and operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.multiplied = self.moved = 0.0
        self.kernels = 0
        self.product: tuple[int, int, int] | None = None
        self._largest = 0.0
        self._is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        within = behind(func)
        if within is not None:
            self._is_inside = True
            with self:
                made = within(*args, **kwargs)
            self._is_inside = False
            return made
        if self._is_inside:
            with self:  # No autograd above it has taken it apart.
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        if not func.is_view and "empty" not in str(func):
            self._count(func, args, kwargs, made)
        return made

    def _count(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        written = [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]
        read = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self.kernels += 1
        self.moved += float(sum(each.numel() for each in (*read, *written)))
        counter = flop_registry.get(func._overloadpacket)
        if counter is None:
            self.flops += float(max((each.numel() for each in (*read, *written)), default=0))
            return
        flops = float(counter(*args, **kwargs, out_val=made))
        self.flops += flops
        self.multiplied += flops
        if flops > self._largest and written:
            self._largest = flops
            self.product = _product(func, written[0].shape)


def _product(func: Any, shape: Sequence[int]) -> tuple[int, int, int]:
    """Rows, columns and batch: a convolution has the channels of its result as columns."""
    if func._overloadpacket.__name__ in _MATRICES:
        return int(shape[-2]), int(shape[-1]), math.prod(shape[:-2])
    columns = int(shape[1]) if len(shape) > 1 else 1
    return max(1, math.prod(shape) // columns), columns, 1


class _Saved:
    """What autograd keeps for backward."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def pack(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is saved."""
        self._kept.append(tensor)
        return tensor

    def slots(self, given: Sequence[Tensor]) -> tuple[int, ...]:
        """Which of the operands are."""
        return tuple(k for k, each in enumerate(given) if self.holds(each))

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or a view of it."""
        return any(_storage(each) == _storage(tensor) for each in self._kept)

    def inside(self, known: Sequence[Tensor]) -> float:
        """Bytes of all others."""
        outside = {_storage(each) for each in known}
        inside = {
            _storage(each): each.untyped_storage().nbytes()
            for each in self._kept
            if _storage(each) not in outside
        }
        return float(sum(inside.values()))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
