"""Batches on their way to a GPU: copies beside compute overwrite nothing that a step reads.

Streams are played: each is a list of what it was given, and waits for others up to some entry.
Memory is given out again as soon as nobody holds it, as torch's allocator does within a stream.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stratagem.executor.interpreter.batch_loading import BatchLoader

GPU = torch.device("cuda")


@dataclass(eq=False)
class Event:
    """Behind the first `count` entries of a stream."""

    stream: Stream
    count: int


@dataclass(eq=False)
class Stream:
    """What it was given: the numbers of the blocks that an entry reads or writes, or an event."""

    given: list[tuple[str, Any]] = field(default_factory=list)

    def record_event(self) -> Event:
        return Event(self, len(self.given))

    def wait_event(self, event: Event) -> None:
        self.given.append(("wait", event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def is_behind(self, place: int, other: Stream, entry: int) -> bool:
        """Whether its entry at a place is begun only when an entry of another one is over."""
        if other is self:
            return entry < place
        waits = [each for what, each in self.given[:place] if what == "wait"]
        return any(
            entry < each.count
            if each.stream is other
            else each.stream is not self and each.stream.is_behind(each.count, other, entry)
            for each in waits
        )


class OnGpu:
    """A tensor on the device that is played, in a block of its stream's memory."""

    def __init__(self, machine: Machine, source: int) -> None:
        self.block = machine.take()
        machine.now.given.append(("write", (self.block, source)))
        weakref.finalize(self, machine.free.append, self.block)
        self.device = GPU


class OnHost:
    """A tensor of the host."""

    device = torch.device("cpu")

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.number = machine, number

    def pin_memory(self) -> OnHost:
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> OnGpu:
        assert device == GPU
        assert non_blocking
        return OnGpu(self.machine, self.number)


class Machine:
    """The stream that is current, and blocks of memory that are free."""

    def __init__(self) -> None:
        self.compute, self.beside = Stream(), Stream()
        self.now = self.compute
        self.free: list[int] = []
        self.blocks = 0

    def take(self) -> int:
        gc.collect()
        if self.free:
            return self.free.pop()
        self.blocks += 1
        return self.blocks - 1

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.beside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.now)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    return made


def check(machine: Machine) -> None:
    """Every read sees what was written for it, and no write comes before the reads of before."""
    compute, beside = machine.compute, machine.beside
    reads = [(at, what[1]) for at, what in enumerate(compute.given) if what[0] == "read"]
    writes = [(at, what[1]) for at, what in enumerate(beside.given) if what[0] == "write"]
    for at, (block, source) in reads:
        (mine,) = [place for place, written in writes if written == (block, source)]
        assert compute.is_behind(at, beside, mine)
        for place, (other, _) in writes:
            if other == block and place > mine:
                assert beside.is_behind(place, compute, at)


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("into_places", [False, True])
def test_a_copy_overwrites_nothing_that_is_read(
    machine: Machine, inputs: int, into_places: bool
) -> None:
    """Copies to places that stay read the batch right away, steps while they go on."""
    loader = BatchLoader(GPU)
    held: list[OnGpu] = []
    for step in range(6):
        batch: Any = {f"x{k}": OnHost(machine, inputs * step + k) for k in range(inputs)}
        loaded: Any = loader.load(batch)
        for _ in range(1 if into_places else 3):
            for k in range(inputs):
                read = loaded[f"x{k}"].block, inputs * step + k
                machine.compute.given.append(("read", read))
        held = [] if into_places else list(loaded.values())
        del loaded
    assert len(held) == (0 if into_places else inputs)
    check(machine)
    assert machine.blocks <= 3 * inputs


def test_the_next_batch_is_copied_while_a_step_is_computed(machine: Machine) -> None:
    loader = BatchLoader(GPU)
    for step in range(4):
        batch: Any = {"x": OnHost(machine, step)}
        loader.load(batch)
        machine.compute.given.append(("step", step))
    steps = {what[1]: at for at, what in enumerate(machine.compute.given) if what[0] == "step"}
    copies = [at for at, what in enumerate(machine.beside.given) if what[0] == "write"]
    assert not machine.beside.is_behind(copies[3], machine.compute, steps[2])
    assert machine.beside.is_behind(copies[3], machine.compute, steps[1])


def test_what_is_there_stays_there(machine: Machine) -> None:
    """A step that is recorded reads its inputs where they are, and asks no other stream."""
    there = torch.ones(2, device="meta")
    assert BatchLoader(GPU).load({}) == {}
    assert BatchLoader(torch.device("meta")).load({"x": there})["x"] is there
    assert not machine.compute.given
    assert not machine.beside.given
