"""What is run where: stages, their cases, and the sizes of a GPU and of a rehearsal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
Figures = dict[str, object]

STAGES = (
    "environment",
    "kernels",
    "one_rank",
    "streams",
    "nccl",
    "operators",
    "steps",
    "wall",
    "memory",
    "communicators",
    "device_tests",
)
"""In the order in which they run: what later ones need is shown by earlier ones."""

DONE, WRONG, FAILED, CRASHED, SLOW, SKIPPED, BEGUN, LEFT = (
    "done",
    "wrong",
    "failed",
    "crashed",
    "too slow",
    "skipped",
    "begun",
    "left",
)
BAD = frozenset({WRONG, FAILED, CRASHED, SLOW})
ENDED = frozenset({DONE, SKIPPED}) | BAD


ALL = "all cases"
"""The case that says that a stage has come to its end, so that it need not be started again."""


class SkippedError(Exception):
    """A case cannot be run here; says why."""


@dataclass(frozen=True)
class Case:
    """One thing that a stage shows.

    Attributes:
        name: in its stage.
        run: gives the figures; ``agrees`` among them says whether what was compared is equal.
        seconds: that it may take before its process is ended.
    """

    name: str
    run: Callable[[], Figures]
    seconds: float = 120.0


@dataclass(frozen=True)
class Setting:
    """Where results go, and whether a GPU is there or stand-ins for one."""

    out: Path
    rehearse: bool = False

    @property
    def device(self) -> str:
        """What torch calls the device."""
        return "cpu" if self.rehearse else "cuda"

    @property
    def num_gpus(self) -> int:
        """How many there are; stand-ins play two."""
        return 2 if self.rehearse else torch.cuda.device_count()

    def size(self, real: T, small: T) -> T:
        """The second one in a rehearsal."""
        return small if self.rehearse else real

    def need(self, *modules: str) -> None:
        """Leave a case out where a module is not installed.

        Raises:
            SkippedError: names the first that is missing.
        """
        for module in modules:
            if find_spec(module) is None:
                raise SkippedError(f"{module} is not installed")

    def need_gpus(self, count: int) -> None:
        """Leave a case out where there are fewer GPUs.

        Raises:
            SkippedError: with both numbers.
        """
        if self.num_gpus < count:
            raise SkippedError(f"needs {count} GPUs, and there is {self.num_gpus}")
