"""What is tried with one model: capture, counts, a search, and steps by plans of some ranks."""

from __future__ import annotations

import contextlib
import io
import math
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import stratagem as sg
from benchmarks.zoo.examples import Example, example_of
from benchmarks.zoo.runner import Line
from benchmarks.zoo.torchvision_stand_in import import_torchvision
from benchmarks.zoo.truth import EXACT, Step, doubled, torch_flops, torch_step, worst_of
from stratagem.executor import execute, model_state
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.operators.kinds.generics import is_generic
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.kinds.sums_over_samples import takes_statistics
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.step_programs import DRAWING
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from tests.support.plans import Case, drawing, make_plan, mesh_of

RANKS = (2, 3)
"""On how many threads a step is made."""

EVALUATIONS = 40
"""Of a search."""

SECONDS = 600.0
"""A step by a plan may take."""


def tried(path: Path, name: str, show: Callable[[Line], None]) -> None:
    """Try one model, showing its line whenever there is more to say.

    Args:
        path: of the file that makes it.
        name: of its function there.
        show: is given the line.
    """
    begun = time.perf_counter()
    line: Line = {"model": f"{path.stem}.{name}", "captured": False}

    def say(**more: Any) -> None:
        line.update(more, seconds=round(time.perf_counter() - begun, 1))
        show(line)

    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            import_torchvision()
            example = example_of(path, name)
            graph = sg.capture(
                example.model, kwargs=example.batch, loss=example.loss, targets=example.targets
            )
        say(captured=True, generic=round(_generic_share(graph), 4))
        truth = torch_step(example)
        say(parameters=_counts(graph, example, truth), flops_ratio=_ratio(graph, example))
        plans = {f"searched for {n} ranks": _searched(graph, n) for n in RANKS}
        say(searched=True)
        case = Case(example.model, example.tensors, graph)
        plans |= {f"drawn for {n} ranks": make_plan(case, drawing(n), (n,)) for n in RANKS}
        differences = [
            _difference(plan, what, graph, example, truth) for what, plan in plans.items()
        ]
        say(executed_equal=not any(differences), error="; ".join(filter(None, differences)))
    except Exception as error:
        say(error=_in_words(error))


def _in_words(error: Exception) -> str:
    """The error, and where it comes from unless it is one that is worded for users.

    Files are named without their folders, which are those of one machine.
    """
    words = f"{type(error).__name__}: {error}".split(" ")
    said = " ".join(word if "/" not in word else Path(word).name for word in words)
    if isinstance(error, ValueError):
        return said
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"crash: {said} ({Path(frame.filename).name}:{frame.lineno})"


# -- counts -------------------------------------------------------------------------------------


def _flops(operator: Operator) -> float:
    return kind_of(operator).flops(operator, operator.sizes)


def _generic_share(graph: OperatorGraph) -> float:
    total = sum(map(_flops, graph.operators))
    return sum(map(_flops, filter(is_generic, graph.operators))) / total if total else 0.0


def _ratio(graph: OperatorGraph, example: Example) -> float | None:
    """Operations of products against those that torch counts; None where it counts none."""
    products = (each for each in graph.operators if kind_of(each).product is not None)
    theirs = torch_flops(example)
    return round(sum(map(_flops, products)) / theirs, 3) if theirs else None


def _counts(graph: OperatorGraph, example: Example, truth: Step) -> bool:
    """Whether what is trained is what torch trains, scalar for scalar."""
    mine = {each.name: math.prod(each.shape) for each in graph.parameters if each.trainable}
    theirs = {
        name: parameter.numel()
        for name, parameter in example.model.named_parameters()
        if name in truth.gradients
    }
    return mine == theirs


# -- plans --------------------------------------------------------------------------------------


def _searched(graph: OperatorGraph, ranks: int) -> Plan:
    cluster = replace(sg.Cluster.preset("local-cpu"), devices_per_node=ranks)
    budget = sg.Budget(evaluations=EVALUATIONS, skeletons=1, bounded=0, threads=1)
    found = sg.search(
        graph,
        cluster,
        budget=budget,
        prefer="fastest",
        draws=0,
        progress=False,
    )
    return found.plan


def _difference(plan: Plan, what: str, graph: OperatorGraph, example: Example, truth: Step) -> str:
    """What a plan trains differently; empty if nothing."""
    norms = any(map(takes_statistics, graph.operators))
    parts = plan.num_microbatches if norms else 1
    if any(map(_draws, graph.operators)):
        truth = _step(_alone(plan, graph, parts), graph, example)
    elif parts > 1:
        truth = torch_step(example, parts=parts)
    found = _step(plan, graph, example)
    missing = truth.gradients.keys() - found.gradients.keys()
    if missing:
        return f"the plan {what} makes no gradient of {min(missing)}"
    name, error, allowed = worst_of(found, example, truth, parts=parts)
    if error <= allowed or _is_exact(plan, example, parts):
        return ""
    return f"the plan {what} trains {name} {error:.1e} apart from torch; {allowed:.1e} may be"


def _is_exact(plan: Plan, example: Example, parts: int) -> bool:
    """Whether a plan trains in float64 what torch does.

    So it is told where float32 tells nothing: batch norms of a handful of values multiply rounding
    errors a thousandfold.
    """
    wide = doubled(example)
    graph = sg.capture(wide.model, kwargs=wide.batch, loss=wide.loss, targets=wide.targets)
    if any(map(_draws, graph.operators)):
        return False
    plan = replace(plan, fingerprint=graph.fingerprint)
    errors = _step(plan, graph, wide).errors_against(torch_step(wide, parts=parts))
    return max(errors.values()) <= EXACT


def _step(plan: Plan, graph: OperatorGraph, example: Example) -> Step:
    state = model_state(example.model)
    made = execute(plan, graph, state, example.tensors, gradients=True, timeout=SECONDS)
    assert made.gradients is not None
    return Step(made.losses[0], made.gradients)


def _alone(plan: Plan, graph: OperatorGraph, parts: int) -> Plan:
    """A plan of one device, which drops out what the other does, in so many microbatches."""
    choices = {name: Choice((REPLICATE,)) for name in graph.names}
    stage = Stage(tuple(graph.names), mesh_of((1,)), choices)
    return replace(plan, stages=(stage,), num_microbatches=parts, schedule="1f1b", bucket_bytes=0)


def _draws(operator: Operator) -> bool:
    steps = operator.attributes.get("steps", ())
    dropped = operator.attributes.get("dropout")
    return bool(dropped) or any(function in DRAWING for function, _ in steps)


torch.set_num_threads(1)
