"""The folder of a run's checkpoints: which are complete, which stay, and who writes to it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stratagem.executor.checkpoints.index import INDEX_NAME, CheckpointIndex
from stratagem.simulator.base.files import sync

KEEP = 2
"""How many checkpoints stay unless told."""

LOCK_NAME = ".run"
"""The file that names the run that writes to a folder, and is locked by it."""


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return Path(folder) / f"step-{step:08d}"


def complete_checkpoints(folder: str | Path) -> dict[int, Path]:
    """The complete checkpoints of a folder by step, ascending; none where it does not exist."""
    found: dict[int, Path] = {}
    for path in Path(folder).glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / INDEX_NAME).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def finite_checkpoints(folder: str | Path) -> dict[int, Path]:
    """Those of them whose loss and tensors are finite; a damaged one counts as if it were."""
    return {step: path for step, path in complete_checkpoints(folder).items() if _is_finite(path)}


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint, given its own folder, or the last finite one of a folder of checkpoints.

    Raises:
        ValueError: when there is no complete one, or none that is finite.
    """
    if (Path(path) / INDEX_NAME).is_file():
        return Path(path)
    complete, finite = complete_checkpoints(path), finite_checkpoints(path)
    if not complete:
        raise ValueError(
            f"{path} has no complete checkpoint: neither {INDEX_NAME} nor a folder step-… with one"
        )
    if not finite:
        raise ValueError(
            f"no checkpoint of {path} is finite: all {len(complete)} were written after a loss "
            f"that was not; name one of them, step {max(complete)} say, to load it all the same"
        )
    chosen = max(finite)
    left_out = [step for step in complete if step > chosen]
    if left_out:
        warnings.warn(
            f"the checkpoints of {path} after steps {', '.join(map(str, left_out))} are not "
            f"finite; the one after step {chosen} is taken",
            stacklevel=2,
        )
    return finite[chosen]


def publish(temporary: Path, final: Path, *, keep: int) -> None:
    """Make a checkpoint visible, and then remove what it replaces.

    The last `keep` stay, and the last finite one in any case.
    """
    if final.exists():  # One that is not finite, which the run has gone back behind.
        remove(final)
    temporary.rename(final)
    sync(final.parent)
    steps = list(complete_checkpoints(final.parent))
    stay = set(steps[-keep:])
    if not any(_is_finite(checkpoint_path(final.parent, step)) for step in stay):
        stay.update(list(finite_checkpoints(final.parent))[-1:])
    for step in steps:
        if step not in stay:
            remove(checkpoint_path(final.parent, step))


def remove(path: Path) -> None:
    """Remove a checkpoint, which at once is none any more."""
    (path / INDEX_NAME).unlink(missing_ok=True)
    shutil.rmtree(path)


def _is_finite(path: Path) -> bool:
    try:
        return CheckpointIndex.load(path).finite
    except ValueError:
        return True  # What cannot be read is named when it is to be used.


@contextmanager
def only_writer(folder: Path | None, plan: str) -> Iterator[None]:
    """Write to a folder of checkpoints as the only run that does; nothing to do without one.

    Args:
        folder: of the run's checkpoints; made when it is not there.
        plan: the name of the plan that runs, for whoever comes too.

    Raises:
        ValueError: when another run writes there; names it.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = _lock(folder)
    try:
        os.ftruncate(handle, 0)
        host, pid = socket.gethostname(), os.getpid()
        os.pwrite(handle, f"the run of plan {plan!r}, process {pid} on {host}".encode(), 0)
        yield
    finally:
        (folder / LOCK_NAME).unlink(missing_ok=True)
        os.close(handle)


def _lock(folder: Path) -> int:
    """The open and locked file of a folder; not one that its holder removed meanwhile."""
    path = folder / LOCK_NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(handle, 4096, 0).decode(errors="replace") or "another run"
            os.close(handle)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise OSError(
                    error.errno,
                    f"{folder} cannot be locked ({os.strerror(error.errno or 0)}); write "
                    f"checkpoints to a file system that has locks",
                ) from error
            raise ValueError(
                f"{holder} writes checkpoints to {folder} now; wait for it, end it, or write to "
                f"another folder"
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)
