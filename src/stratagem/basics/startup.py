"""What the program does before it imports anything that takes long."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def prepare() -> None:
    """Let an interrupt end the program at once and quietly, until `heed_interrupts`.

    Example:
        >>> prepare()  # doctest: +SKIP

    Imports can be left at no moment in good order: what a module in C imports turns an interrupt
    into another error. One that the caller has ignored, as shells do for what runs in the
    background, stays ignored. Takes the current folder from the path, too: `python -m` puts it
    first, and a torch.py there would be imported.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def heed_interrupts() -> None:
    """Let an interrupt raise `KeyboardInterrupt` again.

    Example:
        >>> heed_interrupts()
    """
    import signal

    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)
