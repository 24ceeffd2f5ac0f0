"""Plans in the words of other programs: DTensor, FSDP2, torchtitan, Megatron-LM, DeepSpeed, …

Each export says what its format cannot express, and what the nearest plan that it can express is
predicted to cost.

In:      a plan and its graph.
Out:     files of other programs, and what they cannot say.
Imports: exports.reading, the search, the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stratagem.exports.accelerate import accelerate_deepspeed, accelerate_fsdp, accelerate_megatron
from stratagem.exports.deepspeed import deepspeed
from stratagem.exports.dtensor import dtensor
from stratagem.exports.fsdp2 import fsdp2
from stratagem.exports.megatron import megatron
from stratagem.exports.reading.differences import differences
from stratagem.exports.reading.export import Export, ExportDraft
from stratagem.exports.torchtitan import torchtitan
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import simulate_plan

__all__ = ["FORMATS", "LOSSLESS", "Export", "export", "lossless_exports"]

FORMATS: dict[str, Callable[[Plan, OperatorGraph], ExportDraft]] = {
    "dtensor": dtensor,
    "fsdp2": fsdp2,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate-fsdp": accelerate_fsdp,
    "accelerate-deepspeed": accelerate_deepspeed,
    "accelerate-megatron": accelerate_megatron,
}
"""What makes each format of a plan."""

PROGRAMS = ("fsdp2", "torchtitan", "megatron", "deepspeed")
"""Formats that programs which train take as they are; accelerate's say the same once more, and
DTensor's is code to write into a model."""
LOSSLESS = 0.005
"""What is lost by an export if its plan is predicted to take so much longer, a share, is nothing:
a tenth of what predictions tell apart."""


def lossless_exports(
    plan: Plan,
    graph: OperatorGraph,
    *,
    costs: CostModel | None = None,
    step_time: float | None = None,
    check: Callable[[], None] = lambda: None,
    memory: RowMemory | None = None,
) -> tuple[str, ...]:
    """The formats of `PROGRAMS` by which nothing is lost.

    The plan that they say fits, and is predicted to take at most `LOSSLESS` longer. None can say
    that products are in another format than what is stored.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> "megatron" in lossless_exports(TrainingSetup(tensor=2).plan(graph, cluster), graph)
        True

    Args:
        plan: for this graph.
        graph: the model at its whole batch.
        costs: prices of operators; the device model of the plan's cluster when left out.
        step_time: predicted seconds of the plan, where they are known.
        check: called before each format is tried; may raise where there is no time left.
        memory: rows priced before.
    """
    if graph.is_forward or plan.training.multiplying_as_stored() != plan.training:
        return ()
    prices, memory = costs_or_default(costs), memory or RowMemory()
    if step_time is None:
        step_time = simulate_plan(plan, graph, prices, memory=memory).step_time
    found = []
    for target in PROGRAMS:
        check()
        nearest = FORMATS[target](plan, graph).nearest
        said = simulate_plan(nearest, graph, prices, memory=memory)
        if said.fits and said.step_time <= (1.0 + LOSSLESS) * step_time:
            found.append(target)
    return tuple(found)


def export(
    plan: Plan, graph: OperatorGraph, target: str, *, costs: CostModel | None = None
) -> Export:
    """Say a plan in the words of another program, and what that leaves out.

    Example:
        >>> from stratagem.searcher.space.training_setup import TrainingSetup
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph, cluster = gpt(num_layers=4, batch=16), Cluster.preset("dgx-a100", num_nodes=1)
        >>> plan = TrainingSetup(
        ...     tensor=2, pipeline=2, zero=1, inputs_first=True, overlap_gradients=False
        ... ).plan(graph, cluster)
        >>> found = export(plan, graph, "megatron")
        >>> found.missing, found.ratio
        ((), 1.0)

    What a format cannot say is replaced by the nearest that it can, as a plan of ours that is
    priced by the same costs.

    Args:
        plan: for this graph.
        graph: the model at its whole batch.
        target: one of ``dtensor``, ``fsdp2``, ``torchtitan``, ``megatron``, ``deepspeed``,
            ``accelerate-fsdp``, ``accelerate-deepspeed`` and ``accelerate-megatron``.
        costs: prices of operators; the device model of the plan's cluster when left out.

    Raises:
        ValueError: when there is no such format, the plan is not for this graph, or that is a
            forward pass.
    """
    check_arguments(
        "export", plan=(plan, Plan), graph=(graph, OperatorGraph), target=(target, str)
    )
    if target not in FORMATS:
        raise unknown("export", target, FORMATS)
    if graph.is_forward:
        raise ValueError(
            f"plan {plan.name!r} is of the forward pass {graph.name!r}, but {target} is told how "
            "a model is trained; export a plan of its training step"
        )
    prices, memory = costs_or_default(costs), RowMemory()
    simulated = simulate_plan(plan, graph, prices, memory=memory)
    sayable = replace(plan, training=plan.training.multiplying_as_stored())
    draft = FORMATS[target](sayable, graph)
    nearest = replace(draft.nearest, name=f"{plan.name}, as {target} says it")
    again = simulate_plan(nearest, graph, prices, memory=memory)
    made = Export(
        target=target,
        text=draft.text,
        missing=(*differences(plan, nearest, graph), *draft.missing, *_recipe(plan.training)),
        plan=plan,
        nearest=nearest,
        time=simulated.step_time,
        nearest_time=again.step_time,
        fits=again.fits,
    )
    return replace(made, text=_headed(made, draft.comment))


_RECIPE = (
    *("betas", "epsilon", "amsgrad", "momentum", "nesterov", "weight_decay", "groups"),
    *("clip_norm", "clip_norm_type", "clip_value", "average", "average_decay", "newton_schulz"),
    *("adafactor", "blocks", "coupled_decay", "dampening", "maximize"),
)
"""What training has beside what formats are told."""


def _recipe(training: Training) -> tuple[str, ...]:
    """What of the recipe is left to the user, in a sentence."""
    usual = Training()
    own = [name for name in _RECIPE if getattr(training, name) != getattr(usual, name)]
    if not own:
        return ()
    said = ", ".join(
        f"{name} ({len(training.groups)})"
        if name == "groups"
        else f"{name}={getattr(training, name)}"
        for name in own
    )
    return (f"Set the rest of the recipe where the model is trained: {said}.",)


def _headed(made: Export, comment: str) -> str:
    """The text below a comment that says what it leaves out, where the format has comments."""
    if not comment:
        return made.text
    sentences = (made.summary, *made.missing)
    lines = [line for sentence in sentences for line in sentence.splitlines()]
    said = "\n".join(f"{comment}{line.replace(NUL, REPLACED)}" for line in lines)
    return f"{said}\n{made.text}"


NUL, REPLACED = "\0", "\ufffd"
"""What no text of a program may have in it, and what stands there instead."""
