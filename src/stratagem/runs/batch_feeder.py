"""Batches of this process for ranks that are processes: drawn here, read there, in step.

    loader ── draw ──▶ batch-7.pt ──▶ rank 0, rank 1, …
    this process ◀──── taken-0, taken-1: what is read everywhere goes, a few are drawn ahead

The ranks so get what threads of this process would: the same batches in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from stratagem.executor.training.batches import Batches, Ordered

AHEAD = 4
"""How many batches are drawn before the slowest rank asks for them."""
POLL_SECONDS = 0.002


class Feeder:
    """Draws batches in a thread of its own, as a context around the run.

    Example:
        >>> with Feeder(folder, batches, num_batches=100, num_ranks=2) as feeder:  # doctest: +SKIP
        ...     run_ranks(arguments, 2, look=feeder.check)

    Args:
        folder: that the ranks read too.
        batches: at the first one to be given.
        num_batches: how many the ranks will take.
        num_ranks: that must have read a batch before it goes.

    Raises:
        ValueError: when the first batch does not fit, or there is none.
    """

    def __init__(
        self, folder: str | Path, batches: Batches, *, num_batches: int, num_ranks: int
    ) -> None:
        self._folder, self._batches = Path(folder), batches
        self._num_batches, self._num_ranks = num_batches, num_ranks
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stratagem feeder")
        self._write(0)

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what went wrong while drawing, if anything did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        gone = 0
        try:
            for number in range(1, self._num_batches):
                while number >= self._taken() + AHEAD:
                    if self._stop.wait(POLL_SECONDS):
                        return
                self._write(number)
                # A rank that goes on from a checkpoint reads its first batch twice.
                while gone < self._taken() - 1:
                    _file(self._folder, gone).unlink()
                    gone += 1
        except BaseException as error:
            self._error = error

    def _write(self, number: int) -> None:
        batch = dict(self._batches.at(number))
        made = self._folder / "batch.tmp"
        torch.save({"batch": batch, "epoch": self._batches.position[0]}, made)
        made.rename(_file(self._folder, number))

    def _taken(self) -> int:
        """How many batches every rank has read."""
        return min(_count(_marker(self._folder, rank)) for rank in range(self._num_ranks))


class Fed(Ordered):
    """What a `Feeder` draws, on a rank: an iterable, gone through again for every pass.

    Args:
        folder: of the feeder.
        rank: of this process.
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank
        self._first = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number, epoch = self._first, None
        while True:
            path = _file(self._folder, number)
            while not path.exists():
                time.sleep(POLL_SECONDS)
            found = torch.load(path, map_location="cpu", weights_only=True)
            if epoch not in (None, found["epoch"]):
                self._first = number
                return
            number, epoch = number + 1, found["epoch"]
            made = self._folder / f"taken-{self._rank}.tmp"
            made.write_text(str(number))
            made.rename(_marker(self._folder, self._rank))
            yield found["batch"]


def _file(folder: Path, number: int) -> Path:
    return folder / f"batch-{number}.pt"


def _marker(folder: Path, rank: int) -> Path:
    return folder / f"taken-{rank}"


def _count(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0
