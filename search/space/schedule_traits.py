"""What a schedule does, read from its actions: whatever its name, and whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import accumulate, pairwise

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.schedules.actions import (
    WEIGHT_GRADIENT_KINDS,
    Action,
    ActionKind,
    Schedule,
)
from stratagem.simulator.schedules.named_schedules import SCHEDULES, slices_tokens
from stratagem.simulator.schedules.schedule_record import ScheduleRecord, Sizes

VIRTUAL_STAGES = 2
"""Stages of each set of devices in an interleaved pipeline (Narayanan et al. 2021)."""


@dataclass(frozen=True)
class Traits:
    """What a schedule does on any number of ranks.

    Attributes:
        rounds: stages that it gives a rank of a pipeline.
        splits_backward: whether gradients of parameters are made apart from those of inputs.
        runs_ahead: whether all microbatches pass forward before the first goes back.
        knows_end: whether what a stage holds is known from its place before the end alone, however
            many stages there are before.
    """

    rounds: int
    splits_backward: bool
    runs_ahead: bool
    knows_end: bool

    @property
    def fills(self) -> bool:
        """Whether a rank waits at both ends of a step until a microbatch has passed those before.

        Where a rank has several stages, or makes gradients of parameters later, others fill in.
        """
        return self.rounds == 1 and not self.splits_backward

    @property
    def suits_unequal(self) -> bool:
        """Whether the program over stages can plan unequal ones: it knows what each will hold."""
        return self.fills and self.knows_end


@dataclass(frozen=True)
class Run:
    """What a schedule does on some ranks with some microbatches.

    Attributes:
        held: by stage, the microbatches that it holds at most, the one that runs included; where a
            rank has several stages, those of all of them.
        waiting: by rank, how many have yet to go back at most when one does; of all its stages.
        ranks: by stage, the rank that has it.
        splits_backward: whether some gradients of parameters are made apart.
        runs_ahead: whether all microbatches pass forward before the first goes back.
    """

    held: tuple[int, ...]
    waiting: tuple[int, ...]
    ranks: tuple[int, ...]
    splits_backward: bool
    runs_ahead: bool


def searched_schedules() -> tuple[str, ...]:
    """The schedules that a search may try: of those with a name, what updates once a step.

    Each stage must have one home, and tokens stay whole.

    Example:
        >>> searched_schedules()
        ('gpipe', '1f1b', 'interleaved', 'zb-h1')
    """
    return tuple(name for name, record in SCHEDULES.items() if _traits(record) is not None)


class Form(Enum):
    """What plans are tried in that were found without, as no choices are searched in it."""

    SLICED = "sliced tokens"
    MIRRORED = "two directions"
    PLACED = "operators on parts of meshes"


def form_of(name: str) -> Form | None:
    """The form that plans under a schedule of a name have, read from its actions; None for none.

    Example:
        >>> form_of("terapipe"), form_of("chimera"), form_of("1f1b")
        (<Form.SLICED: 'sliced tokens'>, <Form.MIRRORED: 'two directions'>, None)
    """
    return _form(SCHEDULES[name]) if name in SCHEDULES else None


@cache
def _form(record: ScheduleRecord) -> Form | None:
    if slices_tokens(record):
        return Form.SLICED
    made = record.made(_SMALL)
    return Form.MIRRORED if made is not None and made.is_mirrored else None


_SMALL = Sizes(2, 4, 2)
"""What every schedule with two homes for a stage is made of."""


def splits_backward(name: str) -> bool:
    """Whether a schedule with two homes for a stage makes gradients of parameters apart.

    Example:
        >>> splits_backward("chimera"), splits_backward("dualpipe")
        (False, True)
    """
    return SCHEDULES[name].make(_SMALL).splits_backward


def formed_schedules() -> tuple[str, ...]:
    """Those under which plans have a form.

    Example:
        >>> formed_schedules()
        ('chimera', 'dualpipe', 'terapipe')
    """
    return tuple(name for name in SCHEDULES if form_of(name) is not None)


def schedules_in(form: Form) -> tuple[str, ...]:
    """The schedules that have a name under which plans have a form.

    Example:
        >>> schedules_in(Form.SLICED), schedules_in(Form.PLACED)
        (('terapipe',), ())
    """
    return tuple(name for name in SCHEDULES if form_of(name) is form)


FORWARD_SCHEDULE = "gpipe"
"""That of forward passes: all microbatches one after the other, and nothing to go back for."""


def schedules_of(
    graph: OperatorGraph, wanted: Sequence[str] | None, default: str = "1f1b"
) -> tuple[str, ...]:
    """The schedules under which pipelines of a graph are searched.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> schedules_of(mlp([8, 8], batch=4), None)
        ('1f1b',)

    Args:
        graph: of a training step, or of a forward pass, which never goes back.
        wanted: those that are asked for; None where none is.
        default: the one that is taken then for training.

    Raises:
        ValueError: a forward pass is to have a schedule that goes back before all is through; only
            schedules of another `Form` are asked for.
    """
    if not graph.is_forward:
        searched = [name for name in wanted or (default,) if form_of(name) is None]
        if not searched:
            raise ValueError(
                f"schedule {', '.join(map(repr, wanted or ()))} is tried on plans that were found "
                f"under another: name one of {', '.join(map(repr, searched_schedules()))} as well"
            )
        return tuple(searched)
    other = [n for n in wanted or () if form_of(n) or not traits_of(n).runs_ahead]
    if other:
        raise ValueError(
            f"{graph.name!r} is a forward pass, in which schedule {other[0]!r} would wait for "
            f"backward passes that are not there; choose {FORWARD_SCHEDULE!r}, or leave it out"
        )
    return tuple(wanted or (FORWARD_SCHEDULE,))


def traits_of(schedule: str) -> Traits:
    """What the schedule of a name does.

    Example:
        >>> traits_of("zb-h1").splits_backward, traits_of("interleaved").rounds
        (True, 2)

    Raises:
        ValueError: there is none of that name that a search may try.
    """
    found = _traits(SCHEDULES[schedule]) if schedule in SCHEDULES else None
    if found is None:
        hint = "A plan of your own may have others"
        raise unknown("schedule for a search", schedule, searched_schedules(), hint=hint)
    return found


def run_of(schedule: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Run | None:
    """What the schedule of a name does in a pipeline; None if it cannot run so.

    Example:
        >>> run_of("1f1b", 3, 8, 3).held, run_of("interleaved", 4, 3, 2)
        ((3, 2, 1), None)

    Args:
        schedule: its name.
        num_stages: of the model.
        num_microbatches: of the batch.
        num_ranks: sets of devices that have the stages.
    """
    return _run(SCHEDULES[schedule], Sizes(num_stages, num_microbatches, num_ranks))


def run_under(schedule: Schedule) -> Run:
    """What a schedule does, whether it has a name or a plan lists its orders.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import one_f_one_b
        >>> run_under(one_f_one_b(3, 8)) == run_of("1f1b", 3, 8, 3)
        True
    """
    return Run(
        _held(schedule),
        tuple(map(_most_waiting, schedule.orders)),
        schedule.homes,
        schedule.splits_backward,
        schedule.runs_ahead,
    )


def why_not_searched(schedule: Schedule) -> str:
    """What a schedule does that a search does not choose for; empty if there is no such thing.

    This is the one record of it: problems, lists of schedules and plans to start from go by it.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import schedule_by_name
        >>> why_not_searched(schedule_by_name("chimera", 2, 2, num_ranks=2))
        'its stages have several homes'
    """
    return next((why for why, holds in NOT_SEARCHED.items() if holds(schedule)), "")


def _has_several_homes(schedule: Schedule) -> bool:
    return any(len(schedule.ranks_of(s)) > 1 for s in range(schedule.num_stages))


def _is_out_of_order(schedule: Schedule) -> bool:
    first = list(dict.fromkeys(schedule.homes))
    return first != sorted(first)


NOT_SEARCHED: dict[str, Callable[[Schedule], bool]] = {
    # Choices on both homes are one, and sums over them depend on all of an operator's.
    "its stages have several homes": _has_several_homes,
    # Prefixes are chosen by the attentions that read them.
    "it slices tokens": lambda schedule: schedule.num_slices > 1,
    # Such a plan does not train what others do, so that none of them is better or worse.
    "it updates weights amid a step": lambda schedule: schedule.update_every is not None,
    # Bounds count ranks as stages bring them up.
    "its ranks are not numbered as stages come to them": _is_out_of_order,
}
"""Why a search does not choose for some schedules, and which these are."""


def most_rounds(schedule: str) -> int:
    """The most stages, of those that are tried, that a schedule can give each of two ranks.

    Example:
        >>> most_rounds("interleaved"), most_rounds("chimera")
        (2, 1)
    """
    return _rounds(SCHEDULES[schedule])


def rounds_of(schedule: str, num_ranks: int) -> int:
    """Stages that a schedule gives each of some ranks; one where there is no pipeline."""
    return traits_of(schedule).rounds if num_ranks > 1 else 1


def can_run(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Whether a schedule can run so many microbatches with as many stages as it gives ranks.

    Example:
        >>> can_run("interleaved", 8, 12), can_run("1f1b", 8, 12)
        (False, True)
    """
    stages = num_ranks * rounds_of(schedule, num_ranks)
    return run_of(schedule, stages, num_microbatches, num_ranks) is not None


def first_alike(schedule: str, sizes: Sizes, schedules: Sequence[str]) -> str:
    """The first of some schedules that does what one of them does, or that one itself.

    Ranks that pass several microbatches on do so in an order of each schedule's own. One rank, or
    one microbatch, often leaves schedules nothing to differ in.

    Example:
        >>> several, pipeline = ("gpipe", "1f1b", "interleaved"), Sizes(2, 1, 2)
        >>> first_alike("1f1b", pipeline, several), first_alike("zb-h1", pipeline, several)
        ('gpipe', 'zb-h1')
        >>> first_alike("interleaved", Sizes(1, 8, 1), several)
        '1f1b'

    Args:
        schedule: its name.
        sizes: of the pipeline.
        schedules: names, the one that others are called by first.
    """
    if sizes.num_ranks > 1 and sizes.num_microbatches > 1:
        return schedule
    its = SCHEDULES[schedule]
    return next((name for name in schedules if _same(SCHEDULES[name], its, sizes)), schedule)


@cache
def _same(one: ScheduleRecord, other: ScheduleRecord, sizes: Sizes) -> bool:
    if one == other:
        return True
    first, second = one.made(sizes), other.made(sizes)
    return first is not None and second is not None and first.orders == second.orders


def dealt(
    ranks: Sequence[DeviceMesh], schedule: str, num_stages: int, num_microbatches: int
) -> tuple[DeviceMesh, ...]:
    """The mesh of each stage, where the schedule places them on the meshes of some ranks.

    Raises:
        ValueError: it cannot run so many stages and microbatches on them.
    """
    run = run_of(schedule, num_stages, num_microbatches, len(ranks))
    if run is None:
        raise ValueError(
            f"schedule {schedule!r} cannot run {num_stages} stages and {num_microbatches} "
            f"microbatches on {len(ranks)} ranks: choose other numbers, or another schedule"
        )
    return tuple(ranks[rank] for rank in run.ranks)


@cache
def _rounds(record: ScheduleRecord) -> int:
    tried = range(1, VIRTUAL_STAGES + 1)
    return max((n for n in tried if record.accepts(Sizes(2 * n, 4, 2))), default=1)


@cache
def _traits(record: ScheduleRecord) -> Traits | None:
    """None of a schedule that a search does not choose for."""
    rounds = _rounds(record)
    several = [record.made(Sizes(2 * n, 4, 2)) for n in range(1, VIRTUAL_STAGES + 1)]
    several += [record.made(Sizes(rounds * n, 12, n)) for n in (2, 3, 4, 6)]
    listed = [schedule for schedule in several if schedule is not None]
    if not listed or any(map(why_not_searched, listed)) or slices_tokens(record):
        return None
    plain = [record.made(Sizes(n, 8, n)) for n in range(2, 7)]
    held = [_held(schedule)[::-1] for schedule in plain if schedule is not None]
    return Traits(
        rounds,
        any(schedule.splits_backward for schedule in listed),
        all(schedule.runs_ahead for schedule in listed),
        rounds == 1 and all(more[: len(few)] == few for few, more in pairwise(held)),
    )


@cache
def _run(record: ScheduleRecord, sizes: Sizes) -> Run | None:
    schedule = record.made(sizes)
    if schedule is None:
        return None
    return run_under(schedule)


def _held(schedule: Schedule) -> tuple[int, ...]:
    """By stage, the most microbatches that its rank holds, until their last backward ends."""
    held = [0] * schedule.num_stages
    for order in schedule.orders:
        most = _most(order, WEIGHT_GRADIENT_KINDS)
        for stage in {action.stage for action in order}:
            held[stage] = most
    return tuple(held)


def _most_waiting(order: Iterable[Action]) -> int:
    """The most microbatches on a rank whose way back is yet to begin."""
    return _most(order, (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT))


def _most(order: Iterable[Action], let_go: Container[ActionKind]) -> int:
    """The most microbatches that went forward on a rank and were not let go of."""
    forward = ActionKind.FORWARD
    changes = [(action.kind is forward) - (action.kind in let_go) for action in order]
    return max(0, max(accumulate(changes), default=0))
