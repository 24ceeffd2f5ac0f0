"""Kernels that stay Python: import this before any of them, in a process of its own.

Nothing is compiled then, so that a few hundred moves take a second where numba takes most of a
minute to compile them with checks. Arrays of numpy refuse indices beyond their ends; those here
refuse indices that count from the end, too, which compiled kernels do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stratagem.simulator.base import compiling


def uncompiled(**options: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What `numba.njit` is here: the function as it is, with the name for what it was made of."""

    def same(function: Callable[..., Any]) -> Callable[..., Any]:
        function.py_func = function  # type: ignore[attr-defined]
        return function

    return same


vars(compiling).update(njit=uncompiled)


class FrontArray(np.ndarray[Any, Any]):
    """An array whose indices count from its front, as do all parts of it."""

    def __getitem__(self, index: Any) -> Any:
        refuse_negative(index)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse_negative(index)
        super().__setitem__(index, value)


class FrontRecords(FrontArray, np.recarray[Any, Any]):
    """The same of records."""


def refuse_negative(index: Any) -> None:
    """An `IndexError` for whole numbers below zero."""
    for each in index if isinstance(index, tuple) else (index,):
        if isinstance(each, int | np.integer) and each < 0:
            raise IndexError(f"index {index} counts from the end")


def checked(value: Any) -> Any:
    """A value, or tuples of them, with the same memory in arrays that check."""
    if isinstance(value, np.ndarray):
        return value.view(FrontRecords if value.dtype.names else FrontArray)
    if isinstance(value, tuple):
        parts = map(checked, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
