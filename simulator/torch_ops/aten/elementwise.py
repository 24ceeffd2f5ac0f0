"""aten operators that become elementwise chains: functions, losses, random draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from stratagem.simulator.graph.building.operator_drafts import DraftTensor, expand, permute
from stratagem.simulator.operators.step_programs import Steps
from stratagem.simulator.torch_ops.aten.arguments import ReadingFunction, reads
from stratagem.simulator.torch_ops.aten.calls import AtenCall
from stratagem.simulator.torch_ops.aten.checks import check_kind, kind_of_steps
from stratagem.simulator.torch_ops.aten.expressions import Expression, compact, is_constant
from stratagem.simulator.torch_ops.aten.pointwise import POINTWISE, Term


def _cross_entropy(call: AtenCall) -> DraftTensor:
    logits = call.tensor("self")
    call.refuse_unless(call.arguments.get("weight") is None, "class weights")
    call.refuse_unless(call.arguments.get("label_smoothing", 0) == 0, "label smoothing")
    call.refuse_unless(call.arguments.get("reduction", 1) == 1, "a reduction other than mean")
    target = call.given("target")
    call.refuse_unless(
        isinstance(target, Expression) and "int" in target.dtype,
        "targets that are not class indices from an input",
    )
    order = [0, *range(2, len(logits.dims)), 1] if len(logits.dims) > 1 else [0]
    ignored = call.given("ignore_index")
    return call.builder.cross_entropy(
        permute(logits, order),
        call.handle(target),
        ignore_index=ignored,
        name=call.label("cross_entropy"),
    )


def _mse_loss(call: AtenCall) -> DraftTensor:
    x, target = call.tensor("self"), call.tensor("target")
    steps: Steps = [["sub", [["in", 0], ["in", 1]]], ["pow", [["step", 0], 2]]]
    squares = call.builder.elementwise([x, target], steps, name=call.label("squares"))
    reduction = call.given("reduction")
    if reduction == 0:
        return squares
    make = call.builder.mean if reduction == 1 else call.builder.reduce
    return make(squares, name=call.label("mean" if reduction == 1 else "reduce"))


def _dropout(call: AtenCall) -> DraftTensor:
    x = call.tensor("input")
    train, p = call.given("train"), call.given("p")
    if not train or p == 0:
        return x
    shared = [len(x.dims) - 2] if call.operator == "feature_dropout" else []
    steps: Steps = [["dropout", [["in", 0], p, *shared]]]
    return call.builder.elementwise([x], steps, name=call.label("dropout"))


def _cast(call: AtenCall) -> DraftTensor:
    x = call.tensor("self", broadcast=True)
    if x.dtype == call.dtype:
        return x
    steps: Steps = [["cast", [["in", 0], call.dtype]]]
    return call.builder.elementwise([x], steps, call.dtype, name=call.label("cast"))


def _detach(call: AtenCall) -> DraftTensor:
    x = call.tensor("self")
    return call.builder.handed_on(x, name=call.label("detach"), detached=True)


def _pointwise(call: AtenCall) -> DraftTensor:
    """An elementwise operator of the term that the table gives for the aten operator.

    Constants of one element become numbers, unless the result then has another dtype or shape.
    """
    term, kind = POINTWISE[call.operator].make(call.arguments), (call.shape, call.dtype)
    operands, steps = _chain(call, term, numbers=True)
    if kind_of_steps(steps, operands) != kind:
        operands, steps = _chain(call, term, numbers=False)
    check_kind(kind_of_steps(steps, operands), kind)
    return call.builder.elementwise(operands, steps, call.dtype, name=call.label(steps[-1][0]))


def _chain(call: AtenCall, term: Term, *, numbers: bool) -> tuple[list[DraftTensor], Steps]:
    """The operands and steps of a term; constants of one element are `numbers` in them."""
    operands: list[DraftTensor] = []
    steps: Steps = []

    def write(argument: Any) -> Any:
        if isinstance(argument, Term):
            steps.append([argument.function, [write(each) for each in argument.arguments]])
            return ["step", len(steps) - 1]
        if numbers and isinstance(argument, Expression) and math.prod(argument.shape) == 1:
            known = call.constant(argument) if is_constant(argument) else None
            if known is not None:
                return known.item()
        if isinstance(argument, (DraftTensor, Expression)):
            operands.append(call.handle(argument, broadcast=True))
            return ["in", len(operands) - 1]
        return argument

    write(term)
    return operands, steps


def _where(call: AtenCall) -> DraftTensor:
    """One of both tensors where a constant condition always takes it, as masks of padding do."""
    condition = call.given("condition")
    known = None
    if isinstance(condition, Expression) and is_constant(condition):
        known = call.constant(condition)
    if known is None or known.numel() == 0:
        return _pointwise(call)
    known = compact(known)  # A mask for all samples and heads is one square.
    ever = bool(known.any())
    if ever != bool(known.all()):
        return _pointwise(call)
    one, other = call.given("self"), call.given("other")
    taken = one if ever else other
    if not isinstance(taken, DraftTensor) or taken.dtype != call.dtype:
        return _pointwise(call)
    return expand(taken, call.shape)


def _copy(call: AtenCall) -> Any:
    return call.given("self")


# -- random numbers -----------------------------------------------------------------------------
# Chains over a constant, one number for each of its places. Torch numbers the elements that a
# device happens to have; a plan numbers those of the whole batch: every sharding draws the same.

_DRAWN: list[Any] = ["step", 0]


def _made(call: AtenCall, function: str, *steps: Any) -> DraftTensor:
    """Numbers drawn in the shape of the result, and what is computed with them."""
    constant = Expression("full", (list(call.shape), 1.0, call.dtype), call.shape, call.dtype)
    program: Steps = [[function, [["in", 0]]], *steps]
    places = call.handle(constant)
    label = call.label(call.operator)
    return call.builder.elementwise([places], program, call.dtype, name=label, detached=True)


def _plain(function: str) -> Callable[[AtenCall], DraftTensor]:
    return lambda call: _made(call, function)


def _between(call: AtenCall) -> DraftTensor:
    low, high = call.given("from"), call.given("to")
    steps = [["mul", [_DRAWN, high - low]], ["add", [["step", 1], low]]]
    return _made(call, "uniform", *steps)


def _scaled(call: AtenCall) -> DraftTensor:
    mean, deviation = call.given("mean"), call.given("std")
    steps = [["mul", [_DRAWN, deviation]], ["add", [["step", 1], mean]]]
    return _made(call, "normal", *steps)


def _whole_numbers(call: AtenCall) -> DraftTensor:
    """low + ⌊u · (high − low)⌋, in float64 under every precision, which has room for all."""
    low, high = call.arguments.get("low", 0), call.given("high")
    constant = Expression("full", (list(call.shape), 1, "int64"), call.shape, "int64")
    program: Steps = [
        ["cast", [["in", 0], "float64"]],
        ["uniform", [["step", 0]]],
        ["mul", [["step", 1], float(high - low)]],
        ["floor", [["step", 2]]],
        ["add", [["step", 3], float(low)]],
        ["cast", [["step", 4], call.dtype]],
    ]
    label = call.label("randint")
    places = call.handle(constant)
    return call.builder.elementwise([places], program, call.dtype, name=label, detached=True)


def _exponential(call: AtenCall) -> DraftTensor:
    """−log(1 − u) / λ."""
    steps: Steps = [
        ["sub", [1.0, _DRAWN]],
        ["log", [["step", 1]]],
        ["div", [["step", 2], -call.arguments.get("lambd", 1.0)]],
    ]
    return _made(call, "uniform", *steps)


def _coins(call: AtenCall) -> DraftTensor:
    """1 with a probability, which is one number, or one for each place."""
    if "p" in call.arguments:
        call.given("self")  # of which torch reads the shape alone
        steps = [["lt", [_DRAWN, call.given("p")]], ["cast", [["step", 1], call.dtype]]]
        return _made(call, "uniform", *steps)
    x = call.tensor("self")
    program: Steps = [
        ["uniform", [["in", 0]]],
        ["lt", [_DRAWN, ["in", 0]]],
        ["cast", [["step", 1], call.dtype]],
    ]
    label = call.label("bernoulli")
    return call.builder.elementwise([x], program, call.dtype, name=label, detached=True)


ELEMENTWISE_HANDLERS: dict[str, ReadingFunction[Callable[[AtenCall], Any]]] = {
    **{name: ReadingFunction(_pointwise, term.names) for name, term in POINTWISE.items()},
    **dict.fromkeys(("clone", "lift_fresh_copy"), reads("self")(_copy)),
    **dict.fromkeys(("to", "_to_copy", "type_as"), reads("self")(_cast)),
    **dict.fromkeys(("dropout", "feature_dropout"), reads("input", "p", "train")(_dropout)),
    "where": reads("condition", "self", "other")(_where),
    "detach": reads("self")(_detach),
    "cross_entropy_loss": reads(
        "self", "target", "weight", "reduction", "ignore_index", "label_smoothing"
    )(_cross_entropy),
    "mse_loss": reads("self", "target", "reduction")(_mse_loss),
    "rand": reads()(_plain("uniform")),
    "rand_like": reads()(_plain("uniform")),
    "randn": reads()(_plain("normal")),
    "randn_like": reads()(_plain("normal")),
    "uniform": reads("from", "to")(_between),
    "normal_functional": reads("mean", "std")(_scaled),
    "randint": reads("low", "high")(_whole_numbers),
    "exponential": reads("lambd")(_exponential),
    "bernoulli": reads("self", "p")(_coins),
}
"""aten name → handler, and which arguments it reads."""
