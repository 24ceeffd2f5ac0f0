"""A rank that trains a small model as an exported Python module says, and as one process does.

Run under torchrun by `test_exports_run`: export_worker FOLDER FUNCTION, where FOLDER has exported.py.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.models import MLP, SmallGPT

LEARNING_RATE = 0.1


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch, the same on every rank."""
    torch.manual_seed(0)
    if name == "mlp":
        batch = {"x": torch.randn(8, 12), "target": torch.randint(0, 8, (8,))}
        return MLP([12, 16, 12, 8]), batch
    ids = torch.randint(0, 48, (4, 8))
    model = SmallGPT(hidden=16, num_heads=4, vocabulary=48, sequence=8, tied=name == "tied gpt")
    return model, {"input_ids": ids, "labels": ids.roll(-1, 1)}


def load(folder: str) -> ModuleType:
    """The exported module."""
    spec = importlib.util.spec_from_file_location("exported", Path(folder, "exported.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sharded_by_dtensor(exported: ModuleType, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One backward pass with every tensor a DTensor on all axes; returns the loss."""
    mesh = exported.make_mesh("cpu")
    exported.distribute(model, mesh)
    whole = [Replicate()] * mesh.ndim
    given = {name: distribute_tensor(value, mesh, whole) for name, value in batch.items()}
    with implicit_replication():
        loss = model(**given)
        loss.backward()
    return loss.full_tensor()


def parallelized(exported: ModuleType, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One backward pass with `parallelize_module`, on the one axis of the mesh that splits."""
    mesh = exported.make_mesh("cpu")
    exported.parallelize(model, mesh)
    axis = mesh[exported.STAGES[0]["axis"]]
    given = {name: distribute_tensor(value, axis, [Replicate()]) for name, value in batch.items()}
    with implicit_replication():
        loss = model(**given)
        loss.backward()
    return loss.full_tensor()


def fully_sharded(exported: ModuleType, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Two microbatches of this rank's samples with FSDP2; returns the mean loss of all."""
    exported.shard(model, exported.make_meshes("cpu"))
    rank, ranks, parts = dist.get_rank(), dist.get_world_size(), 2
    total = torch.zeros(())
    for part in range(parts):
        exported.before_microbatch(model, part == parts - 1)
        given = {n: v.chunk(parts)[part].chunk(ranks)[rank] for n, v in batch.items()}
        loss = model(**given) / parts
        loss.backward()
        total += loss.detach() / ranks
    dist.all_reduce(total)
    return total


def main() -> None:
    """Compare the loss, each gradient and each updated parameter with one process."""
    folder, name, function = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, batch = make(name)
    alone = copy.deepcopy(model)
    truth = alone(**batch)
    truth.backward()
    loss = globals()[function](load(folder), model, batch)
    torch.testing.assert_close(loss.detach(), truth.detach(), rtol=1e-5, atol=1e-6)
    names = dict(alone.named_parameters())
    seen = dict(model.named_parameters())
    assert seen.keys() == names.keys()
    for each in (model, alone):
        torch.optim.SGD(each.parameters(), LEARNING_RATE).step()
    for key, parameter in seen.items():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor), key
        assert isinstance(gradient, DTensor), key
        assert gradient.placements == parameter.placements, key
        torch.testing.assert_close(
            gradient.full_tensor(), names[key].grad, rtol=1e-4, atol=1e-6, msg=key
        )
        torch.testing.assert_close(
            parameter.detach().full_tensor(), names[key].detach(), rtol=1e-5, atol=1e-6
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
