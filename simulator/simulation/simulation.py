"""Simulating a plan: step time, memory and the predicted timeline."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar

import msgspec

from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.hostile_texts import check_numbers
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.base.tables import Table
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import NOT_CALIBRATED, Link
from stratagem.simulator.hardware.core_pace import STEP_ERROR, StepPace
from stratagem.simulator.kernel_times.cost_model import (
    CostModel,
    CostSource,
    PacedCosts,
    elasticity,
)
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_rows import OperatorRow
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.device_memory import DeviceMemory, MemoryTimeline
from stratagem.simulator.simulation.priced_plan import (
    PlanModel,
    period_seconds,
    periods_in_words,
    plan_model,
    step_times,
)
from stratagem.simulator.simulation.rank_memory import rank_memory
from stratagem.simulator.simulation.saved_step import KeptMemory, KeptStep, StepLeftOut
from stratagem.simulator.simulation.simulated_step import PlayedStep, SimulatedStep
from stratagem.simulator.timeline.step_critical_path import StepPath
from stratagem.simulator.timeline.timeline import Timeline, statistics
from stratagem.simulator.timeline.timeline_tables import (
    collective_table,
    group_table,
    operator_table,
)

SIMULATION_FORM = FileForm(
    version=1, remedy="simulate the plan again", format="stratagem simulation"
)


TELLS_APART = 0.05
"""Predictions that differ by less do not say which plan is faster. Of pairs among 311 runs
measured with nanotron on H100s, of one model on as many devices, those predicted less than 5 %
apart were in the predicted order in 62 % of cases (a coin is in 50), those 5 to 10 % apart in 80,
those further apart in 95."""
CROWDED = 0.9
"""From this share of a device's memory on a plan that fits hardly ran: of nanotron's runs on H100s
3 of 35 that were predicted to fill more, 29 of 54 at 80 to 90 %, 89 % of those below."""


@dataclass(frozen=True, eq=False)
class Simulation(SavedValue):
    """What the simulator says of a plan.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> graph = mlp([64, 64], batch=32)
        >>> plan = TrainingSetup().plan(graph, Cluster.preset("dgx-a100"))
        >>> simulation = simulate_plan(plan, graph, default_costs())
        >>> Simulation.from_json(simulation.to_json()).step_time == simulation.step_time
        True

    A loaded simulation says all that it said when it was saved: it is printed, drawn and compared
    without the graph and the costs that it was made of, and nothing is simulated again.

    Attributes:
        step_time: seconds from the first task to the last.
        period: of a plan that updates amid its step (PipeDream), seconds from one microbatch to
            the next where it goes on without end, as it is meant to; None of all others.
        memory: the peak of each rank (the devices of one stage, or of several that share them).
        relative_error: of the step time, from the errors of the costs in it, and from how far
            clusters like this one are apart where nobody has measured it.
        is_calibrated: whether the cluster's constants, or costs of the model's operators, were
            measured. If not, `in_words`, reports and tables say so.
        pace: that of the cores at which the step is predicted; None where nobody looked.
        estimated: the share of its computing that was estimated where the rest was timed; None
            where no operator was.
    """

    FILE: ClassVar[str] = "simulation file"

    plan: Plan
    step_time: float
    memory: tuple[DeviceMemory, ...]
    relative_error: float
    is_calibrated: bool
    _step: SimulatedStep
    pace: StepPace | None = None
    estimated: float | None = None
    period: float | None = None

    @property
    def compared_time(self) -> float:
        """Seconds of a step as plans are compared: those of its microbatches' periods, if any.

        A step of such a plan is run as a stream that is drained at its end, which it need not be.
        """
        if self.period is None:
            return self.step_time
        return self.plan.num_microbatches * self.period

    @property
    def timed_as(self) -> str:
        """What `compared_time` is: a step, or so many periods of a stream without end."""
        if self.period is not None:
            return periods_in_words(self.plan.num_microbatches)
        return "a drained step" if self.plan.is_asynchronous else "a step"

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which the step time lies, as far as the errors of its costs say.

        One standard deviation each way if all costs err together, as they do when a device is
        slower than its model.
        """
        return (
            self.step_time * (1.0 - self.relative_error),
            self.step_time * (1.0 + self.relative_error),
        )

    def at_pace(self, reference_s: float) -> float:
        """Seconds of the step while the reference kernel takes so many.

        Raises:
            ValueError: when it is not known at which pace the step was predicted.
        """
        if self.pace is None:
            raise ValueError(
                f"plan {self.plan.name!r} was not simulated with times that were brought to one "
                "pace of the cores; profile it on CPUs, and simulate it again"
            )
        return self.step_time * self.pace.slower(reference_s, communicating=self._communicating)

    @cached_property
    def _communicating(self) -> float:
        return _communicating(self.timeline)

    @property
    def tells_apart(self) -> float:
        """The share by which another plan must be slower on this cluster to be said to be.

        What two predictions have in common, such as a device that is slower than its model, does
        not count; between processes of one machine two steps are each off by themselves.
        """
        return TELLS_APART if self.pace is None else math.sqrt(2) * STEP_ERROR

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """What the passes of one microbatch take in each stage."""
        return self._step.stage_seconds()

    @property
    def fits(self) -> bool:
        """Whether every rank fits its devices."""
        return all(rank.fits for rank in self.memory)

    @property
    def peak_memory(self) -> int:
        """Bytes per device of the fullest rank."""
        return max(rank.peak for rank in self.memory)

    @property
    def in_words(self) -> str:
        """Step time, memory and whether it fits, in a few words."""
        time, memory = format_duration(self.step_time), format_bytes(self.peak_memory)
        stream = ""
        if self.period is not None:
            stream = f" that is drained, {format_duration(self.period)} a microbatch if it is not"
        return f"{time} a step{stream}{self._caveat}, {memory} a device, {self._verdict}"

    @property
    def _caveat(self) -> str:
        return "" if self.is_calibrated else f" ({NOT_CALIBRATED})"

    @property
    def error_in_words(self) -> str:
        """How far the step time may be off, as in ``± 27 %, not calibrated``."""
        caveat = "" if self.is_calibrated else f", {NOT_CALIBRATED}"
        return f"± {100 * self.relative_error:.0f} %{caveat}"

    @property
    def crowded(self) -> str:
        """What is to be said of a plan that fits, but leaves hardly any memory free; or nothing.

        Allocators break memory into pieces, communicators and libraries take some, and no
        simulator sees either.
        """
        if not self.fits:
            return ""
        fullest = max(rank.peak / rank.capacity for rank in self.memory)
        if fullest <= CROWDED:
            return ""
        return (
            f"It fills {fullest:.0%} of a device's memory: of 35 measured runs that were "
            'predicted to fill over 90 %, 3 ran; headroom="measured" leaves room'
        )

    @property
    def _verdict(self) -> str:
        """Whether it fits, as a person says it."""
        return "fits" if self.fits else "does not fit"

    def __repr__(self) -> str:
        return f"<Simulation of {self.plan.name!r}: {self.in_words}>"

    def to_json(self) -> str:
        """The text of a simulation file: figures, timeline, critical path and memory of all ranks.

        Example:
            >>> simulation.save("step.json")  # doctest: +SKIP
            >>> Simulation.load("step.json").timeline  # doctest: +SKIP
            <Timeline 'predicted': 39.7 ms, 9,120 rows on 16 lanes>
        """
        return encode({**SIMULATION_FORM.head, "simulation": self.kept()})

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> Simulation:
        """Read the text of a simulation file."""
        what = what or cls.FILE
        file = SIMULATION_FORM.read(text, _SimulationFile, what)
        with reading(what):
            return cls.from_kept(file.simulation)

    def kept(self, *, brief: bool = False) -> KeptSimulation:
        """What is kept in files: of a brief one only the plan, its step time and its peaks."""
        return KeptSimulation(
            json.loads(self.plan.to_json()),
            self.step_time,
            self.relative_error,
            self.is_calibrated,
            tuple(KeptMemory.of(rank) for rank in self.memory),
            None if brief else KeptStep.of(self._step, len(self.memory)),
            self.pace,
            self.estimated,
            self.period,
        )

    @classmethod
    def from_kept(cls, kept: KeptSimulation) -> Simulation:
        """The simulation that was kept.

        Raises:
            ValueError: if it is none; the message says why.
        """
        plan = Plan.from_json(json.dumps(kept.plan), what="its plan")
        check_numbers(msgspec.to_builtins(kept), "its simulation", least=1e-30, most=2.0**62)
        wanted = len(set(plan.rank_of))
        if len(kept.memory) != wanted or (kept.step and len(kept.step.memory) != wanted):
            raise ValueError(f"it has the memory of {len(kept.memory)} ranks; the plan {wanted}")
        return cls(
            plan,
            kept.step_time,
            tuple(each.memory() for each in kept.memory),
            kept.relative_error,
            kept.is_calibrated,
            kept.step.step() if kept.step else StepLeftOut(plan.name),
            kept.pace,
            kept.estimated,
            kept.period,
        )

    def memory_timeline(self, rank: int) -> MemoryTimeline:
        """The memory of one device of a rank over the step."""
        return self._step.memory_timeline(rank)

    @cached_property
    def timeline(self) -> Timeline:
        """Every task of the step, microbatch by microbatch."""
        return self._step.timeline()

    @cached_property
    def critical_path(self) -> StepPath:
        """The chain of tasks that the step time is made of, and why each waited."""
        return self._step.critical_path()

    @cached_property
    def groups(self) -> Table:
        """Computing, exposed communication, idleness and bubble of each stage."""
        return group_table(self.timeline)

    @cached_property
    def operators(self) -> Table:
        """Time of each operator by pass, the longest first."""
        return operator_table(self.timeline)

    @cached_property
    def collectives(self) -> Table:
        """Time of each communication, and how much of it no computing hides."""
        return collective_table(self.timeline, self.communication_bytes)

    @cached_property
    def communication_bytes(self) -> dict[str, int]:
        """Bytes per device that each communication moves once, by its name, where known."""
        return self._step.communication_bytes()

    def _repr_html_(self) -> str:
        gib = self.peak_memory / 2**30
        return (
            f"<b>{html.escape(self.plan.name)}</b>: {self.step_time * 1e3:.2f} ms "
            f"a step ({self.error_in_words}), {gib:.2f} GiB per device "
            f"({self._verdict})"
        )


@dataclass(frozen=True)
class KeptSimulation:
    """A simulation as files hold it; without `step` a brief one."""

    plan: dict[str, Any]
    step_time: float
    relative_error: float
    is_calibrated: bool
    memory: tuple[KeptMemory, ...]
    step: KeptStep | None = None
    pace: StepPace | None = None
    estimated: float | None = None
    period: float | None = None


@dataclass(frozen=True)
class _SimulationFile:
    """What a simulation file holds."""

    format: str
    version: int
    simulation: KeptSimulation


def simulate_plan(
    plan: Plan, graph: OperatorGraph, costs: CostModel, *, memory: RowMemory | None = None
) -> Simulation:
    """Predict a plan's step time, memory and timeline.

    Args:
        plan: stages, meshes, choices and schedule.
        graph: the model at its whole batch; the plan's substitutions are applied to it.
        costs: prices of operators; links are priced from the plan's cluster.
        memory: rows priced before, when many plans are simulated under the same `costs`.

    Raises:
        ValueError: when the plan is not for `graph` (see `Plan.check`).
    """
    check_arguments("simulate", plan=(plan, Plan), graph=(graph, OperatorGraph))
    graph = plan.on(graph)
    return simulate_model(plan_model(plan, graph, costs, memory))


def simulate_model(model: PlanModel) -> Simulation:
    """Play a plan whose prices are known."""
    times = step_times(model)
    step, pace = PlayedStep(model, times), _pace(model)
    return Simulation(
        plan=model.plan,
        step_time=times.makespan * 1e-9,
        memory=rank_memory(model, times),
        relative_error=_relative_error(model, step, 0.0 if pace is None else STEP_ERROR),
        is_calibrated=model.spread == 0.0,
        _step=step,
        pace=pace,
        estimated=_estimated(model),
        period=period_seconds(model),
    )


def _relative_error(model: PlanModel, step: SimulatedStep, rest: float) -> float:
    """The errors of all prices of a step, those of unlike ones as independent.

    Operators weigh by their times, as if all erred together; links, where they say how far they
    are off, by their share of the step: for messages between stages, for collectives within one.
    How a cluster that nobody has measured differs from others adds to that, and so does the
    `rest`, what steps of processes on shared cores are off for other reasons.
    """
    kernels = _of_operators(model, lambda row, _: float(row.relative_error[0]))
    links = max((_error_of(link, model.plan) for link in _links(model.plan)), default=0.0)
    share = _communicating(step.timeline()) if links else 0.0
    return math.hypot((1 - share) * kernels, share * links, rest, model.spread)


def _links(plan: Plan) -> Iterator[Link]:
    """Those that the devices of a plan use."""
    num_nodes = len(plan.nodes)
    if plan.num_devices > num_nodes:
        yield plan.cluster.intra_node
    if num_nodes > 1:
        yield plan.cluster.inter_node


def _error_of(link: Link, plan: Plan) -> float:
    """How far a link is off as a plan uses it; groups of which nothing is said as messages are."""
    found = link.relative_error if len(plan.stages) > 1 else 0.0
    for size in {stage.mesh.num_devices for stage in plan.stages} - {1}:
        group = link.nearest(size)
        known = 0.0 if group is None else group.relative_error
        found = max(found, known or link.relative_error)
    return found


def _pace(model: PlanModel) -> StepPace | None:
    """That of the cores at which a step is predicted; None on devices of several types."""
    costs, types = model.stages[0].builder.costs, model.plan.device_types
    if len(types) != 1 or not isinstance(costs, PacedCosts):
        return None
    pace = costs.pace(types[0])
    if pace is None:
        return None
    operators = model.graph.operators
    return StepPace(pace.reference_s, _of_operators(model, lambda _, i: elasticity(operators[i])))


def _estimated(model: PlanModel) -> float | None:
    """The share of computing that was not timed, if any was."""
    measured = CostSource.MEASURED.value
    if all(row.sources[0] != measured for stage in model.stages for row in stage.table.rows):
        return None
    return 1.0 - _of_operators(model, lambda row, _: float(row.sources[0] == measured))


def _of_operators(model: PlanModel, value: Callable[[OperatorRow, int], float]) -> float:
    """The mean of a value over the operators of a step, by their times."""
    weighted = total = 0.0
    for stage in model.stages:
        for i in stage.table.operators:
            row = stage.table.row(i)
            ns = float(row.passes_ns[0])
            weighted += ns * value(row, i)
            total += ns
    return weighted / total if total else 0.0


def _communicating(timeline: Timeline) -> float:
    """The share of a step in which devices communicate and do not compute, on average."""
    exposed = statistics(timeline).exposed_communication.values()
    return fmean(exposed) / timeline.duration if exposed and timeline.duration else 0.0
