"""A small model, plans of many kinds for it, and what the checkpoints of its runs hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from stratagem.executor.checkpoints.folder import (
    find_checkpoint,
)
from stratagem.executor.checkpoints.reader import Checkpoint
from stratagem.executor.state.parameter_state import PARAMETER
from stratagem.executor.state.rewritten_parameters import to_model
from stratagem.searcher.space.graph_rewrites import steps as one_step
from stratagem.simulator.graph.models import llama
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Pin, Placement, Shard, check_config
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice

TOKENS = 11
Chooser = Callable[[Operator, int], Choice]


def small_llama() -> OperatorGraph:
    """Two layers of two heads."""
    return llama(
        num_layers=2, hidden=8, num_heads=2, ffn=12, vocabulary=TOKENS, sequence=6, batch=4
    )


def state_of(graph: OperatorGraph) -> dict[str, Tensor]:
    """Random parameters."""
    torch.manual_seed(0)
    return {each.name: 0.3 * torch.randn(each.shape) for each in graph.parameters}


def batches_of(graph: OperatorGraph) -> list[dict[str, Tensor]]:
    """Three of random tokens."""
    torch.manual_seed(1)
    return [
        {each.name: torch.randint(TOKENS, each.shape) for each in graph.inputs} for _ in range(3)
    ]


# -- plans --------------------------------------------------------------------------------------


def replicated(operator: Operator, ways: int) -> Choice:
    return Choice((REPLICATE,))


def sharded(*dims: str, zero: int = 0) -> Chooser:
    """Shard the first of `dims` that an operator can have sharded."""

    def choose(operator: Operator, ways: int) -> Choice:
        for name in dims:
            for dim in operator.dims:
                if name in (dim.name, dim.kind.value) and legal(operator, Shard(dim.name), ways):
                    return Choice((Shard(dim.name),), zero)
        return Choice((REPLICATE,))

    return choose


def drawn(seed: int) -> Chooser:
    rng = random.Random(seed)

    def choose(operator: Operator, ways: int) -> Choice:
        shards = [
            Shard(dim.name) for dim in operator.dims if legal(operator, Shard(dim.name), ways)
        ]
        options: list[Placement] = [REPLICATE, Pin(rng.randrange(ways)), *shards, *shards]
        tried = rng.choice(options)
        if not legal(operator, tried, ways):
            tried = REPLICATE
        return Choice((tried,), rng.randrange(4))

    return choose


def legal(operator: Operator, placement: object, ways: int) -> bool:
    try:
        check_config(operator, (placement,), (ways,))  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def make_plan(
    graph: OperatorGraph,
    choose: Chooser,
    *ways: int,
    rules: tuple[str, ...] = (),
    training: Training | None = None,
) -> Plan:
    """Stages of so many devices each, with the operators cut in equal parts."""
    found = [next(step for step in one_step(graph) if step.rule == rule) for rule in rules]
    graph = rewrite(graph, found).graph
    names = [operator.name for operator in graph.operators if not operator.is_source]
    cuts = [len(names) * s // len(ways) for s in range(len(ways) + 1)]
    stages, device = [], 0
    for s, count in enumerate(ways):
        mesh = DeviceMesh((MeshAxis("axis", count),), tuple(range(device, device + count)))
        device += count
        sources = tuple(o.name for o in graph.operators if o.is_source) if s == 0 else ()
        listed = (*sources, *names[cuts[s] : cuts[s + 1]])
        chosen = {
            name: replicated(graph.operator(name), count)
            if name in sources
            else choose(graph.operator(name), count)
            for name in listed
        }
        stages.append(Stage(listed, mesh, chosen))
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=1),
        training=training or Training(learning_rate=0.01),
        stages=tuple(stages),
        num_microbatches=2,
        substitutions=tuple(found),
        seed=2,
    )


PLANS: dict[str, tuple[Chooser, tuple[int, ...], tuple[str, ...]]] = {
    "one device": (replicated, (1,), ()),
    "data parallel": (sharded("sample"), (2,), ()),
    "zero 1": (sharded("sample", zero=1), (2,), ()),
    "zero 3": (sharded("sample", zero=3), (2,), ()),
    "tensor parallel": (sharded("head", "ffn", "out", "parameter"), (2,), ()),
    "two stages": (sharded("sample", zero=2), (1, 2), ()),
    "rewritten": (sharded("sample", zero=1), (2,), ("merge",)),
    "drawn": (drawn(4), (3,), ()),
    "drawn and rewritten": (drawn(9), (2, 2), ("merge",)),
}


def plan_called(name: str, graph: OperatorGraph) -> Plan:
    choose, ways, rules = PLANS[name]
    return make_plan(graph, choose, *ways, rules=rules)


# -- what a checkpoint holds --------------------------------------------------------------------


def contents(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every tensor of a checkpoint, whole and in the model's form, by kind and name."""
    found = {}
    with Checkpoint(find_checkpoint(folder)) as checkpoint:
        for kind in (PARAMETER, *checkpoint.index.states):
            whole = {
                each.name: checkpoint.whole(kind, each)
                for each in checkpoint.index.tensors
                if each.trained or kind == PARAMETER
            }
            for name, tensor in to_model(checkpoint.index.maps, whole).items():
                found[kind, name] = tensor
    return found


def same(one: dict[tuple[str, str], Tensor], two: dict[tuple[str, str], Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
