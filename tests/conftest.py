"""What all tests share."""

from __future__ import annotations

import gc
import signal


def pytest_configure() -> None:
    """Hear what a shell has its background deaf to, as would be those processes that tests start.

    Under nohup that is the hang-up, behind an ampersand Ctrl-C.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage: Python need not look through them each time."""
    gc.collect()
    gc.freeze()
