"""Hugging Face transformers, where they are installed."""

from __future__ import annotations

from typing import Any


def load() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "this example needs Hugging Face transformers; pip install stratagem[zoo]"
        ) from error
    return transformers
