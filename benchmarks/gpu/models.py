"""Models of every family, with a batch and the graph of each, and plans for one device or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.setting import Setting, SkippedError
from examples.models import SmallGPT, SmallResNet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.small_models import SmallInception, SmallLlama, SmallLSTM

Choices = Mapping[str, Choice]
CLASSES = 10
PRESETS = ("dgx-h200", "dgx-h100", "dgx-a100", "dgx-a100-40", "p3.16xlarge")
"""Bundled clusters, one for each type of device."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model and a batch that it takes; `built` is its graph where it was not captured."""

    module: nn.Module
    batch: Mapping[str, Tensor]
    built: OperatorGraph | None = None

    @cached_property
    def graph(self) -> OperatorGraph:
        """As it was built, or is captured."""
        return self.built or capture(self.module, (), self.batch)


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al. 2021) that classifies the mean of its patches."""

    def __init__(self, *, num_layers: int, hidden: int, heads: int, image: int, patch: int):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, hidden))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, heads, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean(1)), labels)


class Dropping(nn.Module):
    """Layers with dropout, whose masks differ from step to step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        hidden = functional.dropout(self.up(x).relu(), 0.5, self.training)
        return functional.cross_entropy(self.down(hidden), target)


def family(setting: Setting, name: str) -> Model:
    """A model of a family, the same in every process.

    Raises:
        KeyError: when there is no such family.
    """
    torch.manual_seed(0)
    made = FAMILIES[name](setting)
    return replace(made, built=made.built or _graph_of(setting, name))


@cache
def _graph_of(setting: Setting, name: str) -> OperatorGraph:
    """Of a model of a family, captured once a process."""
    with torch.random.fork_rng():
        return FAMILIES[name](setting).graph


def language(module: nn.Module, batch: int, sequence: int, vocabulary: int) -> Model:
    """A language model and random tokens."""
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return Model(module, {"input_ids": ids, "labels": ids.roll(-1, 1)})


def images(module: nn.Module, batch: int, size: int) -> Model:
    """A model of images, and random ones."""
    labels = torch.randint(0, CLASSES, (batch,))
    return Model(module, {"images": torch.randn(batch, 3, size, size), "labels": labels})


def _gpt(setting: Setting) -> Model:
    hidden, sequence = setting.size((64, 32), (16, 8))
    gpt = SmallGPT(hidden=hidden, num_heads=4, vocabulary=64, sequence=sequence)
    for table in (gpt.tokens, gpt.positions):  # As GPT-2 begins: torch's own lets rounding grow.
        nn.init.normal_(table.weight, std=0.02)
    return language(gpt, 8, sequence, 64)


def _llama(setting: Setting) -> Model:
    hidden, sequence = setting.size((64, 32), (16, 7))
    return language(SmallLlama(num_layers=2, hidden=hidden, vocabulary=64), 4, sequence, 64)


def _vit(setting: Setting) -> Model:
    hidden, image = setting.size((64, 32), (16, 8))
    return images(ViT(num_layers=2, hidden=hidden, heads=4, image=image, patch=4), 4, image)


def _resnet(setting: Setting) -> Model:
    channels, image = setting.size(((16, 32), 32), ((4, 6), 8))
    return images(SmallResNet(channels=channels, classes=CLASSES), 4, image)


def _inception(setting: Setting) -> Model:
    return images(SmallInception(width=setting.size(16, 4), classes=CLASSES), 4, 13)


def _lstm(setting: Setting) -> Model:
    hidden = setting.size(64, 10)
    return language(SmallLSTM(num_layers=2, hidden=hidden, vocabulary=64), 4, 4, 64)


def _experts(setting: Setting) -> Model:
    setting.need("pytest")
    from tests.executor.equality.test_models_executed import experts

    case = experts()
    return Model(case.model, case.batch, case.graph)


def _dropping(setting: Setting) -> Model:
    width = setting.size(64, 6)
    x, target = torch.randn(8, width), torch.randint(0, CLASSES, (8,))
    return Model(Dropping(width), {"x": x, "target": target})


FAMILIES: dict[str, Callable[[Setting], Model]] = {
    "gpt": _gpt,
    "llama": _llama,
    "vit": _vit,
    "resnet": _resnet,
    "inception": _inception,
    "lstm": _lstm,
    "experts": _experts,
    "dropout": _dropping,
}


def whole(graph: OperatorGraph, *, recompute: bool = False) -> Choices:
    """One device does it all, and again in backward where it is to recompute."""
    return {
        operator.name: Choice(
            (REPLICATE,),
            recompute=recompute
            and role_of(operator) not in (OperatorRole.SOURCE, OperatorRole.LOSS),
        )
        for operator in graph.operators
    }


def one_stage(
    graph: OperatorGraph,
    choices: Choices,
    training: Training,
    cluster: Cluster,
    *,
    parts: int = 1,
    shape: tuple[int, ...] = (1,),
) -> Plan:
    """A plan whose devices all do the same with other parts."""
    axes = tuple(MeshAxis(f"axis{k}", size) for k, size in enumerate(shape))
    mesh = DeviceMesh(axes, tuple(range(cluster.num_devices)))
    return Plan(
        name="one stage",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=cluster,
        training=training,
        stages=(Stage(tuple(choices), mesh, choices),),
        num_microbatches=parts,
    )


def devices(count: int, preset: str = "dgx-h100") -> Cluster:
    """So many devices of one node."""
    return Cluster.preset(preset, num_nodes=1, devices_per_node=count)


def preset_here(setting: Setting) -> str:
    """The bundled cluster of the GPU that is here.

    Raises:
        SkippedError: when there is none of its type.
    """
    if setting.rehearse:
        return "local-cpu"
    here = torch.cuda.get_device_name()
    for name in PRESETS:
        if Cluster.preset(name).device_type(0).is_called(here):
            return name
    raise SkippedError(f"none of {', '.join(PRESETS)} has the GPU that is here, {here}")
