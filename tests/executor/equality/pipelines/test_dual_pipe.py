"""Plans under DualPipe: that they train what torch does, and what their step is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import stratagem as sg
from stratagem.executor import lower
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.verify import verify
from stratagem.simulator.drawing.pictures import picture_of
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.executor.equality.pipelines.test_chimera import ONE, TWO, opposite
from tests.executor.equality.test_models_executed import case_of
from tests.executor.programs.test_live import measured_peaks
from tests.support.plans import (
    Case,
    Chooser,
    assert_runs_like_torch,
    crossed,
    few,
    megatron,
    sharding,
    slowly,
    unpinned,
    whole,
)


def both_ways(case: Case, choose: Chooser, *shapes: tuple[int, ...], parts: int = 4) -> Plan:
    return opposite(case, choose, *shapes, num_microbatches=parts, schedule="dualpipe")


EQUAL: dict[str, tuple[Chooser, tuple[tuple[int, ...], ...]]] = {
    "two devices": (whole, (ONE, ONE)),
    "data parallel": (sharding("sample"), (TWO, TWO)),
    "zero 2": (sharding("sample", zero=2), (TWO, TWO)),
    "tensor parallel": (megatron, (TWO, TWO)),
}


@pytest.mark.parametrize("name", crossed(EQUAL, every=2))
def test_a_plan_trains_like_torch(name: str) -> None:
    choose, shapes = EQUAL[name]
    case = case_of("gpt")
    plan = both_ways(case, choose, *shapes)
    verify(lower(plan, case.graph))
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("name", ["two devices", *slowly("data parallel", "tensor parallel")])
def test_peaks_are_those_of_the_storages(name: str) -> None:
    choose, shapes = EQUAL[name]
    case = case_of("gpt")
    plan = replace(both_ways(case, choose, *shapes), training=Training(optimizer="sgd"))
    told = peak_bytes(lower(plan, case.graph))
    assert list(told) == pytest.approx(measured_peaks(plan, case), rel=0.05)


class Dropping(nn.Module):
    """Six layers that drop, and a head."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(6) for m in (nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU())]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), y)


def test_four_stages_draw_the_masks_of_one_device() -> None:
    torch.manual_seed(0)
    model, batch = Dropping(), {"x": torch.randn(16, 8), "y": torch.randint(4, (16,))}
    graph = sg.capture(model, kwargs=batch)
    setup = sg.TrainingSetup(
        microbatch=2, pipeline=4, schedule="dualpipe", partition="time", training=Training()
    )
    plan = setup.plan(graph, sg.Cluster.preset("local-cpu", devices_per_node=4))
    assert (len(plan.stages), plan.num_microbatches) == (4, 8)
    verdict = sg.check(plan, model, batch, graph=graph)
    assert verdict.agrees, verdict.sentence()


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_random_choices_train_like_torch(seed: int) -> None:
    case = case_of("gpt")
    plan = both_ways(case, unpinned(seed), TWO, TWO)
    plan = replace(plan, training=Training(optimizer="adam", learning_rate=0.01))
    assert_runs_like_torch(case, replace(plan, inputs_first=bool(seed % 2)))


def test_words_and_pictures_know_it() -> None:
    case = case_of("gpt")
    plan = both_ways(case, sharding("sample"), TWO, TWO)
    told = " ".join(describe(simulate_plan(plan, case.graph, default_costs()), case.graph).split())
    assert "in a DualPipe pipeline of 2 stages, each on its own devices and on those of" in told
    assert "device 3: stage 0, 1" in picture_of(plan)
    assert Plan.from_json(plan.to_json()) == plan


def test_too_few_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 microbatches on 2 stages.*choose 4 microbatches"):
        both_ways(case_of("gpt"), whole, ONE, ONE, parts=2)
