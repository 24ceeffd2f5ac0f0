"""AMPNet's asynchronous pipeline: whoever has a message works on it (Gaunt et al. 2017)."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule, check_sizes
from stratagem.simulator.schedules.schedule_player import StageTimes

FORWARD, BACKWARD = ActionKind.FORWARD, ActionKind.BACKWARD


def ampnet(
    num_stages: int,
    num_microbatches: int,
    times: StageTimes,
    *,
    max_active: int,
    update_every: int = 1,
) -> Schedule:
    """The order in which message-driven stages come to run under given durations.

    Each stage takes the messages that have arrived one by one, gradients before activations and
    older microbatches before younger, and never waits while it has one. A microbatch enters when
    fewer than `max_active` are under way. A stage updates its weights after every `update_every`
    gradients; nothing is stashed, so a backward may see newer weights than its forward did.

    Example:
        >>> schedule = ampnet(2, 3, StageTimes(forward=1, backward=1), max_active=2)
        >>> print(schedule.to_text())
        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
        rank 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: one a rank.
        num_microbatches: that are sent through, the first and the last ones included.
        times: forward, backward, transfer and update are used.
        max_active: most microbatches under way at once.
        update_every: gradients that a stage sums up before it updates.

    Raises:
        ValueError: if a size is below 1, or a time is wrong.
    """
    check_sizes(num_stages, num_microbatches)
    for name, value in (("max_active", max_active), ("update_every", update_every)):
        if value < 1:
            raise ValueError(f"ampnet: {name} is {value}: it must be at least 1")
    machine = _Machine(
        num_stages,
        num_microbatches,
        forward=times.numbers("forward", num_stages).tolist(),
        backward=times.numbers("backward", num_stages).tolist(),
        transfer=times.numbers("transfer", num_stages - 1).tolist(),
        update=times.numbers("update", num_stages).tolist(),
        max_active=max_active,
        update_every=update_every,
    )
    return Schedule(
        "ampnet", num_stages, num_microbatches, machine.run(), update_every=update_every
    )


@dataclass
class _Machine:
    """The stages, what waits at each, and what is on its way.

    `arrivals` are (ns, stage, forward?, microbatch): in one instant gradients come first.
    """

    num_stages: int
    num_microbatches: int
    forward: list[int]
    backward: list[int]
    transfer: list[int]
    update: list[int]
    max_active: int
    update_every: int
    arrivals: list[tuple[int, int, bool, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiting: list[list[tuple[bool, int]]] = [[] for _ in range(self.num_stages)]
        self.orders: list[list[Action]] = [[] for _ in range(self.num_stages)]
        self.free = [0] * self.num_stages
        self.link_free: dict[tuple[int, int], int] = {}
        self.gradients = [0] * self.num_stages
        self.entered = 0

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Send all microbatches through."""
        for _ in range(min(self.max_active, self.num_microbatches)):
            self._enter(0)
        while self.arrivals or any(self.waiting):
            now = self._next_instant()
            while self.arrivals and self.arrivals[0][0] <= now:
                _, stage, ahead, microbatch = heapq.heappop(self.arrivals)
                heapq.heappush(self.waiting[stage], (ahead, microbatch))
            for stage in range(self.num_stages):
                if self.waiting[stage] and self.free[stage] <= now:
                    self._work(stage, now)
        return tuple(map(tuple, self.orders))

    def _next_instant(self) -> int:
        instants = [self.free[s] for s in range(self.num_stages) if self.waiting[s]]
        return min([*instants, *(arrival[0] for arrival in self.arrivals[:1])])

    def _enter(self, now: int) -> None:
        if self.entered < self.num_microbatches:
            heapq.heappush(self.arrivals, (now, 0, True, self.entered))
            self.entered += 1

    def _work(self, stage: int, now: int) -> None:
        ahead, microbatch = heapq.heappop(self.waiting[stage])
        self.orders[stage].append(Action(stage, FORWARD if ahead else BACKWARD, microbatch))
        made = end = now + (self.forward if ahead else self.backward)[stage]
        if not ahead:
            self.gradients[stage] += 1
            if self.gradients[stage] % self.update_every == 0:
                end += self.update[stage]
        self.free[stage] = end
        if ahead and stage == self.num_stages - 1:
            heapq.heappush(self.arrivals, (end, stage, False, microbatch))
        elif not ahead and stage == 0:
            self._enter(end)
        else:
            self._send(stage, stage + 1 if ahead else stage - 1, made, ahead, microbatch)

    def _send(self, stage: int, target: int, now: int, ahead: bool, microbatch: int) -> None:
        begin = max(now, self.link_free.get((stage, target), 0))
        arrival = begin + self.transfer[min(stage, target)]
        self.link_free[stage, target] = arrival
        heapq.heappush(self.arrivals, (arrival, target, ahead, microbatch))
