"""What the first rank concludes from what ranks say, or do not say, of where they are."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from subprocess import Popen
from types import SimpleNamespace

import pytest

from stratagem.executor.running.world import process_rank
from stratagem.executor.watching.judges import Beat, Follower, Judge, Limits
from stratagem.executor.watching.kept_imports import keep_no_more
from stratagem.executor.watching.process_activity import Activity
from stratagem.executor.watching.rank_place import Place, RunPoint


def beats(count: int, *places: RunPoint, done: bool = False) -> dict[int, Beat]:
    return {
        rank: Beat(count, where, "host", 100 + rank, done) for rank, where in enumerate(places)
    }


MOVING = RunPoint(3, "taking the batch", slow=False)
THREE = {0: 3, 1: 3, 2: 3}
"""Periods that each rank may say nothing."""
WAITING = RunPoint(3, "fc sync", 12, waits=True, slow=False)


def test_only_ranks_that_say_nothing_are_silent() -> None:
    judge = Judge(2, Limits())
    for count in range(1, 50):
        assert judge(beats(count, RunPoint(count), MOVING), THREE) is None
    findings = [
        judge({**beats(60 + i, RunPoint(i)), 1: beats(49, MOVING)[0]}, THREE) for i in range(3)
    ]
    assert findings[:2] == [None, None]
    assert findings[2] is not None
    assert findings[2].silent == 1
    assert "rank 1 has been silent" in findings[2].text


def test_a_step_in_which_no_rank_goes_on_is_stuck() -> None:
    for places, words in (
        ((WAITING, MOVING), "rank 1 is at step 3, taking the batch, while the others wait"),
        ((WAITING, WAITING), "rank 0 is at step 3, instruction 12 'fc sync'; rank 1 is at"),
    ):
        judge = Judge(2, Limits(stalled=5))
        findings = [judge(beats(count, *places), THREE) for count in range(1, 8)]
        assert findings[:5] == [None] * 5
        assert findings[5] is not None
        assert words in findings[5].text


def first_finding(judge: Judge, told: Callable[[int], dict[int, Beat]], most: int) -> int | None:
    """The second at which a judge first finds something wrong."""
    return next((count for count in range(1, most) if judge(told(count), THREE) is not None), None)


def test_a_long_instruction_is_given_time() -> None:
    """So many times as long as expected, whatever the ranks that wait for it expect."""
    long = replace(MOVING, doing="fc forward", instruction=3, expected=3.0)
    waiting = replace(WAITING, expected=100.0)
    judge = Judge(2, Limits(stalled=5, patience=4.0))
    assert first_finding(judge, lambda count: beats(count, waiting, long), 60) == 13
    judge = Judge(2, Limits(stalled=5, patience=1.0))
    assert first_finding(judge, lambda count: beats(count, waiting, long), 60) == 6
    judge = Judge(2, Limits(stalled=5, patience=0.1))
    assert first_finding(judge, lambda count: beats(count, waiting, waiting), 60) == 11


BUILDING = RunPoint(-1, "building the model")


def test_what_has_no_expected_time_may_take_as_long_as_it_works() -> None:
    def told(count: int, *, works: bool) -> dict[int, Beat]:
        found = beats(count, WAITING, BUILDING)
        return {**found, 1: replace(found[1], working=works)}

    judge = Judge(2, Limits(stalled=5, preparing=30))
    assert first_finding(judge, lambda count: told(count, works=True), 60) == 31
    judge = Judge(2, Limits(stalled=5, preparing=30))
    assert first_finding(judge, lambda count: told(count, works=count < 9), 60) == 13
    finding = judge(told(99, works=False), THREE)
    assert finding is not None
    assert "rank 1 is at building the model, while the others wait for it" in finding.text


def test_ranks_that_connect_may_be_idle_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for its network, which shows neither as computing nor as reading."""
    watch = SimpleNamespace(place=Place(), guard=nullcontext)

    def fails(backend: str) -> None:
        raise KeyError(backend)

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("stratagem.executor.running.world.Watch", lambda *_: nullcontext(watch))
    monkeypatch.setattr("stratagem.executor.running.world.join", fails)
    with pytest.raises(KeyError, match="nccl"), process_rank(Limits(), backend="nccl"):
        pass
    joining = watch.place.now
    assert str(joining) == "joining the other ranks"
    judge = Judge(2, Limits(stalled=5, preparing=30))
    assert first_finding(judge, lambda count: beats(count, joining, joining), 60) == 31
    judge = Judge(2, Limits(stalled=5, preparing=30))
    assert first_finding(judge, lambda count: beats(count, BUILDING, BUILDING), 60) == 6


def test_a_rank_that_never_comes_is_missed() -> None:
    judge = Judge(3, Limits(stalled=5))
    alone = {0: beats(1, WAITING)[0]}
    findings = [judge({0: replace(alone[0], count=count)}, THREE) for count in range(1, 6)]
    assert findings[:4] == [None] * 4
    assert findings[4] is not None
    assert findings[4].text.startswith("ranks 1, 2 have not joined the run 5 s after rank 0")
    follower = Follower(Limits(stalled=5))
    missed = [follower({}, THREE) for _ in range(5)]
    assert missed[:4] == [None] * 4
    assert missed[4] is not None
    assert missed[4].text.startswith("rank 0 has not joined the run 5 s after others")


@pytest.mark.parametrize("name", ["silent", "stalled", "patience", "preparing"])
def test_limits_are_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be above 0"):
        Limits(**{name: 0.0})


@pytest.mark.skipif(sys.platform != "linux", reason="what a process waits for is not known")
def test_working_is_told_from_waiting() -> None:
    keep_no_more()  # It would be a process that this one has started.
    answers: list[bool] = []

    def ask(activity: Activity, end: threading.Event) -> None:
        activity.is_working()
        end.wait()
        answers.append(activity.is_working())

    def compute() -> None:
        begun = time.process_time()
        while time.process_time() - begun < 0.3:
            pass

    started: list[subprocess.Popen[bytes]] = []

    def compile_something() -> None:
        started.append(Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

    for meanwhile in (compute, lambda: time.sleep(0.5), compile_something):
        end = threading.Event()
        asking = threading.Thread(target=ask, args=(Activity(), end))
        asking.start()
        time.sleep(0.1)
        meanwhile()
        end.set()
        asking.join()
    for each in started:
        each.kill()
        each.wait()
    assert answers == [True, False, True]


def test_what_is_done_is_left_alone() -> None:
    judge = Judge(2, Limits(stalled=5))
    for _ in range(40):
        assert judge(beats(50, MOVING, MOVING, done=True), THREE) is None


def test_the_others_notice_when_the_first_rank_is_gone() -> None:
    follower = Follower(Limits())
    for count in range(1, 20):
        assert follower(beats(count, MOVING), THREE) is None
    findings = [follower(beats(19, MOVING), THREE) for _ in range(5)]
    assert findings[:4] == [None] * 4
    assert findings[4] is not None
    assert "rank 0 has been silent for 5 s" in findings[4].text
    assert follower(beats(19, MOVING, done=True), THREE) is None


def test_what_is_seen_of_a_silent_process_says_how_long_it_may_be() -> None:
    """One that computes may hold Python's lock, one that is stopped goes on no more."""
    limits = Limits()
    seen = {state: limits.quiet(state) for state in ("", "S", "R", "D", "T")}
    assert seen == {"": 10, "S": 10, "R": 600, "D": 600, "T": 4}
    assert Limits(silent=2.0).quiet("T") == 2
    assert Limits(preparing=3.0).quiet("R") == 10
