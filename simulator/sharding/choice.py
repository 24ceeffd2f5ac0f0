"""What a plan decides about one operator, and all there is to say of each of these options.

`Choice` has a field for each option, and `OPTIONS` a record of the same name. What a search tries,
what prices are remembered by, single moves of chains, plan files, pictures, sentences and the
command line go over the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, Flag, auto
from functools import reduce
from typing import Any, Self

from stratagem.simulator.base.field_types import check_fields, check_type
from stratagem.simulator.base.precision import FORMATS
from stratagem.simulator.graph.placement import Config, Pin
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.sharding.pieces_and_fusion import (
    check_fusion,
    check_in_sum,
    check_pieces,
    fuses_forward,
    fuses_in_sum,
    piece_dim,
)


@dataclass(frozen=True)
class Choice:
    """What a strategy decides for one operator.

    Example:
        >>> Choice((), zero=1, chunks=4).fused
        False

    Attributes:
        config: what each mesh axis does to it.
        zero: the ZeRO stage of its parameters (Rajbhandari et al. 2020): 0 keeps everything on
            every data-parallel rank; 1 shards the optimizer state; 2 also the gradients,
            reduce-scattered after every microbatch; 3 also the parameters, gathered before every
            use.
        recompute: what it makes for its own segment is dropped after the forward pass and made
            again in the backward pass, with the conversions of its inputs (see
            `checkpoint_segments`).
        chunks: in how many pieces its passes run, so that a piece's conversion to or from its
            neighbours overlaps with the next piece (CoCoNet, Jangda et al. 2022).
        fused: its elementwise work runs inside the kernel of the collective that feeds it
            (CoCoNet): the update of an operator with parameters in their gradient sync, the
            forward pass of an elementwise one in the conversion of its first input.
        regather: what its inputs are converted from is kept for backward, not the copies, and
            backward converts them again: with sequence parallelism a shard instead of what was
            gathered (Korthikanti et al. 2022, arXiv 2205.05198). What is recomputed converts its
            inputs again anyway.
        streamed: its pieces are parts of one product, and what goes with them is one collective
            that waits for each part (CoCoNet; see `pieces_and_fusion`). Predicted only: the
            executor has a product and a collective for each piece.
        in_sum: its forward pass runs inside the sum of the input that may be pending, of which
            each device does its share (CoCoNet's fused all-reduce; see `pieces_and_fusion`), and
            nobody stores the sum. Where nothing is summed it runs by itself. Predicted only: the
            executor sums first.

    Raises:
        ValueError: if the ZeRO stage is not 0 to 3, `chunks` is below 1, or `streamed` has no
            pieces.
    """

    config: Config
    zero: int = 0
    recompute: bool = False
    chunks: int = 1
    fused: bool = False
    regather: bool = False
    streamed: bool = False
    in_sum: bool = False

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage {self.zero}; it must be 0, 1, 2 or 3")
        if self.chunks.__class__ is not int:  # Choices are made by the million.
            check_type(self.chunks, int, "chunks", "choice")
        if self.chunks < 1:
            raise ValueError(f"{self.chunks} chunks; there must be at least 1")
        if self.streamed and self.chunks == 1:
            raise ValueError(
                "streamed with 1 chunk: one piece has nothing to stream; set chunks to 2 or more, "
                "or streamed to false"
            )

    @property
    def is_pinned(self) -> bool:
        """Whether the operator is on a part of its mesh.

        Example:
            >>> Choice((Pin(1),)).is_pinned, Choice((), zero=1).is_pinned
            (True, False)
        """
        return any(isinstance(placement, Pin) for placement in self.config)

    @property
    def num_products(self) -> int:
        """How many products a pass is, each a launch of its own: streamed pieces are parts of one.

        Example:
            >>> Choice((), chunks=4).num_products, Choice((), chunks=4, streamed=True).num_products
            (4, 1)
        """
        return 1 if self.streamed else self.chunks


class Touches(Flag):
    """What of an operator's price depends on an option: of equal ones one is priced."""

    NOTHING = 0
    PASSES = auto()
    """Its own passes, forward, backward and again."""
    PARAMETERS = auto()
    """Moving, adding up and updating its parameters."""
    STATE = auto()
    """Bytes of parameters, gradients and optimizer state, and of what it makes."""


class ParameterMessage(Enum):
    """What links carry of a parameter between its home and where an operator uses it."""

    GRADIENT = "gradient"
    VALUE = "value"


@dataclass(frozen=True, kw_only=True)
class TriedOptions:
    """Which options of choices a search tries.

    Example:
        >>> TriedOptions(chunks=(1, 4), regather=True).without_savers()
        TriedOptions(chunks=(1, 4), fuse=False, regather=False, stream=False, in_sums=False)

    Attributes:
        chunks: in how many pieces a matrix product may run, to overlap with its collectives.
        fuse: whether elementwise work may run inside collectives.
        regather: whether layers may keep a shard of their gathered inputs only and gather again
            in backward (see `Choice`). It is not tried where every plan fits anyway.
        stream: whether pieces may be streamed too (see `Choice`), for programs whose collectives
            wait for parts of a product. Not for the executor: it has none, and runs separate
            ones, which take longer than predicted.
        in_sums: whether elementwise work may run inside the sums of tensor parallelism (see
            `Choice`), for programs whose collectives compute. Not for the executor: it has none,
            and computes behind them, which takes longer than predicted.

    Raises:
        ValueError: on chunks below 1, or where there are no pieces to stream.
    """

    chunks: tuple[int, ...] = (1,)
    fuse: bool = False
    regather: bool = False
    stream: bool = False
    in_sums: bool = False

    def __post_init__(self) -> None:
        if not self.chunks or min(self.chunks) < 1:
            raise ValueError(f"chunks are {self.chunks}: list whole numbers from 1 up")
        if self.stream and max(self.chunks) == 1:
            raise ValueError(
                f"stream is True, but chunks are {self.chunks}: nothing runs in pieces that could "
                "be streamed; give chunks such as (1, 2, 4), or stream=False"
            )

    def touching(self, part: Touches) -> Self:
        """The same without options that a part of an operator's price does not depend on."""
        return self._without(option for option in OPTIONS if not option.touches & part)

    def without_savers(self) -> Self:
        """The same without options that do nothing but save memory."""
        return self._without(option for option in OPTIONS if option.saves)

    def _without(self, options: Iterable[ChoiceOption]) -> Self:
        names = [option.tried_by for option in options if option.tried_by]
        return replace(self, **{name: USUAL_TRIES[name] for name in names})


May = Callable[[Operator, Mapping[str, int], bool, Choice, Any], bool]


def _always(*_: object) -> bool:
    return True


def _unchecked(operator: Operator, choice: Choice, shape: Sequence[int]) -> None:
    return None


def _as_held(choice: Choice, what: ParameterMessage, held: str) -> str:
    return held


@dataclass(frozen=True, kw_only=True)
class ChoiceOption:
    """One option of a choice.

    Example:
        >>> option_named("chunks").values(TriedOptions(chunks=(1, 4)))
        (1, 4)

    Attributes:
        name: the field of `Choice` that has it.
        touches: what of an operator's price depends on it; a conversion may depend on any.
        phrase: what a choice that has it does to an operator, in a sentence; empty for nothing.
        remark: the same in a picture, in a word or two.
        tried_by: the field of `TriedOptions` by which a search tries it; empty where something
            else decides it, as a stage of ZeRO or a policy of recomputing.
        help: what the command line says of that.
        part_of: the option that it is a detail of: it is at its usual value where that is, and
            moves of one part of a choice change both.
        may: whether an operator, with the sizes of its shard, may have a value that is not the
            usual one: whether it has parameters to train, the choice without, and the value.
        check: refuses a choice of a plan on a mesh of some shape.
        saves: what it does, if that adds work and saves memory, and nothing else: a search leaves
            it out where every plan fits without, and bounds without memory hold with it.
        sends: the format in which links carry what of an operator's own parameters, of what
            devices hold in some format: they convert it before and behind the links.

    Raises:
        ValueError: a field is of another type, it names no field of `Choice` or `TriedOptions`, or
            it says what links carry, but not that the price of that depends on it.
    """

    name: str
    touches: Touches
    phrase: Callable[[Operator, Choice], str]
    remark: Callable[[Choice], str]
    tried_by: str = ""
    help: str = ""
    part_of: str = ""
    may: May = _always
    check: Callable[[Operator, Choice, Sequence[int]], None] = _unchecked
    saves: str = ""
    sends: Callable[[Choice, ParameterMessage, str], str] = _as_held

    def __post_init__(self) -> None:
        check_fields(self, f"option {self.name!r}")
        for what, name, record in (
            ("name", self.name, Choice),
            ("tried_by", self.tried_by, TriedOptions),
            ("part_of", self.part_of, Choice),
        ):
            known = [each.name for each in fields(record) if each.name != "config"]
            if name not in known and (name or what == "name"):
                raise ValueError(
                    f"option {self.name!r}: {what} is {name!r}, which is no field of "
                    f"{record.__name__}; it has {', '.join(known)}: add the field there"
                )
        if self.sends is not _as_held and not self.touches & Touches.PARAMETERS:
            raise ValueError(
                f"option {self.name!r} says what links carry of parameters, but touches "
                f"{self.touches}: add Touches.PARAMETERS"
            )

    @property
    def usual(self) -> Any:
        """Its value where nothing is said of it."""
        return USUAL_VALUES[self.name]

    def values(self, tried: TriedOptions) -> tuple[Any, ...]:
        """The values that a search tries, in its order."""
        asked = getattr(tried, self.tried_by) if self.tried_by else False
        if isinstance(asked, tuple):
            return asked
        return (False, True) if asked else (self.usual,)

    def allows(self, tried: TriedOptions, value: Any) -> bool:
        """Whether a plan of a search may have a value: a usual one, or one that is tried."""
        return not self.tried_by or value == self.usual or value in self.values(tried)


_SHARDED = {
    1: "optimizer state in parts (ZeRO-1)",
    2: "gradients and optimizer state in parts (ZeRO-2)",
    3: "parameters, gradients and optimizer state in parts (ZeRO-3)",
}


def _pieces(choice: Choice) -> str:
    return f"{choice.chunks} {'streamed ' * choice.streamed}pieces" * (choice.chunks > 1)


OPTIONS = (
    ChoiceOption(
        name="zero",
        touches=Touches.PARAMETERS | Touches.STATE,
        phrase=lambda operator, choice: _SHARDED.get(choice.zero, "") if operator.weights else "",
        remark=lambda choice: f"ZeRO-{choice.zero}" * bool(choice.zero),
    ),
    ChoiceOption(
        name="recompute",
        touches=Touches.PASSES,
        phrase=lambda _, choice: "computed again in backward" * choice.recompute,
        remark=lambda choice: "recomputed" * choice.recompute,
    ),
    ChoiceOption(
        name="chunks",
        touches=Touches.PASSES,
        phrase=lambda _, choice: (
            f"in {_pieces(choice)} that overlap with their conversions"
            if choice.chunks > 1
            else ""
        ),
        remark=_pieces,
        tried_by="chunks",
        help="pieces that a product may run in beside its collectives; repeatable",
        may=lambda operator, sizes, _, __, value: piece_dim(operator, sizes, value) is not None,
        check=lambda operator, choice, shape: check_pieces(
            operator, choice.config, shape, choice.chunks
        ),
    ),
    ChoiceOption(
        name="fused",
        touches=Touches.PASSES | Touches.PARAMETERS,
        phrase=lambda operator, choice: (
            ("its update in the gradient sync" if operator.weights else "in its collective")
            * choice.fused
        ),
        remark=lambda choice: "fused" * choice.fused,
        tried_by="fuse",
        help="let elementwise work run inside collectives",
        may=lambda operator, _, trains, *__: trains or fuses_forward(operator),
        check=lambda operator, choice, _: check_fusion(operator) if choice.fused else None,
    ),
    ChoiceOption(
        name="regather",
        touches=Touches.NOTHING,
        phrase=lambda _, choice: "its inputs converted again in backward" * choice.regather,
        remark=lambda choice: "regathered" * choice.regather,
        tried_by="regather",
        help="let layers keep a shard of gathered inputs, and gather them again in backward",
        may=lambda operator, _, __, choice, ___: bool(operator.weights) and not choice.recompute,
        saves="gathering inputs again",
    ),
    ChoiceOption(
        name="streamed",
        touches=Touches.PASSES,
        phrase=lambda _, __: "",
        remark=lambda _: "",
        tried_by="stream",
        help="let pieces be parts of one product that one collective waits for, which the "
        "executor does not have",
        part_of="chunks",
    ),
    ChoiceOption(
        name="in_sum",
        touches=Touches.PASSES,
        phrase=lambda _, choice: "in shares inside the sum that it reads" * choice.in_sum,
        remark=lambda choice: "in sum" * choice.in_sum,
        tried_by="in_sums",
        help="let elementwise work run inside sums, on each device for its share, which the "
        "executor does not have",
        may=lambda operator, _, __, choice, ___: (
            fuses_in_sum(operator) and not (choice.fused and fuses_forward(operator))
        ),
        check=lambda operator, choice, _: (
            check_in_sum(operator, fused=choice.fused) if choice.in_sum else None
        ),
    ),
)
"""In the order in which searches try them; a detail follows what it is a detail of."""

USUAL_VALUES: dict[str, Any] = {f.name: f.default for f in fields(Choice) if f.name != "config"}
"""What each option is where nothing is said of it."""

USUAL_TRIES: dict[str, Any] = {f.name: f.default for f in fields(TriedOptions)}

if [option.name for option in OPTIONS] != list(USUAL_VALUES):
    raise AssertionError("each option of a choice has a record, in the order of its fields")


def sent_format(choice: Choice, what: ParameterMessage, held: str) -> str:
    """The format in which links carry what devices hold of a parameter in some format.

    Example:
        >>> sent_format(Choice((), fused=True), ParameterMessage.GRADIENT, "float32")
        'float32'

    Raises:
        ValueError: an option says that links carry a format that there is none.
    """
    found = reduce(lambda found, option: option.sends(choice, what, found), OPTIONS, held)
    if found not in FORMATS:
        raise ValueError(
            f"links would carry {found!r} of a parameter that is held in {held!r}, as an option's "
            f"`sends` says of {choice}; formats are {', '.join(FORMATS)}: name one of them"
        )
    return found


def option_named(name: str) -> ChoiceOption:
    """The record of an option, by its field of `Choice`."""
    return next(option for option in OPTIONS if option.name == name)
