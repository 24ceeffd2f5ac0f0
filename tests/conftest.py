"""What all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile

import pytest
from hypothesis import settings

from tests.support import examples

FOLDER = "STRATAGEM_TEST_FOLDER"

# How long an example takes is the machine's: no property is one of seconds.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Products of numpy and torch are small here, and threads that wait for the next one spin.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))


def pytest_configure(config: pytest.Config) -> None:
    """Hear what a shell has its background deaf to, as would be those processes that tests start.

    Under nohup that is the hang-up, behind an ampersand Ctrl-C and Ctrl-\\.
    """
    examples.begin(config.option.markexpr)
    if FOLDER not in os.environ:  # Processes of xdist have that of the one that started them.
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="stratagem-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage: Python need not look through them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _what_others_keep_is_no_garbage() -> None:
    """Nor is what the files of tests before have cached: who collects looks through their own.

    A rehearsal on a GPU's stand-ins collects before each of its hundred cases; behind searches,
    whose graphs and prices stay, that took most of four minutes.
    """
    gc.collect()
    gc.freeze()
