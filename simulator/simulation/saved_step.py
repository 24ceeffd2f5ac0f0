"""What a simulation file keeps of a step, and the step that is loaded from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from stratagem.simulator.base.numbers_in_json import packed, unpacked
from stratagem.simulator.engine.critical_path import Wait
from stratagem.simulator.simulation.device_memory import Alive, DeviceMemory, MemoryTimeline
from stratagem.simulator.simulation.simulated_step import SimulatedStep
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from stratagem.simulator.timeline.step_critical_path import StepPath, StepTask
from stratagem.simulator.timeline.timeline import PackedTimeline, Row, Timeline, from_rows


@dataclass(frozen=True)
class KeptMemory:
    """The peak of a rank: the figures of `DeviceMemory`, and what is alive then."""

    state: int
    activations: int
    working: int
    in_flight: int
    capacity: int
    alive: tuple[tuple[str, int, str, int, int], ...]
    waiting: int = 0

    @classmethod
    def of(cls, memory: DeviceMemory) -> KeptMemory:
        """What is kept of a rank's memory."""
        return cls(
            memory.state,
            memory.activations,
            memory.working,
            memory.in_flight,
            memory.capacity,
            tuple((a.use.value, a.stage, a.operator, a.nbytes, a.copies) for a in memory.alive),
            memory.waiting,
        )

    def memory(self) -> DeviceMemory:
        """The memory that was kept."""
        alive = tuple(Alive(Purpose(each[0]), *each[1:]) for each in self.alive)
        return DeviceMemory(
            self.state,
            self.activations,
            self.working,
            self.in_flight,
            self.capacity,
            partial(tuple[Alive, ...], alive),
            self.waiting,
        )


@dataclass(frozen=True)
class KeptCurve:
    """A `MemoryTimeline`: its times and, by use, its bytes, packed."""

    label: str
    times: str
    nbytes: dict[str, str]
    capacity: int

    @classmethod
    def of(cls, curve: MemoryTimeline) -> KeptCurve:
        """What is kept of a memory timeline: nothing of uses without a byte."""
        rows = zip(Purpose, curve.nbytes, strict=True)
        nbytes = {use.value: packed(row) for use, row in rows if row.any()}
        return cls(curve.label, packed(curve.times), nbytes, curve.capacity)

    def curve(self) -> MemoryTimeline:
        """The memory timeline that was kept."""
        times = unpacked(self.times)
        nbytes = np.zeros((len(Purpose), times.size), np.int64)
        rows = {use: row for row, use in enumerate(Purpose)}
        for use, text in self.nbytes.items():
            row = unpacked(text)
            if row.shape != times.shape:
                raise ValueError(
                    f"{self.label} has {times.size} times but {row.size} values of {use}"
                )
            nbytes[rows[Purpose(use)]] = row
        if not times.size or (np.diff(times) < 0).any():
            raise ValueError(f"the times of the memory of {self.label} do not ascend")
        return MemoryTimeline(self.label, times, nbytes, self.capacity)


@dataclass(frozen=True)
class KeptPath:
    """A `StepPath`: its tasks as rows, why each waited, and the kinds of operators."""

    tasks: PackedTimeline
    waits: tuple[str, ...]
    operator_kinds: dict[str, str]

    @classmethod
    def of(cls, path: StepPath) -> KeptPath:
        """What is kept of a critical path."""
        rows = from_rows((Row(*task[:5]) for task in path.tasks), label="critical path")
        waits = tuple(task.wait.value for task in path.tasks)
        return cls(rows.packed(), waits, dict(path.operator_kinds))

    def path(self) -> StepPath:
        """The critical path that was kept."""
        rows = Timeline.unpacked(self.tasks)
        columns = (rows.names, rows.kinds, rows.lane.tolist(), rows.start.tolist())
        tasks = tuple(
            StepTask(name, kind, rows.lanes[lane], start, end, Wait(wait))
            for name, kind, lane, start, end, wait in zip(
                *columns, rows.end.tolist(), self.waits, strict=True
            )
        )
        return StepPath(tasks, self.operator_kinds)


@dataclass(frozen=True)
class KeptStep:
    """All that a simulation answers of its step, as its file holds it."""

    stage_seconds: tuple[float, ...]
    communication_bytes: dict[str, int]
    timeline: PackedTimeline
    critical_path: KeptPath
    memory: tuple[KeptCurve, ...]

    @classmethod
    def of(cls, step: SimulatedStep, num_ranks: int) -> KeptStep:
        """What is kept of a step on so many ranks."""
        return cls(
            step.stage_seconds(),
            step.communication_bytes(),
            step.timeline().packed(),
            KeptPath.of(step.critical_path()),
            tuple(KeptCurve.of(step.memory_timeline(rank)) for rank in range(num_ranks)),
        )

    def step(self) -> SimulatedStep:
        """The step that was kept."""
        return LoadedStep(
            self.stage_seconds,
            self.communication_bytes,
            Timeline.unpacked(self.timeline),
            self.critical_path.path(),
            tuple(kept.curve() for kept in self.memory),
        )


@dataclass(frozen=True, eq=False)
class LoadedStep(SimulatedStep):
    """A step that was played before and kept in a file."""

    _stage_seconds: tuple[float, ...]
    _communication_bytes: dict[str, int]
    _timeline: Timeline
    _critical_path: StepPath
    _memory: tuple[MemoryTimeline, ...]

    def stage_seconds(self) -> tuple[float, ...]:
        """See `SimulatedStep`."""
        return self._stage_seconds

    def timeline(self) -> Timeline:
        """See `SimulatedStep`."""
        return self._timeline

    def critical_path(self) -> StepPath:
        """See `SimulatedStep`."""
        return self._critical_path

    def communication_bytes(self) -> dict[str, int]:
        """See `SimulatedStep`."""
        return self._communication_bytes

    def memory_timeline(self, rank: int) -> MemoryTimeline:
        """See `SimulatedStep`."""
        return self._memory[rank]


@dataclass(frozen=True, eq=False)
class StepLeftOut(SimulatedStep):
    """The step of a simulation of which only the figures were kept.

    Attributes:
        plan: its name.
    """

    plan: str

    def _error(self) -> ValueError:
        return ValueError(
            f"of the simulation of plan {self.plan!r} only step time and peaks were kept in the "
            "file; simulate its plan again: sg.simulate(simulation.plan, graph)"
        )

    def stage_seconds(self) -> tuple[float, ...]:
        """See `SimulatedStep`; raises `ValueError`, as all of these."""
        raise self._error()

    def timeline(self) -> Timeline:
        """See `stage_seconds`."""
        raise self._error()

    def critical_path(self) -> StepPath:
        """See `stage_seconds`."""
        raise self._error()

    def communication_bytes(self) -> dict[str, int]:
        """See `stage_seconds`."""
        raise self._error()

    def memory_timeline(self, rank: int) -> MemoryTimeline:
        """See `stage_seconds`."""
        raise self._error()
