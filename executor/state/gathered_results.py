"""What a forward pass gives back, made whole on rank 0 of the shards of all microbatches.

rank 0   logits m0 ▄▄   logits m1 ▄▄
rank 1   logits m0 ▀▀   logits m1 ▀▀      ──▶   rank 0   logits ██ ██
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.program.instructions.treatments import stored_shape
from stratagem.executor.program.programs import Program, Result
from stratagem.executor.resharding.conversions import run_transfer
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.operators.chain_shares import Share
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype


def gather_results(
    program: Program, values: Mapping[str, Tensor], comm: Communicator
) -> dict[str, Tensor]:
    """What the last step gave back, by name; every rank calls this.

    Returns:
        Whole tensors on rank 0, on the CPU; nothing on other ranks.
    """
    whole: dict[str, Tensor] = {}
    for result in program.results:
        parts = [_gathered(program, result, values.get(name), comm) for name in result.values]
        found = [part for part in parts if part is not None]
        if found:
            whole[result.name] = _joined(result, found)
    return whole


def _gathered(
    program: Program, result: Result, part: Tensor | None, comm: Communicator
) -> Tensor | None:
    """One microbatch's part of a result on rank 0."""
    device = program.ranks[comm.rank].device
    first = DeviceMesh((MeshAxis("one", 1),), (program.ranks[0].device,))
    mesh = program.plan.stages[result.stage].mesh
    transfer = Transfer(result.sizes, mesh, result.placements, first, (REPLICATE,))
    held, dtype = transfer.source_part(device), torch_dtype(result.dtype)
    mine = None if part is None or held is None else part.detach().reshape(held.shape)
    made = run_transfer(mine, transfer, dtype, device, program.rank_of, comm)
    return None if made is None else made.to("cpu", copy=True)


def _joined(result: Result, parts: Sequence[Tensor]) -> Tensor:
    """A result of its parts by microbatch: side by side, added up, or any of them."""
    sizes = list(result.sizes)
    factored = [part.reshape(sizes) for part in parts]
    if result.share is Share.SUM:
        made = torch.stack(factored).sum(0)
    elif result.share is Share.EACH and result.samples is not None:
        made = torch.cat(factored, result.samples)
        sizes[result.samples] *= len(parts)
    else:
        made = factored[0]
    return made.reshape(stored_shape(result.layout, sizes))
