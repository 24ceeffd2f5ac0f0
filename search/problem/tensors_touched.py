"""Which tensors, and so which stages, the choice of an operator decides about."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.stage.shared_conversions import Sharing


class Touched(NamedTuple):
    """Which tensors each operator decides about.

    Attributes:
        starts: by operator, where its tensors begin among `tensors`.
        tensors: those of all operators, one operator after the other.
        stage: of every tensor.
    """

    starts: Ints
    tensors: Ints
    stage: Ints


def tensors_touched(problem: Problem) -> Touched:
    """Which tensors the choice of each operator decides about; worked out once."""
    return problem.derive(_touched)


def _touched(problem: Problem) -> Touched:
    held = problem.tensors
    first, second = held.first, held.second
    tensors = np.arange(first.size)
    pairs = (held.second_stride > 0) & (second != first)
    everywhere = np.ones(first.size, dtype=np.bool_)
    gated, rivals = gate_owners(held.gate, problem.tensor_sharing, everywhere)
    owners = np.concatenate([first, second[pairs], rivals])
    order = np.argsort(owners, kind="stable")
    return Touched(
        np.searchsorted(owners[order], np.arange(len(problem.choices) + 1)),
        np.concatenate([tensors, tensors[pairs], gated])[order],
        np.repeat(np.arange(held.sizes.size), np.diff(held.starts)),
    )


def stages_touched(problem: Problem, i: int) -> list[int]:
    """The stages whose blocks or memory the choice of operator i decides.

    Beside its own these are those that keep what they receive from it.
    """
    starts, tensors, stage = tensors_touched(problem)
    found = tensors[starts[i] : starts[i + 1]]
    return sorted({int(problem.stage_of[i]), *stage[found].tolist()})


def gate_owners(gate: Ints, sharing: Sharing, busy: Flags) -> tuple[Ints, Ints]:
    """Whose gates other readers decide about: (what is behind a gate, an operator) pairs."""
    rows: list[int] = []
    rivals: list[int] = []
    for row in np.flatnonzero((gate >= 0) & busy).tolist():
        found = sharing.rivals(int(gate[row])).tolist()
        rows += [row] * len(found)
        rivals += found
    return np.array(rows, dtype=np.int64), np.array(rivals, dtype=np.int64)
