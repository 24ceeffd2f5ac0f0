"""What a plan must be like for its weights to be stashed (PipeDream, Narayanan et al., SOSP 2019).

Every microbatch is a minibatch of its own, with an update behind it on each stage. With stages
1 … n, whose weights after t updates are w₁(t) … w_n(t), the paper's section 3.3 has

    w(t + 1) = w(t) − rate · ∇f(w₁(t − n + 1), w₂(t − n + 2), …, w_n(t))

and with vertical sync ∇f(w₁(t − n + 1), w₂(t − n + 1), …, w_n(t − n + 1)).

A step of a plan is such a stream of its microbatches, which is drained at the step's end: all t
count from the first update of the step, whose weights stand for those before it. So a checkpoint
between two steps needs no older weights, and the pipeline fills once a step, which costs little
where a step has many microbatches.

f is the loss of the microbatch, as if it were the batch: the whole batch's share of it times the
number of microbatches. A step's loss is the mean of them, each under the weights that it met.
"""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.sharding.parameter_homes import trainable_weights


def check_stashing(plan: Plan, graph: OperatorGraph, ties: Sequence[tuple[int, int, str]]) -> None:
    """Refuse a plan that updates amid its step, but wants what only one update a step can give.

    Args:
        plan: under a schedule that stashes weights.
        graph: that it is for.
        ties: (owner, user, parameter) of each parameter shared between stages.

    Raises:
        ValueError: naming the parameter, the operator or the option at fault.
    """
    where = (
        f"plan {plan.name!r} has schedule {plan.schedule!r}, which updates each stage by itself"
    )
    if plan.training.clip_norm:
        raise ValueError(
            f"{where}: there is no moment at which the norm of all gradients is known, but "
            f"clip_norm is {plan.training.clip_norm:g}. Set it to 0, or choose 1f1b"
        )
    if plan.training.measures_updates:
        raise ValueError(
            f"{where}: there is no moment at which the norms of all updates are known, which "
            f"optimizer {plan.training.optimizer!r} needs. Choose another one, or 1f1b"
        )
    if plan.training.scales_loss:
        raise ValueError(
            f"{where}: there is no moment at which it is known whether any gradient overflows, "
            "which the loss scale of float16 follows. Choose bfloat16, or 1f1b"
        )
    for i, j, parameter in ties:
        names = [graph.operators[k].name for k in (i, j)]
        stages = [plan.stage_of[name] for name in names]
        raise ValueError(
            f"{where}: operators {names[0]!r} of stage {stages[0]} and {names[1]!r} of stage "
            f"{stages[1]} share parameter {parameter!r}, of which both would need one version. "
            "Put them into one stage, untie them, or choose 1f1b"
        )
    for operator in graph.operators:
        if plan.choice(operator.name).zero == 3 and trainable_weights(graph, operator):
            raise ValueError(
                f"{where} and keeps older weights for backward passes; operator "
                f"{operator.name!r} has ZeRO stage 3, under which no device keeps its weights. "
                "Choose ZeRO stage 2 or less, or 1f1b"
            )
