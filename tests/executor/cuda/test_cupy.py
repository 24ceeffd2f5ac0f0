"""What is asked of CuPy: the calls that it has, and memory that is torch's."""

from __future__ import annotations

import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stratagem.executor.cuda.cupy_kernels import has_cupy
from stratagem.executor.cuda.nccl_calls import DTYPES, OPERATIONS
from stratagem.executor.cuda.torch_memory_for_cupy import use_torch_memory
from tests.support.cuda.fake_nccl import FakeCommunicator, FakeNccl

needs_cupy = pytest.mark.skipif(not has_cupy(), reason="CuPy is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:cupy")


class FakeCupy:
    """CuPy's allocators, with memory that is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.malloc: Any = None
        self.stream = 7
        self.held: dict[int, tuple[int, int, int]] = {}
        self.cuda = SimpleNamespace(
            PythonFunctionAllocator=lambda malloc, free: SimpleNamespace(malloc=(malloc, free)),
            set_allocator=lambda malloc: setattr(self, "malloc", malloc),
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
        )
        monkeypatch.setitem(sys.modules, "cupy", self)
        monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", self.allocate)
        monkeypatch.setattr(torch.cuda, "caching_allocator_delete", self.held.pop)

    def allocate(self, size: int, device: int, stream: int) -> int:
        assert size > 0
        address = 4096 * (len(self.held) + 1)
        self.held[address] = size, device, stream
        return address


def test_cupy_takes_memory_of_torch_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy(monkeypatch)
    use_torch_memory()
    allocate, free = fake.malloc
    address = allocate(100, 1)
    assert fake.held == {address: (100, 1, 7)}
    empty = allocate(0, 1)
    free(empty, 1)
    assert list(fake.held) == [address]
    free(address, 1)
    assert not fake.held


def test_torch_takes_an_address_for_a_stream() -> None:
    alloc = inspect.signature(torch.cuda.caching_allocator_alloc)
    assert list(alloc.parameters) == ["size", "device", "stream"]
    delete = inspect.signature(torch.cuda.caching_allocator_delete)
    assert list(delete.parameters) == ["mem_ptr"]


@needs_cupy
def test_cupy_has_the_names_that_are_used() -> None:
    cupy: Any = pytest.importorskip("cupy")
    for name in ("PythonFunctionAllocator", "set_allocator", "get_current_stream", "Device"):
        assert hasattr(cupy.cuda, name)
    assert hasattr(cupy.cuda.Stream, "from_external")
    assert hasattr(cupy, "RawModule")
    allocator = cupy.cuda.PythonFunctionAllocator(
        lambda size, device: 0, lambda address, device: 0
    )
    assert callable(allocator.malloc)


def test_torch_streams_say_their_address_to_others() -> None:
    assert hasattr(torch.cuda.Stream, "__cuda_stream__")
    assert issubclass(torch.cuda.ExternalStream, torch.cuda.Stream)


@needs_cupy
def test_the_stand_in_for_nccl_takes_what_nccl_takes() -> None:
    nccl: Any = pytest.importorskip("cupy.cuda.nccl")
    for name in (*DTYPES.values(), *OPERATIONS.values(), "groupStart", "groupEnd"):
        assert hasattr(nccl, name)
    assert callable(nccl.get_unique_id)
    for name in ("allReduce", "reduce", "reduceScatter", "allGather", "broadcast", "send", "recv"):
        ours = list(inspect.signature(getattr(FakeCommunicator, name)).parameters)[1:]
        (theirs,) = re.findall(r"\(self, (.*)\)", getattr(nccl.NcclCommunicator, name).__doc__)
        assert len(ours) == len(theirs.split(", ")), f"{name}: {theirs}"
        assert ours[-1] == theirs.split()[-1] == "stream"
        assert [n for n, each in enumerate(ours) if each in ("root", "peer")] == [
            n for n, each in enumerate(theirs.split(", ")) if each.split()[-1] in ("root", "peer")
        ]
    split = nccl.NcclCommunicator.commSplit.__doc__
    assert "int color, int key" in split
    assert list(inspect.signature(FakeCommunicator.commSplit).parameters)[1:] == ["color", "key"]
    for name in ("destroy", "abort", "check_async_error"):
        assert hasattr(nccl.NcclCommunicator, name)
    assert isinstance(FakeNccl.available, type(nccl.available))
