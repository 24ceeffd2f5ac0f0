"""What a search hands back."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from stratagem.searcher.driver.budget import StopReason
from stratagem.searcher.driver.incumbent import FrontPoint, TracePoint
from stratagem.searcher.driver.saved_result import (
    KeptDraws,
    KeptPoint,
    KeptSeconds,
    KeptSpace,
    KeptTrace,
    kept_seconds,
    read_seconds,
)
from stratagem.searcher.improvement.outcomes import Fate, SkeletonRecord
from stratagem.searcher.improvement.simpler_plans import simplicity_in_words
from stratagem.searcher.methods.simple_strategies import with_buckets, with_experts
from stratagem.searcher.robustness.robust_choice import FOUND, Robustness
from stratagem.searcher.space.schedule_traits import Form
from stratagem.simulator.base.files import encode, reading
from stratagem.simulator.base.hostile_texts import check_numbers, printable
from stratagem.simulator.base.misspelt_names import few
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.drawing.convergence_curve import convergence_curve
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.token_slices import num_slices
from stratagem.simulator.hardware.cluster import NOT_CALIBRATED
from stratagem.simulator.hardware.headroom import NO_HEADROOM, Headroom
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import shape_of
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.idle_devices import vain_devices
from stratagem.simulator.simulation.simulation import (
    TELLS_APART,
    KeptSimulation,
    Simulation,
)

PROVED_GAP = 5e-4
"""A plan that is nearer to a bound is the best there is, for all that matters."""

MOSTLY = 0.5
"""From this share on a plan is mostly estimated."""
NAMED = 3
"""Known strategies that are named where predictions do not tell them apart."""

FASTER_NOTE = "faster than the plan: "
"""Under which, with their names behind it, the notes of a search say of baselines why they are."""

OTHERWISE = (
    "trained in another way, updated amid a step by gradients of older weights, so that it is no "
    "plan of the search"
)
"""What is said of a pipeline that never drains."""

FITTING = ("yes", "without headroom", "no")
"""What tables say of plans: they fit, or would if nothing had to stay free, or do not."""

UNBOUNDED = {
    Form.SLICED: ("slices no tokens", "slices them"),
    Form.MIRRORED: ("has one home for each stage", "has two"),
    Form.PLACED: ("has every operator on its whole mesh", "has some on parts of it"),
}
"""What plans do that bounds are about, and what one does that they are not about, by form."""

NOTHING_FITS_NOTE = "inter-operator program: nothing fits"
"""Under which the notes of a search say what is short of memory, and what would help."""

RESULT_FORM = FileForm(version=1, remedy="search again", format="stratagem search result")


@dataclass(frozen=True, eq=False)
class SearchResult(SavedValue):
    """The best plan found, beside every baseline on the same simulator.

    Example:
        >>> result = sg.search(graph, cluster)  # doctest: +SKIP
        >>> result.save("result.json")  # doctest: +SKIP
        >>> sg.SearchResult.load("result.json").certificate == result.certificate  # doctest: +SKIP
        True

    A loaded result is printed, drawn, reported, compared and certified as the first one, and a
    search may start from its plan. Of baselines only plan, step time and peaks are kept: for the
    timeline of one, simulate its plan again.

    Attributes:
        plan: the plan, its prediction in it.
        simulation: what the simulator says of it: step time, memory, timeline.
        baselines: the known strategies' plans, simulated.
        bound: seconds under which no plan of the searched space is, or None if the search ended
            before it was known (see `cutting_planes.lower_bound`).
        listed_bound: the same of plans on the skeletons in `space`, which are bounded one by one;
            pipelines that are cut otherwise are bounded together (see `PipelineWork`).
        bounds_all: whether `bound` holds for these as well, as it does on up to `SMALL_CLUSTER`
            devices.
        space: every skeleton of the space and what became of it.
        front: plans of which none is better in time, memory and devices at once.
        trace: how the best score fell.
        notes: what else was left out of the space, and why: counts by reason; and the single
            changes by which pipelines were refined, and skeletons walked to others.
        stop_reason: why the search ended.
        evaluations: plans that chains decided on.
        seconds: wall time of the search.
        fastest: where the simplest plan was asked for and another one takes less, the fastest;
            else None.
        headroom: of each device's memory what was to stay free. Bounds and the certificate are of
            plans that leave it free; baselines that do not keep their row and are marked.
        unbounded: forms in which plans were tried that no bound is about: with sliced tokens, and
            on many devices in two directions and with operators on parts of meshes.
        robustness: what the plans compared take under drawn errors of the prices; None where
            errors were not drawn (`notes` say why; `sg.robustness` draws them).
        exports: formats of other programs that say the plan without loss; None if nobody looked.
    """

    FILE: ClassVar[str] = "search result"

    graph: OperatorGraph
    plan: Plan
    simulation: Simulation
    baselines: Mapping[str, Simulation]
    bound: float | None
    listed_bound: float | None
    bounds_all: bool
    space: tuple[SkeletonRecord, ...]
    front: tuple[FrontPoint, ...]
    trace: tuple[TracePoint, ...]
    notes: Mapping[str, str]
    stop_reason: StopReason
    evaluations: int
    seconds: float
    fastest: Simulation | None = None
    headroom: Headroom = NO_HEADROOM
    unbounded: tuple[Form, ...] = ()
    robustness: Robustness | None = None
    exports: tuple[str, ...] | None = None

    def to_json(self) -> str:
        """The text of the file of a search: all of the above, baselines in brief."""
        kept = _KeptResult(
            graph=json.loads(self.graph.to_json()),
            plan=json.loads(self.plan.to_json()),
            simulation=self.simulation.kept(),
            baselines={name: each.kept(brief=True) for name, each in self.baselines.items()},
            bound=None if self.bound is None else kept_seconds(self.bound),
            listed_bound=None if self.listed_bound is None else kept_seconds(self.listed_bound),
            bounds_all=self.bounds_all,
            space=KeptSpace.of(self.space),
            front=tuple(map(KeptPoint.of, self.front)),
            trace=tuple(map(KeptTrace.of, self.trace)),
            notes={printable(what): printable(why) for what, why in self.notes.items()},
            stop_reason=self.stop_reason.name.lower(),
            evaluations=self.evaluations,
            seconds=self.seconds,
            fastest=None if self.fastest is None else self.fastest.kept(brief=True),
            headroom=self.headroom,
            unbounded=self.unbounded,
            robustness=None if self.robustness is None else KeptDraws.of(self.robustness),
            exports=self.exports,
        )
        return encode({**RESULT_FORM.head, "result": kept})

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> SearchResult:
        """Read the text of the file of a search."""
        what = what or cls.FILE
        file = RESULT_FORM.read(text, _ResultFile, what)
        with reading(what):
            return _read(file.result)

    @property
    def gap(self) -> float | None:
        """How far the plan may be from the best of the space: (step − bound) / step.

        None where no bound is known, or none that is about plans like this one.
        """
        if self.bound is None or not self.simulation.fits or self._is_beside:
            return None
        step = self.simulation.step_time
        return max(0.0, (step - self.bound) / step)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that a second of training takes in; samples where the model embeds none."""
        for operator in self.graph.operators:
            if role_of(operator) is OperatorRole.LOOKUP:
                tokens = math.prod(shape_of(operator.inputs[0].layout, operator.sizes))
                return tokens / self.simulation.step_time
        return self.graph.batch / self.simulation.step_time

    @property
    def cost_per_step(self) -> float:
        """Money that a step costs on the plan's cluster; 0 where its devices have no price."""
        return self.plan.cluster.price_per_hour * self.simulation.step_time / 3600.0

    @property
    def rows(self) -> list[tuple[str, float, int, bool]]:
        """(name, step seconds, peak bytes per device, fits): the plan, then the baselines.

        Seconds are those by which plans are compared (see `Simulation.compared_time`).
        """
        found = self.strategies
        return [(name, s.compared_time, s.peak_memory, self.fits(s)) for name, s in found.items()]

    @property
    def strategies(self) -> dict[str, Simulation]:
        """The plan found, the fastest where that is another one, and the baselines."""
        fastest = {} if self.fastest is None else {"fastest plan": self.fastest}
        return {FOUND: self.simulation, **fastest, **self.baselines}

    @property
    def compared(self) -> dict[str, Plan]:
        """The plan found, the fastest where that is another one, and the baselines that fit.

        Without those that train in another way.
        """
        own = {n: s for n, s in self.strategies.items() if n not in self.baselines}
        return {name: s.plan for name, s in {**own, **self.alike}.items()}

    @property
    def alike(self) -> dict[str, Simulation]:
        """The baselines that fit and train as the plan does: with one update a step."""
        known = self.baselines.items()
        return {n: s for n, s in known if self.fits(s) and not s.plan.is_asynchronous}

    def fits(self, simulation: Simulation) -> bool:
        """Whether a plan leaves the headroom of the search free."""
        if not self.headroom:
            return simulation.fits
        whole = zip(simulation.memory, _capacities(simulation), strict=True)
        return all(memory.peak <= self.headroom.usable(most) for memory, most in whole)

    def fits_without_headroom(self, simulation: Simulation) -> bool:
        """Whether a plan fits the memory, but does not leave the headroom of the search free."""
        if not self.headroom or self.fits(simulation):
            return False
        whole = zip(simulation.memory, _capacities(simulation), strict=True)
        return all(memory.peak <= most for memory, most in whole)

    def fitting(self, simulation: Simulation) -> str:
        """Whether a plan fits, in a word or two (see `FITTING`)."""
        if self.fits(simulation):
            return FITTING[0]
        return FITTING[1 if self.fits_without_headroom(simulation) else 2]

    @property
    def space_table(self) -> Table:
        """Every skeleton, what became of it, its bound (none where no plan fits) and best plan."""
        columns = {
            "skeleton": Unit.TEXT,
            "fate": Unit.TEXT,
            "bound": Unit.SECONDS,
            "best plan": Unit.SECONDS,
        }
        rows = tuple(
            (
                str(r.skeleton),
                r.fate.value + (f" ({r.why})" if r.why else ""),
                r.bound if math.isfinite(r.bound) else None,
                r.best,
            )
            for r in sorted(self.space, key=lambda r: r.bound)
        )
        return Table(f"{len(rows)} skeletons of {self.graph.name}", columns, rows)

    @property
    def certificate(self) -> str:
        """The bound and the gap in a sentence."""
        step = self.simulation.step_time
        if not self.simulation.fits:
            return f"no plan that fits was found{self._shortage}"
        if self.bound is None:
            return "no bound: the search ended before there was one"
        everything = "of the space" if self.bounds_all else f"on the {self._num_listed}"
        told = [f"leaves {self.headroom} free"] if self.headroom else []
        told += [f"{UNBOUNDED[name][0]}" for name in self.unbounded]
        if told:
            everything += f" that {' and '.join(told)}"
        if self._is_beside:
            own = [UNBOUNDED[form][1] for form in self._forms if form in self.unbounded]
            return (
                f"no plan {everything} takes less than {format_duration(self.bound)}; this one "
                f"{' and '.join(own)}, and no bound is about others that do"
            )
        if (self.gap or 0.0) < PROVED_GAP:
            return f"proved: no plan {everything} takes less than {format_duration(step)}"
        return (
            f"no plan {everything} takes less than {format_duration(self.bound)}: "
            f"this one is at most {100 * (self.gap or 0.0):.1f} % from the best"
            f"{self._of_the_other}{self._of_listed}"
        )

    @property
    def _of_the_other(self) -> str:
        """How far the fastest plan may be from the best, where that is another one."""
        if self.fastest is None or self.bound is None:
            return ""
        gap = max(0.0, 1 - self.bound / self.fastest.step_time)
        proved = f"at most {100 * gap:.1f} %" if gap >= PROVED_GAP else "is proved to be the best"
        return f", the fastest one {proved}"

    @property
    def _is_beside(self) -> bool:
        """Whether no bound is about plans like this one."""
        return any(form in self.unbounded for form in self._forms)

    @property
    def _forms(self) -> list[Form]:
        """What bounds may not be about."""
        has = {
            Form.SLICED: num_slices(self.plan.token_slices) > 1,
            Form.MIRRORED: self.plan.is_mirrored,
            Form.PLACED: self.plan.has_pins,
        }
        return [form for form, is_so in has.items() if is_so]

    @property
    def _num_listed(self) -> str:
        """How many skeletons are listed, those left out that constraints do not allow."""
        count = sum(record.fate is not Fate.FORBIDDEN for record in self.space)
        return f"{count:,} skeletons listed" if count > 1 else "skeleton listed"

    @property
    def _of_listed(self) -> str:
        """What is known of the listed skeletons beyond the bound on all plans, if anything."""
        step, bound, listed = self.simulation.step_time, self.bound, self.listed_bound
        if bound is None or listed is None or listed <= bound * (1 + PROVED_GAP):
            return ""
        gap = max(0.0, (step - listed) / step)
        if gap < PROVED_GAP:
            return f", and the best on the {self._num_listed}"
        return (
            f"; on the {self._num_listed} none takes less than {format_duration(listed)} "
            f"({100 * gap:.1f} %)"
        )

    @property
    def _shortage(self) -> str:
        """What lacks how many bytes, and the remedy, if that is known."""
        told = self.notes.get(NOTHING_FITS_NOTE)
        if told and not self.fits_without_headroom(self.simulation):
            return f" ({told})"
        over = [memory.peak - memory.capacity for memory in self.simulation.memory]
        if self.fits_without_headroom(self.simulation):
            return (
                f" (the closest would fit if not {self.headroom} had to stay free: it may run, or "
                "not; ask for less headroom to have it)"
            )
        return f" (the closest lacks {format_bytes(max(over))} a device on rank {np.argmax(over)})"

    @property
    def table(self) -> Table:
        """The plan found and the known strategies, the fastest that fits first.

        Where errors of prices were drawn it is said in which share of the draws each plan is the
        best, and what it loses at worst. Of setups that share experts out it is said how many ways
        (see `with_experts`), of those in other buckets than the plan in which. Where a pipeline
        that never drains is among them, a column says of which the time is that of a step, and of
        which that of periods, and the note that it trains in another way.
        """
        columns = {
            "strategy": Unit.TEXT,
            "step": Unit.SECONDS,
            "more than the plan": Unit.SHARE,
            "memory per device": Unit.BYTES,
            "fits": Unit.TEXT,
        }
        sure = {} if self.robustness is None else self.robustness.by_plan
        if sure:
            columns |= {"best in": Unit.SHARE, "lost at worst": Unit.SHARE}
        streams = self._of_streams
        if streams:
            columns |= {"timed as": Unit.TEXT}
        ours = self.simulation.step_time
        rows: list[tuple[Any, ...]] = []
        for name, s in self.strategies.items():
            told = (self.fitting(s), *(sure.get(name, (None, None)) if sure else ()))
            times = s.compared_time, s.compared_time / ours - 1.0
            timed = (s.timed_as,) if streams else ()
            called = with_buckets(with_experts(name, s.plan), s.plan, self.plan)
            rows.append((called, *times, s.peak_memory, *told, *timed))
        found, *known = rows
        known.sort(key=lambda row: (FITTING.index(row[4]), row[1]))
        title = f"{self.graph.name} on {self.plan.cluster.name}"
        notes = [] if self.robustness is None else [self.robustness.note]
        notes += [streams] if streams else []
        return Table(title, columns, (found, *known), " ".join(notes))

    @property
    def _of_streams(self) -> str:
        """What is to be said of baselines that never drain, if there are any."""
        streams = [name for name, s in self.baselines.items() if s.plan.is_asynchronous]
        return f"{' and '.join(streams)}: {OTHERWISE}." if streams else ""

    @property
    def curve(self) -> str:
        """A picture of how the best step fell, from that of the known strategies on, as HTML."""
        alike = (s for s in self.baselines.values() if s.fits and not s.plan.is_asynchronous)
        start = min((s.step_time for s in alike), default=math.inf)
        if start < (self.fastest or self.simulation).step_time:
            start = math.inf  # of a strategy that the constraints do not allow
        points, before = [(0, start)], 0
        for point, last in zip(self.trace, (None, *self.trace), strict=False):
            if last is not None and point.evaluations < last.evaluations:
                before += last.evaluations  # another graph's search, after that of the first
            points.append((before + point.evaluations, min(points[-1][1], point.best)))
        return convergence_curve(points, self.bound)

    @property
    def _words(self) -> str:
        """How good the plan is, and what was done for it."""
        vain = vain_devices(self.plan, self.plan.rewrite(self.graph).graph)
        simple = self.simplicity[:1].upper() + self.simplicity[1:]
        told = (
            *(simple, self._of_gap, self.order, self._of_faster, self._of_headroom),
            *(self._of_errors, vain, self.simulation.crowded),
        )
        of_fastest = "of the fastest, " if self.fastest is not None else ""
        return (
            f"{self.certificate}. {self.spent}; "
            f"{of_fastest}{self.stop_reason.value}.{self._caveat}"
            + "".join(f" {more}." for more in told if more)
        )

    @property
    def spent(self) -> str:
        """What the search spent: plans that chains decided on, if any, and wall time."""
        what = f"{self.evaluations:,} plans evaluated" if self.evaluations else "Searched"
        return f"{what} in {self.seconds:.1f} s"

    @property
    def simplicity(self) -> str:
        """How alike the plan treats like layers, and what that costs, in a sentence."""
        return simplicity_in_words(self.simulation, self.fastest, self.graph, self.exports)

    @property
    def _of_gap(self) -> str:
        """That no more is to be gained than predictions tell apart, where that is proved."""
        gap = self.gap
        if gap is None or not PROVED_GAP <= gap <= TELLS_APART:
            return ""
        return (
            f"What could still be gained, {100 * gap:.1f} %, is less than predictions tell apart "
            f"({TELLS_APART:.0%})"
        )

    @property
    def order(self) -> str:
        """Between which plans no order is claimed, in a sentence; empty if between none."""
        plan = self.simulation
        if (plan.estimated or 0.0) > MOSTLY:
            return (
                f"Of what the plan computes {plan.estimated:.0%} was estimated, not timed, so "
                "which plan is faster is not claimed: profile more operators"
            )
        apart = plan.tells_apart
        near = [
            name
            for name, each in self.baselines.items()
            if each.fits and not each.plan.is_asynchronous
            if 0 < abs(each.step_time / plan.step_time - 1) < apart
        ]
        if not near:
            return ""
        return (
            f"Predictions that are less than {apart:.0%} apart do not say which plan is faster: "
            f"that of {few(near, NAMED, quoted=False)} or this one"
        )

    @property
    def _of_faster(self) -> str:
        """Which baselines are faster, as they do what was not searched, if any are."""
        told = [
            f"{what.removeprefix(FASTER_NOTE)} ({why})"
            for what, why in self.notes.items()
            if what.startswith(FASTER_NOTE)
        ]
        return f"Faster, but beside what was searched: {'; '.join(told)}" if told else ""

    @property
    def _of_headroom(self) -> str:
        """What had to stay free, if anything had."""
        return f"Of the memory {self.headroom} had to stay free" if self.headroom else ""

    @property
    def _of_errors(self) -> str:
        """How sure the choice is, where errors were drawn."""
        sure = self.robustness
        return "" if sure is None else f"The plan found is {sure.in_words}"

    @property
    def _caveat(self) -> str:
        """What must be said of all figures of a cluster that nobody has measured."""
        if self.simulation.is_calibrated:
            return ""
        cluster = self.plan.cluster
        return (
            f" Cluster {cluster.name!r} is {NOT_CALIBRATED}: steps may be "
            f"{cluster.calibration.spread:.0%} off beside the errors of kernels."
        )

    def __repr__(self) -> str:
        return f"<SearchResult of {self.graph.name!r}: {self.simulation.in_words}>"

    def __str__(self) -> str:
        return f"{self.table}\n{f'{self._words} {self._of_streams}'.rstrip()}"

    def _repr_html_(self) -> str:
        return f"{self.table._repr_html_()}<p>{html.escape(self._words)}</p>{self.curve}"


def _capacities(simulation: Simulation) -> list[int]:
    """The whole memory that a device of each rank of a plan has, whatever is to stay free."""
    plan = simulation.plan
    first: dict[int, int] = {}
    for stage, rank in zip(plan.stages, plan.rank_of, strict=True):
        first.setdefault(rank, stage.mesh.memory_bytes(plan.cluster))
    return [first[rank] for rank in sorted(first)]


@dataclass(frozen=True)
class _KeptResult:
    graph: dict[str, Any]
    plan: dict[str, Any]
    simulation: KeptSimulation
    baselines: dict[str, KeptSimulation]
    bound: KeptSeconds | None
    listed_bound: KeptSeconds | None
    bounds_all: bool
    space: KeptSpace
    front: tuple[KeptPoint, ...]
    trace: tuple[KeptTrace, ...]
    notes: dict[str, str]
    stop_reason: str
    evaluations: int
    seconds: float
    fastest: KeptSimulation | None = None
    headroom: Headroom = NO_HEADROOM
    unbounded: tuple[Form, ...] = ()
    robustness: KeptDraws | None = None
    exports: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _ResultFile:
    """What the file of a search holds."""

    format: str
    version: int
    result: _KeptResult


def _read(kept: _KeptResult) -> SearchResult:
    graph = OperatorGraph.from_json(json.dumps(kept.graph), what="its graph")
    plan = Plan.from_json(json.dumps(kept.plan), what="its plan")
    plan.on(graph)
    figures = {
        name: msgspec.to_builtins(getattr(kept, name))
        for name in (
            *("bound", "listed_bound", "space", "front", "trace", "evaluations", "seconds"),
            *("headroom", "robustness"),
        )
    }
    check_numbers(figures, "its result", least=1e-30, most=2.0**62)
    return SearchResult(
        graph=graph,
        plan=plan,
        simulation=Simulation.from_kept(kept.simulation),
        baselines={name: Simulation.from_kept(each) for name, each in kept.baselines.items()},
        bound=None if kept.bound is None else read_seconds(kept.bound),
        listed_bound=None if kept.listed_bound is None else read_seconds(kept.listed_bound),
        bounds_all=kept.bounds_all,
        space=kept.space.space(),
        front=tuple(each.point() for each in kept.front),
        trace=tuple(each.point() for each in kept.trace),
        notes=kept.notes,
        stop_reason=StopReason[kept.stop_reason.upper()],
        evaluations=kept.evaluations,
        seconds=kept.seconds,
        fastest=None if kept.fastest is None else Simulation.from_kept(kept.fastest),
        headroom=kept.headroom,
        unbounded=kept.unbounded,
        robustness=None if kept.robustness is None else kept.robustness.robustness(),
        exports=kept.exports,
    )
