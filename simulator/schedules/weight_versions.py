"""Versions of a stage's weights, where they are updated while microbatches are under way.

Weight stashing (PipeDream, Narayanan et al., SOSP 2019, section 3.3): a microbatch's forward takes
the newest weights of its stage, and its backward the same ones again, whatever came between. On
stage s of S under 1F1B, version v being that after v updates:

    F0 F1 … (S − s forwards, all of version 0) B0 update F B1 update F …
                                               │        ╰ of version 1
                                               ╰ version 0 is kept for the S − s − 1 others

With vertical sync a microbatch uses on all stages the version that it found on the first, so its
forward may read an older version too. All follows from the orders of the ranks alone, because
updates happen in them.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Schedule,
    makes_weight_gradient,
)


class Seen(NamedTuple):
    """The version of a stage's weights that a microbatch uses, forward and backward.

    `at_forward` and `at_backward` are the updates that the stage has made when the passes begin;
    where there are more than `version`, the pass reads a copy.
    """

    version: int
    at_forward: int
    at_backward: int

    @property
    def is_stashed(self) -> bool:
        """Whether the weights are no longer the newest in the backward pass."""
        return self.at_backward > self.version


def versions_seen(schedule: Schedule, stage: int) -> dict[int, Seen]:
    """The versions of a stage's weights that each microbatch meets.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import pipedream
        >>> [tuple(seen) for seen in versions_seen(pipedream(2, 4), 0).values()]
        [(0, 0, 0), (0, 0, 1), (1, 1, 2), (2, 2, 3)]

    Args:
        schedule: without token slices.
        stage: of the schedule.
    """
    begun, over = _updates_before(schedule, stage)
    version = _updates_before(schedule, 0)[0] if schedule.vertical_sync else begun
    return {m: Seen(version[m], begun[m], updates) for m, updates in over.items()}


def _updates_before(schedule: Schedule, stage: int) -> tuple[dict[int, int], dict[int, int]]:
    """By microbatch, the updates of a stage before its forward, and before its backward."""
    begun: dict[int, int] = {}
    over: dict[int, int] = {}
    for rank in schedule.ranks_of(stage):
        made = 0
        for action in schedule.orders[rank]:
            if action.stage != stage:
                continue
            if action.kind is ActionKind.FORWARD:
                begun[action.microbatch] = made
            if makes_weight_gradient(action):
                over[action.microbatch] = made
            made += action in schedule.updates
    return begun, over


def stashing_actions(schedule: Schedule) -> frozenset[Action]:
    """The updates before which the weights are copied, since some pass will want them again.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import pipedream
        >>> sorted(map(str, stashing_actions(pipedream(2, 4))))
        ['0B0', '0B1', '0B2']
    """
    if not schedule.stashes_weights:
        return frozenset()
    seen = {stage: versions_seen(schedule, stage) for stage in range(schedule.num_stages)}
    wanted = {(s, v.version) for s, each in seen.items() for v in each.values() if v.is_stashed}
    return frozenset(
        action
        for action in schedule.updates
        if (action.stage, seen[action.stage][action.microbatch].at_backward) in wanted
    )


def versions_kept(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Versions of a stage's weights kept at once, and updates that a gradient comes too late for.

    Without stashing there is one version.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import pipedream
        >>> [versions_kept(pipedream(3, 9), stage) for stage in range(3)]
        [(3, 2), (2, 1), (1, 0)]
    """
    seen = versions_seen(schedule, stage).values()
    stale = max((each.at_backward - each.version for each in seen), default=0)
    if not schedule.stashes_weights:
        return 1, stale
    older = (
        {each.version for each in seen if each.version < newest <= each.at_backward}
        for newest in range(len(seen))
    )
    return 1 + max(map(len, older), default=0), stale
