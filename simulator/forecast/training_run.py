"""One long run, as processes in SimPy's time.

    nodes     ──fail──▶ training goes back to the last checkpoint, and one is repaired
    nodes     ──slow──▶ training goes on at the pace of the slowest
    data      ──late──▶ training stands still
    training: wait for nodes, restart, then steps and checkpoints in turn until all steps are saved

Processes that do harm interrupt the one that trains; what it was at is paid for until then.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import simpy

from stratagem.simulator.forecast.hazards import DAY, HOUR, Hazards

Waits = Generator[simpy.Event, Any, None]
"""What a process waits for, one event after the other."""


class Spent(Enum):
    """What the seconds of a run are spent on."""

    USEFUL = "steps that count"
    LOST = "steps that were lost"
    SLOWED = "waiting for slow nodes"
    STALLED = "waiting for data"
    CHECKPOINTS = "checkpoints"
    RESTARTS = "restarts"
    NODES = "waiting for nodes"


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What is to be done.

    Attributes:
        steps: to train, at least one.
        step_seconds: that one takes in the mean where nothing is wrong.
        steps_between: two checkpoints.
        checkpoint_seconds: that training waits for one.
        write_seconds: how long it is written beside training after that.
        num_nodes: that all must be there.
    """

    steps: int
    step_seconds: float
    steps_between: int
    checkpoint_seconds: float
    write_seconds: float
    num_nodes: int

    @property
    def interval(self) -> float:
        """Seconds of the steps between two checkpoints, in the mean, where nothing is wrong."""
        return self.steps_between * self.step_seconds


class _NodeFailed(Exception):  # noqa: N818 - an event of the simulated world, not an error
    """What the process that trains was at has come to nothing."""


class TrainingRun:
    """One run; with the same seed the same misfortunes meet other plans.

    Example:
        >>> plan = RunPlan(
        ...     steps=100, step_seconds=2.0, steps_between=50, checkpoint_seconds=5.0,
        ...     write_seconds=0.0, num_nodes=8,
        ... )
        >>> run = TrainingRun(plan, Hazards(), seed=0)
        >>> run.play(until=1e6)
        210.0
        >>> run.spent[Spent.CHECKPOINTS]
        10.0

    Attributes:
        spent: seconds by what they were spent on; they sum to the wall time.
        failures: of nodes, while the run lasted.
    """

    def __init__(self, plan: RunPlan, hazards: Hazards, seed: int | np.random.SeedSequence):
        self._plan, self._hazards = plan, hazards
        sources = np.random.SeedSequence(seed) if isinstance(seed, int) else seed
        steps, failures, slow, stalls = map(np.random.default_rng, sources.spawn(4))
        self._random = {"steps": steps, "failures": failures, "slow": slow, "stalls": stalls}
        self._env = simpy.Environment()
        self._spares = simpy.Container(self._env, init=hazards.spare_nodes)
        self._missing = 0
        self._lasting = {"slow": 0, "stalls": 0}
        self._done = self._saved = 0
        self._unsaved = 0.0
        self._writing: tuple[float, int, float] | None = None
        self.spent = dict.fromkeys(Spent, 0.0)
        self.failures = 0

    def play(self, *, until: float) -> float:
        """Play the run; its wall seconds, infinite where it has not ended until then."""
        self._training = self._env.process(self._train())
        for harm in self._harms():
            self._env.process(harm)
        self._env.run(until=self._env.any_of([self._training, self._env.timeout(until)]))
        return self._env.now if self._training.triggered else math.inf

    def _harms(self) -> list[Waits]:
        hazards, nodes = self._hazards, self._plan.num_nodes
        harms = []
        if math.isfinite(hazards.node_mtbf_hours):
            harms.append(self._fail(hazards.mtbf(nodes)))
        if math.isfinite(hazards.node_slow_hours):
            every, lasting = hazards.node_slow_hours * HOUR / nodes, hazards.slow_minutes * 60.0
            harms.append(self._disturb("slow", every, lasting))
        if hazards.stalls_per_day:
            every = DAY / hazards.stalls_per_day
            harms.append(self._disturb("stalls", every, hazards.stall_seconds))
        return harms

    def _fail(self, mtbf: float) -> Waits:
        random, nodes = self._random["failures"], self._plan.num_nodes
        while True:
            yield self._env.timeout(random.exponential(mtbf))
            # Nodes that are being repaired do not fail.
            if random.random() * nodes < self._missing:
                continue
            self.failures += 1
            if self._hazards.repair_hours:
                self._missing += 1
                self._env.process(self._repair(random.exponential(self._hazards.repair_hours)))
            self._interrupt(failed=True)

    def _repair(self, hours: float) -> Waits:
        yield self._env.timeout(hours * HOUR)
        yield self._spares.put(1)

    def _disturb(self, kind: str, every: float, lasting: float) -> Waits:
        random = self._random[kind]
        while True:
            yield self._env.timeout(random.exponential(every))
            self._env.process(self._last(kind, random.exponential(lasting)))

    def _last(self, kind: str, seconds: float) -> Waits:
        self._change(kind, 1)
        yield self._env.timeout(seconds)
        self._change(kind, -1)

    def _change(self, kind: str, by: int) -> None:
        before = self._pace
        self._lasting[kind] += by
        if self._pace != before:
            self._interrupt(failed=False)

    def _interrupt(self, *, failed: bool) -> None:
        if self._training.is_alive:
            self._training.interrupt(failed)

    @property
    def _pace(self) -> float:
        """Seconds of steps that a second brings on."""
        if self._lasting["stalls"]:
            return 0.0
        return 1.0 / self._hazards.slow_factor if self._lasting["slow"] else 1.0

    def _train(self) -> Waits:
        while True:
            try:
                yield from self._wait_for_nodes()
                if self.failures:
                    yield from self._spend(Spent.RESTARTS, self._hazards.restart_seconds)
                yield from self._work()
                return
            except _NodeFailed:
                self._go_back()

    def _wait_for_nodes(self) -> Waits:
        while self._missing:
            begin, spare = self._env.now, self._spares.get(1)
            try:
                yield spare
            except simpy.Interrupt:
                # One more may be missing now, which the loop sees.
                if not spare.triggered:
                    spare.cancel()
            if spare.triggered:
                self._missing -= 1
            self.spent[Spent.NODES] += self._env.now - begin

    def _work(self) -> Waits:
        plan = self._plan
        while self._done < plan.steps:
            if rounds := self._undisturbed():
                yield from self._pass(rounds)
            count = min(plan.steps_between, plan.steps - self._done)
            yield from self._spend(Spent.USEFUL, self._seconds(count))
            self._done += count
            yield from self._wait_until_written()
            yield from self._spend(Spent.CHECKPOINTS, plan.checkpoint_seconds)
            self._writing = (self._env.now + plan.write_seconds, self._done, self._unsaved)
        yield from self._wait_until_written()

    def _undisturbed(self) -> int:
        """How often steps and a checkpoint surely follow each other before all that is to come.

        Only what happens brings about what was not foreseen, so that nothing does until then. The
        last round is left out: what is rounded is not to decide what comes first.
        """
        plan = self._plan
        if self._hazards.step_variation or self._pace < 1 or plan.write_seconds > plan.interval:
            return 0
        foreseen = (self._env.peek() - self._env.now) / (plan.interval + plan.checkpoint_seconds)
        left = (plan.steps - self._done) / plan.steps_between
        return max(0, int(min(foreseen, left)) - 1)

    def _pass(self, rounds: int) -> Waits:
        """Train and save so often, undisturbed; the last is written before the next round ends."""
        plan = self._plan
        yield self._env.timeout(rounds * (plan.interval + plan.checkpoint_seconds))
        self.spent[Spent.USEFUL] += rounds * plan.interval
        self.spent[Spent.CHECKPOINTS] += rounds * plan.checkpoint_seconds
        self._done += rounds * plan.steps_between
        self._saved, self._unsaved, self._writing = self._done, 0.0, None

    def _wait_until_written(self) -> Waits:
        if self._writing is not None:
            yield from self._spend(Spent.CHECKPOINTS, self._writing[0] - self._env.now)
            self._settle()

    def _settle(self) -> None:
        """Count on the checkpoint that was being written, if it is written."""
        if self._writing is not None and self._writing[0] <= self._env.now:
            _, self._saved, work = self._writing
            self._unsaved -= work
            self._writing = None

    def _go_back(self) -> None:
        self._settle()
        self.spent[Spent.LOST] += self._unsaved
        self.spent[Spent.USEFUL] -= self._unsaved
        self._done, self._unsaved, self._writing = self._saved, 0.0, None

    def _seconds(self, steps: int) -> float:
        """What so many steps take where nothing is wrong, a gamma variable as sums of such are."""
        variance = self._hazards.step_variation**2
        if not variance:
            return steps * self._plan.step_seconds
        return float(
            self._random["steps"].gamma(steps / variance, variance * self._plan.step_seconds)
        )

    def _spend(self, on: Spent, seconds: float) -> Waits:
        """Spend seconds, at the pace of training if they are steps.

        Raises:
            _NodeFailed: if one failed meanwhile.
        """
        left, failed = seconds, False
        while left > 0 and not failed:
            begin, pace = self._env.now, self._pace if on is Spent.USEFUL else 1.0
            try:
                yield self._env.timeout(left / pace) if pace else self._env.event()
                worked, left = left, 0.0
            except simpy.Interrupt as interrupt:
                worked, failed = (self._env.now - begin) * pace, bool(interrupt.cause)
                left -= worked
            passed = self._env.now - begin
            self.spent[on] += worked
            if on is Spent.USEFUL:
                self._unsaved += worked
            if pace < 1:
                self.spent[Spent.SLOWED if pace else Spent.STALLED] += passed - worked
        if failed:
            raise _NodeFailed
