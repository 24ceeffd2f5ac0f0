"""From a plan to a program."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.executor.context import Context
from stratagem.executor.instructions import Forward, Free, Instruction, Source
from stratagem.executor.passes import PassWriter
from stratagem.executor.program import LOSS, Program, RankProgram
from stratagem.executor.weights import Weights
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.plan import Plan


def lower(plan: Plan, graph: OperatorGraph) -> Program:
    """Make the program that runs a plan.

    Example:
        >>> program = lower(plan, graph)  # doctest: +SKIP
        >>> print(grid(program))  # doctest: +SKIP

    Args:
        plan: for this graph, in float32.
        graph: the model at its whole batch; the plan's substitutions are applied to it.

    Raises:
        ValueError: when the plan is not for `graph` (see `Plan.check`), its precision, schedule or
            one of its options is not executed, the loss has no gradient, or a parameter is shared
            in a way that is not executed (see `Weights`).
    """
    rewritten = plan.rewrite(graph)
    graph = rewritten.graph
    plan.check(graph)
    _check_precision(plan)
    _check_schedule(plan)
    _check_options(plan)
    context = Context(plan, graph, graph.microbatch(plan.num_microbatches))
    _check_loss(context)
    weights = Weights(context)
    return Program(
        plan=plan,
        whole=graph,
        graph=context.graph,
        maps=rewritten.maps,
        homes=weights.homes(),
        ranks=tuple(_rank(context, weights, device) for device in context.ranks),
    )


def _check_precision(plan: Plan) -> None:
    if plan.training.precision != "float32" or plan.training.gradient_bytes != 4:
        raise ValueError(
            f"plan {plan.name!r} trains in {plan.training.precision}, which is simulated only; "
            f"the executor runs float32: search with Training(precision='float32')"
        )


def _check_options(plan: Plan) -> None:
    """Refuse what is simulated only: nothing that a plan promises is left out in silence."""
    for stage in plan.stages:
        for name, choice in stage.choices.items():
            for asked, what, remedy in (
                (choice.recompute, "is recomputed", "search with Options(recompute=('none',))"),
                (
                    choice.chunks > 1,
                    f"runs in {choice.chunks} pieces",
                    "search with Options(chunks=(1,))",
                ),
                (choice.fused, "is fused with a collective", "search with Options(fuse=False)"),
                (choice.regather, "converts its inputs again", "plan with regather=False"),
            ):
                if asked:
                    raise ValueError(
                        f"plan {plan.name!r}: operator {name!r} {what}, which is simulated only; "
                        f"{remedy}"
                    )
    if plan.inputs_first:
        raise ValueError(
            f"plan {plan.name!r} makes gradients of inputs before those of weights, which is "
            f"simulated only; search with Options(inputs_first=False)"
        )
    if plan.bucket_bytes:
        raise ValueError(
            f"plan {plan.name!r} reduces gradients in buckets of {plan.bucket_bytes} bytes, which "
            f"is simulated only; search with Options(bucket_bytes=0)"
        )


def _check_schedule(plan: Plan) -> None:
    schedule = plan.make_schedule()
    one_each = [(stage,) for stage in range(len(plan.stages))]
    if (
        schedule.splits_backward
        or schedule.num_slices > 1
        or schedule.update_every is not None
        or [schedule.ranks_of(stage) for stage in range(len(plan.stages))] != one_each
    ):
        raise ValueError(
            f"plan {plan.name!r} has schedule {plan.schedule!r}, which is simulated only; the "
            "executor runs one stage on each set of devices, whole backwards of whole "
            "microbatches and one update at the end: choose 1f1b or gpipe"
        )


def _check_loss(context: Context) -> None:
    loss = context.graph.index[context.graph.loss]
    if not context.runs_backward[loss]:
        raise ValueError(
            f"the loss {context.graph.loss!r} of graph {context.graph.name!r} depends on no "
            f"trained parameter; there is nothing to train"
        )


def _rank(context: Context, weights: Weights, device: int) -> RankProgram:
    passes = PassWriter(context, weights, device)
    passes.step()
    writer, stored = passes.writer, passes.parameters.stored()
    body = [*_sources(writer.instructions, context), *writer.instructions]
    kept = {each.value for each in stored} | {LOSS}
    return RankProgram(writer.rank, device, writer.stage, stored, _freed(body, kept))


def _sources(instructions: Sequence[Instruction], context: Context) -> list[Instruction]:
    """The sources that a rank's operators read, in graph order."""
    read = {
        operand.value
        for instruction in instructions
        if isinstance(instruction, Forward)
        for operand in instruction.inputs
    }
    return [
        Source(operator.name, f"{operator.name} whole")
        for operator, is_source in zip(context.graph.operators, context.is_source, strict=True)
        if is_source and f"{operator.name} whole" in read
    ]


def _freed(instructions: Sequence[Instruction], kept: set[str]) -> tuple[Instruction, ...]:
    """The instructions with every value freed right after the last one that touches it."""
    last: dict[str, int] = {}
    for number, instruction in enumerate(instructions):
        for value in (*instruction.reads, *instruction.writes):
            last[value] = number
    dying: dict[int, list[str]] = {}
    for value, number in last.items():
        if value not in kept:
            dying.setdefault(number, []).append(value)
    body: list[Instruction] = []
    for number, instruction in enumerate(instructions):
        body.append(instruction)
        if number in dying:
            body.append(Free(tuple(dying[number])))
    return tuple(body)
