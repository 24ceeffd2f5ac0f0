"""Where the ranks of a run find one another: a private folder on one machine, else torch's store.

A run that is started here names a folder that only its user may enter; nothing listens, and nobody
else writes there. Ranks that torchrun started by hand use its store, which listens on the network:
every key then begins with the run's id, which is to be a secret of theirs (``--rdzv-id``).
"""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

STORE_FOLDER = "STRATAGEM_STORE"
"""The environment variable that names the folder of a run on one machine."""

_WORLDS = count()
"""Numbers the worlds that this process joins, one after the other."""


class WatchStore(Protocol):
    """What ranks tell one another by; errors are `RuntimeError`."""

    def set(self, key: str, value: str) -> None:
        """Keep a value."""

    def check(self, keys: list[str]) -> bool:
        """Whether there is a value for every key."""

    def get(self, key: str) -> bytes:
        """A value that is there."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Values that are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Keep a value if there was none, for an `expected` that is empty."""


class FolderStore:
    """A store of few values as files of a folder that is private to one user.

    Example:
        >>> store = FolderStore(tmp_path / "watch")  # doctest: +SKIP
        >>> store.set("beat", "1"), store.get("beat")  # doctest: +SKIP
        (None, b'1')

    Args:
        folder: of this store alone; made when it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: str) -> None:
        """See `WatchStore.set`."""
        self._write(key, value, always=True)

    def check(self, keys: list[str]) -> bool:
        """See `WatchStore.check`."""
        if not self._folder.is_dir():
            raise RuntimeError(f"the folder {self._folder} of the run is gone")
        return all(self._path(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        """See `WatchStore.get`."""
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            raise RuntimeError(f"the store of the run has no {key!r}: {error}") from error

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """See `WatchStore.multi_get`."""
        return [self.get(key) for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `WatchStore.compare_set`."""
        self._write(key, desired, always=False)
        return self.get(key)

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "-")

    def _write(self, key: str, value: str, *, always: bool) -> None:
        """Write a value whole; only where there is none, unless `always`."""
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".new")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(value)
                if always:
                    os.replace(name, self._path(key))
                elif not self._path(key).exists():
                    os.link(name, self._path(key))
            except FileExistsError:
                pass  # Another rank was first.
            finally:
                Path(name).unlink(missing_ok=True)
        except OSError as error:
            raise RuntimeError(f"the store of the run cannot keep {key!r}: {error}") from error


def watch_store(rank: int, *, connect: float, answer: float) -> WatchStore:
    """What ranks watch one another by, with a connection of its own, which waits for nobody's.

    torchrun keeps the store; without it the first rank does.

    Args:
        rank: of this process.
        connect: seconds in which the store must be reached.
        answer: seconds in which it must answer.

    Raises:
        RuntimeError: when it is not reached.
    """
    name = f"watch-{_attempt()}-{next(_WORLDS)}"
    folder = os.environ.get(STORE_FOLDER)
    if folder is not None:
        return FolderStore(Path(folder, name))
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=rank == 0 and not kept,
        timeout=timedelta(seconds=connect),
        wait_for_workers=False,
        multi_tenant=True,
    )
    store.set_timeout(timedelta(seconds=answer))
    made: WatchStore = dist.PrefixStore(_secret(name), store)  # type: ignore[attr-defined]
    return made


def world_store(timeout: float) -> tuple[Any, int, int]:
    """The store by which the ranks of a world connect, this process's rank and their number.

    Args:
        timeout: seconds that it waits for the other ranks.

    Raises:
        ValueError: when RANK, WORLD_SIZE, MASTER_ADDR or MASTER_PORT is not in the environment.
    """
    from torch.distributed.rendezvous import rendezvous

    name = f"world-{_attempt()}-{next(_WORLDS)}"
    folder = os.environ.get(STORE_FOLDER)
    if folder is None:
        store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        return dist.PrefixStore(_secret(name), store), rank, size  # type: ignore[attr-defined]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(folder, name)), size)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=timeout))
    return store, rank, size


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _secret(name: str) -> str:
    """A prefix of keys that nobody knows who does not know the run's id."""
    return f"stratagem/{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{name}/"
