"""Neighbours of a pipeline: plans that differ in a cut, microbatches, schedule, rounds or policy.

What searches skeletons one change at a time goes to these: downhill (`downhill`) or as a Markov
chain (`skeleton_walk`). A kind of change is a *move*, and `register_move` adds one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from stratagem.searcher.space.choices import Choices, choices_of
from stratagem.searcher.space.schedule_traits import (
    dealt,
    run_of,
    searched_schedules,
    traits_of,
)
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.searcher.space.stage_cuts import StageCutter, cut_stages
from stratagem.searcher.space.strategies import sharding_samples, with_recompute
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain, chain_of
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation

Value = TypeVar("Value")

STEPS = (1, 2, 4)
"""Operators that go from the slowest stage to one beside it."""
MOST_ROUNDS = 4
"""Stages that a rank may come to have."""


class Change(NamedTuple):
    """A plan that differs from another in one thing, and what that is in a few words."""

    what: str
    skeleton: Skeleton
    choices: Choices


@dataclass(frozen=True)
class Neighbour:
    """A plan that a move makes of another, said by `change`; `kind` is the name of the move."""

    kind: str
    change: str
    skeleton: Skeleton
    choices: Choices


@dataclass(frozen=True)
class PipelineToChange:
    """A plan, and what may be changed in it.

    Attributes:
        skeleton: with the policy of each stage.
        choices: of all operators.
        graph: the model at its whole batch.
        policies: of recomputing, that stages may have; those that recompute more come later.
        schedules: that the pipeline may run under.
        slowest: which stage is.
        cutter: of `graph`, where stages are cut anew.
    """

    skeleton: Skeleton
    choices: Choices
    graph: OperatorGraph
    policies: tuple[str, ...]
    schedules: tuple[str, ...]
    slowest: int
    cutter: StageCutter


Move = Callable[[PipelineToChange], Iterable[Change]]
"""Makes plans that differ from one in one kind of thing."""


@dataclass(frozen=True)
class Neighbourhood:
    """What plans of a search are neighbours.

    Attributes:
        situation: model, cluster, training and prices.
        options: of choices.
        policies: of recomputing, that stages may have; those that recompute more come later.
        schedules: that the pipeline may run under.
        bound: seconds that no plan of a skeleton is under, quickly (see `ComputingBounds`).
        allows: whether plans on a skeleton may be tried.
        room: a plan under the memory that it may use, which constraints may leave less of.
    """

    situation: Situation
    options: Options
    policies: tuple[str, ...]
    schedules: tuple[str, ...]
    bound: Callable[[Skeleton], float]
    allows: Callable[[Skeleton], bool]
    room: Callable[[Simulation], Simulation] = lambda simulation: simulation

    def around(self, skeleton: Skeleton, best: Simulation) -> list[Neighbour]:
        """Those of a plan on a skeleton that may be tried; whether they are plans is open.

        Where the plan fits, none only recomputes more.
        """
        choices, busy = choices_of(best.plan), best.stage_seconds
        here = PipelineToChange(
            skeleton,
            choices,
            self.situation.graph,
            self.policies,
            self.schedules,
            busy.index(max(busy)),
            self.situation.cutter,
        )
        found = []
        for near in neighbours(here):
            named = replace(near, skeleton=near.skeleton.named_first(self.schedules))
            if (
                named.skeleton != skeleton
                and self.allows(named.skeleton)
                and named.skeleton.run is not None
                and not (best.fits and _recomputes_more(near.choices, choices))
            ):
                found.append(named)
        return found

    def plan(self, near: Neighbour) -> Plan | None:
        """The plan of a neighbour; None where its choices are none of its skeleton's."""
        plan = self.situation.plan(
            near.skeleton, near.choices, name="refined", options=self.options
        )
        try:
            plan.check(self.situation.graph)
        except ValueError:
            return None
        return plan


def recomputing_more(
    skeleton: Skeleton, found: Simulation, graph: OperatorGraph, policies: tuple[str, ...]
) -> tuple[Skeleton, Choices] | None:
    """A plan's skeleton and choices where stages that do not fit recompute more.

    Args:
        skeleton: of the plan, with the policy of each stage.
        found: the plan, simulated, under the memory that it may use.
        graph: the model at its whole batch.
        policies: that stages may have; those that recompute more come later.

    Returns:
        None where a stage that does not fit recomputes all that it may, or all fit.
    """
    if found.fits:
        return None
    every, choices = list(skeleton.policies), choices_of(found.plan)
    small = graph.microbatch(skeleton.num_microbatches)
    for s, its_rank in enumerate(found.plan.rank_of):
        if found.memory[its_rank].fits:
            continue
        now = {name: choices[name] for name in skeleton.stages[s]}
        more = [
            (policy, own)
            for policy in policies[_place(policies, every[s]) + 1 :]
            for own in [with_recompute(small, now, policy)]
            if own != now
        ]
        if not more:
            return None
        every[s] = more[0][0]
        choices.update(more[0][1])
    return replace(skeleton, recompute=tuple(every)), choices


def neighbours(here: PipelineToChange) -> Iterator[Neighbour]:
    """Plans that differ in one thing: what every move makes of a pipeline, one after the other.

    A cut goes to the next place in either direction where the graph is cut anyway (see
    `stage_dp.tables.operator_chain`), or where no more tensors cross than now: a part of a layer
    may change sides. Both cuts of a stage go to the next such places together, too. Of the slowest
    stage single operators go to those beside it.
    An operator that comes into another stage chooses as its like does there; where there is none,
    it keeps its choice, if the meshes have one shape, and shards samples if not. Smaller
    microbatches may be too small for the choices (see `Plan.check`).

    Where all meshes have one shape, ranks may have more stages each or fewer, so that a pipeline
    becomes interleaved (Narayanan et al. 2021) or ceases to be: the graph is cut anew, operators
    keep their choices, and a stage recomputes as the one that does most of those it is made of.
    Schedules that give ranks several stages do so with 2 to `MOST_ROUNDS`.

    Example:
        >>> from stratagem.searcher.space.strategies import data_parallel
        >>> from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8, 8, 8], batch=4)
        >>> names = tuple(op.name for op in graph.operators)
        >>> meshes = tuple(DeviceMesh((MeshAxis("data", 1),), (d,)) for d in range(2))
        >>> skeleton = Skeleton((names[:5], names[5:]), meshes, 2, "1f1b")
        >>> choices = data_parallel(graph, (1,))
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> cutter = StageCutter(graph, Cluster.preset("dgx-a100"))
        >>> under = ("interleaved",)
        >>> here = PipelineToChange(skeleton, choices, graph, ("none",), under, 0, cutter)
        >>> [near.change for near in neighbours(here)][2:]
        ['1 microbatch', '4 microbatches', '2 stages a rank', '3 stages a rank']
    """
    for name, move in MOVES.items():
        for change in move(here):
            yield Neighbour(name, *change)


def _other_cuts(here: PipelineToChange) -> Iterator[Change]:
    skeleton, choices, graph, slowest = here.skeleton, here.choices, here.graph, here.slowest
    chain = chain_of(graph)
    operators = chain.operators.tolist()
    order = [graph.names[i] for i in operators]
    cuts, crossing = chain.cuts.tolist(), _num_crossing(chain)
    ends = _ends(skeleton, graph, chain)
    moved: list[dict[int, int]] = []
    for s, end in enumerate(ends[:-1]):
        inside = range(ends[s - 1] + 1 if s else 1, ends[s + 1])
        narrow = [place for place in inside if crossing[place] <= crossing[end]]
        places = {*_around(cuts, end), *_around(narrow, end)}
        if slowest in (s, s + 1):
            places |= {end - step if slowest == s else end + step for step in STEPS}
        moved += [{s: place} for place in sorted(places.intersection(inside))]
    for to in moved + _moved_alike(ends, cuts):
        at = [to.get(s, end) for s, end in enumerate(ends[:-1])]
        then = replace(skeleton, stages=cut_stages(graph, operators, at))
        names = (f"cut {s + 1} before {order[place]!r}" for s, place in to.items())
        yield Change(" and ".join(names), then, _carried(skeleton, then, choices, graph))


def cut_elsewhere(skeleton: Skeleton, graph: OperatorGraph) -> Iterator[Skeleton]:
    """The same pipeline with one cut at every other place between those beside it.

    Args:
        skeleton: whose stages follow one another in the order of the graph; none else is cut.
        graph: at its whole batch.
    """
    chain = chain_of(graph)
    ends = _ends(skeleton, graph, chain)
    for s, end in enumerate(ends[:-1]):
        for place in range(ends[s - 1] + 1 if s else 1, ends[s + 1]):
            if place != end:
                at = [place if k == s else other for k, other in enumerate(ends[:-1])]
                stages = cut_stages(graph, chain.operators.tolist(), at)
                yield replace(skeleton, stages=stages)


def _ends(skeleton: Skeleton, graph: OperatorGraph, chain: OperatorChain) -> list[int]:
    """Where the stages end among the operators of a chain; none where they do not follow it."""
    stage_of = _by_operator(skeleton, range(len(skeleton.stages)))
    stages = [stage_of[graph.names[i]] for i in chain.operators.tolist()]
    if stages != sorted(stages):
        return []
    return [bisect_left(stages, s + 1) for s in range(len(skeleton.stages))]


def _moved_alike(ends: list[int], cuts: list[int]) -> list[dict[int, int]]:
    """Both ends of a stage moved to the next places where the graph is cut, the same way.

    Where one end alone moves, the stage gets longer or shorter, which is often worse first.
    """
    found = []
    for s in range(len(ends) - 2):
        lower = ends[s - 1] if s else 0
        first, second, upper = ends[s : s + 3]
        before = bisect_left(cuts, first) - 1, bisect_left(cuts, second) - 1
        behind = bisect_right(cuts, first), bisect_right(cuts, second)
        for one, other in (before, behind):
            if 0 <= one < other < len(cuts) and lower < cuts[one] and cuts[other] < upper:
                found.append({s: cuts[one], s + 1: cuts[other]})
    return found


def _by_operator(skeleton: Skeleton, values: Iterable[Value]) -> dict[str, Value]:
    """What each stage has, by the names of its operators."""
    stages = zip(skeleton.stages, values, strict=True)
    return {name: value for names, value in stages for name in names}


def _num_crossing(chain: OperatorChain) -> list[int]:
    """Per place in the order of operators, how many tensors are read behind it from before it."""
    count = len(chain.operators)
    last = np.arange(count)
    np.maximum.at(last, chain.edge_starts, chain.edge_ends)
    begun = np.bincount(np.arange(count) + 1, minlength=count + 2)
    over = np.bincount(last + 1, minlength=count + 2)
    crossing: list[int] = np.cumsum(begun - over)[: count + 1].tolist()
    return crossing


def _around(places: list[int], place: int) -> list[int]:
    """The last before and the first behind a place, of some in order."""
    before, behind = bisect_left(places, place), bisect_right(places, place)
    return [*places[max(before - 1, 0) : before], *places[behind : behind + 1]]


def _carried(old: Skeleton, new: Skeleton, choices: Choices, graph: OperatorGraph) -> Choices:
    """The choices on the new skeleton.

    An operator that changes its stage chooses as the last of those there that are like it. Where
    there is none, and its choice is for a mesh of another shape, it shards samples.
    """
    shape_of = _by_operator(old, [mesh.shape for mesh in old.meshes])
    small = graph.microbatch(new.num_microbatches)
    found = dict(choices)
    for before, names, mesh in zip(old.stages, new.stages, new.meshes, strict=True):
        come = set(names).difference(before)
        like = {graph.operator(name).signature: choices[name] for name in before if come}
        for name in come:
            signature = graph.operator(name).signature
            if signature in like:
                found[name] = like[signature]
            elif shape_of[name] != mesh.shape:
                known = choices[name]
                sampled = sharding_samples(
                    small, small.operator(name), mesh.shape, zero=known.zero
                )
                found[name] = replace(sampled, recompute=known.recompute)
    return found


def _other_counts(here: PipelineToChange) -> Iterator[Change]:
    skeleton = here.skeleton
    now, every = skeleton.num_microbatches, list(here.graph.microbatch_counts)
    near = _around(every, now) + [n for n in every if n == 2 * now or 2 * n == now]
    for count in sorted(set(near)):
        then = replace(skeleton, num_microbatches=count)
        if then.run is not None:
            what = "1 microbatch" if count == 1 else f"{count} microbatches"
            yield Change(what, then, here.choices)


def _other_schedules(here: PipelineToChange) -> Iterator[Change]:
    skeleton = here.skeleton
    now = skeleton.schedule
    if now in searched_schedules():
        plain = _is_plain(now)
    else:
        plain = len(skeleton.stages) == skeleton.num_ranks
    for name in here.schedules:
        if name != now and _is_plain(name) and plain:
            yield Change(name, replace(skeleton, schedule=name, orders=()), here.choices)


def _other_rounds(here: PipelineToChange) -> Iterator[Change]:
    skeleton, cutter = here.skeleton, here.cutter
    ranks, parts = skeleton.num_ranks, skeleton.num_microbatches
    now, meshes = len(skeleton.stages) // ranks, tuple(dict.fromkeys(skeleton.meshes))
    alike = len(meshes) == ranks and len({mesh.shape for mesh in meshes}) == 1
    if ranks == 1 or len(skeleton.stages) != now * ranks or not alike:
        return
    for rounds in range(1, min(MOST_ROUNDS, cutter.num_layers // ranks) + 1):
        if rounds == now:
            continue
        names = [name for name in here.schedules if _is_plain(name) == (rounds == 1)]
        what = f"{rounds} stages a rank" if rounds > 1 else "1 stage a rank"
        for name in names:
            if run_of(name, rounds * ranks, parts, ranks) is not None:
                placed = dealt(meshes, name, rounds * ranks, parts)
                then = Skeleton(cutter.stages(rounds * ranks), placed, parts, name)
                change = f"{what}, {name}" if len(names) > 1 or rounds == 1 else what
                yield _recut(change, here, then)


def _is_plain(schedule: str) -> bool:
    """Whether the schedule of a name gives each rank one stage."""
    return traits_of(schedule).rounds == 1


def _recut(what: str, here: PipelineToChange, new: Skeleton) -> Change:
    """The same choices in other stages, each with the most recomputing policy it is made of."""
    small, made = here.graph.microbatch(new.num_microbatches), dict(here.choices)
    policy_of = _by_operator(here.skeleton, here.skeleton.policies)
    chosen: list[str] = []
    for names in new.stages:
        there = {policy_of[name] for name in names}
        chosen.append(max(there, key=lambda policy: _place(here.policies, policy)))
        if len(there) > 1:
            own = {name: here.choices[name] for name in names}
            made.update(with_recompute(small, own, chosen[-1]))
    policy = chosen[0] if len(set(chosen)) == 1 else tuple(chosen)
    return Change(what, replace(new, recompute=policy), made)


def _other_policies(here: PipelineToChange) -> Iterator[Change]:
    skeleton, choices = here.skeleton, here.choices
    small = here.graph.microbatch(skeleton.num_microbatches)
    under = {policy: with_recompute(small, choices, policy) for policy in here.policies}
    for s, names in enumerate(skeleton.stages):
        for policy, made in under.items():
            own = {name: made[name] for name in names}
            if all(own[name] == choices[name] for name in names):
                continue
            every = (*skeleton.policies[:s], policy, *skeleton.policies[s + 1 :])
            yield Change(
                f"stage {s + 1}: {policy} recompute",
                replace(skeleton, recompute=every),
                {**choices, **own},
            )


def _place(policies: tuple[str, ...], policy: str) -> int:
    """The place of a policy among those of a search; −1 of one that a known plan alone has."""
    return policies.index(policy) if policy in policies else -1


def _recomputes_more(one: Choices, other: Choices) -> bool:
    return any(choice.recompute and not other[name].recompute for name, choice in one.items())


MOVES: dict[str, Move] = {
    "a cut": _other_cuts,
    "the number of microbatches": _other_counts,
    "the schedule": _other_schedules,
    "how many stages a rank has": _other_rounds,
    "what a stage recomputes": _other_policies,
}
"""By what each changes; the order decides which of equal plans is found first."""

BUNDLED = frozenset(MOVES)
"""Those that need not be registered."""


def register_move(name: str, move: Move) -> None:
    """Let searches make a kind of change of one's own, beside those of `MOVES`.

    Example:
        >>> register_move("nothing at all", lambda here: [])
        >>> list(registered_moves())
        ['nothing at all']
        >>> del MOVES["nothing at all"]

    Args:
        name: what the move changes, which no other move does.
        move: makes plans of one. Those that are none (see `Plan.check`), or that the constraints
            do not allow, are left out; all others are priced as any other, so a move can only
            make a search find more. It must give the same changes in the same order every time.

    Raises:
        ValueError: the name is taken.
    """
    if name in MOVES:
        raise ValueError(
            f"move {name!r} is there already, one of {len(MOVES)}: register yours under another "
            "name"
        )
    MOVES[name] = move


def registered_moves() -> Mapping[str, Move]:
    """Those that `register_move` added: other processes must be told of them."""
    return {name: move for name, move in MOVES.items() if name not in BUNDLED}
