"""What is predicted of a parameter tied inside a stage is what its program does."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from stratagem.executor import lower
from stratagem.executor.program.instructions import Bundle, Convert
from stratagem.executor.program.programs import Program
from stratagem.searcher.space.skeletons import operator_choices
from stratagem.simulator.graph.placement import FLAT, REPLICATE, Config, local_elements
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.priced_plan import plan_model
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan
from stratagem.simulator.stage.tensor_lifetimes import Purpose
from tests.support.plans import Case, gpt_case, make_case, make_plan, sharding

CASE = gpt_case()
COSTS = RooflineCosts()
OF_TIED = {"tokens gather", "head gather", "tokens sync", "tokens publish", "tokens ↔ head"}


def frozen_case() -> Case:
    """Its tokens are not trained."""
    case = gpt_case()
    case.model.tokens.weight.requires_grad_(False)
    return make_case(case.model, **case.batch)


def plan_of(
    zero: int,
    configs: dict[str, Config],
    shape: tuple[int, ...],
    parts: int,
    case: Case = CASE,
) -> Plan:
    def choose(operator: Operator, mesh: tuple[int, ...]) -> Choice:
        made = sharding("sample", zero=zero)(operator, mesh[:1])
        plain = (*made.config, *(REPLICATE,) * (len(mesh) - 1))
        return Choice(configs.get(operator.name, plain), zero if operator.weights else 0)

    training = Training("float32", learning_rate=0.1)
    return make_plan(case, choose, shape, num_microbatches=parts, training=training)


def executed(program: Program) -> Counter[str]:
    """How often each communication of the tied parameter is written."""
    found: Counter[str] = Counter()
    for each in program.ranks[0].instructions:
        for part in each.parts if isinstance(each, Bundle) else (each,):
            if isinstance(part, Convert) and part.task in OF_TIED and moves(part):
                found[part.task] += 1
    return found


def moves(convert: Convert) -> bool:
    return any(step.collective is not Collective.SLICE for step in convert.steps)


def simulated(simulation: Simulation) -> Counter[str]:
    """How often each takes time."""
    line = simulation.timeline
    rows = zip((line.names[n] for n in range(len(line.names))), line.start, line.end, strict=True)
    return Counter(name for name, start, end in {*rows} if name in OF_TIED and end > start)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_tied_user_gathers_what_its_owner_shards(zero: int, parts: int) -> None:
    """Gathers of the head were in no prediction: its row knows of no stage of ZeRO."""
    plan = plan_of(zero, {}, (2,), parts)
    simulation = simulate_plan(plan, CASE.graph, COSTS)
    found = executed(lower(plan, CASE.graph))
    assert simulated(simulation) == found
    assert found["head gather"] == (2 * parts if zero == 3 else 0)


def draw(rng: random.Random) -> tuple[Plan, int]:
    zero, parts = rng.randrange(4), rng.choice([1, 2])
    shape = rng.choice([(2,), (2, 2)])
    configs = {}
    for name in ("tokens", "head"):
        choices = operator_configs(name, shape)
        configs[name] = rng.choice(choices)
    return plan_of(zero, configs, shape, parts), zero


def operator_configs(name: str, shape: tuple[int, ...]) -> list[Config]:
    graph = CASE.graph.microbatch(2)
    made = operator_choices(graph, graph.operator(name), shape, (0,))
    return [choice.config for choice in made]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_owner_and_user_choose(seed: int) -> None:
    """Collectives, and the bytes of all copies of the value."""
    plan, zero = draw(random.Random(seed))
    program = lower(plan, CASE.graph)
    assert simulated(simulate_plan(plan, CASE.graph, COSTS)) == executed(program)
    assert parameter_bytes(plan, CASE) == sum(kept_bytes(program, zero))


def kept_bytes(program: Program, zero: int) -> list[int]:
    """Of every copy of the tokens that is kept, but for the home that has no gathers."""
    shape = program.plan.stages[0].mesh.shape
    return [
        4 * local_elements(stored.sizes, stored.placements, shape)
        for stored in program.ranks[0].stored
        if stored.parameter == "tokens.weight"
        if zero == 3 or FLAT not in stored.placements
    ]


def parameter_bytes(plan: Plan, case: Case) -> int:
    """What is predicted of all copies that owner and user have."""
    (stage,) = plan_model(plan, case.graph, COSTS).stages
    life = stage.tensors.lifetimes
    ends = {case.graph.index[name] for name in ("tokens", "head")}
    return sum(
        int(nbytes)
        for use, owner, nbytes in zip(life.uses, life.owner, stage.tensors.nbytes, strict=True)
        if use is Purpose.PARAMETERS and owner in ends
    )


@pytest.mark.parametrize("zero", [0, 3])
def test_a_frozen_parameter_is_there_once(zero: int) -> None:
    """Each of its readers counted it: twice a frozen table that the head shares."""
    case = frozen_case()
    plan = plan_of(zero, {}, (2,), 2, case)
    program = lower(plan, case.graph)
    assert simulated(simulate_plan(plan, case.graph, COSTS)) == executed(program)
    (kept,) = kept_bytes(program, zero)
    assert parameter_bytes(plan, case) == kept == 50 * 24 * 4 // (2 if zero else 1)


def test_each_stage_has_a_frozen_parameter_of_its_own() -> None:
    case = frozen_case()
    plan = make_plan(case, sharding("sample"), (1,), (1,), num_microbatches=2)
    program = lower(plan, case.graph)
    assert [len(kept_bytes(replace(program, ranks=(rank,)), 0)) for rank in program.ranks] == [
        1,
        1,
    ]
    for stage, name in zip(
        plan_model(plan, case.graph, COSTS).stages, ("tokens", "head"), strict=True
    ):
        row = stage.table.row(case.graph.index[name])
        assert row.parameter_bytes[0] == 50 * 24 * 4
