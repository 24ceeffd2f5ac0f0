"""Trials of calls on small tensors: whole, and in parts that are put together again."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stratagem.simulator.operators.step_programs import is_reference
from stratagem.simulator.torch_ops.generic.calls import Call, run_calls

LARGEST = 2**23
"""Scalars of all tensors of a trial; what torch cannot make smaller is not tried."""

_DRAWS = 4
"""Times that whole numbers are drawn until there is a result."""

_META = torch.device("meta")

_RELATIVE, _ABSOLUTE = 1e-7, 1e-9
_OF_FLOAT32 = 1e4
"""How much more float32 may be off than float64."""


class FactorPlace(NamedTuple):
    """A factor of a dim of an operand."""

    operand: int
    dim: int
    leaf: int


class Target(NamedTuple):
    """A factor of a dim of the result, and the product of the factors outside of it."""

    dim: int
    outer: int


class Mode(enum.Enum):
    """What the results of parts are to the result of the whole."""

    EACH = "its parts, one after the other"
    SUM = "their sum"
    MEAN = "their mean, each counted by its size"


@dataclass(frozen=True)
class OperandShape:
    """The factors of every dim of an operand, and whether its gradient may be asked for."""

    dims: tuple[tuple[int, ...], ...]
    dtype: str
    trained: bool = True

    @property
    def is_float(self) -> bool:
        """Whether it holds numbers that have fractions."""
        return "float" in self.dtype

    @property
    def has_gradient(self) -> bool:
        """Whether it may have a gradient."""
        return self.trained and self.is_float


Sizes = dict[FactorPlace, int]
Indices = Sequence[Tensor]


@dataclass(frozen=True)
class _Run:
    """Operands, what was made of them, and gradients of the floats among the operands."""

    operands: tuple[Tensor, ...]
    result: Tensor
    cotangent: Tensor | None
    gradients: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _Whole:
    """What is drawn beside activations.

    Attributes:
        highest: one above the largest whole number.
        special: a whole number that some are instead; None for none.
        fed: draws floats that no gradient is asked for, if not as the others.
    """

    highest: int
    special: int | None = None
    fed: Callable[..., Tensor] | None = None

    def numbers(self, shape: Sequence[int]) -> Tensor:
        drawn = torch.randint(self.highest, shape)
        if self.special is None:
            return drawn
        return drawn.masked_fill(torch.rand(shape) < 0.4, self.special)


class Trial:
    """Runs calls on tensors of other sizes than those that they were exported with."""

    def __init__(self, calls: Sequence[Call], operands: Sequence[OperandShape]) -> None:
        self._calls = calls
        self._operands = operands
        self._wholes: list[_Run] = []
        self._sizes: Sizes = {}
        self._made: tuple[int, ...] = ()
        self._numbers = sorted({each for each in _integers(list(calls)) if not 0 <= each < 3})
        self.told_shape = "'shape': True" in repr(calls)
        # Others are given none: where numbers say places, as in grid_sample, kernels read at none
        # of them, and that may end the process.
        self._leaves_out_nan = any(name.startswith("aten::nan") for name, *_ in calls)

    def shape(
        self, sizes: Mapping[FactorPlace, int], expected: Sequence[int]
    ) -> tuple[int, ...] | None:
        """The shape of the result, None where torch takes no such sizes; computes nothing."""
        given = [
            torch.empty(self._shape_of(k, sizes), dtype=getattr(torch, each.dtype), device=_META)
            for k, each in enumerate(self._operands)
        ]
        made = self._tried(given, expected, _META)
        return None if made is None else tuple(made.shape)

    def begin(self, sizes: Sizes, shape: Sequence[int]) -> bool:
        """Run the calls on whole operands of `sizes`; whether that could be done."""
        self._sizes, self._made = sizes, tuple(shape)
        scalars = math.prod(shape) + sum(
            math.prod(self._shape_of(k, sizes)) for k in range(len(self._operands))
        )
        if scalars > LARGEST:
            return False
        self._wholes = []
        for draw in (torch.randn, _unit):
            drawn = (self._whole(draw, _Whole(highest)) for highest in (3, 2, 1))
            self._wholes += itertools.islice((run for run in drawn if run is not None), 1)
        # What comes from the batch may say which of two things is done: 1 or -1, 1 or 0.
        runs = (self._whole(torch.randn, _Whole(2, fed=fed)) for fed in (_signs, _truths))
        self._wholes += [run for run in runs if run is not None]
        if not self._wholes:
            return False
        # What is left out where it is there, as targets that are ignored: others then count more.
        special = [(_unit, _Whole(2, number)) for number in self._numbers]
        holes = [(_with_holes, _Whole(2))] if self._leaves_out_nan else []
        for draw, whole in [*special, *holes]:
            run = self._whole(draw, whole)
            if run is not None:
                self._wholes.append(run)
        return True

    def confirms(self, places: Sequence[FactorPlace], target: Target | None) -> Mode | None:
        """What parts are to the whole, if they make it in every way; None if they do not."""
        size = self._sizes[places[0]]
        if size < 2 or any(self._sizes[each] != size for each in places):
            return None
        if target is not None and self._made[target.dim] % (target.outer * size):
            return None
        every = torch.arange(size)
        partitions = [(every[:1], every[1:]), (every[::2], every[1::2])]
        modes = [Mode.EACH] if target is not None else [Mode.SUM, Mode.MEAN]
        for mode in modes:
            if all(
                self._agree(whole, places, target, mode, parts)
                for whole in self._wholes
                for parts in partitions
            ):
                return mode
        return None

    def _agree(
        self,
        whole: _Run,
        places: Sequence[FactorPlace],
        target: Target | None,
        mode: Mode,
        parts: Indices,
    ) -> bool:
        if mode is not Mode.EACH and not whole.result.is_floating_point():
            return False
        size = self._sizes[places[0]]
        total = torch.zeros_like(whole.result)
        sums: dict[int, Tensor] = {}
        of = {place.operand: place for place in places}
        for index in parts:
            share = len(index) / size if mode is Mode.MEAN else 1.0
            run = self._part(whole, of, target, share, index)
            if run is None:
                return False
            if target is not None:
                if not _same(run.result, self._picked(whole.result, target, size, index)):
                    return False
            elif run.result.shape != total.shape:
                return False
            else:
                total = total + share * run.result
            for k, (gradient, mine) in enumerate(zip(whole.gradients, run.gradients, strict=True)):
                if gradient is None or mine is None:
                    if gradient is not None or mine is not None:
                        return False
                elif k in of:
                    if not _same(mine, self._part_of(gradient, of[k], index)):
                        return False
                else:
                    sums[k] = sums[k] + mine if k in sums else mine
        if target is None and not _same(total, whole.result):
            return False
        return all(
            _same(sums[k], gradient)
            for k, gradient in enumerate(whole.gradients)
            if k not in of and gradient is not None
        )

    def _part(
        self,
        whole: _Run,
        of: Mapping[int, FactorPlace],
        target: Target | None,
        share: float,
        index: Tensor,
    ) -> _Run | None:
        operands = [
            self._part_of(each, of[k], index) if k in of else each
            for k, each in enumerate(whole.operands)
        ]
        size = self._sizes[next(iter(of.values()))]
        shape, cotangent = list(self._made), whole.cotangent
        if target is not None:
            shape[target.dim] = shape[target.dim] // size * len(index)
            if cotangent is not None:
                cotangent = self._picked(cotangent, target, size, index)
        elif cotangent is not None:
            cotangent = share * cotangent
        shown = self._tried([each.to(_META) for each in operands], shape, _META)
        if shown is None or list(shown.shape) != shape:
            return None
        return self._ran(operands, shape, cotangent)

    def _whole(self, draw: Callable[..., Tensor], whole: _Whole) -> _Run | None:
        """A run on what is drawn, again where whole numbers are not of the kind that is asked for.

        Lengths of sequences may be such that a loss of them has no end.
        """
        counts = any(not each.is_float for each in self._operands)
        runs = (self._drawn(draw, whole) for _ in range(_DRAWS if counts else 1))
        return next((run for run in runs if run is not None), None)

    def _drawn(self, draw: Callable[..., Tensor], whole: _Whole) -> _Run | None:
        given = []
        for k, each in enumerate(self._operands):
            shape = self._shape_of(k, self._sizes)
            if each.is_float:
                of = draw if each.trained or whole.fed is None else whole.fed
                given.append(of(shape, dtype=torch.float64))
            elif each.dtype == "bool":
                given.append(torch.rand(shape) < 0.5)
            else:
                given.append(whole.numbers(shape).to(getattr(torch, each.dtype)))
        for dtype in (torch.float64, torch.float32):
            cast = [each.to(dtype) if each.is_floating_point() else each for each in given]
            made = self._tried(cast, self._made, torch.device("cpu"))
            if made is None or tuple(made.shape) != self._made:
                continue
            cotangent = (
                torch.randn(made.shape).to(made.dtype) if made.is_floating_point() else None
            )
            run = self._ran(cast, self._made, cotangent)
            if run is not None and _finite(run.result, *run.gradients) and _says_something(run):
                return run
        return None

    def _ran(
        self, operands: Sequence[Tensor], shape: Sequence[int], cotangent: Tensor | None
    ) -> _Run | None:
        leaves = [
            each.detach().clone().requires_grad_(shape.has_gradient)
            for each, shape in zip(operands, self._operands, strict=True)
        ]
        with torch.enable_grad():
            made = self._tried(leaves, shape, torch.device("cpu"))
        if made is None:
            return None
        gradients: list[Tensor | None] = [None] * len(leaves)
        if cotangent is not None and made.requires_grad:
            if made.shape != cotangent.shape:
                return None
            wanted = [k for k, each in enumerate(leaves) if each.requires_grad]
            try:
                found = torch.autograd.grad(
                    made, [leaves[k] for k in wanted], cotangent, allow_unused=True
                )
            except RuntimeError:
                return None
            for k, gradient in zip(wanted, found, strict=True):
                gradients[k] = gradient
        return _Run(tuple(operands), made.detach(), cotangent, tuple(gradients))

    def _tried(
        self, operands: Sequence[Tensor], shape: Sequence[int], device: torch.device
    ) -> Tensor | None:
        """What the calls make; None where torch refuses, whichever way it says so."""
        try:
            made = run_calls(self._calls, operands, (), shape, device)
        except Exception:
            return None
        return made if isinstance(made, Tensor) else None

    def _shape_of(self, operand: int, sizes: Mapping[FactorPlace, int]) -> list[int]:
        return [
            math.prod(sizes[FactorPlace(operand, dim, leaf)] for leaf in range(len(leaves)))
            for dim, leaves in enumerate(self._operands[operand].dims)
        ]

    def _part_of(self, tensor: Tensor, place: FactorPlace, index: Tensor) -> Tensor:
        outer = math.prod(
            self._sizes[FactorPlace(place.operand, place.dim, leaf)] for leaf in range(place.leaf)
        )
        return self._picked(tensor, Target(place.dim, outer), self._sizes[place], index)

    def _picked(self, tensor: Tensor, target: Target, size: int, index: Tensor) -> Tensor:
        """The part of a tensor that has some indices of a factor of a dim."""
        shape, at = tensor.shape, target.dim
        apart = tensor.reshape(*shape[:at], target.outer, size, -1, *shape[at + 1 :])
        part = apart.index_select(at + 1, index)
        return part.reshape(*shape[:at], -1, *shape[at + 1 :])


def _unit(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers that are probabilities, and whose logarithms and roots are defined."""
    return torch.rand(shape, dtype=dtype) * 0.8 + 0.1


def _signs(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """1 or -1."""
    return torch.randint(2, shape).to(dtype) * 2 - 1


def _truths(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """1 or 0."""
    return torch.randint(2, shape).to(dtype)


def _says_something(run: _Run) -> bool:
    """Whether not everything is 0, which is the same however it is cut."""
    return any(bool(each.any()) for each in (run.result, *run.gradients) if each is not None)


def _with_holes(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers among which some are none: means that leave them out are of fewer."""
    drawn = torch.randn(shape, dtype=dtype)
    return drawn.masked_fill(torch.rand(shape) < 0.3, torch.nan)


def _integers(argument: Any) -> Iterator[int]:
    """The whole numbers among arguments."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        yield argument
    elif isinstance(argument, Mapping):
        yield from _integers(list(argument.values()))
    elif isinstance(argument, list) and not is_reference(argument):
        for each in argument:
            yield from _integers(each)


def _same(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, two))
    loose = 1.0 if one.dtype == torch.float64 else _OF_FLOAT32
    scale = float(two.abs().max()) if two.numel() else 0.0
    return bool(
        torch.allclose(one, two, rtol=_RELATIVE * loose, atol=(_ABSOLUTE + 1e-10 * scale) * loose)
    )


def _finite(*tensors: Any) -> bool:
    return all(
        bool(torch.isfinite(each).all())
        for each in tensors
        if each is not None and each.is_floating_point()
    )
