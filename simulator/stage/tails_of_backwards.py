"""What is played apart of a backward block: its gradient sync, its update, or neither.

A rank with several stages sums the gradients of one beside its next blocks, and updates behind all
of them. Where weights are stashed, what a backward sends on leaves before its sync and update (see
`macro_graph`). Each part is the block itself, in which all tasks but its own have nothing to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from stratagem.simulator.schedules.macro_graph import (
    BARE_BACKWARD,
    SYNC,
    SYNCED_BACKWARD,
    SYNCED_WEIGHT_GRADIENT,
    UPDATE,
)
from stratagem.simulator.stage.stage_blocks import Block, Role, StageBlocks

SYNCS = frozenset({Role.SYNC, Role.TIE_GRADIENT})
"""Roles of tasks that bring the gradients of a stage together."""
UPDATES = frozenset({Role.STASH, Role.UPDATE, Role.PUBLISH, Role.TIE_PUBLISH})
"""Roles of tasks that wait for what `SYNCS` do, to update parameters and hand them out."""


def with_parts_apart(blocks: StageBlocks) -> StageBlocks:
    """The blocks of a stage, and those in which sync and update are apart from the rest."""
    backward, weights = blocks.backward, blocks.weight_backward
    apart = {
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


def _idle(block: Block, roles: Collection[Role]) -> Block:
    """A block whose tasks of some roles have nothing to do."""
    idle = np.array([role in roles for role in block.roles], dtype=np.bool_)
    return replace(block, base=np.where(idle, 0, block.base))


def _only(block: Block, roles: Collection[Role]) -> Block:
    """A block in which tasks of all other roles have nothing to do."""
    return _idle(block, frozenset(Role) - frozenset(roles))
