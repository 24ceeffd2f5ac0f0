"""Token slices of causal models: their graphs, what they cost, and what a plan says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stratagem.exports import export
from stratagem.profiler.timing.profile_operators import plan_operators
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.models import bert, gpt, llama, mlp, moe, nmt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.token_slices import Slices, token_dims, token_slices
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.flat_graph import flat_graph
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.priced_plan import PlanModel, plan_model
from stratagem.simulator.simulation.simulation import simulate_model, simulate_plan
from stratagem.simulator.simulation.token_slice_memory import sliced_tensors
from tests.support.examples import examples
from tests.support.plans import Case, Chooser, make_plan, sharding, whole

COSTS = RooflineCosts()


def model(**sizes: int) -> OperatorGraph:
    given = {"num_layers": 2, "hidden": 64, "num_heads": 4, "vocabulary": 96, "sequence": 24}
    return gpt(**{**given, "batch": 4, **sizes})


def gated() -> OperatorGraph:
    return llama(
        num_layers=2,
        hidden=64,
        num_heads=4,
        num_kv_heads=2,
        ffn=96,
        vocabulary=96,
        sequence=24,
        batch=4,
        tied=True,
    )


def plan_of(
    graph: OperatorGraph,
    slices: Slices,
    *shapes: tuple[int, ...],
    choose: Chooser = whole,
    parts: int = 2,
) -> Plan:
    case = Case(nn.Module(), {}, graph)
    plan = make_plan(case, choose, *(shapes or ((1,), (1,))), num_microbatches=parts)
    return replace(plan, schedule="terapipe", token_slices=slices)


# -- graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [model, gated])
def test_every_operator_with_positions_is_cut(make: Callable[[], OperatorGraph]) -> None:
    graph = make()
    for operator, dims in zip(graph.operators, token_dims(graph), strict=True):
        names = {d.name for d in operator.dims}
        if operator.kind == "attention":
            assert (dims.own, dims.seen) == ({"query"}, {"key"})
        else:
            assert dims.own == names & {"sequence"}


def compositions(total: int) -> st.SearchStrategy[tuple[int, ...]]:
    cuts = st.sets(st.integers(1, total - 1), max_size=5)
    return cuts.map(
        lambda chosen: tuple(
            b - a for a, b in zip([0, *sorted(chosen)], [*sorted(chosen), total], strict=True)
        )
    )


@given(compositions(24), st.sampled_from([model, gated]))
@settings(max_examples=examples(25))
def test_the_work_of_all_slices_is_that_of_the_whole(
    lengths: tuple[int, ...], make: Callable[[], OperatorGraph]
) -> None:
    graph = make()
    slices = token_slices(graph, lengths)
    assert [each.stop - each.start for each in slices] == list(lengths)
    for operator in graph.operators:
        if "sequence" in operator.sizes or operator.kind == "attention":
            parts = [each.graph.operator(operator.name) for each in slices]
            flops = sum(kind_of(part).flops(part, part.sizes) for part in parts)
            assert flops == pytest.approx(kind_of(operator).flops(operator, operator.sizes))


def test_what_masks_keys_is_seen_as_far_as_they_are() -> None:
    """ALiBi adds a slope times the key's position."""
    graph = gpt(
        num_layers=1,
        hidden=16,
        num_heads=2,
        vocabulary=8,
        sequence=12,
        batch=2,
        positions="alibi",
    )
    (alibi,) = (op.name for op in graph.operators if "alibi" in op.name)
    first, last = token_slices(graph, (4, 8))
    assert 4 in first.graph.operator(alibi).sizes.values()
    assert 12 in last.graph.operator(alibi).sizes.values()
    (name,) = last.dims[alibi].seen
    assert last.places(alibi) == {name: (0, 12)}


def positions_summed() -> OperatorGraph:
    b = GraphBuilder("summed")
    x = b.linear(b.input("x", (4, 6, 8)), b.parameter("w", (8, 8)))
    x = b.attention(x, x, x, causal=True)
    return b.build(b.reduce(b.pointwise("mul", x, b.parameter("each", (6, 1)))))


REFUSED: dict[str, tuple[Callable[[], OperatorGraph], str]] = {
    "looks ahead": (
        lambda: bert(num_layers=1, hidden=64, num_heads=4, sequence=16, batch=4),
        "looks at later positions: token slices need causal",
    ),
    "no attention": (lambda: mlp([8, 8], batch=4), "has no attention: token slices need a causal"),
    "recurrent": (
        lambda: nmt(num_layers=1, hidden=8, vocabulary=16, sequence=3, batch=4),
        "has no attention: token slices need a causal",
    ),
    "experts": (
        lambda: moe(
            num_layers=2,
            hidden=16,
            num_heads=2,
            experts=4,
            vocabulary=16,
            sequence=8,
            batch=4,
        ),
        r"\(moe_dispatch\) .* may mix positions \(token\) \(slots are counted along it\)",
    ),
    "a parameter a position": (positions_summed, "has a parameter for each position"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_sliced_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        token_dims(make())


def test_scores_as_operators_of_their_own_are_refused() -> None:
    """The scores of unfused attention have pairs of positions, whatever makes them causal."""
    q = {"num_layers": 1, "hidden": 16, "num_heads": 2, "vocabulary": 8, "sequence": 12}
    with pytest.raises(ValueError, match="has no attention: token slices need a causal model"):
        token_dims(gpt(**q, batch=2, attention="unfused"))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        (5, "24 positions, which cannot be cut into 5 equal slices: choose a divisor of 24"),
        ((12, 8), r"lengths \[12, 8\] have 20 positions, but graph .* has 24"),
        ((24, 0), "the lengths are at least 1 and add up to 24"),
    ],
)
def test_slices_that_are_not_of_the_tokens_are_refused(slices: Slices, message: str) -> None:
    graph = model()
    with pytest.raises(ValueError, match=message):
        plan_of(graph, slices).check(graph)


def test_sharded_positions_are_refused() -> None:
    graph = model()
    plan = plan_of(graph, 2, (2,), (2,), choose=sharding("sequence"))
    with pytest.raises(ValueError, match=r"is sharded along its positions \('sequence', mesh"):
        plan.check(graph)


# -- plans --------------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [4, (10, 8, 6)])
def test_a_plan_file_keeps_its_slices(slices: Slices) -> None:
    plan = plan_of(model(), slices)
    text = plan.to_json()
    assert json.loads(text)["token_slices"] == (slices if slices == 4 else list(slices))
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


def test_a_plan_is_profiled_slice_by_slice() -> None:
    graph = model()
    found = plan_operators(graph, plan_of(graph, (16, 8)))
    keys = [op.sizes["key"] for op, _ in found if op.kind == "attention"]
    assert sorted(set(keys)) == [16, 24]
    assert any(op.kind == "prefix" for op, _ in found)


# -- simulation ---------------------------------------------------------------------------------

SLICES: list[Slices] = [2, 4, (10, 8, 6), (1, 23)]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("make", [model, gated])
def test_two_levels_are_the_flat_graph(make: Callable[[], OperatorGraph], slices: Slices) -> None:
    graph = make()
    plan = plan_of(graph, slices, (2,), (1,), choose=sharding("head", zero=1))
    sliced = plan_model(plan, graph, COSTS)
    times = simulate(flat_graph(sliced).graph)
    assert times.makespan == round(simulate_model(sliced).step_time * 1e9)


def test_slices_shorten_a_pipeline_as_more_microbatches_would() -> None:
    graph = gpt(num_layers=8, hidden=2048, num_heads=16, vocabulary=512, sequence=2048, batch=2)
    plan = plan_of(graph, 1, *((1,),) * 4)
    sliced = replace(plan, token_slices=4)
    steps = [simulate_plan(each, graph, COSTS).step_time for each in (plan, sliced)]
    # Four stages and two microbatches idle for 3 of 5 steps, eight passes for 3 of 11.
    assert 11 / 8 / (5 / 2) < steps[1] / steps[0] < 0.75


def test_every_task_of_a_slice_is_named_like_that_of_the_whole() -> None:
    graph = model()
    names = set(simulate_plan(plan_of(graph, (16, 8)), graph, COSTS).timeline.names)
    plain = set(simulate_plan(plan_of(graph, 1), graph, COSTS).timeline.names)
    transfers = {name for name in names | plain if "⇢" in name}
    assert transfers - plain == {
        f"stage {a} ⇢ stage {b}, microbatch {m}, slice {k}"
        for a, b in ((0, 1), (1, 0))
        for m in range(2)
        for k in range(2)
    }
    prefixes = names - plain - transfers
    assert plain - transfers <= names
    assert prefixes == {
        f"h.{layer}.attn.attention.{what} {how}"
        for layer in range(2)
        for what in ("keys", "values")
        for how in ("forward", "recompute", "backward")
    }


# -- memory -------------------------------------------------------------------------------------


def held(sliced: PlanModel, rank: int) -> list[int]:
    """Bytes that each slice of a microbatch holds between forward and backward."""
    tensors = sliced_tensors(sliced, rank)
    first = rank * len(sliced.parts)
    return [tensors[first + k].held[0] for k in range(len(sliced.parts))]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("make", [model, gated])
def test_all_slices_hold_what_a_microbatch_holds(
    make: Callable[[], OperatorGraph], slices: Slices
) -> None:
    """Keys and values are kept once, not once for every slice that reads them."""
    graph = make()
    plan = plan_of(graph, slices, (1,), (2,), choose=sharding("head"))
    sliced = plan_model(plan, graph, COSTS)
    plain = plan_model(replace(plan, token_slices=1), graph, COSTS)
    for rank in range(2):
        assert sum(held(sliced, rank)) == plain.stages[rank].tensors.held[0]


def recomputing(choose: Chooser) -> Chooser:
    return lambda op, shape: replace(choose(op, shape), recompute=not op.is_source)


def test_recomputed_slices_keep_keys_and_values_for_the_later_ones() -> None:
    """On top of what recomputation keeps: the projections, but for the last slice."""
    graph = model()
    plan = plan_of(graph, (10, 8, 6), choose=recomputing(whole))
    sliced = plan_model(plan, graph, COSTS)
    plain = plan_model(replace(plan, token_slices=1), graph, COSTS)
    samples, hidden, item = 2, 64, 4
    projected = (10 + 8) * samples * 3 * hidden * item
    for rank in range(2):
        assert sum(held(sliced, rank)) - plain.stages[rank].tensors.held[0] == projected


@pytest.mark.parametrize("choose", [whole, recomputing(whole), recomputing(sharding("head"))])
@pytest.mark.parametrize("slices", SLICES)
def test_the_curve_over_time_has_the_peak(choose: Chooser, slices: Slices) -> None:
    graph = model()
    simulation = simulate_plan(plan_of(graph, slices, (2,), (2,), choose=choose), graph, COSTS)
    for rank, memory in enumerate(simulation.memory):
        assert simulation.memory_timeline(rank).peak == memory.peak
        assert memory.peak == memory.state + sum(
            each.total for each in memory.alive if each.use.value not in STATE
        )


STATE = ("parameters", "gradients", "optimizer state")


def test_gradients_for_earlier_slices_wait() -> None:
    """After the last slice's backward pass: those of keys and values of all slices before."""
    graph = model(num_layers=1)
    sliced = plan_model(plan_of(graph, (10, 8, 6), (1,)), graph, COSTS)
    tensors = sliced_tensors(sliced, 0)
    waiting = [tensors[key].held[0] for key in sorted(tensors) if key >= 3]
    assert waiting == [2 * length * 2 * 64 * 4 for length in (10, 8)]


# -- words and exports --------------------------------------------------------------------------


def test_plans_say_how_their_tokens_are_cut() -> None:
    graph = model()
    simulation = simulate_plan(plan_of(graph, (16, 8)), graph, COSTS)
    words = " ".join(describe(simulation, graph).split())
    assert "in a TeraPipe pipeline of 2 stages" in words
    assert "the tokens of each in 2 slices" in words
    assert simulation.plan.token_slices == (16, 8)
    assert "h.0.attn.attention.keys" not in simulation.plan.stage_of


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "terapipe"])
def test_every_schedule_of_plans_has_words(name: str) -> None:
    graph = model()
    plan = replace(plan_of(graph, 1), schedule=name)
    said = describe(simulate_plan(plan, graph, COSTS), graph).lower()
    assert name in said


@pytest.mark.parametrize("form", ["dtensor", "megatron"])
def test_exports_say_that_tokens_are_not_sliced_there(form: str) -> None:
    graph = model()
    found = export(plan_of(graph, (16, 8)), graph, form)
    assert "The plan cuts tokens into 2 slices, this 1." in " ".join(found.missing)
