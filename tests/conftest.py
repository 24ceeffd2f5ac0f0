"""What all tests share."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Torch and thousands of tests are no garbage: Python need not look through them each time."""
    gc.collect()
    gc.freeze()
