"""Plans with sliced tokens (TeraPipe), or two homes for each stage (Chimera, DualPipe), of others.

Choices are not searched under these schedules: those of both homes of a stage are one, and what
makes the keys that a slice reads follows from its attention. But any such plan can be simulated.
So the best pipelines that a search has found are tried in these forms, with their own choices:

    S stages, M microbatches, 1F1B   ──▶  K slices of each microbatch, M or fewer of these
                                     ──▶  two opposite pipelines on the same devices

A step of a pipeline is its fill, S − 1 stages, and the rest. What would not be faster than the
best plan without any fill at all is left as it is: other forms save a part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from stratagem.searcher.improvement.neighbours import recomputing_more
from stratagem.searcher.improvement.token_slicing import default_unit, estimated_lengths
from stratagem.searcher.improvement.trials import Trials
from stratagem.searcher.space.choices import choices_of, with_choices
from stratagem.searcher.space.schedule_traits import Form, form_of
from stratagem.searcher.space.situation import is_better, rank
from stratagem.searcher.space.skeletons import skeleton_of
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.graph.token_slices import num_positions, num_slices, token_dims
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.named_schedules import SCHEDULES
from stratagem.simulator.schedules.schedule_record import Sizes
from stratagem.simulator.simulation.simulation import Simulation

Asked = Mapping[Form, tuple[str, ...]]
"""Forms that are asked for, each with the schedules under which plans have it."""

OF_EACH = 2
"""Plans of each number of ranks that are tried in other forms, unlike in cuts or choices."""
FEWEST = 2
"""Slices that are tried first; then twice or half as many, with as many microbatches or others."""


def slicing_refused(graph: OperatorGraph) -> str:
    """Why the tokens of a model cannot be sliced; empty if they can.

    Example:
        >>> from stratagem.simulator.graph.models import gpt, mlp
        >>> slicing_refused(mlp([8, 8], batch=4))
        "graph 'mlp' has no attention: token slices need a causal model"
        >>> slicing_refused(gpt(num_layers=1, hidden=8, num_heads=2, sequence=4, batch=2))
        ''
    """
    try:
        num_positions(graph, token_dims(graph))
    except ValueError as error:
        return str(error)
    return ""


@dataclass
class OtherForms:
    """Tries pipelines in other forms until so many plans were simulated.

    Attributes:
        trials: what simulates them.
        forms: `Form.SLICED`, `Form.MIRRORED`, both or none: what may be tried, by which schedules.
        policies: of recomputing, that stages may have; those that recompute more come later.
        time: seconds of the best plan known, whenever it is asked for.
        tried: what was simulated and may be, by form, in order.
    """

    trials: Trials
    forms: Asked
    policies: tuple[str, ...]
    time: Callable[[], float]
    tried: dict[Form, list[Simulation]] = field(default_factory=dict)

    def try_all(self, known: Iterable[Simulation]) -> None:
        """Try the best plans of each number of ranks, the most promising first.

        Args:
            known: plans of the search, simulated.
        """
        before = self.time()
        for pipeline in _pipelines(known):
            if _without_fill(pipeline) > self.time():
                break
            for schedule in self.forms.get(Form.SLICED, ()):
                self._slice(pipeline, schedule)
            for schedule in self.forms.get(Form.MIRRORED, ()):
                self._mirror(pipeline, schedule)
        found = min(self.tried.get(Form.SLICED, []), key=self.trials.rank, default=None)
        if found is not None and self.trials.room(found).fits and found.step_time < before:
            self._try_unequal(found)

    def _slice(self, pipeline: Simulation, schedule: str) -> None:
        """Downhill over numbers of microbatches and of equal slices, from the plan's own."""
        graph = self.trials.situation.graph
        plan, total = _with_whole_positions(pipeline.plan, graph), _positions(graph)
        counts = graph.microbatch_counts

        def simulated(at: tuple[int, int]) -> Simulation | None:
            parts, slices = at
            if parts not in counts or slices < FEWEST or total % slices:
                return None
            return self._simulated(
                replace(plan, schedule=schedule, num_microbatches=parts, token_slices=slices)
            )

        own = num_slices(plan.token_slices)
        here = plan.num_microbatches, own if own > 1 and total % own == 0 else FEWEST
        now, seen = simulated(here), {here}
        while now is not None:
            near = [at for at in _around(*here) if at not in seen]
            seen.update(near)
            better = None
            for at in near:
                found = simulated(at)
                if found is not None and is_better(self.trials.room(found), self.trials.room(now)):
                    better = at, found
                    break
            if better is None:
                return
            here, now = better

    def _try_unequal(self, sliced: Simulation) -> None:
        """The lengths that are best by estimate, where equal slices have made a better plan."""
        s, total = self.trials.situation, _positions(self.trials.situation.graph)
        whole, unit = replace(sliced.plan, token_slices=1), default_unit(total)
        lengths = estimated_lengths(whole, s.graph, s.costs, total, unit, s.memory)
        self._simulated(replace(whole, token_slices=lengths))

    def _mirror(self, pipeline: Simulation, schedule: str) -> None:
        """Both directions, with the plan's own microbatches and with one or two for each stage."""
        plan = pipeline.plan
        shapes = [stage.mesh.shape for stage in plan.stages]
        if len(shapes) % 2 or shapes != shapes[::-1]:
            return
        graph, stages = self.trials.situation.graph, len(plan.stages)
        plan = with_choices(
            plan, {n: replace(c, fused=False) for n, c in choices_of(plan).items()}
        )
        for parts in dict.fromkeys((plan.num_microbatches, stages, 2 * stages)):
            sizes = Sizes(stages, parts, plan.num_ranks)
            if parts in graph.microbatch_counts and SCHEDULES[schedule].accepts(sizes):
                self._simulated(
                    replace(plan, schedule=schedule, num_microbatches=parts, token_slices=1)
                )

    def _simulated(self, plan: Plan) -> Simulation | None:
        """A plan, recomputing more while it does not fit; None if it is none or not allowed."""
        best: Simulation | None = None
        now: Plan | None = replace(plan, orders=(), prediction=None, name="in another form")
        while now is not None and (found := self.trials.simulated(now)) is not None:
            form = form_of(plan.schedule)
            assert form is not None
            self.tried.setdefault(form, []).append(found)
            best = found if best is None else min(best, found, key=self.trials.rank)
            room, graph = self.trials.room(found), self.trials.situation.graph
            more = recomputing_more(skeleton_of(now), room, graph, self.policies)
            now = None if more is None else with_choices(now, more[1])
        return best


def _pipelines(known: Iterable[Simulation]) -> list[Simulation]:
    """The best plans of each number of ranks with one stage each that may take other forms."""
    best: dict[int, list[Simulation]] = {}
    for simulation in sorted(known, key=rank):
        plan = simulation.plan
        if (
            1 < plan.num_ranks == len(plan.stages)
            and simulation.fits
            and not plan.substitutions
            and not plan.has_pins
            and not plan.is_asynchronous
        ):
            alike = best.setdefault(plan.num_ranks, [])
            if len(alike) < OF_EACH and all(plan.stages != each.plan.stages for each in alike):
                alike.append(simulation)
    return sorted((each for alike in best.values() for each in alike), key=_without_fill)


def _without_fill(simulation: Simulation) -> float:
    """Seconds of a pipeline's step if no rank waited for the first pass, or behind the last."""
    seconds = simulation.stage_seconds
    return simulation.step_time - (simulation.plan.num_ranks - 1) * sum(seconds) / len(seconds)


def _around(parts: int, slices: int) -> Iterator[tuple[int, int]]:
    """Numbers of microbatches and slices beside some: more slices first."""
    yield parts, 2 * slices
    yield parts // 2 if parts % 2 == 0 else 0, 2 * slices
    yield parts // 2 if parts % 2 == 0 else 0, slices
    yield parts, slices // 2 if slices % 2 == 0 else 0
    yield 2 * parts, slices


def _positions(graph: OperatorGraph) -> int:
    return num_positions(graph, token_dims(graph))


def _with_whole_positions(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan where nothing is sharded along positions, which slices have whole."""
    choices = choices_of(plan)
    for operator, dims in zip(graph.operators, token_dims(graph), strict=True):
        choice = choices[operator.name]
        config = tuple(
            REPLICATE if isinstance(placed, Shard) and placed.dim in dims.all else placed
            for placed in choice.config
        )
        choices[operator.name] = replace(choice, config=config)
    return with_choices(plan, choices)
