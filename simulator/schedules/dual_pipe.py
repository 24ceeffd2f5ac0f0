"""DualPipe: microbatches from both ends at once, and weight gradients where ranks would wait.

The order of DeepSeek-V3 (DeepSeek-AI 2024, section 3.2.1) as its authors published it. Rank r of S
has stages r and S − 1 − r. What a rank does is the same seen from either end, so it is written for
both: direction 0 enters on the rank's own half, direction 1 on the other.

    forwards that fill the pipeline, then those of both directions     F0 … F0 F1
    the first gradients, split, as there is nothing else to do yet     I1 W F1
    the steady part: a forward and a backward of opposite directions   F0 B1 F1 B0
    backwards that empty it; towards the end weight gradients wait     B1 F1 B0 … B1 I0
    weight gradients between the last input gradients, then the rest   W I0 … W

The authors' kernels run a forward and a backward beside each other; here one follows the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from fractions import Fraction

from stratagem.simulator.schedules.actions import Action, ActionKind, Schedule, check_sizes
from stratagem.simulator.schedules.schedule_record import PassTimes, ScheduleRecord, Sizes


def dualpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Two opposite pipelines without a flush between units, weight gradients in the bubble.

    Example:
        >>> from stratagem.simulator.schedules.actions import grid
        >>> print(grid(dualpipe(4, 8)))
        rank 0  0F0 0F1 0F2 3F4 3I4 3W4 3F5 0F3 3B5 3F6 0B0 3B6 3F7 0B1 3B7 0I2 0W2 0I3 0W3
        rank 1  ... 1F0 2F4 1F1 2F5 1F2 2B4 2F6 1B0 1F3 2B5 2F7 1B1 2B6 1B2 2I7 1I3 2W7 1W3
        rank 2  ... 1F4 2F0 1F5 2F1 1F6 2B0 2F2 1B4 1F7 2B1 2F3 1B5 2B2 1B6 2I3 1I7 2W3 1W7
        rank 3  0F4 0F5 0F6 3F0 3I0 3W0 3F1 0F7 3B1 3F2 0B4 3B2 3F3 0B5 3B3 0I6 0W6 0I7 0W7

    Rank r holds stage r for the first half of the microbatches and stage S − 1 − r for the second,
    so each stage has two copies whose gradients are summed before the update, and a rank holds
    S + 1 microbatches at most.

    With W ≤ I ≤ F ≤ B = I + W the two ranks in the middle never wait from their first action to
    their last. They begin (S / 2 − 1) F after the outermost ranks and end (S / 2 − 1)(I − W)
    before those, so every rank is idle for (S / 2 − 1)(F + I − W). The report's table 2 has
    (S / 2 − 1)(F&B + B − 3 W), where both of a pair F&B come out of it at its end.

    Raises:
        ValueError: if a size is below 1, the number of stages or of microbatches is odd, or there
            are fewer than 2 microbatches for each stage.
    """
    _check(Sizes(num_stages, num_microbatches, num_stages))
    orders = tuple(tuple(_order(r, num_stages, num_microbatches)) for r in range(num_stages))
    return Schedule("dualpipe", num_stages, num_microbatches, orders)


def _check(sizes: Sizes) -> None:
    stages, parts, ranks = sizes.num_stages, sizes.num_microbatches, sizes.num_ranks
    check_sizes(stages, parts)
    if stages % 2:
        raise ValueError(
            f"dualpipe: {stages} stages is odd, but two opposite pipelines meet in pairs of "
            f"stages: choose {stages + 1} stages"
        )
    if parts % 2 or parts < 2 * stages:
        raise ValueError(
            f"dualpipe: {parts} microbatches on {stages} stages, but both directions have as "
            f"many, and each at least one for each stage: choose "
            f"{max(parts + parts % 2, 2 * stages)} microbatches"
        )
    if ranks != stages:
        raise ValueError(
            f"dualpipe: {stages} stages on {ranks} ranks, but each rank has a stage of either "
            f"direction: choose {stages} ranks"
        )


def _order(rank: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    each = num_microbatches // 2
    down, up = (rank, range(each)), (num_stages - 1 - rank, range(each, num_microbatches))
    (stage_0, its_0), (stage_1, its_1) = (down, up) if 2 * rank < num_stages else (up, down)
    outside = 1 + min(stage_0, stage_1)  # Ranks of its half, itself and those nearer to the end.
    inside = num_stages // 2 - outside
    words = [
        *["F0"] * (2 * inside),
        *["F0", "F1"] * outside,
        *["I1", "W", "F1"] * inside,
        *["F0", "B1", "F1", "B0"] * (each - num_stages + outside),
        *["B1", "F1", "B0"] * inside,
        *(["B1", "B0"] * outside)[:outside],
        *(["I1", "I0"] * outside)[outside:],
        *["W", "I0"] * inside,
        *["W"] * outside,
    ]
    return _numbered(words, (stage_0, stage_1), (its_0, its_1))


def _numbered(
    words: list[str], stages: tuple[int, int], its: tuple[range, range]
) -> Iterator[Action]:
    """The actions that words such as ``B1`` stand for: each the next of its kind and direction.

    Whole and split backwards of a direction are numbered as one; ``W`` is the oldest that waits.
    """
    following = {kind: [iter(part) for part in its] for kind in ("forward", "backward")}
    waiting: deque[Action] = deque()
    for word in words:
        if word == "W":
            yield waiting.popleft()
            continue
        kind, direction = ActionKind(word[0]), int(word[1])
        way = "forward" if kind is ActionKind.FORWARD else "backward"
        action = Action(stages[direction], kind, next(following[way][direction]))
        yield action
        if kind is ActionKind.INPUT_GRADIENT:
            waiting.append(action._replace(kind=ActionKind.WEIGHT_GRADIENT))


def _bubble(sizes: Sizes, times: PassTimes) -> Fraction | None:
    forward, backward, inputs, weights = times
    if not weights <= inputs <= forward <= backward == inputs + weights:
        return None
    idle = (sizes.num_stages // 2 - 1) * (forward + inputs - weights)
    return Fraction(idle, idle + sizes.num_microbatches * (forward + backward))


DUALPIPE = ScheduleRecord(
    "dualpipe",
    lambda sizes: dualpipe(sizes.num_stages, sizes.num_microbatches),
    "a DualPipe",
    bubble=_bubble,
    check=_check,
)
