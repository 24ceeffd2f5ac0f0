"""A run's own folder, and the process that keeps it: both end with the caller, however it ends."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from stratagem.executor.watching import keeper
from stratagem.executor.watching.kept_imports import BeginKeeper, spawned_keeper

LOOK_SECONDS = 0.25
"""How often a run is looked at."""

END_SECONDS = keeper.STOP_SECONDS + 10.0
"""How long the keeper gets to end what it keeps."""


class Scratch:
    """A folder that only this user may enter, as a context, with processes that end with it.

    Example:
        >>> with Scratch() as scratch:
        ...     code = scratch.run(["true"], log=scratch.folder / "log")
        >>> code, scratch.folder.exists()
        (0, False)

    Attributes:
        folder: the folder; it and all processes of `run` are gone at the end of the context, and
            also when this process is killed.

    Args:
        begin: begins the process that keeps them.
    """

    def __init__(self, begin: BeginKeeper = spawned_keeper) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stratagem-"))
        try:
            self._keeper = begin(self.folder)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._tell(keeper.END)
        with suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()
        end = time.monotonic() + END_SECONDS
        while self.folder.exists() and time.monotonic() < end:
            # What the keeper did not end, as it was killed, may write for a moment still.
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(0.0 if not self.folder.exists() else LOOK_SECONDS)

    def run(
        self,
        command: Sequence[str],
        *,
        log: Path,
        folder: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        look: Callable[[], bool] | None = None,
    ) -> int | None:
        """Run a command to its end, and then whatever it has left running.

        Args:
            command: and its arguments.
            log: file for what it says.
            folder: where it runs; the current directory by default.
            environment: of the command; that of this process by default.
            timeout: seconds until it is stopped; None waits to the end.
            look: is called now and then; the command is stopped when it says so by True.

        Returns:
            The exit code; None when it took longer than `timeout`.

        Raises:
            RuntimeError: when the process that keeps the run has been killed.
        """
        order = {
            "command": list(command),
            "log": str(log),
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        self._tell(f"{json.dumps(order)}\n".encode())
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._answers(min(LOOK_SECONDS, max(0.0, until - time.monotonic()))):
            late = time.monotonic() >= until
            if late or (look is not None and look()):
                self._tell(keeper.STOP)
                code = self._code()
                return None if late else code
        return self._code()

    def _tell(self, line: bytes) -> None:
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.write(line)
            self._keeper.stdin.flush()

    def _answers(self, seconds: float) -> bool:
        assert self._keeper.stdout is not None
        return keeper.can_be_read(self._keeper.stdout, seconds)

    def _code(self) -> int:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            code = self._keeper.wait()
            told = "" if code is None else f" (exit code {code})"
            raise RuntimeError(
                f"the process that keeps the run was ended by another one{told}, and the run with "
                f"it; run again"
            )
        return int(line)
