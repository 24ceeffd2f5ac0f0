"""What exported DTensor and FSDP2 modules compute is what one process of torch computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.executor.running.launch import run_ranks
from stratagem.exports import export
from stratagem.searcher.methods.literature import one_stage_plan, random_choices
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.examples import are_all_drawn

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
WORKER = Path(__file__).parents[1] / "support" / "workers" / "export_worker.py"


def captured(name: str) -> OperatorGraph:
    """The graph of one of the worker's models."""
    spec = importlib.util.spec_from_file_location("export_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    model, batch = worker.make(name)
    return capture(model, (), batch)


def cases(name: str) -> Iterator[tuple[str, str, Plan]]:
    """Formats, functions of the worker, and plans of a model for four ranks."""
    graph = captured(name)

    def degrees(**setup: int | bool) -> Plan:
        return TrainingSetup(training=Training(), **setup).plan(graph, CLUSTER)

    every = are_all_drawn()  # Torch takes four ranks seconds for the rules of a model's tensors.
    if every or name == "gpt":
        yield "dtensor", "parallelized", degrees(tensor=2)
    if every or name == "mlp":
        yield "dtensor", "sharded_by_dtensor", degrees(tensor=2)
    if every or name == "tied_gpt":
        yield "dtensor", "parallelized", degrees(tensor=4, sequence_parallel=True)
    for zero in (0, 1, 2, 3) if every and name == "gpt" else (1, 3) if name == "gpt" else (3,):
        yield "fsdp2", "fully_sharded", degrees(zero=zero)
    if name != "mlp":  # DTensor cannot view some splits of the merged tokens of a loss.
        return
    situation = Situation(graph, CLUSTER, Training(), RooflineCosts())
    mesh = DeviceMesh((MeshAxis("x", 2), MeshAxis("y", 2)), tuple(range(4)))
    for seed in range(6 if every else 1):
        choices = random_choices(graph, mesh.shape, seed=seed)
        plan = one_stage_plan(f"random {seed}", situation, mesh, choices)
        yield "dtensor", "sharded_by_dtensor", plan


@pytest.mark.slow
def test_exports_train_as_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    number = 0
    for name in ("mlp", "gpt", "tied_gpt"):
        graph = captured(name)
        for target, function, plan in cases(name):
            made = export(plan, graph, target, costs=RooflineCosts())
            made.save(tmp_path / f"{number:02}.{name}.{function}.py")
            number += 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_ranks(["export_worker", str(tmp_path)], 4, folder=WORKER.parent, timeout=300)
