"""What all tests share."""

from __future__ import annotations

import gc
import signal


def pytest_configure() -> None:
    """Under nohup processes are born deaf to a hang-up, and so would those be that tests start."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage: Python need not look through them each time."""
    gc.collect()
    gc.freeze()
