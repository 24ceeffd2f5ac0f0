"""One pool of device memory for torch and CuPy.

Each has a pool of its own, which keeps what was freed, and so takes it from the other. All tensors
of a run are torch's; whatever CuPy needs beside them, for a model that makes arrays of CuPy say,
comes from the same pool. While steps are recorded that is memory of the graph, where a pool that
asks the driver for more would break the recording.
"""

from __future__ import annotations

import torch


def use_torch_memory() -> None:
    """Let CuPy allocate what it makes from now on, in this process, by torch's allocator.

    Example:
        >>> use_torch_memory()  # doctest: +SKIP
        >>> array = cupy.zeros(1 << 20)  # doctest: +SKIP
        >>> torch.cuda.memory_allocated()  # doctest: +SKIP
        8388608
    """
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(_allocate, _free).malloc)


def _allocate(size: int, device: int) -> int:
    """The address of memory for CuPy's current stream; 0 for no bytes, as the driver gives."""
    import cupy

    if size == 0:
        return 0
    stream = cupy.cuda.get_current_stream().ptr
    return int(torch.cuda.caching_allocator_alloc(size, device, stream))


def _free(address: int, device: int) -> None:
    if address:
        torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]
