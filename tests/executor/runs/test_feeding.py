"""Batches drawn in one process and read by ranks in others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import stratagem as sg
from examples.models import MLP
from stratagem.executor.training.batches import Batches
from stratagem.runs.batch_feeder import Fed, Feeder
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.torch_ops.capture.capture import capture

SIZE = 4


class Rows(Dataset[dict[str, Tensor]]):
    """Numbered rows, of which one may be broken."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 5 * SIZE

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if row == self.broken:
            raise KeyError(f"row {row} is broken")
        return {"x": torch.full((6,), float(row)), "target": torch.tensor(row % 3)}


def loader(broken: int = -1) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Rows(broken), batch_size=SIZE, shuffle=broken < 0)


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    torch.manual_seed(0)
    example = {"x": torch.randn(SIZE, 6), "target": torch.randint(0, 3, (SIZE,))}
    return capture(MLP([6, 8, 3]), kwargs=example)


def firsts(batches: Batches, steps: range) -> Iterator[tuple[list[float], tuple[int, int]]]:
    for step in steps:
        yield batches.at(step)["x"][:, 0].tolist(), batches.position


def test_ranks_get_the_batches_that_a_thread_of_this_process_would(
    tmp_path: Path, graph: OperatorGraph
) -> None:
    """Over several passes, each in an order of its own, at the same positions."""
    wanted = list(firsts(Batches(loader(), graph, seed=5), range(12)))
    given = Batches(loader(), graph, seed=5)
    with Feeder(tmp_path, given, num_batches=12, num_ranks=2) as feeder:
        both = [firsts(Batches(Fed(tmp_path, rank), graph), range(12)) for rank in (0, 1)]
        assert list(zip(*both, strict=True)) == [(each, each) for each in wanted]
        feeder.check()


def test_what_every_rank_has_read_goes(tmp_path: Path, graph: OperatorGraph) -> None:
    given = Batches(loader(), graph, seed=1)
    with Feeder(tmp_path, given, num_batches=20, num_ranks=2):
        both = [firsts(Batches(Fed(tmp_path, rank), graph), range(20)) for rank in (0, 1)]
        for _ in range(20):
            assert next(both[0]) == next(both[1])
            assert len(list(tmp_path.glob("batch-*.pt"))) < 12


def test_a_resumed_run_begins_with_the_pass_it_was_in(
    tmp_path: Path, graph: OperatorGraph
) -> None:
    wanted = list(firsts(Batches(loader(), graph, seed=2), range(14)))
    given = Batches(loader(), graph, seed=2)
    given.seek((1, 0))
    with Feeder(tmp_path, given, num_batches=9, num_ranks=1):
        mine = Batches(Fed(tmp_path, 0), graph)
        mine.at(0)
        mine.seek((1, 3))
        assert list(firsts(mine, range(8, 14))) == wanted[8:]


def test_what_fails_while_drawing_is_told(tmp_path: Path, graph: OperatorGraph) -> None:
    given = Batches(loader(broken=9), graph)
    with Feeder(tmp_path, given, num_batches=5, num_ranks=1) as feeder:
        feeder._thread.join(30)
        with pytest.raises(KeyError, match="row 9 is broken"):
            feeder.check()


@pytest.mark.slow
def test_both_backends_train_alike_on_a_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step and from a checkpoint in the middle of a pass."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    model = MLP([6, 8, 3])
    graph = capture(model, kwargs=next(iter(loader())))
    cluster = Cluster.preset("local-cpu", devices_per_node=2)
    plan = sg.TrainingSetup(microbatch=2, training=sg.Training()).plan(graph, cluster)
    kept = tmp_path / "kept"
    alone = sg.execute(plan, model, loader(), graph=graph, steps=8, progress=False)
    first = sg.execute(
        plan,
        model,
        loader(),
        graph=graph,
        steps=7,
        backend="gloo",
        checkpoint=kept,
        progress=False,
    )
    with pytest.warns(UserWarning, match="not run as a CUDA graph: ranks of this backend have no"):
        rest = sg.execute(
            plan,
            model,
            loader(),
            graph=graph,
            steps=8,
            backend="gloo",
            resume=kept,
            cuda_graph=True,
            progress=False,
        )
    assert (*first.losses, *rest.losses) == pytest.approx(alone.losses, rel=1e-5)
    assert len(set(alone.losses)) == 8
    with pytest.raises(KeyError, match="row 17 is broken"):
        sg.execute(
            plan, model, loader(broken=17), graph=graph, steps=9, backend="gloo", progress=False
        )
