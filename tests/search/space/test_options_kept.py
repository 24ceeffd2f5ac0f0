"""A search gives nothing that its options do not allow, and proves nothing of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stratagem.searcher.driver.incumbent import Incumbent
from stratagem.searcher.methods.literature.setup_families import megatron_setups, zero_setups
from stratagem.searcher.space.constraints import BoundConstraints, Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.graph.models import gpt, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.search.driver.test_promises import cluster_of, quick
from tests.support.examples import examples


def two_linears() -> OperatorGraph:
    return mlp([256, 256, 256], batch=64)


def drawn_space(number: int) -> Space:
    rng = np.random.default_rng(number)
    chunks = (1, 2) if rng.random() < 0.5 else (1,)
    policies = (("none", "full"), ("full",), ("none",), ("selective", "full"))
    return Space(
        recompute=policies[rng.integers(len(policies))],
        chunks=chunks,
        fuse=bool(rng.random() < 0.5),
        bucket_bytes=int(rng.choice([0, 2**18])),
        inputs_first=bool(rng.random() < 0.5),
        regather=bool(rng.random() < 0.5),
        stream=len(chunks) > 1 and bool(rng.random() < 0.5),
        place=bool(rng.random() < 0.5),
        in_sums=bool(rng.random() < 0.5),
        headroom=0.0,
    )


def breaches(plan: Plan, options: Options) -> list[str]:
    """What a plan does that options do not allow, read from the plan alone."""
    chosen = [choice for stage in plan.stages for choice in stage.choices.values()]
    found = {
        "buckets": plan.bucket_bytes != options.bucket_bytes,
        "inputs first": plan.inputs_first and not options.inputs_first,
        "pieces": any(choice.chunks not in options.chunks for choice in chosen),
        "fused": any(choice.fused for choice in chosen) and not options.fuse,
        "in sums": any(choice.in_sum for choice in chosen) and not options.in_sums,
        "streamed": any(choice.streamed for choice in chosen) and not options.stream,
        "gathered again": any(choice.regather for choice in chosen) and not options.regather,
        "on parts": plan.has_pins and not options.place,
    }
    return [name for name, is_so in found.items() if is_so]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(examples(30, few=4)))
def test_no_search_gives_or_proves_what_its_options_do_not_allow(number: int) -> None:
    """Known strategies came with options of their own: a plan that recomputes nothing was said to
    be proved where all should be recomputed, and one of REINFORCE's, on parts of a mesh, to be at
    most so far from a bound that is about none of these.
    """
    graph = two_linears()
    cluster = cluster_of(2, 1, 0.5)
    space = drawn_space(number)
    options = space.options()
    found = quick(graph, cluster, space=space, baselines=("REINFORCE", "Megatron-LM 3D"))
    assert breaches(found.plan, options) == []
    start = quick(graph, cluster, space=drawn_space(1000 + number)).plan
    told = quick(graph, cluster, space=replace(space, start_options=False), start=start)
    assert breaches(told.plan, replace(options, place=options.place or start.has_pins)) == []
    # Nobody's options: those of the plan to start from, which is not made worse.
    own = quick(graph, cluster, start=start)
    again = simulate_plan(start, graph, default_costs()).step_time
    assert own.simulation.step_time <= again * (1 + 1e-9)
    letter = Space(recompute=space.recompute, headroom=0.0).bind(graph)
    assert letter.violations(found.simulation) == letter.violations(told.simulation) == []
    for result in (found, told, own):
        assert result.bound is not None
        assert result.bound <= result.simulation.step_time * (1 + 1e-9)


def test_what_megatron_and_deepspeed_do_is_an_option_of_a_search_that_is_told_nothing() -> None:
    """A search of GPT-3 showed Megatron-LM's plan as 2.7 % faster than the one that it gave."""
    graph = gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=64, sequence=16, batch=32)
    cluster = Cluster.preset("dgx-a100", num_nodes=1)
    situation = Situation(graph, cluster, Training(), default_costs())
    setups = [*megatron_setups(situation), *zero_setups(situation, 2), *zero_setups(situation, 3)]
    assert any(setup.sequence_parallel for setup in setups)
    assert any(setup.virtual_stages > 1 for setup in setups)
    incumbent = Incumbent(BoundConstraints(Space(), graph), Options())
    for setup in setups:
        try:
            plan = setup.plan(graph, cluster)
        except ValueError:  # Too large a microbatch, or too many ways.
            continue
        assert breaches(plan, Options()) == ["inputs first"] * setup.inputs_first
        assert incumbent.lacks(plan) == ["inputs_first=True"] * setup.inputs_first
        assert incumbent.is_option(plan) == (not setup.inputs_first)
