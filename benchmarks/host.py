"""What does a step of one rank cost the host, beside the same step in eager torch?

    python -m benchmarks.host [--case NAME] [--steps 30]

Models are so small that their kernels do next to nothing: what is timed is the host, by the time
that the process computes, so that others on the machine count for little. Both ways take turns in
one process. A kernel is what torch's dispatcher is asked for, but for views and
memory; an operator on lists of tensors counts once, as it is a few launches on a GPU.

Prints one JSON object a line: `timed` says whether every instruction was timed, as in some steps,
or none, as in most; `ours_ms` and `theirs_ms` are medians, `kernels` ours, theirs and the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.models import ViT
from examples.models import SmallGPT, SmallResNet
from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.small_models import SmallLlama

BLOCKS = 12
WARMUP = 3
NO_KERNELS = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "set_")
"""Operators that give memory or a name to it, beside the views that say that they are."""

CLIP = 1.0
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model, the inputs of its loss, and how it is trained."""

    name: str
    make: Callable[[], nn.Module]
    batch: Mapping[str, Tensor]
    training: Training


class Counting(TorchDispatchMode):
    """Counts kernels; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.kernels += not (func.is_view or name in NO_KERNELS)
        return func(*args, **(kwargs or {}))


def cases() -> list[Case]:
    """Transformers and convolutions, in float32 and as they are trained in bfloat16."""
    ids = torch.randint(0, 64, (2, 8))
    tokens = {"input_ids": ids, "labels": ids}
    images = {"images": torch.randn(2, 3, 8, 8), "labels": torch.randint(0, 10, (2,))}
    models: dict[str, tuple[Callable[[], nn.Module], Mapping[str, Tensor]]] = {
        "gpt": (_gpt, tokens),
        "llama": (lambda: SmallLlama(num_layers=BLOCKS, hidden=32, vocabulary=64), tokens),
        "vit": (_vit, images),
        "resnet": (lambda: SmallResNet(channels=(8,) * BLOCKS), images),
    }
    plain = Training(optimizer="adam", learning_rate=1e-3)
    mixed = Training("bfloat16", optimizer="adam", learning_rate=1e-3, clip_norm=CLIP)
    ways = {"float32": plain, "bfloat16, clipped": mixed}
    return [
        Case(f"{name}, {way}", make, batch, training)
        for name, (make, batch) in models.items()
        for way, training in ways.items()
    ]


def _gpt() -> nn.Module:
    return SmallGPT(num_layers=BLOCKS, hidden=32, num_heads=2, vocabulary=64, sequence=8)


def _vit() -> nn.Module:
    return ViT(num_layers=BLOCKS, hidden=32, heads=2, image=8, patch=4)


def ours(case: Case, comm: Communicator, *, timed: bool) -> Step:
    """A step of a plan on one device."""
    interpreter = interpreter_of(case, comm)
    return lambda: interpreter.step(case.batch) if timed else interpreter.issue(case.batch)


def interpreter_of(case: Case, comm: Communicator) -> Interpreter:
    """What runs the plan of one device for a case."""
    model = _made(case)
    graph = capture(model, (), case.batch)
    return Interpreter(lower(_plan(graph, case.training), graph), comm, model_state(model))


def theirs(
    case: Case,
    device: str = "cpu",
    *,
    compiled: Callable[[nn.Module], nn.Module] = lambda model: model,
    capturable: bool = False,
    loaded: bool = False,
) -> Step:
    """A step of torch, with its fused optimizer: eager, or of the model as it is `compiled`.

    A CUDA graph can record a step whose optimizer is `capturable`: it counts on the device. Each
    step brings its batch from the host, as training does, unless it was `loaded` before.
    """
    model, training = _made(case).to(device), case.training
    given = dict(case.batch)
    if training.formats.master:
        model = model.bfloat16()
        given = {
            name: each.bfloat16() if each.is_floating_point() else each
            for name, each in given.items()
        }
    there = {name: each.to(device) for name, each in given.items()}
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=training.learning_rate, fused=True, capturable=capturable
    )
    forward = compiled(model)

    def batch() -> dict[str, Tensor]:
        if loaded or device == "cpu":
            return there
        return {
            name: each.pin_memory().to(device, non_blocking=True) for name, each in given.items()
        }

    def step() -> None:
        with torch.enable_grad():
            loss = forward(**batch())
            loss.backward()
        if training.clip_norm:
            torch.nn.utils.clip_grad_norm_(parameters, training.clip_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def _plan(graph: OperatorGraph, training: Training) -> Plan:
    choices = {operator.name: Choice((REPLICATE,)) for operator in graph.operators}
    return Plan(
        name="one rank",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=1),
        training=training,
        stages=(Stage(tuple(choices), DeviceMesh((MeshAxis("one", 1),), (0,)), choices),),
    )


def kernels_of(step: Step) -> int:
    """How many kernels a step starts."""
    with Counting() as counting:
        step()
    return counting.kernels


def measured(case: Case, steps: int) -> list[dict[str, object]]:
    """A line for steps that are timed, and one for others."""

    def rank(comm: Communicator) -> list[dict[str, object]]:
        with torch.autograd.set_multithreading_enabled(False):
            return [_line(case, comm, steps, timed=timed) for timed in (True, False)]

    return run_local(1, rank)[0]


def _line(case: Case, comm: Communicator, steps: int, *, timed: bool) -> dict[str, object]:
    both = ours(case, comm, timed=timed), theirs(case)
    spent: tuple[list[float], list[float]] = [], []
    for number in range(WARMUP + steps):
        for step, times in zip(both, spent, strict=True):
            start = time.process_time()
            step()
            if number >= WARMUP:
                times.append(1e3 * (time.process_time() - start))
    mine, other = map(statistics.median, spent)
    kernels, needed = map(kernels_of, both)
    return {
        "case": case.name,
        "timed": timed,
        "ours_ms": round(mine, 2),
        "theirs_ms": round(other, 2),
        "ratio": round(mine / other, 2),
        "kernels": [kernels, needed, round(kernels / needed, 2)],
    }


def main() -> None:
    """Print a line for each way of each case."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.host")
    made.add_argument("--case", help="the beginning of its name; all cases when left out")
    made.add_argument("--steps", type=int, default=30, help="that are timed, of each way")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    for case in cases():
        if case.name.startswith(arguments.case or ""):
            for line in measured(case, arguments.steps):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
