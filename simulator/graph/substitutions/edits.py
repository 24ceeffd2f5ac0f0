"""Rewriting a graph: operators replaced by others, readers and parameters following.

A rule describes what it does to one place of a graph as an `Edit`; `edited` carries out many of
them at once, so that 96 layers are rewritten in one pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.substitutions.parameter_map import ParameterMap, join
from stratagem.simulator.operators.operator import Input, Layout, Operator, Parameter

Match = tuple[str, ...]
"""The operators that a substitution replaces, by name, in the order that its rule asks for."""


@dataclass(frozen=True)
class Substituted:
    """Places at which one rule was applied at once, in terms of the graph before.

    Example:
        >>> Substituted("merge", (("mlp.gate", "mlp.up"),)).rule
        'merge'
    """

    rule: str
    matches: tuple[Match, ...]


@dataclass(frozen=True)
class Rewritten:
    """What substitutions made of a graph.

    Attributes:
        graph: the new graph.
        steps: what was applied, in order; enough to make it again.
        maps: per step what happened to the parameters.
        stands_for: per new operator the operators of the first graph whose work it does; an
            operator that is not listed is the one of its name.
    """

    graph: OperatorGraph
    steps: tuple[Substituted, ...] = ()
    maps: tuple[ParameterMap, ...] = ()
    stands_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def originals(self, operator: str) -> tuple[str, ...]:
        """The operators of the first graph that an operator stands for."""
        return self.stands_for.get(operator, (operator,))

    def then(self, step: Substituted, later: GraphEdit) -> Rewritten:
        """This with one more step."""
        traced = {
            name: tuple(dict.fromkeys(old for each in names for old in self.originals(each)))
            for name, names in later.stands_for.items()
        }
        names = set(later.graph.names)
        known = {name: old for name, old in self.stands_for.items() if name in names}
        return Rewritten(
            later.graph, (*self.steps, step), (*self.maps, later.parameters), {**known, **traced}
        )


@dataclass(frozen=True)
class GraphEdit:
    """What one step did to a graph; the fields are those of `Rewritten` for one step."""

    graph: OperatorGraph
    parameters: ParameterMap
    stands_for: Mapping[str, tuple[str, ...]]


class Substitution(Protocol):
    """A rule that replaces operators by others that compute the same."""

    @property
    def name(self) -> str:
        """What plans and errors call it."""
        ...

    def matches(self, graph: OperatorGraph) -> tuple[Match, ...]:
        """Every place at which it can be applied, in the order of the graph."""
        ...

    def apply(self, graph: OperatorGraph, matches: Sequence[Match]) -> GraphEdit:
        """Apply it at some of its matches, which have no operator in common."""
        ...


@dataclass(frozen=True)
class Edit:
    """What a rule does to one place of a graph.

    Attributes:
        removed: operators that go.
        made: operators that come, each with the removed one whose place it takes.
        redirect: per removed operator how a reader of it reads on.
        stands_for: per operator made, the removed ones whose work it does.
        parameters: what happens to the parameters.
    """

    removed: tuple[str, ...]
    made: tuple[tuple[str, Operator], ...]
    redirect: Mapping[str, Callable[[Input], Input]]
    stands_for: Mapping[str, tuple[str, ...]]
    parameters: ParameterMap = field(default_factory=ParameterMap)


def edited(graph: OperatorGraph, edits: Sequence[Edit]) -> GraphEdit:
    """Carry out edits that remove different operators.

    Raises:
        ValueError: two edits remove the same operator, or the new graph is broken.
    """
    removed: set[str] = set()
    placed: dict[str, list[Operator]] = {}
    redirect: dict[str, Callable[[Input], Input]] = {}
    for edit in edits:
        twice = removed.intersection(edit.removed)
        if twice:
            raise ValueError(
                f"graph {graph.name!r}: operator {min(twice)!r} is in two matches of one step; "
                "apply them one after the other"
            )
        removed.update(edit.removed)
        redirect.update(edit.redirect)
        for anchor, operator in edit.made:
            placed.setdefault(anchor, []).append(operator)
    operators: list[Operator] = []
    for operator in graph.operators:
        operators += placed.get(operator.name, ())
        if operator.name not in removed:
            operators.append(operator)
    parameters = join([edit.parameters for edit in edits])
    changed = replace(
        graph,
        operators=tuple(_redirected(operator, redirect) for operator in operators),
        parameters=_renewed(graph.parameters, [edit.parameters for edit in edits]),
    )
    stands_for = {name: olds for edit in edits for name, olds in edit.stands_for.items()}
    return GraphEdit(changed, parameters, stands_for)


def _redirected(operator: Operator, redirect: Mapping[str, Callable[[Input], Input]]) -> Operator:
    if not any(read.source in redirect for read in operator.inputs):
        return operator
    inputs = tuple(
        redirect[read.source](read) if read.source in redirect else read
        for read in operator.inputs
    )
    return replace(operator, inputs=inputs)


def _renewed(
    parameters: Sequence[Parameter], maps: Sequence[ParameterMap]
) -> tuple[Parameter, ...]:
    """The parameters of the new graph; new ones come where the first of the old ones was."""
    removed = {old.name for each in maps for old in each.removed}
    place: dict[str, list[Parameter]] = {}
    for each in maps:
        for new in each.added:
            place.setdefault(each.made_of[new.name][0].old.parameter, []).append(new)
    found: list[Parameter] = []
    for parameter in parameters:
        found += place.get(parameter.name, ())
        if parameter.name not in removed:
            found.append(parameter)
    return tuple(found)


def unused_name(name: str, taken: Container[str]) -> str:
    """`name`, with a number behind it if it is taken.

    Example:
        >>> unused_name("part", {"part", "part1"})
        'part2'
    """
    number = 0
    while (found := f"{name}{number or ''}") in taken:
        number += 1
    return found


def renamed(layout: Layout, called: Mapping[str, str]) -> Layout:
    """A layout with its dims called otherwise.

    Example:
        >>> renamed((("a",), ("b", "c")), {"a": "x", "b": "y", "c": "z"})
        (('x',), ('y', 'z'))
    """
    return tuple(tuple(called[name] for name in group) for group in layout)


def nameless(operator: Operator) -> tuple[Any, ...]:
    """Equal for operators that do the same to tensors of the same factors, whatever the names."""
    number = {dim.name: i for i, dim in enumerate(operator.dims)}

    def numbered(layout: Layout) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(number[name] for name in group) for group in layout)

    return (
        operator.kind,
        tuple((dim.size, dim.kind, dim.whole) for dim in operator.dims),
        tuple((numbered(read.layout), read.order, read.select) for read in operator.inputs),
        tuple(numbered(weight.layout) for weight in operator.weights),
        tuple((numbered(o.layout), o.dtype, o.differentiable) for o in operator.outputs),
        repr(sorted(operator.attributes.items())),
    )


def own_parameters(graph: OperatorGraph) -> frozenset[str]:
    """The parameters that exactly one operator uses, once."""
    uses = Counter(w.parameter for operator in graph.operators for w in operator.weights)
    return frozenset(name for name, count in uses.items() if count == 1)
