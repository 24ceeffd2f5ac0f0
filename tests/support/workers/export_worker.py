"""A rank that trains small models as exported Python modules say, and as one process does.

Run under torchrun by `test_exports_run`: export_worker FOLDER, where FOLDER has the file
NUMBER.MODEL.FUNCTION.py for each case.
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[3]))

from examples.models import MLP, SmallGPT

LEARNING_RATE = 0.1


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and a batch, the same on every rank."""
    torch.manual_seed(0)
    if name == "mlp":
        batch = {"x": torch.randn(8, 12), "target": torch.randint(0, 8, (8,))}
        return MLP([12, 16, 12, 8]), batch
    ids = torch.randint(0, 48, (8, 8))
    model = SmallGPT(hidden=16, num_heads=4, vocabulary=48, sequence=8, tied=name == "tied_gpt")
    return model, {"input_ids": ids, "labels": ids.roll(-1, 1)}


def load(path: Path) -> ModuleType:
    """The exported module."""
    spec = importlib.util.spec_from_file_location("exported", path)
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


def check(path: Path) -> None:
    """Compare the loss, each gradient and each updated parameter with one process."""
    _, name, function, _ = path.name.split(".")
    model, batch = make(name)
    alone = copy.deepcopy(model)
    truth = alone(**batch)
    truth.backward()
    loss = globals()[function](load(path), model, batch)
    torch.testing.assert_close(loss.detach(), truth.detach(), rtol=1e-5, atol=1e-6)
    truths = dict(alone.named_parameters())
    assert {n for n, _ in model.named_parameters()} == truths.keys(), path.name
    for each in (model, alone):
        torch.optim.SGD(each.parameters(), LEARNING_RATE).step()
    for key, parameter in model.named_parameters():
        gradient = parameter.grad
        assert isinstance(parameter, DTensor), key
        assert isinstance(gradient, DTensor), key
        assert gradient.placements == parameter.placements, key
        truth = truths[key].grad
        assert truth is not None, key
        pairs: tuple[tuple[DTensor, Tensor], ...] = ((gradient, truth), (parameter, truths[key]))
        for ours, theirs in pairs:
            torch.testing.assert_close(
                ours.full_tensor().detach(), theirs.detach(), rtol=1e-4, atol=1e-6
            )
    if function == "fully_sharded":
        assert isinstance(model, FSDPModule)


def main() -> None:
    """All cases of a folder, in order."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with sdpa_kernel(SDPBackend.MATH):  # Others have no rule of DTensor's on CPUs.
        for path in sorted(Path(sys.argv[1]).glob("*.py")):
            try:
                check(path)
            except Exception as error:
                raise RuntimeError(f"case {path.name}: {error}") from error
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
