"""What is said of a schedule that has a name: one record, which everything else goes by.

A record says how the schedule is called and how its actions are made. What a schedule *does*
(stages a rank, split backwards, what is held, homes of a stage, when updates come) is read from
the actions that it makes: see `actions.Schedule`, and `searcher.space.schedule_traits` for what a
search asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.schedules.actions import Schedule


@dataclass(frozen=True)
class Sizes:
    """All that the schedules with a name are made of."""

    num_stages: int
    num_microbatches: int
    num_ranks: int
    num_slices: int = 1


class PassTimes(NamedTuple):
    """How long a stage of a balanced pipeline takes for a microbatch, or a slice of its tokens.

    A whole backward is `backward`; where it is split, both parts of it.
    """

    forward: int
    backward: int
    input_gradient: int = 0
    weight_gradient: int = 0


OF_TORCH = (
    "1F1B",
    "Interleaved1F1B",
    "GPipe",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
"""What ``torch.distributed.pipelining.schedules.get_schedule_class`` has, but base classes."""


def _no_closed_form(sizes: Sizes, times: PassTimes) -> None:
    return None


@dataclass(frozen=True)
class ScheduleRecord:
    """A schedule with a name.

    Example:
        >>> from stratagem.simulator.schedules.named_schedules import gpipe
        >>> record = ScheduleRecord("mine", lambda s: gpipe(s.num_stages, s.num_microbatches))
        >>> record.accepts(Sizes(2, 4, num_ranks=2)), record.accepts(Sizes(4, 4, num_ranks=2))
        (True, False)

    Attributes:
        name: by which plans, searches and files ask for it.
        make: the schedule of some sizes; what it cannot be made of, it refuses by a `ValueError`.
        words: what a pipeline under it is, with its article: ``a GPipe``. Its name if left out.
        several: the schedule that it becomes where a rank has several stages, which it has not.
        torch_name: what torch.distributed.pipelining calls it; empty where it has no such one.
        bubble: the share of their time in which the ranks of a balanced pipeline are idle, for
            transfers that take no time; None for sizes and times for which no formula is known.
            Of what never flushes, once its pace has settled.
        check: refuses by a `ValueError` sizes that `make` refuses, and no others, without making a
            schedule of thousands of actions; left out, one is made to see.

    Raises:
        ValueError: it has no name, a field is of another type, or torch has no such schedule.
    """

    name: str
    make: Callable[[Sizes], Schedule]
    words: str = ""
    several: str = ""
    torch_name: str = ""
    bubble: Callable[[Sizes, PassTimes], Fraction | None] = _no_closed_form
    check: Callable[[Sizes], None] | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a schedule has no name: give it one that no other has")
        check_fields(self, f"schedule {self.name!r}")
        if self.torch_name and self.torch_name not in OF_TORCH:
            raise ValueError(
                f"schedule {self.name!r}: torch_name is {self.torch_name!r}, which is no schedule "
                f"of torch.distributed.pipelining; those are {', '.join(OF_TORCH)}: leave it out "
                "where it is none of them"
            )

    @property
    def title(self) -> str:
        """The words without their article."""
        return self.words.split(" ", 1)[-1] or self.name

    def made(self, sizes: Sizes) -> Schedule | None:
        """The schedule of some sizes, on so many ranks; None where there is none."""
        try:
            schedule = self.checked(sizes)
        except ValueError:
            return None
        return schedule if schedule.num_ranks == sizes.num_ranks else None

    def checked(self, sizes: Sizes) -> Schedule:
        """What `make` makes of some sizes, on whatever ranks, under the record's name.

        Raises:
            ValueError: there is none, it is of other sizes, or no plan can train by its updates.
        """
        schedule = self.make(sizes)
        for what in ("num_stages", "num_microbatches"):
            asked, found = getattr(sizes, what), getattr(schedule, what)
            if asked != found:
                raise ValueError(
                    f"schedule {self.name!r} was asked for {asked} {what[4:]} and made {found}: "
                    "its record must make what is asked for, or raise a ValueError"
                )
        every = schedule.update_every
        if every is not None and (every != 1 or not schedule.stashes_weights):
            stashing = "" if schedule.stashes_weights else ", with no weights stashed"
            raise ValueError(
                f"schedule {self.name!r} updates weights every {every} microbatches{stashing}: "
                "plans train by one update a step (leave update_every out), or by one behind "
                "each microbatch (update_every=1 with stashes_weights)"
            )
        return schedule if schedule.name == self.name else replace(schedule, name=self.name)

    def accepts(self, sizes: Sizes) -> bool:
        """Whether there is such a schedule of some sizes; setups ask for the same ones often."""
        return _accepts(self, sizes)


@cache
def _accepts(record: ScheduleRecord, sizes: Sizes) -> bool:
    if record.check is None:
        return record.made(sizes) is not None
    try:
        record.check(sizes)
    except ValueError:
        return False
    return True
