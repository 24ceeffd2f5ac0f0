"""Whether a plan's first step is that of one process of torch, judged by what rounding explains.

errors      of the loss, every gradient and every buffer that a step changes
   │ all within the tolerance of the precision? ── yes ──▶ it agrees
   no
   ▼
once more against float64, beside what one process of torch makes of it in the plan's own
precision: a value may be off a few times as far as torch's own is
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.results.verdict import Verdict
from stratagem.executor.running.execute import LOCAL_SECONDS, prepare
from stratagem.executor.running.planned_graph import planned_graph
from stratagem.executor.running.torch_reference import (
    TRUTH,
    StepOutcome,
    forward_outputs,
    output_errors,
    reference_of,
)
from stratagem.executor.state.parameter_parts import check_state, model_state
from stratagem.executor.training.batches import Batches
from stratagem.executor.training.training_loop import first_step
from stratagem.executor.watching.rank_place import Place
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.base.precision import FORMATS, is_full
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan

ROUNDING = 8.0
"""How many times as far from float64 as torch's own value one may be: orders of sums differ."""


def check(
    plan: Plan,
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    graph: OperatorGraph | None = None,
) -> Verdict:
    """Make a step by a plan, with its ranks as threads of this process, and judge it.

    Example:
        >>> verdict = sg.check(plan, model, batch)  # doctest: +SKIP
        >>> print(verdict.sentence())  # doctest: +SKIP
        agrees with one process of torch: loss and 12 gradients to 3.1e-07 (worst: head.weight, …)

    Args:
        plan: for this model and batch.
        model: its parameters and buffers are read, not changed.
        batch: the keyword arguments of the model's `forward`.
        graph: what `capture` gave; the model is captured anew when left out.

    Raises:
        ValueError: when the plan is not for this model and batch or cannot be executed; when one
            device cannot repeat its step, see `judge`.
    """
    check_arguments(
        "check",
        plan=(plan, Plan),
        model=(model, nn.Module),
        batch=(batch, Mapping),
        graph=(graph, OperatorGraph | None),
    )
    used = graph or planned_graph(plan, model, batch)
    reference_of(plan, plan.rewrite(used).graph)  # Refused here where there is none.
    program, state = prepare(plan, used), model_state(model)
    check_state(program, state)
    batches = Batches(batch, used, seed=plan.seed, buffers=state)

    def run(comm: Communicator) -> ExecutionResult:
        return first_step(Interpreter(program, comm, state), batches, Place())

    result = run_local(program.world_size, run, timeout=LOCAL_SECONDS)[0]
    return judge(model, batch, result, plan, used)


def judge(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    result: ExecutionResult,
    plan: Plan,
    graph: OperatorGraph,
) -> Verdict:
    """Compare the first step of a plan with that of one device.

    Example:
        >>> verdict = judge(model, batch, result, plan, graph)  # doctest: +SKIP
        >>> verdict.agrees, verdict.worst  # doctest: +SKIP
        (True, 'head.weight')

    One process of torch runs the whole batch. Batch norms see it by the microbatches of the plan
    (and by the samples of each device where their statistics are local). Where the model drops
    out, a plan of one device runs instead, which draws the same masks. Gradients are clipped as
    the plan's are. Of a forward pass, what it gives back is compared with what the model returns
    when it evaluates.

    Args:
        model: as it was before the step.
        batch: that of the step, which the model takes as keyword arguments.
        result: of a plan's first step, with its gradients.
        plan: that was run.
        graph: of the model, as it was captured.

    Raises:
        ValueError: when the result has no gradients or lacks one that the model has; when one
            device cannot repeat the step (see `reference_of`).
    """
    if graph.is_forward:
        return _judge_forward(model, batch, result, plan)
    if result.gradients is None:
        raise ValueError("the result has no gradients; run it with gradients=True")
    reference = reference_of(plan, plan.rewrite(graph).graph)
    precision = _precision(model, plan)
    tolerance = FORMATS[precision].tolerance
    found = StepOutcome(result.losses[0], result.gradients, result.parameters)
    errors = found.errors_against(reference.step(model, batch))
    verdict = Verdict(errors, dict.fromkeys(errors, tolerance), reference.words)
    if verdict.agrees or precision == TRUTH:
        return verdict
    truth = reference.step(model, batch, TRUTH)
    own = reference.step(model, batch, precision).errors_against(truth)
    return _in_truth(found.errors_against(truth), own, tolerance, reference.words)


def _judge_forward(
    model: nn.Module, batch: Mapping[str, Tensor], result: ExecutionResult, plan: Plan
) -> Verdict:
    """Compare what a forward pass gave back with what the model returns."""
    if result.outputs is None:
        raise ValueError("the result has no outputs; judge that of a forward pass, on rank 0")
    words, precision = "one process of torch that evaluates", _precision(model, plan)
    tolerance = FORMATS[precision].tolerance
    errors = output_errors(result.outputs, forward_outputs(model, batch))
    verdict = Verdict(errors, dict.fromkeys(errors, tolerance), words)
    if verdict.agrees or precision == TRUTH:
        return verdict
    truth = forward_outputs(model, batch, TRUTH)
    own = output_errors(forward_outputs(model, batch, precision), truth)
    return _in_truth(output_errors(result.outputs, truth), own, tolerance, words)


def _in_truth(
    errors: Mapping[str, float], own: Mapping[str, float], tolerance: float, words: str
) -> Verdict:
    """The verdict against float64, where each value may be off as far as torch's `own` is."""
    allowed = {name: max(tolerance, ROUNDING * own.get(name, 0.0)) for name in errors}
    return Verdict(errors, allowed, f"{words} in float64")


def _precision(model: nn.Module, plan: Plan) -> str:
    """The lowest precision that the plan computes in."""
    training = plan.training
    if not is_full(training.formats.lowest):
        return training.formats.lowest
    kept = {str(each.dtype).removeprefix("torch.") for each in model.parameters()}
    return max(kept & FORMATS.keys(), key=lambda name: FORMATS[name].tolerance)
