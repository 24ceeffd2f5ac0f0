"""Which tasks of a block, and which waits for them, are in the plan whatever it chooses.

A block has tasks for all that the choices of its operators may do, and those that are idle still
have whoever is behind them wait for whatever is before:

    u runs again ──▶ (v does not) ──▶ w runs again

In the plan itself, which keeps the result of v, w does not wait for u. And whether a v that drops
its result is run again at all hangs on who reads it (`run_again`). Neither may stand in a bound on
plans; where all choices of an operator recompute it, or none, there is no doubt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.graph.checkpoint_segments import run_again
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.stage.stage_blocks import Block, TaskRole

_MADE_AGAIN = frozenset(
    {
        TaskRole.RECOMPUTE,
        TaskRole.CONVERT_AGAIN,
        TaskRole.LAUNCH,
        TaskRole.LAUNCH_CONVERSION,
    }
)
"""Roles of what holds up an operator that runs again, but for gathers and the release of it."""


@dataclass(frozen=True, eq=False)
class SureWaits:
    """A block's topology less the waits in doubt, and which tasks may be idle in a plan although
    their operator is recomputed in it."""

    successor_offsets: Ints
    successors: Ints
    is_doubtful: Flags


def sure_waits(table: CostTable, block: Block) -> SureWaits:
    """The waits of a block of the stage that `table` prices that are in every plan.

    Releases stay: all who wait for the task wait for them anyway (`recompute_triggers`).
    """
    optional = {i for i in table.operators if _is_optional(table, i)}
    nothing = np.zeros(len(block.base), dtype=np.bool_)
    if not optional:
        return SureWaits(block.successor_offsets, block.successors, nothing)
    doubtful = _in_doubt(table, optional)
    owners = [_made_again(table, block, task) for task in range(len(block.base))]
    runs = [role in (TaskRole.RECOMPUTE, TaskRole.CONVERT_AGAIN) for role in block.roles]
    heads = np.array([owner in optional for owner in owners]) & np.array(runs)
    is_doubtful = np.array([owner in doubtful for owner in owners])
    roles = np.array([role in _MADE_AGAIN for role in block.roles])
    tails = np.repeat(np.arange(len(block.base)), np.diff(block.successor_offsets))
    own, into = np.array([-1 if owner is None else owner for owner in owners]), block.successors
    ends = np.array([role is TaskRole.RECOMPUTE for role in block.roles])[into]
    converts = np.array([role is TaskRole.CONVERT_AGAIN for role in block.roles])[tails]
    keeps = ~heads[into] | ~roles[tails] | (converts & ends & (own[tails] == own[into]))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(tails[keeps], minlength=len(nothing)))])
    return SureWaits(offsets.astype(np.int64), block.successors[keeps], is_doubtful)


def _is_optional(table: CostTable, i: int) -> bool:
    row = table.row(i)
    return row.may_recompute and bool(row.keeps.any())


def _in_doubt(table: CostTable, optional: set[int]) -> set[int]:
    """The operators that run again in some plans that drop their results, and in some do not."""
    may = {i for i in table.operators if table.row(i).may_recompute}
    sure, inside = may - optional, set(table.operators)
    ever = run_again(table.graph, inside, may)
    return {i for i in ever if i not in run_again(table.graph, inside, sure | {i})}


def _made_again(table: CostTable, block: Block, task: int) -> int | None:
    """The operator that a task runs again or launches again, or whose inputs it converts again."""
    role, subject, label = block.roles[task], int(block.subjects[task]), block.labels[task]
    if role is TaskRole.RECOMPUTE or (role is TaskRole.LAUNCH and "recompute" in label):
        return subject
    converts = role is TaskRole.LAUNCH_CONVERSION and "again" in label
    if role is TaskRole.CONVERT_AGAIN or converts:
        return table.edges[subject].consumer
    return None
