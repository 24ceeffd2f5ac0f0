"""What microbatches may do to a graph: which values are sums over samples, and which are not.

The loss of a step is the sum of the losses of its microbatches, and so are its gradients, if every
value is one of three things:

    EACH   one for every sample           activations, losses of tokens
    SUM    a sum over samples             the loss; means over the batch, divided by its whole size
    SAME   alike for every microbatch     parameters, constants, sources of the whole batch

and if sums are only added to sums, scaled by what is the same, cast or reduced. A root of a sum, a
product of two, or a sample that looks at another one or at a sum has no such parts: the graph then
runs with one microbatch. What is the same for every microbatch and is added to a sum, such as a
penalty on weights or the bias of a layer that reads a mean over the batch, would be counted once a
microbatch: each adds its share of it instead.

The same holds for the token slices of a microbatch, whose losses are added up too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce as fold

from stratagem.simulator.operators.chain_shares import Place, Share, step_shares
from stratagem.simulator.operators.kinds.kind_record import Linearity, OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, role_of
from stratagem.simulator.operators.kinds.vocabularies import classes
from stratagem.simulator.operators.operator import DimKind, Operator, Operators, factors
from stratagem.simulator.operators.step_programs import Steps, shift_steps

EACH, SUM, SAME = Share.EACH, Share.SUM, Share.SAME

Cuts = Sequence[frozenset[str]]
"""Per operator the dims that are cut."""


@dataclass(frozen=True)
class Added:
    """What an operator adds to a sum though it is the same for every part.

    Attributes:
        places: the arguments that are added, of the steps of an elementwise one; of another it is
            the bias.
        dtype: what they are cast to before each part takes its share, as some may be whole
            numbers; empty if none is.
    """

    places: tuple[Place, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Parts:
    """How the values of a graph come together from those of parts of its batch.

    Attributes:
        problem: why parts do not make the whole; empty if they do.
        shares: of each output of every operator, as far as it was followed.
        added: per operator what is the same for every part and is added to a sum.
        batch_norms: operators that normalise by the statistics of a part.
    """

    problem: str = ""
    shares: tuple[tuple[Share, ...], ...] = ()
    added: Mapping[str, Added] = field(default_factory=dict)
    batch_norms: tuple[str, ...] = ()


class _MixedError(Exception):
    """Parts do not make the whole."""


def sample_cuts(graph: Operators) -> tuple[frozenset[str], ...]:
    """Per operator the dims that microbatches cut: those that count samples."""
    return tuple(
        frozenset(dim.name for dim in operator.dims if dim.kind is DimKind.SAMPLE)
        for operator in graph.operators
    )


def parts_of(graph: Operators, cuts: Cuts, what: str = "samples", *, apart: bool = False) -> Parts:
    """Whether parts of a batch make the whole, and what each of them must add.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8], batch=4)
        >>> parts_of(graph, sample_cuts(graph)).problem
        ''

    Args:
        graph: of all parts together.
        cuts: the dims of its operators that the parts divide.
        what: what these dims count, for the problem's words.
        apart: whether it is known that operators keep apart what these dims count.
    """
    shares: list[tuple[Share, ...]] = []
    added: dict[str, Added] = {}
    norms: list[str] = []
    try:
        for i, operator in enumerate(graph.operators):
            where = f"operator {operator.name!r} ({operator.kind})"
            if not apart:
                _check_reads(graph, i, cuts, where, what)
                _check_apart(operator, cuts[i], where, what)
            given = [shares[graph.index[read.source]][read.output] for read in operator.inputs]
            if cuts[i]:
                made = _of_cut(operator, cuts[i], given, where, what)
                if takes_statistics(operator):
                    norms.append(operator.name)
            else:
                made, more = _of_whole(graph, i, given, where, what)
                if more is not None:
                    added[operator.name] = more
            shares.append(made)
        # What a forward pass gives back may be one for every sample, a sum, or the same.
        if not graph.outputs and shares[graph.index[graph.loss]][0] is not SUM:
            raise _MixedError(f"the loss {graph.loss!r} is no sum over {what}")
    except _MixedError as problem:
        return Parts(str(problem), tuple(shares), batch_norms=tuple(norms))
    return Parts("", tuple(shares), added, tuple(norms))


def sizes_cut(graph: Operators, cuts: Cuts) -> int:
    """The most equal parts that all dims that are cut can be cut into; 1 where there are none."""
    named = zip(graph.operators, cuts, strict=True)
    return fold(math.gcd, (op.sizes[name] for op, names in named for name in names), 0) or 1


def fewest_values(graph: Operators) -> int | None:
    """The fewest values that a batch norm takes a mean and variance of; None if it has none."""
    found = []
    for operator in map(graph.operator, graph.batch_norms):
        channel = factors(operator.weights[0].layout)
        found.append(math.prod(d.size for d in operator.dims if d.name not in channel))
    return min(found, default=None)


def takes_statistics(operator: Operator) -> bool:
    """Whether an operator normalises by the mean and variance of what it is given.

    Example:
        >>> from stratagem.simulator.graph.models import resnet
        >>> takes_statistics(resnet(18, batch=8).operator("bn1"))
        True
    """
    is_norm = role_of(operator) is OperatorRole.BATCH_NORM
    return is_norm and bool(operator.attributes.get("training", True))


def add_shares(operator: Operator, added: Added, parts: int) -> Operator:
    """The operator of one of `parts`, which adds its share of what is the same for all of them.

    Example:
        >>> operator = Operator("x", "elementwise", (), (), (), (),
        ...                     {"steps": [["add", [["in", 0], ["weight", 0]]]]})
        >>> add_shares(operator, Added(((0, 1),)), 4).attributes["steps"]
        [['div', [['weight', 0], 4]], ['add', [['in', 0], ['step', 0]]]]
    """
    if role_of(operator) is not OperatorRole.CHAIN:
        parts *= operator.attributes.get("bias_parts", 1)
        return replace(operator, attributes={**operator.attributes, "bias_parts": parts})
    steps: Steps = []
    moved: dict[tuple[str, object], list[object]] = {}
    for number, (function, arguments) in enumerate(operator.attributes["steps"]):
        given = shift_steps([[function, arguments]], moved)[0][1]
        for step, position in added.places:
            if step == number:
                if isinstance(given[position], list):
                    if added.dtype:
                        steps.append(["cast", [given[position], added.dtype]])
                        given[position] = ["step", len(steps) - 1]
                    steps.append(["div", [given[position], parts]])
                    given[position] = ["step", len(steps) - 1]
                else:
                    given[position] = given[position] / parts
        steps.append([function, given])
        moved["step", number] = ["step", len(steps) - 1]
    return replace(operator, attributes={**operator.attributes, "steps": steps})


def _check_reads(graph: Operators, i: int, cuts: Cuts, where: str, what: str) -> None:
    """Dims that are cut are read by dims that are, and never by number."""
    operator = graph.operators[i]
    for read in operator.inputs:
        producer = graph.index[read.source]
        made = factors(graph.operators[producer].outputs[read.output].layout)
        if any(made[position] in cuts[producer] for position, _ in read.select):
            raise _MixedError(f"{where} takes some {what} of {read.source!r} by their number")
        for position, name in zip(read.order, factors(read.layout), strict=True):
            if (made[position] in cuts[producer]) != (name in cuts[i]):
                raise _MixedError(f"{where} reads {what} of {read.source!r} as something else")
    for weight in operator.weights:
        if cuts[i].intersection(factors(weight.layout)):
            raise _MixedError(f"{where} has a value of {weight.parameter!r} for each of {what}")


def _check_apart(operator: Operator, cut: frozenset[str], where: str, what: str) -> None:
    """What one index of a dim that is cut gives depends on no other one."""
    if not cut:
        return
    if len(cut) > 1:
        raise _MixedError(f"{where} relates {what} with one another ({', '.join(sorted(cut))})")
    (name,) = cut
    whole = operator.dim(name).whole
    if whole and not operator.is_source:
        raise _MixedError(f"{where} mixes {what}: of its dim {name!r}, {whole}")
    if name in (*operator.windows, *operator.windows.values()):
        raise _MixedError(f"{where} slides a window over {what} ({name})")
    if name in _ordered(operator):
        raise _MixedError(f"{where} goes by the order of {what} ({name})")


def _of_cut(
    operator: Operator, cut: frozenset[str], given: Sequence[Share], where: str, what: str
) -> tuple[Share, ...]:
    """The outputs of an operator that has dims that are cut."""
    for share, read in zip(given, operator.inputs, strict=True):
        if share is SUM:
            raise _MixedError(f"{where} gives {read.source!r}, a sum over {what}, to each of them")
    made = tuple(
        EACH if cut.intersection(factors(each.layout)) else SUM for each in operator.outputs
    )
    if SUM in made and not kind_of(operator).sums:
        raise _MixedError(f"{where} may mix {what} ({', '.join(sorted(cut))})")
    return made


def _ordered(operator: Operator) -> tuple[str, ...]:
    """The dims along which an operator treats one index unlike another."""
    if role_of(operator) is OperatorRole.LOSS:
        return classes(operator)
    if operator.attributes.get("causal"):
        return operator.inputs[0].layout[-2]
    return ()


def _of_whole(
    graph: Operators, i: int, given: Sequence[Share], where: str, what: str
) -> tuple[tuple[Share, ...], Added | None]:
    """The outputs of an operator of which every part runs all, and what each adds a share of."""
    operator = graph.operators[i]
    kind, count = kind_of(operator), len(operator.outputs)
    if SUM not in given:
        if takes_statistics(operator):
            raise _MixedError(f"{where} would count its statistics once a microbatch")
        return (SAME,) * count, None
    if kind.role is OperatorRole.CHAIN:
        found = step_shares(operator.attributes["steps"], given)
        if found.problem:
            raise _MixedError(f"{where} {found.problem} a sum over {what}")
        if found.added and not all("float" in each.dtype for each in operator.outputs):
            raise _MixedError(f"{where} adds whole numbers to a sum over {what}")
        more = Added(found.added, _counting_dtype(graph, i)) if found.added else None
        return (found.share,) * count, more
    if kind.linear is Linearity.ONE and tuple(given).count(SUM) == 1:
        return (SUM,) * count, None
    if kind.linear is Linearity.ALL and all(share is SUM for share in given):
        biased = kind.product is not None and kind.product.has_bias(operator)
        return (SUM,) * count, Added() if biased else None
    raise _MixedError(f"{where} makes something else than a sum of a sum over {what}")


def _counting_dtype(graph: Operators, i: int) -> str:
    """The dtype of what an operator makes, if it reads whole numbers; empty otherwise."""
    operator = graph.operators[i]
    read = [graph.operator(each.source).outputs[each.output].dtype for each in operator.inputs]
    return "" if all("float" in dtype for dtype in read) else operator.outputs[0].dtype
