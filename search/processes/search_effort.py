"""How much of everything a search does: all limits of its effort, in one record."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.saved_values import shown

AT_LEAST_ONE = ("together", "nearly", "nearly_divisor", "refined_pipelines", "walk_evaluations")


def _check(name: str, value: float) -> None:
    if value < 0:
        raise ValueError(f"effort: {name} is {value}; it must be 0 or more")


@dataclass(frozen=True)
class Scaled:
    """How often something is done whose work grows with the operators of a model.

    Example:
        >>> [Scaled(24, 12_000).of(operators) for operators in (100, 1_000, 9_999)]
        [24, 12, 4]

    Attributes:
        most: times for a small model.
        operators: that it may come to, all times together.
        least: times for a large model.

    Raises:
        ValueError: on a negative number.
    """

    most: int
    operators: int
    least: int = 4

    def __post_init__(self) -> None:
        check_fields(self, "effort")
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

    def of(self, num_operators: int, *, least: int | None = None) -> int:
        """How often it is done for a model of so many operators.

        Args:
            num_operators: of the model.
            least: times at least, where that depends on what else is asked for.
        """
        floor = min(self.least, self.most) if least is None else least
        return max(floor, min(self.most, self.operators // num_operators))


@dataclass(frozen=True, kw_only=True)
class SearchEffort:
    """How much of everything a search does; what is `Scaled` is done less for larger models.

    Example:
        >>> SearchEffort(walked=Scaled(0, 0), descents=0).walked.of(500)
        0

    What there is is measured to be worth its time on the models of `benchmarks.search`. Less makes
    a search quicker and its plans worse, more the other way round; what is proved holds with any.

    Attributes:
        least_evaluations: plans evaluated on a skeleton that is searched, whatever its share of
            the budget is. Chains of a few dozen end anywhere, and small models are evaluated in
            microseconds: of two small transformers on two and four devices, chains of 8,000 end
            1.6 to 2.9 % above what nearly all of 32,000 come to, in 0.13 s each.
        ranked: skeletons on which known strategies are simulated.
        drafted: plans of the program over stages that are simulated, at least two for each
            skeleton that is searched.
        part_devices: stages of small models are planned on every part of the cluster of at most so
            many devices, for about a second each (ten seconds on 14 devices); on larger parts, and
            of larger models, only where a ranked pipeline is near the best plan.
        planned_slack: stages of models that are not small are planned only for numbers of
            microbatches and ranks of which a pipeline on the list is not proved to take more than
            so many times the best plan.
        recut: pipelines that are cut elsewhere, each at `cuts` places.
        cuts: see `recut`.
        certified: skeletons whose bounds are sharpened, unless a budget says how many.
        certified_work: work that may take: operators times pairs of choices, and more.
        memory_work: work of a bound without memory above which none with memory is tried: on
            three axes operators of Mixtral have 2,500 choices with all that saves memory, and
            such bounds, which took two minutes each, were no better than those without.
        ahead: bounds of so few pipelines are sharpened before stages are planned, which may prove
            that a known strategy is near enough.
        near_work: work of evaluations by which such a strategy is searched then, at most.
        near_evaluations: how many these are at most. Of Llama 3 8B on 32 H100s 5,000 to 10,000
            make the plan 0.4 % better than ZeRO-3, in 2 s; 40,000 make none better, in 12 s.
        class_evaluations: plans by which the best known strategy is changed by classes before
            bounds are sharpened.
        together: skeletons sharpened at the same time, on any number of cores.
        bound_rounds: cutting planes of a skeleton's bound.
        enumerated: plans of a skeleton that is enumerated instead of searched, at most.
        kept_pairs: operators times pairs of choices above which prices of edges are not kept for
            other skeletons: they would take gigabytes.
        shared_operators: models of fewer operators are searched by one process, which is faster
            than others start.
        refined_pipelines: pipelines that single changes make better, going downhill.
        refined: simulations for each of these.
        kinds: kinds of pipelines of which the best is refined at last.
        starts_of_kind: plans of a kind, of different cuts, that are refined: single changes may
            end before the best.
        kind_slack: kinds whose best plan takes more than so many times the best are left alone.
        anew: plans at most whose neighbours choose anew.
        anew_slack: those that take at most so many times the best of all.
        walked: skeletons that a walk has priced.
        walked_share: of the evaluations of a search, those for chains within walks.
        walk_evaluations: of a chain within a walk, at least.
        nearly: what takes at most so many times the best is nearly as good.
        nearly_searched: skeletons of small models that are searched because a plan was met on them
            that is nearly as good, or none that fits; each by a `nearly_divisor`-th of the least
            evaluations. And those that recompute something else on the pipeline of the best.
        nearly_divisor: see `nearly_searched`.
        descents: how often a search goes downhill at last.
        descent_evaluations: chains of so many plans choose anew on neighbours of small models
            then, what is come to is searched, and the search goes on from there.
        again: skeletons of a small model that are searched once more with other random numbers, as
            all chains may end beside the best plan where little fits.
        formed: simulations of other forms of plans: sliced tokens, two directions.
        formed_share: of the seconds of a budget, those that are left for other forms.
        placed: plays of plans with operators on parts of meshes.
        simpler: simpler plans that are simulated.

    Raises:
        ValueError: on a negative number, or a share above 1.
    """

    least_evaluations: Scaled = Scaled(128_000, 6_400_000, 0)
    ranked: Scaled = Scaled(48, 6_000)
    drafted: Scaled = Scaled(32, 600)
    part_devices: int = 8
    planned_slack: float = 1.2
    recut: int = 4
    cuts: int = 2
    certified: int = 200
    certified_work: float = 2e10
    memory_work: float = 1e9
    ahead: int = 32
    near_work: int = 2_000_000
    near_evaluations: Scaled = Scaled(40_000, 5_200_000, 0)
    class_evaluations: int = 2_000
    together: int = 8
    bound_rounds: int = 12
    enumerated: int = 100_000
    kept_pairs: int = 20_000_000
    shared_operators: int = 100
    refined_pipelines: int = 3
    refined: Scaled = Scaled(24, 12_000)
    kinds: Scaled = Scaled(32, 600, 3)
    starts_of_kind: int = 2
    kind_slack: float = 1.5
    anew: int = 8
    anew_slack: float = 1.25
    walked: Scaled = Scaled(16, 6_000)
    walked_share: float = 0.2
    walk_evaluations: int = 250
    nearly: float = 1.1
    nearly_searched: int = 16
    nearly_divisor: int = 4
    descents: int = 3
    descent_evaluations: int = 2_000
    again: int = 4
    formed: Scaled = Scaled(48, 6_000)
    formed_share: float = 0.05
    placed: Scaled = Scaled(4_000, 800_000)
    simpler: Scaled = Scaled(64, 30_000)

    __repr__ = shown

    def near_passes(self, num_operators: int) -> float:
        """Forward passes of a step of which `near_work` allows an evaluation of a chain."""
        return self.near_work / num_operators

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if field.type == Scaled.__name__ and not isinstance(value, Scaled):
                raise ValueError(
                    f"effort: {name} is {value!r}; give Scaled(most, operators): how often "
                    "for a small model, and how many operators all times may come to"
                )
        check_fields(self, "effort")
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, Scaled):
                continue
            _check(name, value)
            if name.endswith("share") and value > 1:
                raise ValueError(f"effort: {name} is {value}; a share is at most 1")
            if name in AT_LEAST_ONE and value < 1:
                raise ValueError(f"effort: {name} is {value}; it must be 1 or more")
