"""Conditions of one's own: what they forbid is nowhere, the best of what they allow is found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

import stratagem as sg
from stratagem.searcher.problem.priced_skeleton import make_problem
from stratagem.searcher.space.choices import choices_of
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Skeleton, skeletons
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Shard
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import Simulation

CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


def keeps_samples(operator: Operator, choice: Choice, mesh: DeviceMesh) -> bool:
    return operator.kind != "linear" or Shard("sample") not in choice.config


def cuts_the_batch(skeleton: Skeleton) -> bool:
    return skeleton.num_microbatches == 2


RULES = (
    sg.Rule("products see all samples", choices=keeps_samples),
    sg.Rule("two microbatches", skeletons=cuts_the_batch),
)


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return mlp([4096, 4096], batch=64)


def search(graph: OperatorGraph, *rules: sg.Rule) -> sg.SearchResult:
    wishes = sg.Space(pipeline=1, zero_stages=(0,), rules=rules)
    budget = sg.Budget(evaluations=200, gap=0.1)
    return sg.search(graph, CLUSTER, space=wishes, budget=budget, progress=False)


def is_allowed(plan: sg.Plan, graph: OperatorGraph) -> bool:
    """What `RULES` say, said of a plan."""
    stage = plan.stages[0]
    return plan.num_microbatches == 2 and not any(
        graph.operator(name).kind == "linear" and Shard("sample") in choice.config
        for name, choice in stage.choices.items()
    )


def every_plan(graph: OperatorGraph) -> Iterator[Simulation]:
    """All plans of one stage, simulated one by one."""
    situation = Situation(graph, CLUSTER, sg.Training(), default_costs())
    names = [operator.name for operator in graph.operators]
    for skeleton in skeletons(graph, CLUSTER):
        if skeleton.num_ranks == 1:
            problem = make_problem(
                graph, skeleton, CLUSTER, situation.training, situation.costs, (0,)
            )
            for each in itertools.product(*problem.choices):
                chosen = dict(zip(names, each, strict=True))
                yield situation.simulate(situation.plan(skeleton, chosen, name="tried"))


@pytest.mark.slow
def test_the_best_of_what_rules_allow_is_found(graph: OperatorGraph) -> None:
    every = list(every_plan(graph))
    allowed = [each for each in every if is_allowed(each.plan, graph)]
    best = min(each.step_time for each in allowed)
    assert best > min(each.step_time for each in every)
    result = search(graph, *RULES)
    assert is_allowed(result.plan, graph)
    assert result.simulation.step_time == pytest.approx(best, rel=1e-9)
    assert result.bound is not None
    assert result.bound <= best
    assert not is_allowed(search(graph).plan, graph)


def test_choices_are_those_that_the_rule_says(graph: OperatorGraph) -> None:
    skeleton = next(skeletons(graph, CLUSTER))
    given = (graph, skeleton, CLUSTER, sg.Training(), default_costs(), (0,))
    bound = sg.Space(rules=RULES[:1]).bind(graph)
    free, held = make_problem(*given), make_problem(*given, constraints=bound)
    mesh = skeleton.meshes[0]
    for operator, some, every in zip(graph.operators, held.choices, free.choices, strict=True):
        assert list(some) == [each for each in every if keeps_samples(operator, each, mesh)]
    assert held.choices != free.choices


def test_a_plan_to_start_from_is_held_to_rules_too(graph: OperatorGraph) -> None:
    setup = sg.TrainingSetup(microbatch=32, training=sg.Training())
    plan = setup.plan(graph, CLUSTER)
    assert any(Shard("sample") in choice.config for choice in choices_of(plan).values())
    wishes = sg.Space(rules=RULES)
    budget = sg.Budget(evaluations=50, gap=0.1)
    found = sg.search(graph, CLUSTER, start=plan, space=wishes, budget=budget, progress=False)
    assert found.plan.num_microbatches == 2


def test_what_says_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="rule 'empty' says nothing; give it choices or skel"):
        sg.Rule("empty")
    with pytest.raises(ValueError, match="a rule without a name"):
        sg.Rule("", skeletons=cuts_the_batch)
    with pytest.raises(ValueError, match="2 rules are called 'two microbatches'"):
        sg.Space(rules=(RULES[1], RULES[1]))


def test_the_names_of_rules_are_told(graph: OperatorGraph) -> None:
    never = sg.Rule("never", skeletons=lambda skeleton: False)
    with pytest.raises(ValueError, match=r"meets the constraints .*Rule\(name='never'\)"):
        search(graph, never)


def test_each_condition_is_asked_where_its_constraint_is_given(graph: OperatorGraph) -> None:
    """A new one in `allows` was passed over, where another property said that all is allowed."""
    given: dict[str, sg.Space] = {
        "_is_pinned_so": sg.Space(pin={"layers.0": (Shard("sample"),)}),
        "_is_on_no_forbidden": sg.Space(forbid=(("sample", "data"),)),
        "_is_on_required": sg.Space(require=(("sample", "data"),)),
        "_has_zero_stage": sg.Space(zero_stages=(0,)),
        "_has_few_tensor_ways": sg.Space(max_tensor=1),
        "_meets_rules": sg.Space(rules=RULES[:1]),
    }
    assert sg.Space().bind(graph).allows_all
    for name, space in given.items():
        bound = space.bind(graph)
        assert [each.__name__ for each in bound._conditions] == [name]
        assert not bound.allows_all
