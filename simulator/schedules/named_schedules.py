"""The schedules that the literature names, each with its bubble in closed form.

The bubble is the share of their time in which the ranks of a balanced pipeline are idle. It is
given for S stages, M microbatches and transfers that take no time; F, B, I and W are the times of
a stage's forward, backward, input gradient and weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Schedule,
    check_sizes,
    validate,
)
from stratagem.simulator.schedules.dual_pipe import DUALPIPE
from stratagem.simulator.schedules.schedule_record import PassTimes, ScheduleRecord, Sizes

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (GPipe, Huang et al. 2019).

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(gpipe(2, 2)))
        rank 0  0F0 0F1 ... ... 0B0 0B1
        rank 1  ... 1F0 1F1 1B0 1B1 ...

    The bubble is (S − 1) / (M + S − 1).

    Raises:
        ValueError: if a size is below 1.
    """
    return _one_stage_a_rank("gpipe", num_stages, num_microbatches, _gpipe_order)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """As few forwards ahead as keep the pipeline full (PipeDream-Flush, Narayanan et al. 2021).

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(one_f_one_b(2, 3)))
        rank 0  0F0 0F1 ... 0B0 0F2 0B1 ... 0B2
        rank 1  ... 1F0 1B0 1F1 1B1 1F2 1B2 ...

    As long as GPipe, but stage s of S holds S - s microbatches at most instead of all.

    Raises:
        ValueError: if a size is below 1.
    """
    return _one_stage_a_rank("1f1b", num_stages, num_microbatches, _one_f_one_b_order)


def interleaved(num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """1F1B with v stages a rank, stage s on rank s mod S (Narayanan et al., SC 2021, section 2.2).

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(interleaved(4, 2, num_ranks=2)))
        rank 0  0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...

    Over S ranks the bubble is (S − 1) / (v · M + S − 1): in relation to the ideal time the
    paper's (S − 1) / M / v.

    Raises:
        ValueError: if a size is below 1, or the ranks do not divide stages and microbatches.
    """
    _check_interleaved(Sizes(num_stages, num_microbatches, num_ranks))
    orders = tuple(
        tuple(_interleaved_order(rank, num_ranks, num_stages, num_microbatches))
        for rank in range(num_ranks)
    )
    return Schedule("interleaved", num_stages, num_microbatches, orders)


def _check_interleaved(sizes: Sizes) -> None:
    check_sizes(sizes.num_stages, sizes.num_microbatches)
    ranks = sizes.num_ranks
    for what, count in (("stages", sizes.num_stages), ("microbatches", sizes.num_microbatches)):
        if ranks < 1 or count % ranks:
            raise ValueError(
                f"interleaved: {count} {what} are no multiple of {ranks} ranks; choose "
                f"{max(1, count // max(ranks, 1)) * max(ranks, 1)} {what}, or custom"
            )


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight gradients fill the bubble (ZB-H1, Qi et al. 2023, section 2.1).

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(zb_h1(2, 2)))
        rank 0  0F0 0F1 ... 0I0 0W0 0I1 0W1
        rank 1  ... 1F0 1I0 1F1 1I1 1W0 1W1

    Stage s makes its weight gradients s microbatches late, so that no stage holds more than the S
    microbatches of 1F1B's first. With M ≥ S, W ≤ F and W ≤ I every rank is idle for (S − 1)(F + I
    − W), the paper's table 1, where 1F1B's is for (S − 1)(F + I + W).

    Raises:
        ValueError: if a size is below 1.
    """
    return _one_stage_a_rank("zb-h1", num_stages, num_microbatches, _zb_h1_order)


def chimera(num_stages: int, num_microbatches: int) -> Schedule:
    """Two pipelines in opposite directions over the same ranks (Li & Hoefler, SC 2021).

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(chimera(4, 4)))
        rank 0  0F0 0F1 ... 3F2 3B2 3F3 3B3 0B0 ... 0B1
        rank 1  ... 1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1 ...
        rank 2  ... 1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3 ...
        rank 3  0F2 0F3 ... 3F0 3B0 3F1 3B1 0B2 ... 0B3

    Rank r holds stage r of the one and stage S − 1 − r of the other, so each stage has two copies
    whose gradients are summed before the update. Units of S microbatches, half in each direction,
    follow each other without a gap; the last may be smaller. With F = B and M a multiple of S the
    bubble is the paper's (S − 2) / (2 M + S − 2); with B = 2 F and M = S it is (S − 2) / (3 M / 2
    + S − 2), and further units leave gaps between them.

    Raises:
        ValueError: if a size is below 1, the number of stages is odd, or there is one microbatch.
    """
    check_sizes(num_stages, num_microbatches)
    if num_stages % 2:
        raise ValueError(
            f"chimera: {num_stages} stages is odd, but two opposite pipelines meet in pairs of "
            f"stages: choose {num_stages + 1} stages"
        )
    if num_microbatches == 1:
        raise ValueError(
            "chimera: 1 microbatch passes in one direction, but there are two opposite pipelines: "
            "choose 2 microbatches"
        )
    orders: list[list[tuple[int, Action]]] = [[] for _ in range(num_stages)]
    for rank, when, action in _chimera_slots(num_stages, num_microbatches):
        orders[rank].append((when, action))
    return Schedule(
        "chimera",
        num_stages,
        num_microbatches,
        tuple(tuple(action for _, action in sorted(o, key=lambda p: p[0])) for o in orders),
    )


def terapipe(num_stages: int, num_microbatches: int, num_slices: int) -> Schedule:
    """GPipe over slices of the tokens of each microbatch (TeraPipe, Li et al. 2021).

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(terapipe(2, 1, num_slices=2)))
        rank 0  0F0   0F0.1 ...   ...   0B0.1 0B0
        rank 1  ...   1F0   1F0.1 1B0.1 1B0   ...

    A slice needs the slices before it (causal attention), its gradient those behind it. Slices of
    times f₁, f₂, … and b₁, b₂, … take Σ f + (S − 1) max f + Σ b + (S − 1) max b, the paper's
    equation for both passes; equal slices, K of them, have the bubble (S − 1) / (M · K + S − 1).

    Raises:
        ValueError: if a size is below 1.
    """
    check_sizes(num_stages, num_microbatches, num_slices)

    def order(stage: int) -> Iterator[Action]:
        slices = range(num_slices)
        for kind, parts in ((F, slices), (B, slices[::-1])):
            for microbatch in range(num_microbatches):
                yield from (Action(stage, kind, microbatch, part) for part in parts)

    orders = tuple(tuple(order(stage)) for stage in range(num_stages))
    return Schedule("terapipe", num_stages, num_microbatches, orders, num_slices)


def pipedream(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B that never flushes: an update after every backward (PipeDream, Harlap et al. 2018).

    Example:
        >>> pipedream(4, 100).update_every
        1

    Stage s keeps the S − s versions of its weights that microbatches in flight have seen (weight
    stashing), and its gradients are S − 1 − s updates late. A balanced pipeline has no bubble once
    it is full. `num_microbatches` are simulated, first and last ones included.

    Raises:
        ValueError: if a size is below 1.
    """
    plain = one_f_one_b(num_stages, num_microbatches)
    return Schedule(
        "pipedream",
        num_stages,
        num_microbatches,
        plain.orders,
        update_every=1,
        stashes_weights=True,
    )


def pipedream_vertical(num_stages: int, num_microbatches: int) -> Schedule:
    """PipeDream with vertical sync (Narayanan et al. 2019, section 3.3).

    Example:
        >>> pipedream_vertical(4, 100).vertical_sync
        True

    A microbatch uses the version of the weights that it found on the first stage on every stage.
    So all gradients are S − 1 updates late, and every stage keeps S versions.

    Raises:
        ValueError: if a size is below 1.
    """
    plain = pipedream(num_stages, num_microbatches)
    return replace(plain, name="pipedream-vertical", vertical_sync=True)


def _gpipe_bubble(sizes: Sizes, times: PassTimes) -> Fraction:
    units = sizes.num_microbatches * sizes.num_slices
    return Fraction(sizes.num_stages - 1, units + sizes.num_stages - 1)


def _interleaved_bubble(sizes: Sizes, times: PassTimes) -> Fraction:
    rounds = sizes.num_stages // sizes.num_ranks
    return Fraction(sizes.num_ranks - 1, rounds * sizes.num_microbatches + sizes.num_ranks - 1)


def _zb_h1_bubble(sizes: Sizes, times: PassTimes) -> Fraction | None:
    forward, _, inputs, weights = times
    if sizes.num_microbatches < sizes.num_stages or weights > min(forward, inputs):
        return None
    idle = (sizes.num_stages - 1) * (forward + inputs - weights)
    return Fraction(idle, idle + sizes.num_microbatches * (forward + inputs + weights))


def _chimera_bubble(sizes: Sizes, times: PassTimes) -> Fraction | None:
    stages, parts = sizes.num_stages, sizes.num_microbatches
    if times.backward == times.forward and parts % stages == 0:
        return Fraction(stages - 2, 2 * parts + stages - 2)
    if times.backward == 2 * times.forward and parts == stages:
        return Fraction(2 * stages - 4, 5 * stages - 4)
    return None


def _no_bubble(sizes: Sizes, times: PassTimes) -> Fraction:
    return Fraction(0)


def _by_stages(
    make: Callable[[int, int], Schedule],
) -> Callable[[Sizes], Schedule]:
    """What makes a schedule of sizes, of which only stages and microbatches count."""
    return lambda sizes: make(sizes.num_stages, sizes.num_microbatches)


_RECORDS = (
    ScheduleRecord(
        "gpipe", _by_stages(gpipe), "a GPipe", torch_name="GPipe", bubble=_gpipe_bubble
    ),
    ScheduleRecord(
        "1f1b",
        _by_stages(one_f_one_b),
        "a 1F1B",
        several="interleaved",
        torch_name="1F1B",
        bubble=_gpipe_bubble,
    ),
    ScheduleRecord(
        "interleaved",
        lambda sizes: interleaved(sizes.num_stages, sizes.num_microbatches, sizes.num_ranks),
        "an interleaved 1F1B",
        torch_name="Interleaved1F1B",
        bubble=_interleaved_bubble,
        check=_check_interleaved,
    ),
    ScheduleRecord("zb-h1", _by_stages(zb_h1), "a ZB-H1", bubble=_zb_h1_bubble),
    ScheduleRecord("chimera", _by_stages(chimera), "a Chimera", bubble=_chimera_bubble),
    DUALPIPE,
    ScheduleRecord(
        "terapipe",
        lambda sizes: terapipe(sizes.num_stages, sizes.num_microbatches, sizes.num_slices),
        "a TeraPipe",
        bubble=_gpipe_bubble,
    ),
    ScheduleRecord("pipedream", _by_stages(pipedream), "a PipeDream", bubble=_no_bubble),
    ScheduleRecord(
        "pipedream-vertical",
        _by_stages(pipedream_vertical),
        "a vertically synchronised PipeDream",
        bubble=_no_bubble,
    ),
)

SCHEDULES: dict[str, ScheduleRecord] = {record.name: record for record in _RECORDS}
"""The schedules that a plan can name; AMPNet's order depends on times (see `ampnet`)."""


DEFAULT_SCHEDULE = "1f1b"
"""Of plans and searches that ask for none."""

REMEMBERED_SCHEDULES = 4
"""A large one takes 100 MB, and compared plans share it; of macro graphs as many are."""


def register_schedule(record: ScheduleRecord) -> None:
    """Give a schedule of one's own a name, by which plans, searches and files may ask for it.

    Example:
        >>> register_schedule(
        ...     ScheduleRecord(
        ...         "all forwards first", lambda s: gpipe(s.num_stages, s.num_microbatches)
        ...     )
        ... )
        >>> schedule_by_name("all forwards first", 2, 4).num_ranks
        2
        >>> del SCHEDULES["all forwards first"]

    Args:
        record: with a name that no other schedule has.

    Raises:
        ValueError: the name is taken, or what it makes of two or four stages on two ranks, with
            four microbatches, is incomplete, of other sizes or deadlocks, or updates weights amid
            a step otherwise than behind each microbatch, with weights stashed.
    """
    if record.name in SCHEDULES:
        raise ValueError(
            f"schedule {record.name!r} is there already, one of {len(SCHEDULES)}: register yours "
            "under another name"
        )
    made = [record.made(Sizes(stages, 4, 2)) for stages in (2, 4)]
    for schedule in filter(None, made) if any(made) else [record.checked(Sizes(2, 4, 2))]:
        validate(schedule)
    SCHEDULES[record.name] = record


def registered_schedules() -> dict[str, ScheduleRecord]:
    """Those that `register_schedule` added: other processes must be told of them."""
    return {name: record for name, record in SCHEDULES.items() if record not in _RECORDS}


@lru_cache(maxsize=REMEMBERED_SCHEDULES)
def _made(record: ScheduleRecord, sizes: Sizes) -> Schedule:
    return record.checked(sizes)


def record_of(name: str) -> ScheduleRecord:
    """The record of the schedule of a name.

    Example:
        >>> record_of("interleaved").words
        'an interleaved 1F1B'

    Raises:
        ValueError: if there is none.
    """
    if name not in SCHEDULES:
        raise unknown(
            "schedule", name, SCHEDULES, hint="A plan may list orders of its own: custom"
        )
    return SCHEDULES[name]


def schedule_by_name(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    num_slices: int = 1,
) -> Schedule:
    """Make the schedule of a name in `SCHEDULES`; asked for again soon, it is the same object.

    Example:
        >>> schedule_by_name("1f1b", 4, 8).num_ranks
        4
        >>> schedule_by_name("interleaved", 4, 8, num_ranks=2).num_ranks
        2

    Args:
        name: of the schedule.
        num_stages: stages of the model.
        num_microbatches: parts of the batch.
        num_ranks: ranks to place the stages on; as many as stages if not given.
        num_slices: parts of the tokens, for TeraPipe.

    Raises:
        ValueError: if the name is unknown, a size is below 1, the schedule needs another number
            of ranks, or it does not slice tokens.
    """
    ranks = num_stages if num_ranks is None else num_ranks
    sizes = Sizes(num_stages, num_microbatches, ranks, num_slices)
    schedule = _made(record_of(name), sizes)
    if schedule.num_slices != num_slices:
        slicing = (n for n, each in SCHEDULES.items() if slices_tokens(each))
        raise ValueError(
            f"schedule {name!r} does not slice tokens, but {num_slices} token slices are asked "
            f"for: choose {' or '.join(slicing)}, or 1 slice"
        )
    if schedule.num_ranks != ranks:
        raise ValueError(
            f"schedule {name!r} places {num_stages} stages on {schedule.num_ranks} ranks, not on "
            f"{ranks}: choose interleaved for several stages a rank, or custom"
        )
    return schedule


def with_rounds(name: str, rounds: int) -> str:
    """The schedule that one becomes where each rank has so many stages; empty if there is none.

    Example:
        >>> with_rounds("1f1b", 2), with_rounds("1f1b", 1), with_rounds("gpipe", 2)
        ('interleaved', '1f1b', '')

    Raises:
        ValueError: if there is no schedule of that name.
    """
    first = record_of(name)
    for record in (first, SCHEDULES.get(first.several)):
        if record is not None and record.accepts(Sizes(2 * rounds, 12, 2)):
            return record.name
    return ""


def plain_schedules() -> tuple[str, ...]:
    """All but those that others become where ranks have several stages, the default one first.

    Example:
        >>> plain_schedules()[:3]
        ('1f1b', 'gpipe', 'zb-h1')
    """
    several = {record.several for record in SCHEDULES.values()}
    names = dict.fromkeys((DEFAULT_SCHEDULE, *SCHEDULES))
    return tuple(name for name in names if name not in several)


def slices_tokens(record: ScheduleRecord) -> bool:
    """Whether a schedule passes slices of the tokens of a microbatch.

    Example:
        >>> [name for name, record in SCHEDULES.items() if slices_tokens(record)]
        ['terapipe']
    """
    sliced = record.made(Sizes(2, 2, 2, num_slices=2))
    return sliced is not None and sliced.num_slices > 1


def _one_stage_a_rank(
    name: str,
    num_stages: int,
    num_microbatches: int,
    order: Callable[[int, int, int], Iterable[Action]],
) -> Schedule:
    """One rank a stage, each in the order that ``order(stage, stages, microbatches)`` yields."""
    check_sizes(num_stages, num_microbatches)
    orders = (tuple(order(stage, num_stages, num_microbatches)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, tuple(orders))


def _gpipe_order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    for kind in (F, B):
        yield from (Action(stage, kind, microbatch) for microbatch in range(num_microbatches))


def _one_f_one_b_order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    ahead = num_stages - stage
    for forward in range(num_microbatches + ahead):
        if forward >= ahead:
            yield Action(stage, B, forward - ahead)
        if forward < num_microbatches:
            yield Action(stage, F, forward)


def _zb_h1_order(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    """1F1B's order, each backward an input gradient; the weight gradients follow `stage` late."""
    late = 0
    for action in _one_f_one_b_order(stage, num_stages, num_microbatches):
        if action.kind is F:
            yield action
            continue
        yield Action(stage, I, action.microbatch)
        if action.microbatch >= stage:
            yield Action(stage, W, late)
            late += 1
    yield from (Action(stage, W, microbatch) for microbatch in range(late, num_microbatches))


def _interleaved_order(
    rank: int, num_ranks: int, num_stages: int, num_microbatches: int
) -> Iterator[Action]:
    """Microbatches pass in groups of as many as there are ranks, through one stage at a time."""
    per_rank = num_stages // num_ranks
    total = num_microbatches * per_rank

    def action(kind: ActionKind, k: int) -> Action:
        turn = k // num_ranks % per_rank
        stage = rank + num_ranks * (turn if kind is F else per_rank - 1 - turn)
        return Action(stage, kind, k // (num_ranks * per_rank) * num_ranks + k % num_ranks)

    ahead = min(total, 2 * (num_ranks - rank - 1) + (per_rank - 1) * num_ranks)
    yield from (action(F, k) for k in range(ahead))
    for k in range(ahead, total):
        yield action(F, k)
        yield action(B, k - ahead)
    yield from (action(B, k) for k in range(total - ahead, total))


def _chimera_slots(num_stages: int, num_microbatches: int) -> Iterator[tuple[int, int, Action]]:
    """(rank, time slot, action) of both pipelines, with F = B = 1 slot.

    Microbatch i of a unit in one direction enters stage s in slot s + 2i and leaves it backward in
    slot S + 2i + S − 1 − s. On rank r the slots of its two stages never meet, because S is even;
    modulo 2S they are all different, so units follow each other every 2S slots.
    """
    for first in range(0, num_microbatches, num_stages):
        count = min(num_stages, num_microbatches - first)
        down = count - count // 2
        for number in range(count):
            upward = number >= down
            place = number - down if upward else number
            for stage in range(num_stages):
                rank = num_stages - 1 - stage if upward else stage
                begin = 2 * first + 2 * place
                yield rank, begin + stage, Action(stage, F, first + number)
                back = begin + 2 * num_stages - 1 - stage
                yield rank, back, Action(stage, B, first + number)


def unfolded(schedule: Schedule) -> Schedule:
    """The same schedule with stage s called p + s where it runs on its second home.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import chimera
        >>> print(unfolded(chimera(2, 2)).to_text())
        rank 0: 0F0 3F1 3B1 0B0
        rank 1: 2F1 1F0 1B0 2B1
    """
    stages = schedule.num_stages
    orders = tuple(
        tuple(
            action if action.stage == rank else action._replace(stage=stages + action.stage)
            for action in order
        )
        for rank, order in enumerate(schedule.orders)
    )
    return replace(schedule, num_stages=2 * stages, orders=orders)
