"""Ranks that are threads with a stream each: what they take, they wait for."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.models import SmallGPT
from stratagem.executor.backends import threads
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.cuda.event_clock import EventClock
from stratagem.executor.cuda.streams import CudaStreams
from tests.support.cuda.fake_nccl import FakeStreams
from tests.support.plans import assert_equal_to_torch, make_case, make_plan, megatron


@pytest.mark.parametrize("cupy", [False, True])
def test_what_others_wait_for_goes_first(monkeypatch: pytest.MonkeyPatch, cupy: bool) -> None:
    """A collective of a few places for kernels need not wait until a matrix product is over."""
    made: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    def stream(*device: torch.device, priority: int, non_blocking: bool = True) -> Any:
        made.append(priority)
        return SimpleNamespace(ptr=len(made))

    fake = SimpleNamespace(cuda=SimpleNamespace(Device=Device, Stream=stream))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: address)
    streams = CudaStreams(torch.device("cuda", 0), cupy=cupy)
    streams.new()
    compute, aside = made
    assert aside < compute == 0


class LoggedStreams(FakeStreams):
    """Remembers which events a thread recorded and waited for."""

    def __init__(self, log: list[tuple[str, int, int]], number: int) -> None:
        self.log, self.number = log, number
        self.compute = f"compute {number}"
        self.count = 0

    def record(self, stream: str) -> Any:
        self.count += 1
        event = self.number * 10**9 + self.count
        self.log.append(("record", self.number, event))
        return event

    def wait(self, stream: str, event: int) -> None:
        assert stream == self.compute
        self.log.append(("wait", self.number, event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every thread gets streams; the log of their events."""
    found: list[tuple[str, int, int]] = []
    numbers = iter(range(1, 100))
    lock = threading.Lock()

    def streams(device: torch.device) -> LoggedStreams:
        with lock:
            return LoggedStreams(found, next(numbers))

    monkeypatch.setattr(threads, "_streams", streams)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    return found


def test_a_collective_waits_for_all_that_is_given_and_for_the_result(
    log: list[tuple[str, int, int]],
) -> None:
    def rank(comm: Communicator) -> float:
        assert isinstance(comm.clock, EventClock)
        return comm.all_reduce(torch.ones(1) * comm.rank, (0, 1, 2)).item()

    assert run_local(3, rank) == [3.0] * 3
    recorded = {event for what, _, event in log if what == "record"}
    waits = [(by, event) for what, by, event in log if what == "wait"]
    assert {event for _, event in waits} <= recorded
    by_thread = {by: [e for b, e in waits if b == by] for by, _ in waits}
    last = max(by_thread, key=lambda by: len(by_thread[by]))
    assert sorted(map(len, by_thread.values())) == [1, 1, 4]
    result = by_thread[last][-1]
    assert all(events[-1] == result for events in by_thread.values())
    assert {event // 10**9 for event in by_thread[last][:3]} == set(by_thread)


def test_a_message_is_waited_for(log: list[tuple[str, int, int]]) -> None:
    def rank(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send(torch.ones(2), 1)
        else:
            comm.recv((2,), torch.float32, 0)

    run_local(2, rank)
    (recorded,) = [event for what, _, event in log if what == "record"]
    (waited,) = [event for what, _, event in log if what == "wait"]
    assert recorded == waited


def test_plans_run_so_equal_torch(log: list[tuple[str, int, int]]) -> None:
    torch.manual_seed(0)
    model = SmallGPT(num_layers=1, hidden=16, num_heads=2, vocabulary=30, sequence=6)
    labels = torch.randint(0, 30, (4, 6))
    case = make_case(model, input_ids=torch.randint(0, 30, (4, 6)), labels=labels)
    assert_equal_to_torch(case, make_plan(case, megatron, (2,), (1,), num_microbatches=2))
    assert any(what == "wait" for what, _, _ in log)


def test_the_host_sleeps_where_it_waits_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that spins would count as working, so that nobody would see that a device hangs."""
    made: list[dict[str, bool]] = []

    def event(**options: bool) -> SimpleNamespace:
        made.append(options)
        return SimpleNamespace(record=lambda stream: None)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    streams = CudaStreams(torch.device("cuda", 0), cupy=False)
    streams.record(streams.compute)
    with EventClock(streams).untimed():
        streams.record(streams.compute)
    assert made == [
        {"enable_timing": True, "blocking": True},
        {"enable_timing": False, "blocking": True},
    ]
