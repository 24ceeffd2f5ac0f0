"""What `benchmarks.local_fidelity` runs: plans of small models on processes or on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import data_parallel, tensor_parallel
from stratagem.simulator.graph.models import gpt, llama, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype

Models = Mapping[str, Callable[[], OperatorGraph]]

MODELS: Models = {
    "gpt": lambda: gpt(
        num_layers=4, hidden=256, num_heads=8, vocabulary=4096, sequence=128, batch=8
    ),
    "llama": lambda: llama(
        num_layers=4,
        hidden=256,
        num_heads=8,
        num_kv_heads=4,
        ffn=704,
        vocabulary=4096,
        sequence=128,
        batch=8,
    ),
    "mlp": lambda: mlp([1024, 2048, 2048, 1024], batch=512),
    "resnet18": lambda: resnet(18, batch=16, image=64, classes=100),
}
LARGE_MODELS: Models = {
    "gpt": lambda: gpt(
        num_layers=12, hidden=1024, num_heads=16, vocabulary=32768, sequence=1024, batch=8
    ),
    "mlp": lambda: mlp([4096, 16384, 16384, 4096], batch=4096),
    "resnet50": lambda: resnet(50, batch=64, image=224, classes=1000),
}
"""For a GPU."""


@dataclass(frozen=True)
class Way:
    """How the plans of a name train on several devices: with a schedule as a pipeline."""

    strategy: Callable[[OperatorGraph, Sequence[int]], Choices]
    recompute: bool = False
    num_microbatches: int = 1
    bucket_bytes: int = 0
    schedule: str = ""
    stages_a_rank: int = 1


def _tensor_parallel(graph: OperatorGraph, shape: Sequence[int]) -> Choices:
    return tensor_parallel(graph, shape, 0)


BUCKET = 25 * 2**20
WAYS = {
    "data parallel": Way(data_parallel),
    "data parallel, buckets": Way(data_parallel, bucket_bytes=BUCKET),
    "data parallel, recompute": Way(data_parallel, recompute=True),
    "data parallel, microbatches": Way(data_parallel, num_microbatches=2),
    "ZeRO-1": Way(partial(data_parallel, zero=1)),
    "ZeRO-2, buckets": Way(partial(data_parallel, zero=2), bucket_bytes=BUCKET),
    "ZeRO-3": Way(partial(data_parallel, zero=3)),
    "tensor parallel": Way(_tensor_parallel),
    "tensor parallel, recompute": Way(_tensor_parallel, recompute=True),
    "GPipe": Way(data_parallel, num_microbatches=4, schedule="gpipe"),
    "1F1B": Way(data_parallel, num_microbatches=4, schedule="1f1b"),
    "interleaved": Way(data_parallel, num_microbatches=4, schedule="interleaved", stages_a_rank=2),
    "ZB-H1": Way(data_parallel, num_microbatches=4, schedule="zb-h1"),
    "Chimera": Way(data_parallel, num_microbatches=4, schedule="chimera"),
}
"""On two processes."""
IMPOSSIBLE = {("resnet18", "Chimera")}
"""Running statistics would see half of the microbatches on either home."""
WHOLE, PARTS, AGAIN, PARTS_AGAIN = "whole", "microbatches", "recompute", "microbatches, recompute"
ONE_DEVICE = {
    WHOLE: Way(data_parallel),
    PARTS: Way(data_parallel, num_microbatches=4),
    AGAIN: Way(data_parallel, recompute=True),
    PARTS_AGAIN: Way(data_parallel, recompute=True, num_microbatches=4),
}
"""Plans of one device."""
TURNS = 9
"""That every plan gets unless told."""
CLASSES = {"gpt": 4096, "llama": 4096, "mlp": 1024, "resnet18": 100, "resnet50": 1000}
"""Ids and labels of a model are below this."""


@dataclass(frozen=True)
class Setting:
    """Plans of models, each on all devices of a cluster; `device` is what torch calls them.

    Every plan gets so many `turns`, and trains as `training` says.
    """

    cluster: Cluster
    device: str
    models: Models
    plans: tuple[tuple[str, str], ...]
    ways: Mapping[str, Way]
    turns: int = TURNS
    only: str = ""
    """The model of all plans, if only one was asked for."""
    training: Training = field(default_factory=Training)

    @property
    def load(self) -> int:
        """How many other devices share the machine's memory."""
        return self.cluster.num_devices - 1

    def graph(self, model: str) -> OperatorGraph:
        """The operator graph of one of the models."""
        return _built(self.models[model])

    def plan(self, model: str, name: str) -> Plan:
        """One of the plans."""
        graph, way = self.graph(model), self.ways[name]
        names = tuple(operator.name for operator in graph.operators)
        devices = self.cluster.num_devices
        whole = DeviceMesh((MeshAxis("data", devices),), tuple(range(devices)))
        stages = (
            _pipeline(graph, self.cluster, way)
            if way.schedule
            else (Stage(names, whole, _choices(graph, way, (devices,))),)
        )
        return Plan(
            name=f"{model}, {name}",
            model=graph.name,
            fingerprint=graph.fingerprint,
            cluster=self.cluster,
            training=self.training,
            stages=stages,
            num_microbatches=way.num_microbatches,
            bucket_bytes=way.bucket_bytes,
            schedule=way.schedule or "1f1b",
        )

    def all_plans(self) -> list[Plan]:
        """Of every model, in the order of `plans`."""
        return [self.plan(model, name) for model, name in self.plans]


@cache
def _built(make: Callable[[], OperatorGraph]) -> OperatorGraph:
    return make()


def two_processes(turns: int, only: str = "") -> Setting:
    """Plans of all models, or of one only, on two processes.

    Raises:
        ValueError: on a model that is not there.
    """
    if only and only not in MODELS:
        raise ValueError(f"model {only!r} is not one of {', '.join(MODELS)}")
    models = {name: make for name, make in MODELS.items() if only in ("", name)}
    cluster = Cluster.preset("local-cpu", devices_per_node=2)
    pairs = ((model, name) for model in models for name in WAYS)
    plans = tuple(each for each in pairs if each not in IMPOSSIBLE)
    return Setting(cluster, "cpu", models, plans, WAYS, turns=turns, only=only)


def one_device(preset: str) -> Setting:
    """Plans on one device of a bundled cluster: a core, or the GPU of this machine."""
    cluster = Cluster.preset(preset, num_nodes=1, devices_per_node=1)
    is_cpu = cluster.device_type(0).name == "cpu"
    models = MODELS if is_cpu else LARGE_MODELS
    first, *_, second, third = models
    plans = (
        *((first, name) for name in (WHOLE, PARTS, AGAIN, PARTS_AGAIN)),
        *((model, name) for model in (second, third) for name in (WHOLE, PARTS)),
    )
    if is_cpu:
        return Setting(cluster, "cpu", models, plans, ONE_DEVICE)
    return Setting(cluster, "cuda", models, plans, ONE_DEVICE, training=Training("bfloat16"))


def _choices(graph: OperatorGraph, way: Way, shape: Sequence[int]) -> Choices:
    choices = way.strategy(graph, shape)
    if not way.recompute:
        return choices
    again = {op.name for op in graph.operators if not op.is_source}
    return {n: replace(c, recompute=n in again) for n, c in choices.items()}


def _pipeline(graph: OperatorGraph, cluster: Cluster, way: Way) -> tuple[Stage, ...]:
    """Stages on each process in turn."""
    choices, devices = _choices(graph, way, (1,)), cluster.num_devices
    cuts = balanced_stages(graph, cluster, devices * way.stages_a_rank)
    return tuple(
        Stage(
            names,
            DeviceMesh((MeshAxis("data", 1),), (number % devices,)),
            {name: choices[name] for name in names},
        )
        for number, names in enumerate(cuts)
    )


def state_of(graph: OperatorGraph) -> dict[str, Tensor]:
    """Parameters as models begin: small random matrices, gains of one, no bias."""
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    for parameter in graph.parameters:
        if len(parameter.shape) > 1:
            state[parameter.name] = 0.02 * torch.randn(parameter.shape, generator=generator)
        else:
            is_gain = parameter.name.endswith(("weight", "running_var"))
            state[parameter.name] = torch.full(parameter.shape, float(is_gain))
    return state


def batch_of(model: str, graph: OperatorGraph) -> dict[str, Tensor]:
    """Random inputs."""
    generator = torch.Generator().manual_seed(1)
    return {
        given.name: torch.randint(CLASSES[model], given.shape, generator=generator)
        if torch_dtype(given.dtype) is torch.int64
        else torch.randn(given.shape, generator=generator)
        for given in graph.inputs
    }
