"""The memory that kernels on a CPU get, and give back."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep what its tensors free, for the tensors that it makes next.

    A training step frees all that it made. glibc gives large pieces back to the system at once,
    and every page of them has to be mapped and cleared anew in the next step, which took 5 to 15 %
    of the steps of small models. Threads that begin later share one heap, since those of threads
    are given back too. Tensors above 32 MiB still are: glibc allows no more, and where it maps
    none at all, what is freed fits the next tensors badly and processes take twice the memory.
    Does nothing under another C library, and nothing to memory of a GPU.

    Example:
        >>> keep_freed_memory()
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_TRIM_THRESHOLD, _NEVER)
        set_option(_ARENA_MAX, 1)
