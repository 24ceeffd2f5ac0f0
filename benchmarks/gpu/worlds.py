"""Worlds of ranks for the stages: on GPUs over NCCL, in a rehearsal on what stands in for both."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from shutil import which
from typing import TypeVar

import torch

from benchmarks.gpu.setting import Figures, Setting, SkippedError
from stratagem.executor.backends.nccl import NcclCommunicator, join_nccl
from stratagem.executor.backends.rank_stores import STORE_FOLDER
from stratagem.executor.running.launch import run_ranks

T = TypeVar("T")


def alone(setting: Setting, rank: Callable[[NcclCommunicator], T]) -> T:
    """What the only rank of a world of NCCL gives, in this process.

    Example:
        >>> alone(Setting(Path("out")), lambda comm: comm.world_size)  # doctest: +SKIP
        1
    """
    if setting.rehearse:
        return played(1, rank)[0]
    with _environment():
        comm = join_nccl()
        try:
            with comm.working():
                found = rank(comm)
                comm.close()
        except BaseException:
            comm.leave()
            raise
    return found


def played(size: int, rank: Callable[[NcclCommunicator], T]) -> list[T]:
    """What threads give that play ranks over NCCL, recorded graphs among what they play."""
    from tests.support.cuda.fake_graphs import recording
    from tests.support.cuda.fake_nccl import run_fake

    with stand_ins():
        return run_fake(size, rank, recording)


@contextmanager
def stand_ins() -> Iterator[None]:
    """The kernels of a GPU on the host, compiled as C.

    Raises:
        SkippedError: where there is no C compiler.
    """
    from tests.support.cuda.fake_graphs import start
    from tests.support.cuda.host_kernels import kernels_on_the_host

    if not (which("cc") or which("gcc")):
        raise SkippedError("a rehearsal needs a C compiler: cc or gcc")
    with kernels_on_the_host(start):
        yield


def kernels(setting: Setting) -> AbstractContextManager[None]:
    """A context in which our kernels can be started: on the GPU, or on what stands in for it."""
    if setting.rehearse:
        return stand_ins()
    setting.need("cupy")
    return nullcontext()


@contextmanager
def _environment() -> Iterator[None]:
    """What a world of one rank needs: it finds itself in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", STORE_FOLDER: folder}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def wait_for_device(setting: Setting) -> None:
    """Let the host wait until the device has done all that it was given."""
    if not setting.rehearse:
        torch.cuda.synchronize()


def seconds_of(setting: Setting, run: Callable[[], object], repeats: int) -> float:
    """Mean seconds of a call among `repeats` that follow one another, the host not waiting."""
    wait_for_device(setting)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    wait_for_device(setting)
    return (time.perf_counter() - start) / repeats


def free_bytes(setting: Setting) -> int:
    """Memory of the device that nobody has; of a rehearsal, minus what this process has."""
    if setting.rehearse:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return -pages * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def on_ranks(setting: Setting, count: int, stage: str, case: str) -> Figures:
    """What `rank_of` of a stage makes every rank do in a world of several GPUs, of rank 0.

    Raises:
        SkippedError: where there are fewer GPUs.
    """
    if setting.rehearse:
        rank = import_module(f"benchmarks.gpu.stages.{stage}").rank_of(setting, case)
        found: Figures = played(count, rank)[0]
        return found
    setting.need_gpus(count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        run_ranks(
            ["benchmarks.gpu.rank", stage, case, str(setting.out), str(path)], count, timeout=200
        )
        figures: Figures = json.loads(path.read_text("utf-8"))
    return figures
