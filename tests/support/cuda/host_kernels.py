"""The CUDA kernels on the host: compiled as C, and started as `cupy_kernels.start` starts them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from stratagem.executor.cuda.cuda_sources import SOURCE
from stratagem.executor.cuda.cupy_kernels import StructArgument
from stratagem.executor.cuda.dropout_words import DeviceWords
from stratagem.executor.cuda.fused_losses import FusedLosses
from stratagem.executor.optimizers.fused_optimizers import FusedAdam, FusedSGD
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels

OPTIONS = ("-O1", "-std=c11", "-Wall", "-Werror", "-ffp-contract=off", "-fPIC", "-shared")
KINDS: dict[type, Any] = {
    np.float64: ctypes.c_double,
    np.int32: ctypes.c_int32,
    np.uint32: ctypes.c_uint32,
    np.int64: ctypes.c_int64,
}


@lru_cache(maxsize=1)
def host_kernels() -> ctypes.CDLL:
    """The kernels as functions of the host, where a loop stands for the threads."""
    return compiled(SOURCE, "kernels.c", ("cc", "gcc"), OPTIONS)


def compiled(
    text: str, name: str, compilers: Sequence[str], options: Sequence[str]
) -> ctypes.CDLL:
    """A source as a library of the host, by the first of some compilers that is there.

    Raises:
        RuntimeError: what the compiler says where it fails.
    """
    compiler = next(filter(None, map(shutil.which, compilers)), None)
    if compiler is None:
        pytest.skip(f"no {' or '.join(compilers)}")
    folder = Path(mkdtemp(prefix="stratagem-kernels-"))
    try:
        source, library = folder / name, folder / "library.so"
        source.write_text(text)
        command = [compiler, *options, str(source), "-o", str(library), "-lm"]
        made = subprocess.run(command, check=False, capture_output=True, text=True)
        if made.returncode:
            raise RuntimeError(made.stderr)
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)


def start_on_host(name: str, num_threads: int, *arguments: Any, most_blocks: int = 1) -> None:
    """What `cupy_kernels.start` does, on the host."""
    getattr(host_kernels(), name)(*map(passed, arguments))


def passed(argument: Any) -> Any:
    """A tensor by its address, None as a null pointer, a NumPy scalar by its own type, and a
    table as a struct of its bytes."""
    if isinstance(argument, StructArgument):
        return struct_of(argument.packed.nbytes).from_buffer_copy(argument.packed.tobytes())
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return KINDS[type(argument)](argument)


@lru_cache(maxsize=8)
def struct_of(nbytes: int) -> type[ctypes.Structure]:
    """A struct of so many bytes, aligned as pointers are."""
    words = ctypes.c_uint64 * (nbytes // 8)
    return type("Struct", (ctypes.Structure,), {"_fields_": [("words", words)]})


@contextmanager
def kernels_on_the_host(start: Callable[..., None] = start_on_host) -> Iterator[None]:
    """Let ranks on CPUs have a GPU's optimizers, words and losses, whose kernels `start` runs."""

    def optimizer(training: Training, device: torch.device | None = None) -> FusedSGD:
        adam = training.optimizer == "adam"
        return FusedAdam(training) if adam else FusedSGD(training)

    def faster(device: torch.device) -> FasterKernels:
        return FasterKernels(DeviceWords(device), FusedLosses())

    replaced = {
        "executor.interpreter.interpreter.make_optimizer": optimizer,
        "executor.interpreter.interpreter.faster_on": faster,
        "executor.optimizers.fused_optimizers.start": start,
        "executor.cuda.dropout_words.start": start,
        "executor.cuda.fused_losses.start": start,
    }
    with ExitStack() as stack:
        for name, instead in replaced.items():
            stack.enter_context(patch(f"stratagem.{name}", instead))
        yield
