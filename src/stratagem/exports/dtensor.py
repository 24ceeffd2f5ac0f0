"""DTensor: placements of every parameter and module, and a plan for `parallelize_module`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from stratagem.exports.reading.dtensor_placements import (
    nearest_plan,
    parameter_placements,
    read_placements,
    result_placements,
)
from stratagem.exports.reading.export import ExportDraft
from stratagem.exports.reading.parallel_styles import module_of, module_styles, said, split_axes
from stratagem.searcher.space.strategies import replicated
from stratagem.simulator.base.hostile_texts import python_text
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Partial, Placements
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.simulation.plan_in_words import collapse

HEAD = """\
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

"""

TAIL = '''

def make_mesh(device_type="cuda", stage=0):
    """The mesh of a stage; every rank calls it for every stage."""
    axes = STAGES[stage]["axes"]
    ranks = torch.tensor(STAGES[stage]["devices"]).reshape(tuple(axes.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes))


def parallelize(model, mesh, stage=0):
    """Tensor parallelism along the one axis that splits parameters; samples are the user's."""
    axis, styles = STAGES[stage]["axis"], STAGES[stage]["styles"]
    if axis is None:
        raise ValueError("parallelize_module takes one axis, this stage splits along several")
    users = _users(model)
    parallelize_module(model, mesh[axis], styles)
    for (first, name), *others in users:  # It makes parameters anew, tied ones apart.
        for module, other in others:
            module.register_parameter(other, getattr(first, name))
    _distribute_parameters(model, mesh[axis], {})
    return model


def distribute(model, mesh, stage=0):
    """Every parameter and the inputs of every module, along all axes of the mesh."""
    for name, (inputs, output) in STAGES[stage]["modules"].items():
        module = model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, given, p=inputs: (_as(given[0], p), *given[1:]))
        module.register_forward_hook(lambda _, given, made, p=output: _as(made, p))
    _distribute_parameters(model, mesh, STAGES[stage]["parameters"])
    return model


def _users(model):
    """For every parameter the modules that have it, and what they call it."""
    found = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((module, name))
    return found.values()


def _as(tensor, placements):
    return tensor.redistribute(placements=placements) if isinstance(tensor, DTensor) else tensor


def _distribute_parameters(model, mesh, placements):
    """Make parameters DTensors, whole where nothing is said, and sum their gradients up."""
    whole = (Replicate(),) * mesh.ndim
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for users in _users(model):
        module, name = users[0]
        old = new = getattr(module, name)
        if not isinstance(old, DTensor):
            placed = placements.get(names[id(old)], whole)
            new = nn.Parameter(distribute_tensor(old.detach(), mesh, placed), old.requires_grad)
        if new.requires_grad:
            new.register_post_accumulate_grad_hook(_sum_up)
        for module, name in users:
            module.register_parameter(name, new)


def _sum_up(parameter):
    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
'''


def dtensor(plan: Plan, graph: OperatorGraph) -> ExportDraft:
    """A Python module with the placements of a plan, and functions that apply them to the model.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import llama
        >>> graph = llama(num_layers=2, batch=16)
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> text = dtensor(TrainingSetup(tensor=4).plan(graph, cluster), graph).text
        >>> '"layers.0.mlp.down.weight": (Replicate(), Shard(1)),' in text
        True
    """
    whole = _unrewritten(plan, graph)
    if whole.is_mirrored:
        whole = replace(whole, schedule="1f1b")  # torch has no second homes for stages.
    nearest = nearest_plan(whole, graph)
    small = graph.microbatch(plan.num_microbatches)
    text = "".join(
        (HEAD, "STAGES = [\n", *(_stage(small, stage) for stage in nearest.stages), "]\n", TAIL)
    )
    return ExportDraft(text, nearest, tuple(_missing(small, nearest)))


def _unrewritten(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan for the model as it is: what rewriting made or removed is whole on each device."""
    if not plan.substitutions:
        return plan
    stage_of, last = {}, 0
    for name in graph.names:
        last = max(last, plan.stage_of.get(name, last))
        stage_of[name] = last
    stages = []
    for number, stage in enumerate(plan.stages):
        names = tuple(name for name in graph.names if stage_of[name] == number)
        choices = replicated(graph, stage.mesh.shape) | dict(stage.choices)
        stages.append(replace(stage, operators=names, choices={n: choices[n] for n in names}))
    return replace(plan, stages=tuple(stages), substitutions=(), fingerprint=graph.fingerprint)


def _stage(graph: OperatorGraph, stage: Stage) -> str:
    axes = split_axes(graph, stage)
    axis = axes[0] if axes else len(stage.mesh.axes) - 1
    name = stage.mesh.axes[axis].name
    styles = module_styles(graph, stage, axis) if len(axes) <= 1 else {}
    sizes = ", ".join(f"{python_text(axis.name)}: {axis.size}" for axis in stage.mesh.axes)
    parameters = {
        name: _tuple(placed) for name, placed in parameter_placements(graph, stage).items()
    }
    return (
        "    {\n"
        f'        "devices": {list(stage.mesh.devices)},\n'
        f'        "axes": {{{sizes}}},\n'
        f'        "axis": {python_text(name) if len(axes) <= 1 else None},\n'
        f"{_table('styles', styles)}"
        f"{_table('parameters', parameters)}"
        f"{_table('modules', dict(_modules(graph, stage)))}"
        "    },\n"
    )


def _modules(graph: OperatorGraph, stage: Stage) -> Iterator[tuple[str, str]]:
    """Modules, how they need their first input, and how they hand on their result."""
    operators = [graph.operator(name) for name in stage.operators]
    modules = [module_of(graph, operator) for operator in operators]
    for operator, module in zip(operators, modules, strict=True):
        if module and modules.count(module) == 1 and operator.inputs:
            needed = read_placements(operator, 0, stage)
            if not any(isinstance(p, Partial) for p in needed):
                out = result_placements(graph, operator, stage)
                yield module, f"({_tuple(needed)}, {_tuple(out)})"


def _missing(graph: OperatorGraph, nearest: Plan) -> Iterator[str]:
    if len(nearest.stages) > 1:
        yield (
            "DTensor has no pipelines: each stage has a mesh and tables of its own here; cut the "
            f"model and run schedule {nearest.schedule!r} with torch.distributed.pipelining."
        )
    for number, stage in enumerate(nearest.stages):
        where = f" of stage {number}" if len(nearest.stages) > 1 else ""
        axes = split_axes(graph, stage)
        if len(axes) > 1:
            names = ", ".join(stage.mesh.axes[axis].name for axis in axes)
            yield (
                f"parallelize_module takes one axis, but the axes {names}{where} all split more "
                "than samples: use distribute()."
            )
        loose = [
            operator.name
            for operator in map(graph.operator, stage.operators)
            if not operator.is_source and not module_of(graph, operator)
        ]
        if loose and axes:
            yield (
                f"Functions without a module{where} take what DTensor infers from their inputs, "
                f"unless the model calls redistribute(): {collapse(loose)}."
            )
    tied = [
        operator.name
        for stage in nearest.stages
        for operator in map(graph.operator, stage.operators)
        for weight in operator.weights
        if graph.owners.get(weight.parameter, operator.name) != operator.name
    ]
    if tied:
        yield f"Tied parameters lie as their first user has them, for {collapse(tied)} too."


def _table(name: str, entries: Mapping[str, str]) -> str:
    lines = "".join(
        f"            {python_text(key)}: {value},\n" for key, value in entries.items()
    )
    return f'        "{name}": {{\n{lines}        }},\n' if lines else f'        "{name}": {{}},\n'


def _tuple(placements: Placements) -> str:
    listed = ", ".join(map(said, placements))
    return f"({listed},)" if len(placements) == 1 else f"({listed})"
