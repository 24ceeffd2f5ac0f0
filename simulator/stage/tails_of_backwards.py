"""What is played apart of a backward block: its gradient sync, its update, or neither.

A rank with several stages sums the gradients of one beside its next blocks, and updates behind all
of them; all ranks do the first where every microbatch sums its gradients. Where weights are
stashed, what a backward sends on leaves before its sync and update (see `macro_graph`). Each part
is the block itself, in which all tasks but its own have nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from stratagem.simulator.base.arrays import Flags
from stratagem.simulator.schedules.work_kinds import (
    BARE_BACKWARD,
    LAST_LINKS,
    LAST_LINKS_WEIGHT_GRADIENT,
    LINKS,
    LINKS_BACKWARD,
    LINKS_INPUT_GRADIENT,
    LINKS_WEIGHT_GRADIENT,
    REDUCED_BACKWARD,
    REDUCED_WEIGHT_GRADIENT,
    SYNC,
    SYNCED_BACKWARD,
    SYNCED_WEIGHT_GRADIENT,
    UPDATE,
)
from stratagem.simulator.stage.stage_blocks import Block, StageBlocks, TaskRole

SYNCS = frozenset({TaskRole.SYNC, TaskRole.TIE_GRADIENT})
"""Roles of tasks that bring the gradients of a stage together."""
UPDATES = frozenset({TaskRole.STASH, TaskRole.UPDATE, TaskRole.PUBLISH, TaskRole.TIE_PUBLISH})
"""Roles of tasks that wait for what `SYNCS` do, to update parameters and hand them out."""


PARAMETER_GATHERS = frozenset({TaskRole.GATHER, TaskRole.TIE_GATHER})
"""Roles of tasks that bring parameters together, on the links that bring gradients together."""


def with_sums_apart(blocks: StageBlocks, *, accumulates: bool) -> StageBlocks:
    """The blocks of a stage, of which those before the last do not sum gradients.

    Where a stage `accumulates` gradients, those that do are apart, and what links do in each.
    """
    backward, weights = blocks.backward, blocks.weight_backward
    makes = backward if weights is None else weights
    if not makes.inner_base[_are(makes, SYNCS)].any():
        return blocks
    bare = replace(
        blocks,
        backward=_inner_idle(backward, SYNCS),
        weight_backward=None if weights is None else _inner_idle(weights, SYNCS),
    )
    if not accumulates:
        return bare
    each = replace(backward, base=backward.inner_base)
    apart = {
        REDUCED_BACKWARD: each,
        LINKS: _only(blocks.forward, PARAMETER_GATHERS),
        LINKS_BACKWARD: _only(each, PARAMETER_GATHERS | SYNCS),
        LAST_LINKS: _only(backward, PARAMETER_GATHERS | SYNCS | UPDATES),
    }
    if weights is not None and blocks.input_backward is not None:
        each = replace(weights, base=weights.inner_base)
        apart[REDUCED_WEIGHT_GRADIENT] = each
        apart[LINKS_INPUT_GRADIENT] = _only(blocks.input_backward, PARAMETER_GATHERS)
        apart[LINKS_WEIGHT_GRADIENT] = _only(each, SYNCS)
        apart[LAST_LINKS_WEIGHT_GRADIENT] = _only(weights, SYNCS | UPDATES)
    return replace(bare, apart=apart)


def with_parts_apart(blocks: StageBlocks) -> StageBlocks:
    """The blocks of a stage, and those in which sync and update are apart from the rest."""
    backward, weights = blocks.backward, blocks.weight_backward
    apart = {
        **blocks.apart,
        SYNCED_BACKWARD: _idle(backward, UPDATES),
        SYNC: _only(backward, SYNCS),
        UPDATE: _only(backward, UPDATES),
    }
    if weights is not None:
        apart[SYNCED_WEIGHT_GRADIENT] = _idle(weights, UPDATES)
    return replace(blocks, apart=apart)


def with_bare_backward(blocks: StageBlocks) -> StageBlocks:
    """The blocks of a stage that stashes weights, and its backward without sync and update."""
    bare = _idle(blocks.backward, SYNCS | UPDATES)
    return replace(blocks, apart={BARE_BACKWARD: bare})


def _idle(block: Block, roles: Collection[TaskRole]) -> Block:
    """A block whose tasks of some roles have nothing to do."""
    return replace(block, base=np.where(_are(block, roles), 0, block.base))


def _inner_idle(block: Block, roles: Collection[TaskRole]) -> Block:
    """A block whose tasks of some roles have nothing to do before the last microbatch."""
    return replace(block, inner_base=np.where(_are(block, roles), 0, block.inner_base))


def _are(block: Block, roles: Collection[TaskRole]) -> Flags:
    return np.array([role in roles for role in block.roles], dtype=np.bool_)


def _only(block: Block, roles: Collection[TaskRole]) -> Block:
    """A block in which tasks of all other roles have nothing to do."""
    return _idle(block, frozenset(TaskRole) - frozenset(roles))
