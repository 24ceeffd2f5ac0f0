"""What a user allows a plan to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.searcher.space.schedule_traits import searched_schedules
from stratagem.simulator.graph.checkpoint_segments import RECOMPUTE_POLICIES, check_policy
from stratagem.simulator.hardware.headroom import NO_HEADROOM, Headroom


@dataclass(frozen=True)
class PipelineLimits:
    """Bounds on a plan; an empty list allows everything.

    Example:
        >>> PipelineLimits(max_stages=8, tensor_ways=(8,), headroom=Headroom(0.1)).capacity(100)
        90

    Attributes:
        max_stages: most pipeline stages.
        num_stages: exactly these numbers of stages.
        tensor_ways: tensor-parallel ways that a stage may have.
        zero_stages: ZeRO stages of its parameters; stage 1 reduces gradients once a step, where 2
            and 3 do after every microbatch.
        microbatches: numbers of microbatches.
        recompute: policies (see `checkpoint_segments.recomputed_operators`).
        headroom: what of each device's memory stays free.
        equal_meshes: whether all stages get equally many devices.

    Raises:
        ValueError: naming the field, what is wrong and what is allowed.
    """

    max_stages: int = 64
    num_stages: tuple[int, ...] = ()
    tensor_ways: tuple[int, ...] = ()
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    microbatches: tuple[int, ...] = ()
    recompute: tuple[str, ...] = RECOMPUTE_POLICIES
    headroom: Headroom = NO_HEADROOM
    equal_meshes: bool = False

    def __post_init__(self) -> None:
        for name in ("num_stages", "tensor_ways", "microbatches"):
            low = [n for n in getattr(self, name) if n < 1]
            if low:
                raise ValueError(f"limits: {name} lists {low[0]}; list whole numbers from 1 up")
        if self.max_stages < 1:
            raise ValueError(f"limits: max_stages is {self.max_stages}; it must be at least 1")
        if not self.zero_stages or set(self.zero_stages) - {0, 1, 2, 3}:
            raise ValueError(
                f"limits: zero_stages are {self.zero_stages}; list some of 0, 1, 2 and 3"
            )
        if not self.recompute:
            raise ValueError(
                "limits: recompute lists no policy: give at least one, such as 'none'"
            )
        for policy in self.recompute:
            check_policy(policy)

    def capacity(self, nbytes: int) -> int:
        """The bytes of a device that a plan may use."""
        return self.headroom.usable(nbytes)

    def allows_stages(self, count: int) -> bool:
        """Whether a plan may have `count` stages."""
        return count <= self.max_stages and (not self.num_stages or count in self.num_stages)

    def allows_tensor(self, ways: int) -> bool:
        """Whether a stage may be `ways`-fold tensor parallel."""
        return not self.tensor_ways or ways in self.tensor_ways

    def allows_microbatches(self, count: int) -> bool:
        """Whether the batch may be cut into `count` parts."""
        return not self.microbatches or count in self.microbatches


def check_schedules(schedules: Sequence[str]) -> None:
    """Refuse schedules that the dynamic program does not know.

    Raises:
        ValueError: naming it and those there are.
    """
    known = searched_schedules()
    unknown = [schedule for schedule in schedules if schedule not in known]
    if unknown or not schedules:
        wrong = repr(unknown[0]) if unknown else "no schedule at all"
        raise ValueError(f"the planner has no {wrong}: choose from {', '.join(known)}")
