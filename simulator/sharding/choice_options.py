"""What is asked of all options of a choice at once: keys of prices, single moves, ways to run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.sharding.choice import (
    OPTIONS,
    USUAL_TRIES,
    USUAL_VALUES,
    Choice,
    ChoiceOption,
    Touches,
    TriedOptions,
)
from stratagem.simulator.sharding.pieces_and_fusion import fuses_forward, summed_input

_KEYS = {
    part: attrgetter("config", *(option.name for option in OPTIONS if option.touches & part))
    for part in (Touches.PASSES, Touches.PARAMETERS, Touches.STATE)
}


def priced_by(part: Touches) -> Callable[[Choice], Any]:
    """What a part of an operator's price depends on, of a choice: equal keys have equal prices.

    Example:
        >>> key = priced_by(Touches.PASSES)
        >>> key(Choice((), zero=3)) == key(Choice(()))
        True
        >>> key(Choice((), chunks=2)) == key(Choice(()))
        False
    """
    return _KEYS[part]


def options_of(choice: Choice) -> tuple[Any, ...]:
    """The value of each option, in the order of `OPTIONS` and of the fields of `Choice`.

    Example:
        >>> options_of(Choice((), chunks=2, streamed=True))
        (0, False, 2, False, False, True, False)
    """
    values: tuple[Any, ...] = _VALUES(choice)
    return values


_VALUES = attrgetter(*USUAL_VALUES)


def option_parts(choice: Choice) -> tuple[object, ...]:
    """The options of a choice as single moves change them, each with its details.

    Example:
        >>> option_parts(Choice((), chunks=2, streamed=True))
        (0, False, (2, True), False, False, False)
    """
    return tuple(part(choice) for part in _PARTS)


_PARTS = tuple(
    attrgetter(option.name, *(each.name for each in OPTIONS if each.part_of == option.name))
    for option in OPTIONS
    if not option.part_of
)


Asked = tuple[tuple[ChoiceOption, int, tuple[Any, ...]], ...]
"""Options that a search tries, their places among all, and the values that it tries."""


def asked_of(tried: TriedOptions) -> Asked:
    """The options of which a search tries more than the usual value.

    Example:
        >>> [(each.name, values) for each, _, values in asked_of(TriedOptions(fuse=True))]
        [('fused', (False, True))]
    """
    every = ((option, place, option.values(tried)) for place, option in enumerate(OPTIONS))
    return tuple(each for each in every if each[2] != (each[0].usual,))


def ways_to_run(
    start: Choice, operator: Operator, sizes: Mapping[str, int], asked: Asked, *, trains: bool
) -> list[Choice]:
    """A choice with every combination of the options that a search tries.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> layer = mlp([8, 4], batch=2).operator("layers.0")
        >>> asked = asked_of(TriedOptions(chunks=(1, 2), regather=True))
        >>> ways = ways_to_run(Choice(()), layer, layer.sizes, asked, trains=True)
        >>> [(way.chunks, way.regather) for way in ways]
        [(1, False), (1, True), (2, False), (2, True)]

    Args:
        start: says placements, ZeRO stage and recompute.
        operator: that has it.
        sizes: of its shard, by dim.
        asked: what the search tries.
        trains: whether it has parameters to train.
    """
    found = [start]
    for option, place, values in asked:
        found = [
            way
            for choice in found
            for way in _ways(choice, option, place, values, operator, sizes, trains)
        ]
    return found


def _ways(
    choice: Choice,
    option: ChoiceOption,
    place: int,
    values: Sequence[Any],
    operator: Operator,
    sizes: Mapping[str, int],
    trains: bool,
) -> list[Choice]:
    """A choice with each value of an option that it may have."""
    usual = option.usual
    if option.part_of and getattr(choice, option.part_of) == USUAL_VALUES[option.part_of]:
        return [choice]
    others = _VALUES(choice)
    ways = []
    for value in values:
        if value == usual:
            ways.append(choice)
        elif option.may(operator, sizes, trains, choice, value):
            chosen: tuple[Any, ...] = (*others[:place], value, *others[place + 1 :])
            ways.append(Choice(choice.config, *chosen))
    return ways or [choice]


def as_tried(choice: Choice, tried: TriedOptions) -> Choice:
    """A choice without what a search does not try; itself where it has nothing of that.

    Example:
        >>> as_tried(Choice((), zero=2, chunks=4, streamed=True), TriedOptions()) == Choice((), 2)
        True
    """
    usual: dict[str, Any] = {}
    for option in OPTIONS:
        if option.part_of in usual or not option.allows(tried, getattr(choice, option.name)):
            usual[option.name] = option.usual
    return replace(choice, **usual) if usual else choice


def tries_of(choices: Iterable[Choice]) -> dict[str, Any]:
    """What a search must try so that plans may have some choices, by field of `TriedOptions`.

    Example:
        >>> tries_of([Choice((), chunks=4), Choice((), fused=True)])
        {'chunks': (1, 4), 'fuse': True, 'regather': False, 'stream': False, 'in_sums': False}
    """
    chosen = list(choices)
    found: dict[str, Any] = {}
    for option in OPTIONS:
        if option.tried_by:
            values = {option.usual, *(getattr(choice, option.name) for choice in chosen)}
            lists = isinstance(USUAL_TRIES[option.tried_by], tuple)
            found[option.tried_by] = tuple(sorted(values)) if lists else len(values) > 1
    return found


def check_choice(operator: Operator, choice: Choice, shape: Sequence[int]) -> None:
    """Refuse options that an operator cannot have on a mesh of some shape.

    Raises:
        ValueError: naming the operator, what was asked for and what it can have.
    """
    for option in OPTIONS:
        option.check(operator, choice, shape)


class JoinedInputs(NamedTuple):
    """The inputs in whose conversions an operator's forward pass may run, None where it has none.

    Attributes:
        first: what a `fused` choice joins: the first, if its stage converts it.
        summed: what one `in_sum` joins (see `summed_input`).
    """

    first: int | None = 0
    summed: int | None = 0

    def of(self, operator: Operator, choice: Choice) -> int | None:
        """The input in whose conversion a forward pass runs; None where it runs by itself."""
        if choice.in_sum:
            return self.summed
        return self.first if choice.fused and fuses_forward(operator) else None


def joined_inputs(graph: OperatorGraph, i: int, inside: Container[int]) -> JoinedInputs:
    """Which inputs of operator `i` the stage of some operators converts for it.

    What comes from another stage is converted before it is sent, and sources not at all.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph = mlp([8, 8, 8], batch=2)
        >>> relu = graph.index["relu"]
        >>> joined_inputs(graph, relu, range(relu + 1)), joined_inputs(graph, relu, [relu])
        (JoinedInputs(first=0, summed=0), JoinedInputs(first=None, summed=None))
    """
    first = None
    if fuses_forward(graph.operators[i]):
        producer = graph.reads[i][0].producer
        first = 0 if producer in inside and not graph.operators[producer].is_source else None
    return JoinedInputs(first, summed_input(graph, i, inside))


def shares_conversion(operator: Operator, choice: Choice, slot: int, joined: JoinedInputs) -> bool:
    """Whether an operator may read a copy that another one reads too (see `shared_conversions`).

    What it reads in pieces, or inside a conversion, is its own.
    """
    return choice.chunks == 1 and joined.of(operator, choice) != slot
