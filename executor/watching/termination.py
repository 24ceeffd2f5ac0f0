"""SIGTERM, seen by a thread while the main thread is inside a collective.

Python runs signal handlers in the main thread between two of its own instructions, which a
collective that waits for a lost rank never reaches. The wake-up socket is written to at once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class TerminationSignal:
    """SIGTERM, seen by a thread while the main thread is inside a collective."""

    _current: TerminationSignal | None = None

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._caught = False

    def catch(self) -> None:
        """Begin, where Python lets us: in the main thread."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
            signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            self._caught = True
            TerminationSignal._current = self

    def wait(self, seconds: float) -> bool:
        """Whether SIGTERM comes within some seconds."""
        if not select.select([self._ours], [], [], seconds)[0]:
            return False
        return signal.SIGTERM in self._ours.recv(64)

    def release(self) -> None:
        """Leave signals as they were."""
        if self._caught:
            self._caught, TerminationSignal._current = False, None
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._ours.close()
        self._theirs.close()

    @classmethod
    def forget(cls) -> None:
        """Let a forked process, such as a worker of a DataLoader, end by SIGTERM as usual."""
        if cls._current is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            cls._current = None


os.register_at_fork(after_in_child=TerminationSignal.forget)
