"""The examples have the published sizes, train as torch does, and keep their plans."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from examples import gallery
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    crossed,
    make_case,
    make_plan,
    random_plan,
    whole,
)

PARAMETERS = {
    "gpt2": 124_439_808,
    "llama3": 8_030_261_248,
    "mixtral": 46_702_792_704,
    "vit": 304_326_632,
    "t5": 737_668_096,
    "resnet50": 25_557_032,
    "wide_resnet": 68_883_240,
    # two tables, four layers of which each has 8 · 1024² + 4 · 1024, attention, and the head
    "translator": 2 * 20480 * 1024 + 4 * (8 * 1024**2 + 4 * 1024) + 3 * 1024**2 + 1025 * 20480,
}
ZOO = ("gpt2", "llama3", "vit", "t5", "resnet50", "mixtral")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
torch.set_num_threads(1)


@pytest.fixture(params=gallery.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


LARGE = ("llama3", "mixtral", "t5")
"""Whose published size takes seconds to capture."""
MEDIUM = ("translator", "vit")
"""Whose published size takes some of them."""
of_half = pytest.mark.parametrize("name", crossed(gallery.NAMES, every=2), indirect=True)
of_published_size = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.long] * (name in LARGE) + [pytest.mark.slow] * (name in MEDIUM),
        )
        for name in gallery.NAMES
    ],
    indirect=True,
)


def installed(name: str) -> str:
    if name in ZOO:
        pytest.importorskip("transformers")
    return name


@functools.cache
def small_case(name: str) -> Case:
    torch.manual_seed(0)
    model, inputs = importlib.import_module(f"examples.{name}").small()
    return make_case(model, **inputs)


@functools.cache
def graph_of(name: str) -> OperatorGraph:
    return gallery.graph_of(name)


@pytest.mark.slow
@of_published_size
def test_parameters_are_those_published(name: str) -> None:
    assert graph_of(name).num_parameters == PARAMETERS[name]


@of_half
def test_one_rank_computes_what_torch_does(name: str) -> None:
    case = small_case(name)
    assert_equal_to_torch(case, make_plan(case, whole, (1,)))


@of_half
def test_a_random_plan_computes_what_torch_does(name: str) -> None:
    case = small_case(name)
    assert_equal_to_torch(case, random_plan(case, 0))


@of_published_size
def test_committed_plans_are_still_priced_as_they_were(name: str) -> None:
    plan, graph, job = Plan.load(gallery.plan_file(name)), graph_of(name), gallery.job(name)
    plan.check(plan.rewrite(graph).graph)
    assert plan.cluster == job.devices
    assert plan.training == Training(job.precision)
    simulation = simulate_plan(plan, graph, default_costs())
    assert simulation.fits
    assert plan.prediction is not None
    assert simulation.step_time == pytest.approx(plan.prediction.step_time, rel=1e-6)
    assert tuple(rank.peak for rank in simulation.memory) == plan.prediction.peak_memory


SOON = ("vit",)
"""Whose search takes a quarter of a minute on two cores; those of all eight take eight minutes."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SOON else pytest.mark.long) for name in gallery.NAMES],
)
def test_a_search_finds_the_committed_plan(name: str) -> None:
    found = gallery.job(installed(name)).search(graph_of(name)).plan
    assert found.to_json() == gallery.plan_file(name).read_text()


def test_an_unknown_example_is_refused() -> None:
    with pytest.raises(ValueError, match="no example 'alexnet'; there are gpt2, llama3"):
        gallery.job("alexnet")
