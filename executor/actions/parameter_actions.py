"""The actions about parameters: norms, numbers that updates ask for, updates and directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.actions.registry import Action, runs
from stratagem.executor.optimizers.make_optimizer import muon_of
from stratagem.executor.optimizers.measuring import Measuring
from stratagem.executor.optimizers.muon import moved_by
from stratagem.executor.program.instructions import Direct, Measure, Norm, Update, Updated
from stratagem.executor.state.gradient_lists import (
    GradientChange,
    clip_scale,
    clipped,
    handfuls,
    norm_of_all,
    sum_of_powers,
)


@runs(Norm)
def norm(instruction: Norm, rank: RankState) -> Action:
    """The action of finding the norm of all gradients, and whether they are finite."""
    values, comm = rank.memory.values, rank.comm
    order = float(rank.program.plan.training.clip_norm_type)
    counted = [
        value
        for value, stage, placements in instruction.gradients
        if rank.parts.seats[stage].is_first(placements)
    ]

    def run() -> None:
        powers = sum_of_powers([values[value] for value in counted], comm.device, order)
        found = norm_of_all(comm, powers, order) / rank.memory.seed
        values[instruction.value] = found
        if rank.scale is not None:
            rank.overflowed = not bool(found.isfinite())
            rank.scale.update(overflowed=rank.overflowed)

    return run


@runs(Measure)
def measure(instruction: Measure, rank: RankState) -> Action:
    """The action that brings together what ranks measure of their parts of all parameters."""
    values, comm, number = rank.memory.values, rank.comm, instruction.number
    here, everyone = instruction.parameters, tuple(range(comm.world_size))
    named = [each.updated for each in here]
    counted = [
        each.counts and rank.parts.seats[each.stage].is_first(each.placements) for each in here
    ]
    shapes = rank.program.graph.parameter_index
    first = _measuring(rank)
    ends = [*accumulate(first.count(number, shapes[name].shape) for name in instruction.names)]
    own = {
        name: slice(begun, end)
        for name, begun, end in zip(instruction.names, (0, *ends), ends, strict=False)
    }

    def run() -> None:
        optimizer = _measuring(rank)
        row = torch.zeros(ends[-1], dtype=optimizer.dtype, device=comm.device)
        if not rank.overflowed and named:
            length = None if instruction.norm is None else values[instruction.norm]
            found = [
                numbers
                for handful in handfuls(_changes(named, rank))
                for numbers in optimizer.measure(number, _scaled(handful, length, rank))
            ]
            for each, counts, numbers in zip(named, counted, found, strict=True):
                if counts:
                    row[own[each.parameter]] = numbers
        whole = comm.all_reduce(row, everyone, optimizer.reduction)
        values[instruction.value] = whole
        if not rank.overflowed:
            names = [each.parameter for each in named]
            optimizer.take(number, {name: whole[own[name]] for name in names})

    return run


def _measuring(rank: RankState) -> Measuring:
    assert isinstance(rank.optimizer, Measuring), "no other optimizer measures"
    return rank.optimizer


@runs(Update)
def update(instruction: Update, rank: RankState) -> Action:
    """The action of updating the parameters of an operator."""
    return update_all([instruction], rank)


def update_all(instructions: Sequence[Update], rank: RankState) -> Action:
    """What updates the parameters of some operators, a handful of them at a time."""
    every = [each for update in instructions for each in update.parameters]
    named = [each for each in every if each.direction is None]
    moves = [_mover(each, rank) for each in every if each.direction is not None]
    kept = {
        each.parameter: (rank.states[each.value], update.share)
        for update in instructions
        for each in update.parameters
    }
    norm = instructions[0].norm

    def run() -> None:
        length = None if norm is None else rank.memory.values[norm]
        inside, changes = _scale_inside(length, rank), _changes(named, rank)
        if inside is None or rank.keeps_gradients:
            for handful in handfuls(changes):
                scaled = _scaled(handful, length, rank)
                if rank.keeps_gradients:
                    for change in scaled:
                        state, share = kept[change.name]
                        state.keep_gradient(change.gradient, share)
                if inside is None and not rank.overflowed:
                    rank.optimizer.all_of(scaled)
        if inside is not None:
            rank.optimizer.all_of(changes, inside)
        if moves and not rank.overflowed:
            rank.optimizer.all_of([move() for move in moves])

    return run


@runs(Direct)
def direct(instruction: Direct, rank: RankState) -> Action:
    """The action of making this rank's part of a direction."""
    values, updated, norm = rank.memory.values, instruction.updated, instruction.norm
    state = rank.states[updated.value]

    def run() -> None:
        change = state.changed_by(values[updated.gradient])
        (scaled,) = _scaled([change], None if norm is None else values[norm], rank)
        if rank.keeps_gradients:
            state.keep_gradient(scaled.gradient, instruction.share)
        if rank.overflowed:  # Others wait for a part, which nobody reads.
            values[instruction.value] = torch.zeros_like(scaled.parameter)
        else:
            muon = muon_of(rank.optimizer, scaled.name)
            values[instruction.value] = muon.direct(scaled)

    return run


def _changes(named: Sequence[Updated], rank: RankState) -> list[GradientChange]:
    """How parameters are to be changed by their gradients."""
    values = rank.memory.values
    return [rank.states[each.value].changed_by(values[each.gradient]) for each in named]


def _mover(updated: Updated, rank: RankState) -> Callable[[], GradientChange]:
    """What makes a change of this rank's part of a matrix, by the direction of all of it."""
    direction, values = updated.direction, rank.memory.values
    assert direction is not None
    state = rank.states[updated.value]
    settings = rank.program.plan.training.for_parameter(updated.parameter).newton_schulz
    shape = rank.program.graph.parameter_index[updated.parameter].shape

    def moved() -> GradientChange:
        whole = moved_by(values[direction].reshape(shape), settings)
        change = state.changed_by(state.cut(whole))
        return change._replace(gradient=change.gradient.reshape(change.parameter.shape))

    return moved


def _scale_inside(norm: Tensor | None, rank: RankState) -> Tensor | None:
    """What the optimizer itself multiplies gradients by, if nothing else is done to them.

    Then nothing is made of them: their clipping is part of the pass that reads them.
    """
    longest = rank.program.plan.training.clip_norm
    if norm is None or not longest or rank.scale is not None or not rank.optimizer.takes_scale:
        return None
    return clip_scale(norm, longest).float()


def _scaled(
    changes: Sequence[GradientChange], norm: Tensor | None, rank: RankState
) -> Sequence[GradientChange]:
    """Changes whose gradients are without the loss scale, and clipped."""
    training = rank.program.plan.training
    longest, most = training.clip_norm, training.clip_value
    if rank.scale is None and not (longest or most):
        return changes
    gradients = [change.gradient for change in changes]
    if rank.scale is not None:
        whole = [gradient.float() for gradient in gradients]
        gradients = list(torch._foreach_div(whole, rank.memory.seed))
    if longest and norm is not None:
        gradients = clipped(gradients, norm, longest)
    if most and gradients:
        gradients = list(torch._foreach_clamp_min(gradients, -most))
        torch._foreach_clamp_max_(gradients, most)
    return [
        GradientChange(name, parameter, gradient, copy)
        for (name, parameter, _, copy), gradient in zip(changes, gradients, strict=True)
    ]
