"""FSDP2: which modules are fully sharded, over which ranks, and what they keep (Zhao et al. 2023,
arXiv 2304.11277)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from stratagem.exports.reading.differences import summed_axes
from stratagem.exports.reading.export import ExportDraft
from stratagem.exports.reading.fsdp_units import unit_gradient_bytes, unit_of, wrapped_modules
from stratagem.exports.reading.one_setup import SetupLimits, nearest_uniform
from stratagem.simulator.base.hostile_texts import python_text
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.parameter_homes import zero_stage


def _zero_stages(tensor: int, pipeline: int) -> Sequence[int]:
    return (0, 1, 2, 3)


LIMITS = SetupLimits(zero_stages=_zero_stages, tensor=False, recompute=("none",))

HEAD = """\
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

"""

TAIL = '''

def make_meshes(device_type="cuda"):
    """The ranks that shard a parameter, and those that have a copy of it each."""
    shards = init_device_mesh(device_type, (NUM_RANKS,), mesh_dim_names=("shard",))
    copies = init_device_mesh(
        device_type, (NUM_RANKS, 1), mesh_dim_names=("replicate", "shard")
    )
    return shards, copies


def shard(model, meshes):
    """Apply fully_shard to every unit, the model itself last."""
    shards, copies = meshes
    for name, zero in UNITS.items():
        fully_shard(
            model.get_submodule(name),
            mesh=shards if zero else copies,
            reshard_after_forward=zero == 3,
            mp_policy=MP_POLICY,
        )
    return model


def before_microbatch(model, last):
    """Say whether a microbatch is the step's last: when gradients are reduced."""
    for name, zero in UNITS.items():
        unit = model.get_submodule(name)
        unit.set_requires_gradient_sync(last or zero >= 2, recurse=False)
        unit.set_reshard_after_backward(last or zero == 3, recurse=False)
'''


def fsdp2(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """A Python module with the units of FSDP2, and functions that apply them to the model.

    Each member of a list of modules (a layer) is a unit with a ZeRO stage of its own: 3 gathers
    parameters before every use (`reshard_after_forward`); 2 reduces gradients after each
    microbatch, 1 after the last; 0 has a copy on every rank.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=2, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> text = fsdp2(TrainingSetup(zero=3).plan(graph, cluster), graph).text
        >>> 'UNITS = {"h.0": 3, "h.1": 3, "": 3}' in text
        True
    """
    found = nearest_uniform(plan, graph, LIMITS)
    units = wrapped_modules(graph)
    stages = dict.fromkeys((*units, ""), found.setup.zero) | _unit_stages(plan, graph, units)
    (stage,) = found.plan.stages
    zero = {
        operator.name: zero_stage(
            graph, operator, stages[unit_of(operator.weights[0].parameter, units)]
        )
        for operator in graph.operators
        if operator.weights
    }
    choices = {
        name: replace(choice, zero=zero.get(name, 0) if found.data > 1 else 0)
        for name, choice in stage.choices.items()
    }
    nearest = replace(
        found.plan,
        stages=(replace(stage, choices=choices),),
        bucket_bytes=unit_gradient_bytes(graph, plan.training),
    )
    missing = []
    if any(c.recompute for each in plan.stages for c in each.choices.values()):
        missing.append("Recomputing is torch.utils.checkpoint's, not FSDP2's.")
    if found.plan.num_devices > 1:
        missing.append(
            "Each rank is given its part of the samples by the data loader: "
            f"{found.setup.microbatch} a microbatch."
        )
    return ExportDraft(_text(stages, found.data, plan.training), nearest, tuple(missing))


def _unit_stages(plan: Plan, graph: OperatorGraph, units: tuple[str, ...]) -> dict[str, int]:
    """The ZeRO stage that most parameters of a unit have in the plan, where one does something."""
    votes: dict[str, Counter[int]] = {}
    planned = plan.rewrite(graph).graph
    for parameter, name in planned.owners.items():
        operator, choice = planned.operator(name), plan.choice(name)
        mesh = plan.stages[plan.stage_of[name]].mesh
        if summed_axes(planned, operator, choice.config, mesh) > 1:
            found = votes.setdefault(unit_of(parameter, units), Counter())
            found[choice.zero] += math.prod(planned.parameter_index[parameter].shape)
    return {unit: max(found, key=lambda z: (found[z], z)) for unit, found in votes.items()}


def _text(stages: dict[str, int], ranks: int, training: Training) -> str:
    listed = ", ".join(f"{python_text(unit)}: {zero}" for unit, zero in stages.items())
    policy = "MixedPrecisionPolicy()"
    formats = training.formats
    if formats.master:
        policy = (
            f"MixedPrecisionPolicy(param_dtype=torch.{formats.storage}, "
            f"reduce_dtype=torch.{formats.gradients})"
        )
    return f"{HEAD}NUM_RANKS = {ranks}\nUNITS = {{{listed}}}\nMP_POLICY = {policy}\n{TAIL}"
