"""Parameters on their way in and out: whole tensors by name, and every rank's part of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.program.programs import Home, Program
from stratagem.executor.resharding.conversions import run_transfer
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.sharding.mesh_transfers import Transfer
from stratagem.simulator.torch_ops.kernels.step_programs import as_pairs, torch_dtype


def check_state(program: Program, state: Mapping[str, Tensor]) -> None:
    """Refuse a model's state that lacks a parameter of the program or has it in another shape.

    Raises:
        ValueError: names the parameter and both shapes or dtypes.
    """
    for parameter in program.model_parameters:
        if parameter.name not in state:
            raise ValueError(
                f"the model's state has no {parameter.name!r}, which graph "
                f"{program.graph.name!r} uses; pass model_state(model) of the captured model"
            )
        given, dtype = state[parameter.name], torch_dtype(parameter.dtype)
        check_values({parameter.name: given})
        if tuple(given.shape) != parameter.shape or not _is_exact(given.dtype, dtype):
            raise ValueError(
                f"parameter {parameter.name!r} is {tuple(given.shape)} {given.dtype} in the "
                f"model's state, but {parameter.shape} {parameter.dtype} in graph "
                f"{program.graph.name!r}; pass the state of the captured model"
            )


def check_values(state: Mapping[str, Tensor]) -> None:
    """Refuse tensors of a model that was built without values.

    Raises:
        ValueError: names the first of them.
    """
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} of the model has no values: it is on the meta device; make it on the "
                "CPU, or give weights= with a file or folder of safetensors that has it"
            )


def _is_exact(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers are of a dtype, or become so without rounding: files may have less.

    torch promotes no number of 8 bits, so formats are compared by their digits and largest number.
    """
    if not (given.is_floating_point and wanted.is_floating_point):
        return given == wanted
    held, needed = torch.finfo(wanted), torch.finfo(given)
    return given == wanted or (held.eps <= needed.eps and held.max >= needed.max)


def collect(
    program: Program, homes: tuple[Home, ...], parts: Mapping[str, Tensor], comm: Communicator
) -> dict[str, Tensor]:
    """Bring parameters (or their gradients) together on rank 0, by name.

    Every rank calls this. `parts` has, by parameter name, what this rank holds of each at home.

    Returns:
        Whole tensors in the shapes of the parameters on rank 0, on the CPU; nothing on other
        ranks.
    """
    device = program.ranks[comm.rank].device
    first = DeviceMesh((MeshAxis("one", 1),), (program.ranks[0].device,))
    whole: dict[str, Tensor] = {}
    for home in homes:
        stored = home.stored
        mesh = program.plan.stages[home.stage].mesh
        transfer = Transfer(stored.sizes, mesh, stored.placements, first, (REPLICATE,))
        parameter = program.graph.parameter_index[stored.parameter]
        part = parts.get(stored.parameter)
        held, dtype = transfer.source_part(device), torch_dtype(parameter.dtype)
        if part is not None and held is not None:
            part = part.reshape(held.shape).to(dtype)
        tensor = run_transfer(part, transfer, dtype, device, program.rank_of, comm)
        if tensor is not None:
            whole[stored.parameter] = tensor.reshape(parameter.shape).to("cpu", copy=True)
    return whole


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model by name, also buffers that `state_dict` leaves out.

    They are on the CPU, wherever the model is: each rank takes its part to its own device. Those
    of a model that has no values stay on the meta device. Complex numbers are pairs of real ones,
    as `torch.view_as_real` shows them.

    Example:
        >>> sorted(model_state(nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    given = {name: each.detach() for name, each in named.items()}
    return {name: as_pairs(each if each.is_meta else each.cpu()) for name, each in given.items()}
