"""Compiling and starting the kernels of `gpu.sources` on torch tensors, through CuPy."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stratagem.executor.gpu.sources import SOURCE

THREADS = 256
"""Threads of a block."""

MOST_BLOCKS = 2048
"""Enough to fill any GPU; each thread then works on several elements."""

INSTALL = (
    "pip install 'stratagem[gpu]' (CuPy and NCCL for CUDA 12), or 'stratagem[gpu-cuda13]' where "
    "torch is built for CUDA 13"
)


@lru_cache(maxsize=1)
def has_cupy() -> bool:
    """Whether CuPy is installed; it is not imported to find out."""
    return find_spec("cupy") is not None


def check_gpu(what: str) -> None:
    """Refuse what needs CUDA and CuPy where one of them is missing.

    Raises:
        RuntimeError: names what is missing, and the remedy.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{what} needs a CUDA device, and torch {torch.__version__} finds none; use a machine "
            f"with one and a CUDA build of torch, or backend 'local' or 'gloo'"
        )
    if not has_cupy():
        raise RuntimeError(f"{what} needs CuPy, which is not installed: {INSTALL}")


@lru_cache(maxsize=1)
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE, options=("--std=c++17",))


@lru_cache(maxsize=64)
def _kernel(name: str, device: int) -> Any:
    """A kernel, loaded on the device that is current."""
    return _module().get_function(name)


def start(name: str, num_threads: int, *arguments: Any) -> None:
    """Start a kernel on torch's current stream; tensors are passed by their addresses.

    Args:
        num_threads: how many elements there are to work on, one a thread.
        arguments: tensors, None for a null pointer, and NumPy scalars of the kernel's own types.
    """
    import cupy

    device = torch.cuda.current_device()
    blocks = max(1, min(MOST_BLOCKS, -(-num_threads // THREADS)))
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    with cupy.cuda.Device(device), stream:
        _kernel(name, device)((blocks,), (THREADS,), tuple(map(_passed, arguments)))


def _passed(argument: Any) -> Any:
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.data_ptr()) if isinstance(argument, Tensor) else argument
