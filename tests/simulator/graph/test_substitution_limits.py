"""Which substitutions are refused and why, and factors that split dims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stratagem.executor import execute
from stratagem.executor.running.torch_reference import gradient_errors
from stratagem.executor.state.rewritten_parameters import to_model, to_rewritten
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import part
from stratagem.simulator.graph.models import gpt, layers, llama, moe
from stratagem.simulator.graph.substitutions import Rewritten, Substituted, rewrite
from stratagem.simulator.graph.substitutions.split_factors import FactorCut, refine
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.operators.operator import Input
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.rewritable_graphs import (
    SMALL,
    TOKENS,
    TOLERANCE,
    assert_same,
    at_random,
    batch_of,
    everything,
    matches,
    parallel,
    plan_of,
    run,
    state_of,
)


def test_steps_that_do_not_fit_are_refused() -> None:
    graph = llama(num_layers=1, ffn=12, **SMALL)
    with pytest.raises(
        ValueError, match=r"no substitution 'fold'; there are merge, merge-unequal"
    ):
        rewrite(graph, [Substituted("fold", (("embed",),))])
    with pytest.raises(
        ValueError, match=r"'merge' does not fit operators 'embed', 'norm'; it has"
    ):
        rewrite(graph, [Substituted("merge", (("embed", "norm"),))])
    (first, *_) = matches(graph, "merge")
    with pytest.raises(ValueError, match=r"'layers.0.attn.\w' is in two matches of one step"):
        rewrite(graph, [Substituted("merge", (first, first))])


def test_plan_says_which_of_its_substitutions_does_not_fit() -> None:
    plan = plan_of(everything(llama(num_layers=2, ffn=12, **SMALL), "merge"))
    other = gpt(num_layers=1, **SMALL)
    with pytest.raises(
        ValueError, match=r"made for model 'llama' with 1 substitutions, one of wh"
    ):
        execute(plan, other, state_of(other), batch_of(other))
    longer = llama(num_layers=2, ffn=12, **{**SMALL, "sequence": 8})
    with pytest.raises(ValueError, match=r"made for model 'llama' \(fingerprint"):
        execute(plan, longer, state_of(longer), batch_of(longer))


def test_state_of_the_model_is_asked_for_by_the_names_of_the_model() -> None:
    graph = llama(num_layers=2, ffn=12, **SMALL)
    plan, state = plan_of(everything(graph, "merge")), state_of(graph)
    del state["layers.1.attn.k.weight"]
    with pytest.raises(ValueError, match=r"state has no 'layers\.1\.attn\.k\.weight'"):
        execute(plan, graph, state, batch_of(graph))


def test_simulating_takes_the_graph_before_or_after() -> None:
    graph = llama(num_layers=2, ffn=12, **SMALL)
    rewritten = everything(graph, "merge")
    plan = plan_of(rewritten, at_random(0), 2)
    times = {
        simulate_plan(plan, each, default_costs()).step_time for each in (graph, rewritten.graph)
    }
    assert len(times) == 1
    told = describe(simulate_plan(plan, graph, default_costs()), graph)
    assert "q+k+v" in told
    assert "rewritten first: merge (4×)." in told.replace("\n", " ")


def test_changed_parts_would_be_noticed() -> None:
    """The comparison with the first graph can fail: queries and keys exchanged are found."""
    graph = llama(num_layers=1, ffn=12, **SMALL)
    rewritten = everything(graph, "merge")
    swapped = [
        replace(o, inputs=(_other_half(o.inputs[0]), *o.inputs[1:])) if "rotary_" in o.name else o
        for o in rewritten.graph.operators
    ]
    wrong = replace(rewritten, graph=replace(rewritten.graph, operators=tuple(swapped)), steps=())
    plan = plan_of(wrong)
    state = to_rewritten(rewritten.maps, state_of(graph))
    found = execute(plan, wrong.graph, state, batch_of(graph), gradients=True)
    truth = run(graph, plan_of(Rewritten(graph)))
    assert found.gradients is not None
    assert truth.gradients is not None
    errors = gradient_errors(to_model(rewritten.maps, found.gradients), truth.gradients)
    assert max(errors.values()) > 100 * TOLERANCE


def _other_half(read: Input) -> Input:
    ((place, index),) = read.select
    return replace(read, select=((place, 1 - index),))


def test_a_factor_is_split_wherever_it_goes() -> None:
    graph = parallel(heads=4, ffn=12)
    finer = refine(graph, [FactorCut("layers.0.down", "in", 4)])
    changed = {o.name for o in finer.operators if o.sizes != graph.operator(o.name).sizes}
    assert changed == {f"layers.0.{name}" for name in ("up", "gelu", "down")}
    assert refine(finer, []) == finer
    assert_same(graph, Rewritten(finer))
    for name in ("down", "up"):
        assert 4 in finer.operator(f"layers.0.{name}").sizes.values()


def test_a_selected_and_a_tied_factor_are_split() -> None:
    """Of 6 parts, seen as 2 times 3, part 4 is number (1, 1); tied tables stay alike."""
    graph = moe(num_layers=1, ffn=12, experts=4, expert_every=2, **SMALL)
    table = next(o for o in graph.operators if o.kind == "embedding" and len(o.weights) == 1)
    finer = refine(graph, [FactorCut(table.name, table.weights[0].layout[1][0], 4)])
    assert_same(graph, Rewritten(finer))
    b = GraphBuilder("parts")
    x, labels = b.input("x", (4, 8)), b.input("labels", (4,), "int64")
    six = layers.linear(b, "six", x, 6 * 5)
    product = b.pointwise("mul", part(six, 1, 4, 6), part(six, 1, 1, 6))
    graph = b.build(b.cross_entropy(layers.linear(b, "head", product, TOKENS), labels))
    finer = refine(graph, [FactorCut("six", "out0", 2)])
    assert sorted(finer.operator("mul").inputs[0].select) == [(1, 1), (2, 1)]
    assert_same(graph, Rewritten(finer))


def test_cuts_that_do_not_fit_are_refused() -> None:
    graph = parallel()
    with pytest.raises(ValueError, match=r"'in' \(reduction\) of size 12 cannot be split into 5"):
        refine(graph, [FactorCut("layers.0.down", "in", 5)])
    with pytest.raises(ValueError, match=r"'sample' .* cannot be split into 2"):
        refine(graph, [FactorCut("layers.0.down", "sample", 2)])
