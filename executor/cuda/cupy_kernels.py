"""Compiling and starting the kernels of `cuda_sources` on torch tensors, through CuPy."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import KERNELS, SOURCE
from stratagem.simulator.torch_ops.kernels.library_versions import dotted

THREADS = 256
"""Threads of a block."""

MOST_BLOCKS = 2048
"""Enough to fill any GPU; each thread then works on several elements."""

INSTALL = (
    "pip install 'stratagem[gpu]' (CuPy and NCCL for CUDA 12), or 'stratagem[gpu-cuda13]' where "
    "torch is built for CUDA 13"
)

LEAST_CUPY = 14
"""Major version: older ones have other ids of worlds and no streams of others."""


def has_cupy() -> bool:
    """Whether CuPy is installed; it is not imported to find out."""
    return "cupy" in sys.modules or find_spec("cupy") is not None


def cupy_fault() -> str:
    """Why CuPy cannot work beside torch here, empty if it can; it is imported to find out.

    Example:
        >>> cupy_fault()  # doctest: +SKIP
        'CuPy 13.6.0 is installed, and 14 or newer is needed'
    """
    if not has_cupy():
        return "CuPy is not installed"
    try:
        import cupy
        from cupy.cuda import nccl
    except Exception as error:
        return f"CuPy cannot be imported ({type(error).__name__}: {error})"
    if int(cupy.__version__.split(".")[0]) < LEAST_CUPY:
        return f"CuPy {cupy.__version__} is installed, and {LEAST_CUPY} or newer is needed"
    (major, *_), of_torch = (
        cupy_versions().cuda.split("."),
        (torch.version.cuda or "").split(".")[0],
    )
    if of_torch and major != of_torch:
        return f"CuPy {cupy.__version__} is for CUDA {major}, but torch for CUDA {of_torch}"
    return "" if nccl.available else f"CuPy {cupy.__version__} finds no NCCL"


class CupyVersions(NamedTuple):
    """Versions of CuPy, of the CUDA that it is for, and of the NCCL that it finds, if any."""

    cupy: str
    cuda: str
    nccl: str


def cupy_versions() -> CupyVersions:
    """The versions of what is installed.

    Example:
        >>> cupy_versions()  # doctest: +SKIP
        CupyVersions(cupy='14.0.1', cuda='12.9', nccl='2.27.3')
    """
    import cupy
    from cupy.cuda import nccl

    cuda = int(cupy.cuda.runtime.runtimeGetVersion())
    found = dotted(int(nccl.get_version())) if nccl.available else ""
    return CupyVersions(cupy.__version__, f"{cuda // 1000}.{cuda % 1000 // 10}", found)


def check_gpu(what: str) -> None:
    """Refuse what needs CUDA, CuPy and NCCL where one of them is missing or does not fit.

    Raises:
        RuntimeError: names what is missing, and the remedy.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{what} needs a CUDA device, and torch {torch.__version__} finds none; use a machine "
            f"with one and a CUDA build of torch, or backend 'local' or 'gloo'"
        )
    fault = cupy_fault()
    if fault:
        raise RuntimeError(
            f"{what} needs CuPy {LEAST_CUPY} or newer with NCCL, for the CUDA of torch: {fault}; "
            f"{INSTALL}; or use backend 'gloo' to train on CPUs"
        )


def compile_kernels() -> None:
    """Compile all kernels for the device that is current, as a first step would.

    Raises:
        Exception: what CuPy raises where the compiler is missing or does not fit.
    """
    made = _compiled()
    for name in KERNELS:
        made.get_function(name)


def _compiled() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE, options=("--std=c++17",))


@lru_cache(maxsize=1)
def _module() -> Any:
    return _compiled()


@lru_cache(maxsize=64)
def _kernel(name: str, device: int) -> Any:
    """A kernel, loaded on the device that is current."""
    return _module().get_function(name)


@lru_cache(maxsize=256)
def _stream(device: int, address: int) -> Any:
    """torch's current stream as CuPy's, which holds no more than where it is."""
    import cupy

    return cupy.cuda.Stream.from_external(torch.cuda.current_stream())


class StructArgument(NamedTuple):
    """An argument that a kernel gets by value: a struct of bytes, with addresses of `tensors`."""

    packed: NDArray[Any]
    tensors: tuple[Tensor, ...]


def start(name: str, num_threads: int, *arguments: Any, most_blocks: int = MOST_BLOCKS) -> None:
    """Start a kernel on torch's current stream; tensors are passed by their addresses.

    Args:
        num_threads: how many elements there are to work on, one a thread.
        arguments: tensors, None for a null pointer, tables, which are passed by value, and NumPy
            scalars of the kernel's own types.
        most_blocks: how many blocks share the work at most.
    """
    import cupy

    device = torch.cuda.current_device()
    blocks = max(1, min(most_blocks, -(-num_threads // THREADS)))
    stream = _stream(device, torch.cuda.current_stream().cuda_stream)
    given = tuple(map(_passed, arguments))
    with cupy.cuda.Device(device), stream:  # One of its own: it knows the device before.
        _kernel(name, device)((blocks,), (THREADS,), given)


def _passed(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    if isinstance(argument, StructArgument):
        return argument.packed
    return np.uint64(0) if argument is None else argument
