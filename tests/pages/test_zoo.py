"""The benchmark over models of others says of each what became of it, whatever that is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.zoo.examples import OWN, example_of, names_in
from benchmarks.zoo.page import page_of
from benchmarks.zoo.runner import line_of, lines
from benchmarks.zoo.trial import _difference, _is_exact
from benchmarks.zoo.truth import torch_step, worst_of
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import Case, make_plan, whole

MODELS = '''
import os

import torch
from torch import nn
from torch.nn import functional


def small():
    """Trains."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, (torch.randn(4, 6),), {}, functional.cross_entropy, torch.randint(3, (4,))


def normed():
    """Normalises four samples."""
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    targets = torch.randint(3, (4,))
    return nn.Sequential(*layers), (torch.randn(4, 6),), {}, functional.cross_entropy, targets


class Choosing(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        return made.mean() if made.sum() > 0 else made.abs().mean()


def choosing():
    return Choosing(6, 3), (torch.randn(4, 6),), {}, None, None


def ending():
    os._exit(7)


def _helper():
    raise AssertionError


def with_arguments(size):
    raise AssertionError


def too_little():
    return nn.Linear(2, 2)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MODELS)
    return path


@pytest.mark.slow
def test_every_model_is_a_line_whatever_becomes_of_it(file: Path) -> None:
    names = names_in(file)
    assert names == ["small", "normed", "choosing", "ending", "too_little"]
    names.remove("normed")
    found = list(lines([(file, name) for name in names], seconds=300, jobs=1))
    small, choosing, ending, too_little = found
    assert small["model"] == "mine.small"
    assert all(small[key] for key in ("captured", "searched", "executed_equal")), small
    assert (small["parameters"], small["flops_ratio"], small["generic"]) == (True, 1.0, 0.0)
    assert small["error"] == ""
    for line in found[1:]:
        assert not any(line[key] for key in ("captured", "searched", "executed_equal"))
    assert "depends on the values of a tensor at" in choosing["error"]
    assert ending["error"].startswith("crash: the process ended with 7")
    assert "it must return a tuple of 5" in too_little["error"]
    page = page_of("\n".join(map(json.dumps, found)))
    assert "Of 4 models 1 are captured, 1 searched and 1 executed equal; 1 end" in page
    assert "**mine.choosing**: ValueError: capture of 'Choosing'" in page


@pytest.mark.slow
def test_a_model_that_takes_too_long_is_a_line(file: Path) -> None:
    line = line_of(file, "small", seconds=0.05)
    assert line["error"] == "crash: not done after 0.05 s"
    assert not line["captured"]


def test_a_plan_that_trains_something_else_is_found(file: Path) -> None:
    """The step of a model whose weights are doubled is not that of the model."""
    example = example_of(file, "small")
    truth = torch_step(example)
    name, error, allowed = worst_of(truth, example, truth)
    assert error <= allowed
    with torch.no_grad():
        example.model[0].weight.mul_(2)
    other = torch_step(example)
    name, error, allowed = worst_of(other, example_of(file, "small"), truth)
    assert error > 100 * allowed, name


def test_batch_norms_are_compared_by_the_microbatches_of_a_plan(file: Path) -> None:
    """In float32, and in float64 where that tells nothing: of the batch they are others."""
    example = example_of(file, "normed")
    graph = capture(
        example.model, kwargs=example.batch, loss=example.loss, targets=example.targets
    )
    case = Case(example.model, example.tensors, graph)
    plan = make_plan(case, whole, (1,), num_microbatches=2)
    assert not _difference(plan, "made", graph, example, torch_step(example))
    assert _is_exact(plan, example, parts=2)
    assert not _is_exact(plan, example, parts=1)


def test_the_project_has_models_of_every_library() -> None:
    """The files are read, not run: their libraries need not be there."""
    counts = {path.stem: len(names_in(path)) for path in OWN}
    assert sum(counts.values()) >= 80
    assert counts.keys() == {
        "adapters", "beyond_text", "diffusion", "families", "plain", "texts", "timm_models",
        "vision",
    }  # fmt: skip
