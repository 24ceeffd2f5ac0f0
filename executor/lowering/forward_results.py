"""What a forward pass gives back, and how it lies on the ranks that have made it."""

from __future__ import annotations

from stratagem.executor.lowering.plan_context import Context
from stratagem.executor.program.programs import Result
from stratagem.simulator.graph.placement import output_placements
from stratagem.simulator.operators.operator import DimKind, GraphOutput, factor_sizes, factors


def results_of(context: Context) -> tuple[Result, ...]:
    """The results of a forward pass, in their order; a training step has none."""
    return tuple(_result(context, output) for output in context.graph.outputs)


def _result(context: Context, output: GraphOutput) -> Result:
    i = context.graph.index[output.operator]
    operator = context.graph.operators[i]
    made = operator.outputs[0]
    kinds = [operator.dim(name).kind for name in factors(made.layout)]
    samples = [at for at, kind in enumerate(kinds) if kind is DimKind.SAMPLE]
    microbatches = range(context.plan.num_microbatches)
    return Result(
        name=output.name,
        stage=context.stage_of[i],
        layout=made.layout,
        sizes=factor_sizes(made.layout, operator.sizes),
        samples=samples[0] if len(samples) == 1 else None,
        placements=output_placements(made, context.configs[i]),
        dtype=context.output_dtype(i, 0),
        share=context.whole.share_of(output),
        values=tuple(value_of(output.operator, 0, microbatch) for microbatch in microbatches),
    )


def value_of(operator: str, output: int, microbatch: int, *, again: bool = False) -> str:
    """What a result of an operator is called in a program.

    Example:
        >>> value_of("fc1", 0, 2), value_of("lstm", 1, 0)
        ('fc1 m2', 'lstm:1 m0')
    """
    number = f":{output}" if output else ""
    return f"{operator}{number}{' again' if again else ''} m{microbatch}"
