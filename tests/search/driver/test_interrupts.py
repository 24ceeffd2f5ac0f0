"""Ctrl-C at any moment of a search: the first gives the best plan by then, a second one ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import stratagem as sg
from stratagem.searcher.driver import search as searching
from stratagem.searcher.driver.budget import StopReason
from stratagem.searcher.driver.incumbent import SearchProgress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.processes import interrupts as hearing
from stratagem.searcher.processes.interrupts import Interrupts
from stratagem.searcher.processes.search_clock import SearchClock
from tests.search.search_words import in_records
from tests.support.plans import few, slowly

GRAPH = sg.models.gpt(num_layers=1, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)
PAIR = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def press_in_vain() -> None:
    """Ctrl-C where an interrupt that is raised is lost, as in a function that frees an object."""
    try:
        press()
    except KeyboardInterrupt:
        return


def found(**changed: Any) -> SearchResult:
    arguments = {
        "budget": sg.Budget(100),
        "bounded": 2,
        "baselines": (),
        "progress": False,
        **changed,
    }
    return sg.search(GRAPH, PAIR, **in_records(arguments))


def when(phase: str, act: Callable[[], None]) -> Callable[[SearchProgress], None]:
    """Does something the first time that a search is in a phase."""
    done = False

    def told(progress: SearchProgress) -> None:
        nonlocal done
        if progress.phase.startswith(phase) and not done:
            done = True
            act()

    return told


class TestInterrupts:
    def test_one_is_kept_until_it_may_raise(self) -> None:
        with Interrupts().heard() as interrupts:
            press()
            assert (interrupts.count, interrupts.is_pending) == (1, True)
            with pytest.raises(KeyboardInterrupt):
                interrupts.release()
            interrupts.taken()
            interrupts.check()

    def test_one_raises_where_it_may_and_is_known_where_that_is_lost(self) -> None:
        with Interrupts().heard() as interrupts:
            interrupts.release()
            press_in_vain()
            with pytest.raises(KeyboardInterrupt):
                SearchClock(interrupts=interrupts).check()

    def test_a_second_one_always_raises(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hearing, "TWICE", 0.0)
        with Interrupts().heard() as interrupts:
            press()
            with pytest.raises(KeyboardInterrupt):
                press()
            with pytest.raises(KeyboardInterrupt):
                interrupts.taken()

    def test_the_same_one_twice_is_one(self) -> None:
        """What runs a program hands on the Ctrl-C that the program had from the terminal."""
        with Interrupts().heard() as interrupts:
            press()
            press()
            interrupts.taken()
            assert interrupts.count == 1

    @pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
    def test_what_is_ignored_or_left_to_the_system_stays_so(self, kind: signal.Handlers) -> None:
        signal.signal(signal.SIGINT, kind)
        with Interrupts().heard():
            assert signal.getsignal(signal.SIGINT) is kind
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def test_another_thread_hears_nothing(self) -> None:
        handlers = []

        def hear() -> None:
            with Interrupts().heard():
                handlers.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=hear)
        thread.start()
        thread.join()
        assert handlers == [signal.default_int_handler]


@pytest.mark.parametrize(
    "where",
    [
        "asked_and_others",
        *slowly("_simplest", "_named", "drawn_steps"),
    ],
)
def test_where_nothing_may_be_raised(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the search proper it raised; after it, it threw the plan found away."""
    own = getattr(searching, where)

    def pressed(*arguments: Any, **named: Any) -> Any:
        press()
        return own(*arguments, **named)

    monkeypatch.setattr(searching, where, pressed)
    result = found()
    assert result.simulation.fits
    assert (result.stop_reason is StopReason.INTERRUPTED) == (
        where in ("asked_and_others", "_simplest")
    )
    assert result.robustness is None
    assert "interrupted" in result.notes["errors of prices"]
    assert result.exports is None


@pytest.mark.parametrize("phase", ["simulating baselines", "bounding", "searching"])
def test_one_that_is_lost_where_it_strikes_ends_the_search(phase: str) -> None:
    result = found(progress=when(phase, press_in_vain))
    assert result.stop_reason is StopReason.INTERRUPTED
    assert result.simulation.fits


@pytest.mark.slow
def test_one_that_becomes_another_error_ends_the_search() -> None:
    def fail() -> None:
        press_in_vain()
        raise SystemError("returned a result with an exception set")

    assert found(progress=when("searching", fail)).stop_reason is StopReason.INTERRUPTED

    def divide() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        found(progress=when("searching", divide))


@pytest.mark.slow
def test_a_second_one_ends_it_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "TWICE", 0.0)

    def twice() -> None:
        press_in_vain()
        press()

    with pytest.raises(KeyboardInterrupt):
        found(progress=when("searching", twice))


@pytest.mark.slow
def test_what_was_proved_by_then_is_said() -> None:
    """The bound that was shown to whoever watched was thrown away."""
    shown: list[float] = []

    def told(progress: SearchProgress) -> None:
        shown.append(progress.bound)
        if progress.phase.startswith("searching"):
            press()

    result = found(progress=told)
    assert result.bound is not None
    assert 0 < max(shown) <= result.bound <= result.simulation.step_time
    assert "no bound" not in result.certificate


@pytest.fixture(scope="module")
def whole() -> float:
    """Seconds that a search takes which nobody interrupts."""
    begun = time.monotonic()
    found()
    return time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("moment", few(range(10), 4))
def test_at_a_random_moment(moment: int, whole: float) -> None:
    share = random.Random(moment).random()
    timer = threading.Timer(share * whole, os.kill, (os.getpid(), signal.SIGINT))
    result = None
    try:
        timer.start()
        result = found()
        timer.cancel()
        timer.join()
    except KeyboardInterrupt:  # Pressed when the search was over, for which it can do nothing.
        assert result is not None
    assert result is not None
    assert result.simulation.fits


SCRIPT = """
import stratagem as sg
graph = sg.models.gpt(
    num_layers=1, hidden=256, num_heads=8, vocabulary=512, sequence=64, batch=32
)
cluster = sg.Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=2)
def show(where):
    print(where.phase, flush=True)
shared = sg.SearchEffort(shared_operators=1)
budget = sg.Budget(10**9, threads=2, bounded=2, effort=shared)
result = sg.search(
    graph, cluster, budget=budget, progress=show
)
print(result.stop_reason.name, result.simulation.fits, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["simulating", "refining"])
def test_of_two_processes_as_a_terminal_sends_it(phase: str) -> None:
    """To all processes of the group; models of 100 operators and more have others help."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            lines.append(line.strip())
            if line.startswith(phase):
                os.killpg(running.pid, signal.SIGINT)
                phase = "never"
    assert running.returncode == 0
    assert lines[-1] == "INTERRUPTED True"
