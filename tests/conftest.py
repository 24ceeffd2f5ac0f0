"""What all tests share."""

from __future__ import annotations

import gc
import signal

import pytest

from tests.support import examples


def pytest_configure(config: pytest.Config) -> None:
    """Hear what a shell has its background deaf to, as would be those processes that tests start.

    Under nohup that is the hang-up, behind an ampersand Ctrl-C.
    """
    examples.begin(config.option.markexpr)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage: Python need not look through them each time."""
    gc.collect()
    gc.freeze()
