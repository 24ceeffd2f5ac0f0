"""A profile on a machine that is disturbed, interrupted, or has little time."""

from __future__ import annotations

import itertools
import math
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratagem.basics.reference_kernel import ReferenceKernel
from stratagem.calibration.profile_space import Profiled
from stratagem.profiler import (
    Effort,
    MeasuredCosts,
    Measurement,
    Timing,
    TimingCache,
    profile_operators,
)
from stratagem.profiler.cache.timing_keys import PACE_KIND, PaceOf, pace_key
from stratagem.profiler.machine.drift_watch import DriftWatch, throttle_reasons
from stratagem.profiler.timing import operator_timing, session
from stratagem.profiler.timing.operator_timing import count_outliers, time_operator
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.core_pace import OF_PRODUCTS, OVER_A_RUN
from stratagem.simulator.kernel_times.cost_model import Direction, RooflineCosts, elasticity
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator

CPU = Cluster.preset("local-cpu").device_type(0)
STRICT = Effort(max_drift=0.1)
LINEAR = next(o for o in mlp([8, 8], batch=64).operators if o.kind == "linear")


def operators(count: int) -> list[tuple[Operator, dict[str, int]]]:
    """Linear operators of 1, 2, … samples."""
    return [(LINEAR, {**LINEAR.sizes, "sample": n}) for n in range(1, count + 1)]


class FakeMachine:
    """A machine whose operators take `sample` seconds at full speed, on a clock of its own.

    `slowdown` says how many times slower it is at a moment, and `elasticity` how times are said
    to go with that.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        slowdown=lambda moment: 1.0,
        elasticity: float = 0.0,
    ) -> None:
        self.moment = 0.0
        self.slowdown = slowdown
        self.timed: list[int] = []
        machine = self

        class Reference:
            def __init__(self, device: torch.device, clock: object) -> None:
                pass

            def seconds(self) -> float:
                return machine.slowdown(machine.moment)

        monkeypatch.setattr(session, "ReferenceKernel", Reference)
        monkeypatch.setattr(session, "time_operator", self.time)
        monkeypatch.setattr(session, "time", types.SimpleNamespace(monotonic=self.now))
        monkeypatch.setattr(
            session,
            "DriftWatch",
            lambda reference, interval: DriftWatch(reference, interval=0.0, now=self.now),
        )
        monkeypatch.setattr(session, "elasticity", lambda operator: elasticity)

    def now(self) -> float:
        return self.moment

    def time(self, operator: Operator, training, device, *, threads, effort, faster) -> Timing:
        samples = operator.sizes["sample"]
        self.timed.append(samples)
        slower = self.slowdown(self.moment)
        self.moment += samples
        measured = Measurement(samples * slower, 0.0, 5)
        return Timing(measured, measured, num_outliers=1, reference_s=slower)


@pytest.fixture
def cache(tmp_path):
    with TimingCache(tmp_path / "timings.sqlite") as opened:
        yield opened


def times(cache: TimingCache) -> set[float]:
    return {
        entry.measurement.median_s
        for entry in cache.entries()
        if entry.key.operator.kind != PACE_KIND
    }


class TestOutliers:
    @given(st.lists(st.floats(0.99, 1.01), min_size=8, max_size=40), st.integers(0, 3))
    def test_injected_ones_are_counted(self, steady: list[float], injected: int) -> None:
        assert count_outliers([*steady, *[5.0] * injected]) == injected

    def test_equal_times_have_none(self) -> None:
        assert count_outliers([1e-5] * 9) == 0

    def test_a_wide_spread_has_none(self) -> None:
        seconds = 1.0 + 0.2 * np.random.default_rng(0).standard_normal(200)
        assert count_outliers(seconds.tolist()) == 0

    def test_they_are_reported(self, cache, monkeypatch) -> None:
        FakeMachine(monkeypatch)
        assert profile_operators(operators(3), Training(), cache).num_outliers == 3


class TestWatch:
    @given(st.lists(st.floats(1.0, 2.0), min_size=2, max_size=12), st.floats(0.0, 0.5))
    def test_an_operator_lies_between_two_looks(self, speeds: list[float], drift: float) -> None:
        looks = iter(speeds)
        watch = DriftWatch(lambda: next(looks), interval=0.0, now=lambda: 0.0)
        for number in range(len(speeds) - 1):
            watch.timed(str(number))
        expected = [
            str(n)
            for n in range(len(speeds) - 1)
            if max(speeds[n], speeds[n + 1]) / min(speeds) > 1 + drift
        ]
        assert watch.disturbed(drift) == expected

    def test_looks_are_an_interval_apart(self) -> None:
        moment, looks = 0.0, []
        watch = DriftWatch(lambda: looks.append(moment) or 1.0, interval=2.0, now=lambda: moment)
        for _ in range(10):
            moment += 0.7
            watch.timed("operator")
        assert looks == pytest.approx([0.0, 2.1, 4.2, 6.3])

    def test_the_kernel_takes_time(self) -> None:
        assert 0 < ReferenceKernel(torch.device("cpu")).seconds() < 1

    def test_a_core_that_just_slept_is_woken_first(self) -> None:
        """Its first three milliseconds take twice as long, and say nothing of its pace at work."""

        class Clock:
            moment = 0.0

            def now(self) -> float:
                return Clock.moment

            def seconds(self, start: float, stop: float) -> float:
                took = 1e-4 if Clock.moment < 3e-3 else 5e-5
                Clock.moment += took
                return took

        kernel = ReferenceKernel(torch.device("cpu"), Clock())
        assert kernel.seconds() == pytest.approx(5e-5)
        Clock.moment = 0.0
        assert kernel.glance() == pytest.approx(1e-4)  # For cores that were at work.

    def test_a_clock_that_stands_still_ends_nothing(self) -> None:
        class Clock:
            def now(self) -> int:
                return 0

            def seconds(self, start: int, stop: int) -> float:
                return 0.0

        assert ReferenceKernel(torch.device("cpu"), Clock()).seconds() == 0.0

    def test_a_kernel_slowed_on_purpose_is_seen(self) -> None:
        """The same kernel on a clock that runs at half speed for a while."""
        slow = 1.0

        class Clock:
            moment = 0

            def now(self) -> int:
                Clock.moment += 1
                return Clock.moment

            def seconds(self, start: int, stop: int) -> float:
                return (stop - start) * slow

        kernel = ReferenceKernel(torch.device("cpu"), Clock())
        watch = DriftWatch(kernel.seconds, interval=0.0)
        watch.timed("before")
        slow = 2.0
        watch.timed("meanwhile")
        slow = 1.0
        watch.timed("also meanwhile")
        watch.timed("after")
        assert watch.disturbed(0.1) == ["meanwhile", "also meanwhile"]
        assert watch.slowness("meanwhile") == 2.0


class TestDisturbed:
    def test_what_was_disturbed_is_timed_again(self, cache, monkeypatch) -> None:
        machine = FakeMachine(monkeypatch, lambda moment: 1.5 if 1 <= moment < 6 else 1.0)
        report = profile_operators(operators(5), Training(), cache, effort=STRICT)
        assert machine.timed == [1, 2, 3, 4, 5, 1, 2, 3]
        assert times(cache) == {1.0, 2.0, 3.0, 4.0, 5.0}
        assert report.disturbed == ()
        assert report.num_timed == 5

    def test_a_machine_that_was_slow_at_first(self, cache, monkeypatch) -> None:
        FakeMachine(monkeypatch, lambda moment: 3.0 if moment < 2 else 1.0)
        report = profile_operators(operators(4), Training(), cache, effort=STRICT)
        assert times(cache) == {1.0, 2.0, 3.0, 4.0}
        assert report.disturbed == ()

    def test_what_stays_disturbed_is_reported(self, cache, monkeypatch) -> None:
        machine = FakeMachine(monkeypatch, lambda moment: 1.0 if moment < 1 else 1.2)
        report = profile_operators(operators(2), Training(), cache, effort=STRICT)
        assert machine.timed == [1, 2] * 3
        assert [text.split(":")[-1] for text in report.disturbed] == [
            " while the device was 20% slower than at its best"
        ] * 2

    def test_the_worst_comes_first_and_one_warning_tells_of_all(self, cache, monkeypatch) -> None:
        """On a busy machine there was a warning for every operator, 38 for a small model."""
        machine = FakeMachine(monkeypatch)
        machine.slowdown = lambda moment: 1.0 + 0.2 * machine.timed[-1] if machine.timed else 1.0
        report = profile_operators(operators(2), Training(), cache, effort=STRICT)
        slowness = [text.split(" slower")[0].split()[-1] for text in report.disturbed]
        assert slowness == ["40%", "20%"]
        done = Profiled(MeasuredCosts(cache, {}, RooflineCosts()), report, 0, CPU, cache.path)
        (warning,) = done.warnings
        assert "40% slower" in warning
        assert "(of 2, 1 less so); profile again" in warning
        alone = replace(report, disturbed=report.disturbed[:1])
        (warning,) = replace(done, report=alone).warnings
        assert "at its best; profile again" in warning

    def test_a_small_drift_is_none(self, cache, monkeypatch) -> None:
        machine = FakeMachine(monkeypatch, lambda moment: 1.0 + 0.01 * moment)
        assert profile_operators(operators(3), Training(), cache, effort=STRICT).disturbed == ()
        assert machine.timed == [1, 2, 3]

    def test_the_reason_that_nvml_gives(self, monkeypatch) -> None:
        fake = types.SimpleNamespace(
            NVMLError=RuntimeError,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x01 | 0x44,
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        properties = types.SimpleNamespace(uuid="1234")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        found = throttle_reasons(torch.device("cuda"))
        assert found == ("power cap", "hardware thermal limit")
        assert throttle_reasons(torch.device("cpu")) == ()


class TestPace:
    """A machine that is slower now and faster then, as cores that are shared with others are."""

    @staticmethod
    def pace(cache: TimingCache, whose: PaceOf) -> Measurement:
        (environment,) = {entry.key.environment for entry in cache.entries()}
        found = cache.own(pace_key(environment, whose))
        assert found is not None
        return found

    def test_each_run_is_brought_to_one_pace(self, monkeypatch):
        """A core that is slow for every other run: its times are as if it had not been."""
        paces = itertools.cycle((1.0, 2.0, 2.0, 1.0, 1.5))
        now = [1.0]

        class Kernel:
            def __init__(self, device):
                pass

            def seconds(self):
                return 1.0

            def glance(self):
                return now[0]

        def timed(run, clock, evict, *, warm=()):
            now[0] = next(paces)
            return 7.0 * now[0] ** elasticity(LINEAR), run()

        monkeypatch.setattr(operator_timing, "ReferenceKernel", Kernel)
        monkeypatch.setattr(operator_timing, "timed", timed)
        timing = time_operator(
            LINEAR, Training(), effort=Effort(seconds=0.0, min_repeats=3, evict_bytes=0)
        )
        for measured in (timing.forward, timing.backward):
            assert measured.median_s == pytest.approx(7.0)
            assert measured.spread == pytest.approx(0.0, abs=1e-9)
        assert timing.reference_s == 1.0

    def test_times_are_brought_to_that_of_the_whole_profile(self, cache, monkeypatch) -> None:
        """From the second moment on everything takes 1.8 times as long: 1 + 2 at a pace of 1."""
        FakeMachine(monkeypatch, lambda moment: 1.0 if moment < 2 else 1.8, elasticity=1.0)
        profile_operators(operators(6), Training(), cache)
        typical = self.pace(cache, PaceOf.TIMES).median_s
        assert 1.0 < typical < 1.8
        taken = sorted(times(cache))
        assert taken == pytest.approx([typical * n for n in (1, 2, 3, 4, 5, 6)])

    def test_times_that_wait_for_memory_change_less(self, cache, monkeypatch) -> None:
        FakeMachine(monkeypatch, lambda moment: 1.8, elasticity=0.3)
        profile_operators(operators(2), Training(), cache)
        assert sorted(times(cache)) == pytest.approx([1.8, 3.6])

    def test_a_later_profile_keeps_the_pace_of_the_first(self, cache, monkeypatch) -> None:
        machine = FakeMachine(monkeypatch, elasticity=1.0)
        profile_operators(operators(2), Training(), cache)
        machine.slowdown = lambda moment: 1.5
        profile_operators(operators(4), Training(), cache)
        assert sorted(times(cache)) == pytest.approx([1.0, 2.0, 3.0, 4.0])
        assert self.pace(cache, PaceOf.TIMES).median_s == 1.0
        both = self.pace(cache, PaceOf.CORES)
        assert 1.0 < both.median_s < 1.5
        assert both.spread == pytest.approx(0.25 / 1.25, rel=0.2)
        assert both.repeats > 4

    def test_costs_are_at_the_pace_of_all_profiles(self, cache, monkeypatch) -> None:
        """Off by as much as the cores vary, beside what their own repeats show."""
        machine = FakeMachine(monkeypatch, elasticity=OF_PRODUCTS)
        profile_operators(operators(2), Training(), cache)
        machine.slowdown = lambda moment: 1.5
        profile_operators(operators(4), Training(), cache)
        (environment,) = {entry.key.environment for entry in cache.entries()}
        costs = MeasuredCosts(cache, {"cpu": environment}, RooflineCosts())
        pace = costs.pace(CPU)
        assert pace is not None
        (operator, sizes), *_ = operators(1)
        cost = costs.operator_cost(operator, sizes, Direction.FORWARD, Training(), CPU)
        assert cost.seconds == pytest.approx(pace.reference_s**OF_PRODUCTS)
        assert cost.relative_error == pytest.approx(
            math.hypot(0.02, OF_PRODUCTS * OVER_A_RUN * pace.spread)
        )

    def test_an_interrupted_profile_brings_what_it_has(self, cache, monkeypatch) -> None:
        machine = FakeMachine(monkeypatch, lambda moment: 1.0 if moment < 1 else 1.8, 1.0)

        def stop(at: object) -> None:
            if len(machine.timed) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            profile_operators(operators(6), Training(), cache, progress=stop)
        typical = self.pace(cache, PaceOf.TIMES).median_s
        assert sorted(times(cache))[1:] == pytest.approx([typical * 2, typical * 3])


class TestProgress:
    def test_what_is_left_is_what_the_others_take(self, cache, monkeypatch) -> None:
        """Predictions 3 times too short, and efforts that do not count: the ratio corrects it."""
        machine = FakeMachine(monkeypatch)
        monkeypatch.setattr(session, "LEAST_SECONDS", 0.0)
        seen = []
        profile_operators(
            operators(6),
            Training(),
            cache,
            effort=Effort(seconds=0.0),
            predict=lambda operator: operator.sizes["sample"] / 3,
            progress=lambda at: seen.append((at.seconds_left, machine.moment)),
        )
        assert [left for left, _ in seen] == pytest.approx([21 - moment for _, moment in seen])

    def test_cached_operators_take_nothing(self, cache, monkeypatch) -> None:
        FakeMachine(monkeypatch)
        profile_operators(operators(2), Training(), cache)
        seen = []
        profile_operators(operators(3), Training(), cache, progress=seen.append)
        assert [at.seconds_left for at in seen] == [None, None, 0.0]
        assert [at.cached for at in seen] == [True, True, False]

    def test_a_budget_ends_it(self, cache, monkeypatch) -> None:
        FakeMachine(monkeypatch)
        report = profile_operators(operators(5), Training(), cache, seconds=2.5)
        assert report.num_timed == 2
        assert [text.split("sample ")[1].split(",")[0] for text in report.left_out] == list("345")
        assert profile_operators(operators(5), Training(), cache).num_timed == 3

    def test_an_interrupt_says_what_is_kept(self, cache, monkeypatch) -> None:
        FakeMachine(monkeypatch)

        def interrupt(progress) -> None:
            if progress.done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            profile_operators(operators(3), Training(), cache, progress=interrupt)
        (note,) = caught.value.__notes__
        assert note.startswith("interrupted: 2 of 3 operators were timed and are kept in ")
        assert str(cache.path) in note
        assert len(times(cache)) == 2
