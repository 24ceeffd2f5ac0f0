"""Pipelines that never flush: their pace once they are full, and how stale their weights are."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Schedule,
    makes_weight_gradient,
    validate,
)
from stratagem.simulator.schedules.schedule_player import Play, StageTimes, play_schedule
from stratagem.simulator.schedules.weight_versions import versions_kept

Node = tuple[str, int, int]
"""What repeats with every microbatch: an action's kind, stage and slice, or that it is sent on."""


@dataclass(frozen=True)
class _Wait:
    """`after` begins no earlier than `lasts` ns after `before` of `shift` microbatches ago."""

    before: Node
    after: Node
    shift: int
    lasts: int


_FIELDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input_gradient",
    ActionKind.WEIGHT_GRADIENT: "weight_gradient",
}


@dataclass(frozen=True)
class SteadyState:
    """What an asynchronous schedule settles into.

    Attributes:
        period: ns from one microbatch to the next, exactly.
        bubble: share of the ranks' time in which they are idle.
        weight_versions: per stage, the most versions of its weights kept at once.
        staleness: per stage, the most updates of its weights that happen between the forward of a
            microbatch and the update by its gradient.
    """

    period: Fraction
    bubble: Fraction
    weight_versions: tuple[int, ...]
    staleness: tuple[int, ...]

    @property
    def throughput(self) -> float:
        """Microbatches per second."""
        return float(1_000_000_000 / self.period)


def steady_state(schedule: Schedule, times: StageTimes) -> SteadyState:
    """The pace of an asynchronous schedule, the first and last microbatches left out.

    Where each rank repeats one order with every microbatch (PipeDream), the period is the largest
    ratio of time to microbatches over the cycles of what waits for what (the maximum cycle ratio
    of its event graph): no simulation is long enough to show it when two stages are almost
    equally slow. Else it is what the play of the schedule repeats.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import pipedream
        >>> state = steady_state(pipedream(4, 16), StageTimes(forward=10, backward=20))
        >>> state.period, state.bubble, state.weight_versions, state.staleness
        (Fraction(30, 1), Fraction(0, 1), (4, 3, 2, 1), (3, 2, 1, 0))

    Args:
        schedule: with `update_every`, and enough microbatches: its middle half counts.
        times: ns of its stages.

    Raises:
        ValueError: when the schedule is synchronous or not valid, nothing in it repeats, or
            nothing takes any time.
    """
    if schedule.update_every is None:
        raise ValueError(
            f"schedule {schedule.name!r} is synchronous: a step ends with an update, so it has no "
            "steady state; play_schedule gives the time of its step"
        )
    validate(schedule)
    followers = _followers(schedule) if schedule.update_every == 1 else None
    if followers is None:
        period = _played_period(play_schedule(schedule, times))
    else:
        period = _largest_cycle_ratio(_event_graph(schedule, times, followers))
    if period == 0:
        raise ValueError(f"schedule {schedule.name!r}: every time is 0 ns; give some a length")
    work = Fraction(0)
    for action in _one_microbatch(schedule):
        work += _nanoseconds(schedule, times, action)
        if makes_weight_gradient(action):
            update = times.numbers("update", schedule.num_stages)[action.stage]
            work += Fraction(int(update), schedule.update_every * schedule.num_slices)
    kept = [versions_kept(schedule, stage) for stage in range(schedule.num_stages)]
    return SteadyState(
        period=period,
        bubble=1 - work / (schedule.num_ranks * period),
        weight_versions=tuple(versions for versions, _ in kept),
        staleness=tuple(stale for _, stale in kept),
    )


def _one_microbatch(schedule: Schedule) -> list[Action]:
    """All that is done for the microbatch in the middle."""
    middle = schedule.num_microbatches // 2
    return [action for action in schedule.rank_of if action.microbatch == middle]


def _nanoseconds(schedule: Schedule, times: StageTimes, action: Action) -> int:
    numbers = times.numbers(_FIELDS[action.kind], schedule.num_stages, schedule.num_slices)
    return int(numbers[action.stage * schedule.num_slices + action.slice])


def _followers(schedule: Schedule) -> dict[Node, tuple[Node, int]] | None:
    """What follows each action on its rank, and by how many microbatches it is ahead.

    None if the middle half of some rank's order does not repeat with every microbatch.
    """
    found: dict[Node, tuple[Node, int]] = {}
    for order in schedule.orders:
        quarter = len(order) // 4
        for first, second in pairwise(order[quarter : len(order) - quarter]):
            follower = _node(second), second.microbatch - first.microbatch
            if found.setdefault(_node(first), follower) != follower:
                return None
    complete = all(_node(action) in found for action in _one_microbatch(schedule))
    return found if complete else None


def _node(action: Action) -> Node:
    return action.kind.value, action.stage, action.slice


def _event_graph(
    schedule: Schedule, times: StageTimes, followers: dict[Node, tuple[Node, int]]
) -> list[_Wait]:
    """What waits for what in the steady state."""
    waits: list[_Wait] = []
    sent = times.numbers("transfer", schedule.num_stages - 1, schedule.num_slices)
    updates = times.numbers("update", schedule.num_stages)
    for action in _one_microbatch(schedule):
        node = _node(action)
        lasts = _nanoseconds(schedule, times, action)
        update = int(updates[action.stage]) if action in schedule.updates else 0
        waits.append(_Wait(node, *followers[node], lasts + update))
        for follower in _needing(schedule, action):
            if schedule.rank_of[follower] == schedule.rank_of[action]:
                waits.append(_Wait(node, _node(follower), 0, lasts + update))
                continue
            pair = min(action.stage, follower.stage)
            link = (f"send {action.kind.value}", action.stage, action.slice)
            travels = int(sent[pair * schedule.num_slices + action.slice])
            waits.append(_Wait(node, link, 0, lasts))
            waits.append(_Wait(link, _node(follower), 0, travels))
            waits.append(_Wait(link, link, 1, travels))
    return waits


def _needing(schedule: Schedule, action: Action) -> list[Action]:
    """The actions of the same microbatch that need an action."""
    return [other for other in _one_microbatch(schedule) if action in schedule.requirements(other)]


def _largest_cycle_ratio(waits: list[_Wait]) -> Fraction:
    """The largest ratio of time to microbatches of all cycles.

    Newton's iteration: a cycle that is too long for the best ratio so far has a better one, until
    there is none. Exact in whole numbers.
    """
    ratio = Fraction(0)
    while (cycle := _long_cycle(waits, ratio)) is not None:
        ratio = Fraction(sum(w.lasts for w in cycle), sum(w.shift for w in cycle))
    return ratio


def _long_cycle(waits: list[_Wait], ratio: Fraction) -> list[_Wait] | None:
    """A cycle that lasts longer than `ratio` times its microbatches (Bellman–Ford)."""
    top, bottom = ratio.numerator, ratio.denominator
    nodes = {wait.before for wait in waits}
    reach = dict.fromkeys(nodes, 0)
    came: dict[Node, _Wait] = {}
    last: Node | None = None
    for _ in range(len(nodes) + 1):
        last = None
        for wait in waits:
            length = reach[wait.before] + bottom * wait.lasts - top * wait.shift
            if length > reach[wait.after]:
                reach[wait.after], came[wait.after], last = length, wait, wait.after
        if last is None:
            return None
    assert last is not None
    for _ in nodes:
        last = came[last].before
    cycle = [came[last]]
    while cycle[-1].before != last:
        cycle.append(came[cycle[-1].before])
    return cycle


def _played_period(play: Play) -> Fraction:
    """The period in which the middle half of a play repeats itself."""
    schedule = play.schedule
    count = schedule.num_microbatches
    nodes = sorted({_node(action) for action in schedule.rank_of})
    row = {node: r for r, node in enumerate(nodes)}
    start = np.zeros((len(nodes), count), dtype=np.int64)
    for action in schedule.rank_of:
        start[row[_node(action)], action.microbatch] = play.span(action)[0]
    middle = start[:, count // 4 : count - count // 4]
    for microbatches in range(1, middle.shape[1] // 3 + 1):
        later = middle[:, microbatches:] - middle[:, :-microbatches]
        if (later == later[0, 0]).all():
            return Fraction(int(later[0, 0]), microbatches)
    raise ValueError(
        f"schedule {schedule.name!r}: nothing repeats in the middle half of {count} microbatches; "
        "simulate more of them, or round the times to fewer digits"
    )
