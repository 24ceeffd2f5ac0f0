"""Collectives are timed, and links fitted to their times."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from stratagem.calibration import executor_measurements
from stratagem.calibration.executor_measurements import measure_links
from stratagem.executor.backends.threads import run_local
from stratagem.profiler import (
    CollectiveTiming,
    fit_collectives,
    fit_link,
    time_collectives,
)
from stratagem.profiler.timing import collective_timing
from stratagem.profiler.timing.collective_timing import KINDS, LATER_SIZES, MESSAGE_ROUNDS, ROUNDS
from stratagem.simulator.hardware.cluster import Link
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import axis_link
from tests.support.brief_timing import collectives_timed_once


class TestLinks:
    @pytest.mark.parametrize("latency_us", [0.0, 3.0, 150.0])
    @pytest.mark.parametrize("bandwidth_gb_s", [0.5, 25.0, 300.0])
    @pytest.mark.parametrize("size", [2, 8])
    def test_a_fit_recovers_the_link(self, latency_us, bandwidth_gb_s, size):
        link = axis_link(Link("wire", bandwidth_gb_s, latency_us), False, 1)
        timings = [
            CollectiveTiming(kind, n, size, collective_time(kind, n, size, link))
            for kind in KINDS
            for n in (2**12, 2**20, 2**28)
        ]
        fitted = fit_link(timings, "wire", shares_compute=True)
        assert fitted.shares_compute
        (groups,) = fitted.by_group_size
        assert groups.size == size
        kinds = fit_collectives(timings)
        assert {(fit.kind, fit.size) for fit in kinds} == {(kind, size) for kind in KINDS}
        for found in (fitted, groups, *kinds):
            assert found.bandwidth_gb_s == pytest.approx(bandwidth_gb_s, rel=0.02)
            assert found.latency_us == pytest.approx(latency_us, rel=0.01, abs=1e-3)

    def test_messages_and_collectives_have_figures_of_their_own(self):
        true = {
            Collective.SEND: Link("wire", 3.0, 40.0),
            Collective.ALL_REDUCE: Link("", 2.0, 9.0),
        }
        timings = [
            CollectiveTiming(kind, n, 2, collective_time(kind, n, 2, axis_link(link, False, 1)))
            for kind, link in true.items()
            for n in (2**12, 2**18, 2**24)
        ]
        fitted = fit_link(timings, "wire")
        assert (fitted.bandwidth_gb_s, fitted.latency_us) == pytest.approx((3.0, 40.0), rel=1e-3)
        (pairs,) = fitted.by_group_size
        assert (pairs.bandwidth_gb_s, pairs.latency_us) == pytest.approx((2.0, 9.0), rel=1e-3)
        message, reduced = sorted(fit_collectives(timings), key=lambda fit: -fit.latency_us)
        assert (message.kind, reduced.kind) == (Collective.SEND, Collective.ALL_REDUCE)
        assert message.error == pytest.approx(0, abs=1e-6)

    def test_a_fit_averages_noise(self):
        """Factors up and down alike: a fit in logarithms, so of relative errors, is unmoved."""
        link = axis_link(Link("wire", 2.0, 10.0), False, 1)
        timings = [
            CollectiveTiming(kind, n, 4, collective_time(kind, n, 4, link) * 1.3 ** (-1) ** i)
            for kind in KINDS
            for n in (2**12, 2**16, 2**20, 2**24)
            for i in range(2)
        ]
        fitted = fit_link(timings, "wire")
        assert fitted.bandwidth_gb_s == pytest.approx(2.0, rel=0.01)
        assert fitted.latency_us == pytest.approx(10.0, rel=0.01)
        assert fitted.relative_error == pytest.approx(math.log(1.3), rel=0.01)
        assert all(
            fit.error == pytest.approx(math.log(1.3), rel=0.01) for fit in fit_collectives(timings)
        )

    def test_kinds_that_are_unlike_have_figures_of_their_own(self):
        """A pooled fit alone priced ZeRO's sums at half of what they took between processes."""
        link = axis_link(Link("wire", 2.0, 10.0), False, 1)
        times = {Collective.ALL_REDUCE: 1.0, Collective.REDUCE_SCATTER: 1.6}
        timings = [
            CollectiveTiming(kind, n, 4, factor * collective_time(kind, n, 4, link))
            for kind, factor in times.items()
            for n in (2**12, 2**16, 2**20, 2**24)
        ]
        found = axis_link(fit_link(timings, "wire"), False, 1, 4)
        for each in timings:
            said = collective_time(each.kind, each.nbytes, each.size, found)
            assert said == pytest.approx(each.seconds, rel=1e-3)
        (figures,) = fit_link(timings, "wire").by_group_size
        assert figures.relative_error == pytest.approx(0, abs=1e-3)
        summed, scatter = (found.of(kind) for kind in times)
        assert scatter.latency == pytest.approx(1.6 * summed.latency, rel=1e-3)
        assert scatter.seconds_per_byte == pytest.approx(1.6 * summed.seconds_per_byte, rel=1e-3)
        assert found.of(Collective.ALL_TO_ALL) is found

    def test_a_kind_that_does_not_grow_goes_by_the_figures_of_all(self):
        """One round of noise on the largest message must not cost the others their link."""
        link = axis_link(Link("wire", 2.0, 10.0), False, 1)
        sizes = (2**12, 2**16, 2**20, 2**24)
        summed, odd = Collective.ALL_REDUCE, Collective.BROADCAST
        timings = [
            CollectiveTiming(kind, n, 4, collective_time(kind, n, 4, link))
            for kind in (summed, Collective.ALL_GATHER)
            for n in sizes
        ]
        timings += [CollectiveTiming(odd, n, 4, 1e-4 / (1 + i)) for i, n in enumerate(sizes)]
        found = fit_link(timings, "wire").by_group_size[0]
        assert {each.kind for each in found.by_kind} == {summed, Collective.ALL_GATHER}
        assert found.relative_error > 0.1

    def test_one_timing_is_too_few(self):
        timing = CollectiveTiming(Collective.SEND, 10, 2, 1.0)
        with pytest.raises(ValueError, match="1 timings cannot tell latency"):
            fit_link([timing], "wire")

    def test_times_must_grow(self):
        timings = [CollectiveTiming(Collective.SEND, n, 2, 1.0 / n) for n in (10, 1000)]
        with pytest.raises(ValueError, match="up to 1000 bytes"):
            fit_link(timings, "wire")

    @pytest.mark.slow
    def test_collectives_of_a_backend_are_timed(self):
        found = run_local(3, lambda comm: time_collectives(comm, [100, 1200], repeats=2))
        assert found[0] == found[1] == found[2]
        assert [(t.kind, t.nbytes) for t in found[0] if not t.later] == [
            (kind, n) for kind in KINDS for n in (108, 1200)
        ]
        assert [(t.kind, t.nbytes) for t in found[0] if t.later] == [
            (Collective.ALL_REDUCE, n) for n in LATER_SIZES
        ]
        assert all(t.seconds > 0 and t.size == 3 for t in found[0])

    @pytest.mark.slow
    def test_groups_of_several_sizes_are_timed(self):
        found = run_local(4, lambda comm: time_collectives(comm, [64], groups=(2, 4), repeats=2))
        assert found[0] == found[3]
        assert [t.size for t in found[0] if t.later] == [2, 2, 4, 4]
        assert [(t.kind, t.size) for t in found[0] if not t.later] == [
            (kind, size)
            for size in (2, 4)
            for kind in KINDS
            if size == 2 or kind is not Collective.SEND
        ]
        rounds = dict.fromkeys(KINDS, ROUNDS) | {Collective.SEND: MESSAGE_ROUNDS}
        assert all(
            t.repeats == 2 * (MESSAGE_ROUNDS if t.later else rounds[t.kind]) and t.spread >= 0
            for t in found[0]
        )
        waits = {t.size: t.wait for t in found[0] if t.kind is not Collective.SEND}
        assert all(t.wait == waits[t.size] for t in found[0] if t.kind is not Collective.SEND)
        assert min(waits.values()) > 0

    @pytest.mark.slow
    def test_waiting_for_a_late_rank_is_no_time_of_a_collective(self, monkeypatch):
        """Ranks that come 20 ms apart, and a collective that takes 2 ms from the last one on."""

        def computing(peers, kind, work):
            late = itertools.cycle([peers.rank, 1 - peers.rank])
            return lambda: time.sleep(0.02 * next(late))

        def slow(peers, kind, numel, size):
            def run():
                peers.barrier()
                time.sleep(0.002)

            return run

        monkeypatch.setattr(collective_timing, "_computation", computing)
        monkeypatch.setattr(collective_timing, "_collective", slow)
        found, *_ = run_local(
            2, lambda comm: time_collectives(comm, [64], kinds=[Collective.ALL_REDUCE], repeats=6)
        )[0]
        assert 0.002 <= found.seconds < 0.015

    @pytest.mark.parametrize("posts", [True, False])
    def test_a_message_is_what_it_adds_to_computing(self, monkeypatch, posts):
        """Carried by the sender for 2 ms, between 2 ms of computing on either side of it.

        What is posted is posted before the receiver computes, and taken behind that.
        """
        did = []

        class Wire:
            device, world_size = torch.device("cpu"), 2

            def __init__(self, comm):
                self.comm, self.rank = comm, comm.rank
                self.all_reduce, self.barrier = comm.all_reduce, comm.barrier
                self.let_go = comm.let_go

            def prepare(self, groups):
                self.comm.prepare(groups)

            def send(self, tensor, target):
                time.sleep(0.002)
                self.comm.send(tensor, target)

            def recv(self, shape, dtype, source):
                did.append("recv")
                return self.comm.recv(shape, dtype, source)

        class Posting(Wire):
            def post(self, shapes, dtype, source, tag):
                did.append("post")

        def product(peers):
            def work():
                time.sleep(0.002)
                if peers.rank == 1:
                    did.append("work")

            return work

        monkeypatch.setattr(collective_timing, "_product", product)
        monkeypatch.setattr(collective_timing, "BETWEEN_SECONDS", 0.002)
        monkeypatch.setattr(collective_timing, "WORK_REPEATS", 1)
        monkeypatch.setattr(collective_timing, "WORK_SECONDS", 1e-9)
        (found,) = run_local(
            2,
            lambda comm: time_collectives(
                (Posting if posts else Wire)(comm), [64], kinds=[Collective.SEND], repeats=3
            ),
        )[0]
        assert 0.0018 <= found.seconds < 0.008
        taken = did.index("recv")
        before = ["post", "work", "work"] if posts else ["work", "work"]
        assert did[taken - len(before) : taken] == before

    def test_ranks_wait_for_whichever_is_slow(self, monkeypatch):
        """Two ranks that take turns to take twice as long: the last takes 40 ms, the mean 30."""
        monkeypatch.setattr(collective_timing, "WORK_SECONDS", 0.03)

        def waited(comm):
            turns = itertools.cycle((0.04, 0.02) if comm.rank else (0.02, 0.04))
            work = collective_timing._MeetingWork(comm, 2, lambda: time.sleep(next(turns)))
            return work.waits()

        one, other = run_local(2, waited)
        assert one == other
        assert fmean(one) == pytest.approx(1 / 3, rel=0.3)

    def test_a_sum_needed_later_is_what_it_adds_to_computing(self, monkeypatch):
        """Sums that take 6 ms beside 10 ms of computing, of which 2 ms are lost to them."""
        monkeypatch.setattr(collective_timing, "BETWEEN_SECONDS", 0.01)
        monkeypatch.setattr(collective_timing, "_product", lambda _: partial(time.sleep, 0.01))

        def begun(peers, tensor, group):
            over = time.perf_counter() + 0.006
            time.sleep(0.002)
            return done_at(over)

        def done_at(over):
            return SimpleNamespace(finish=lambda: time.sleep(max(0, over - time.perf_counter())))

        def timed(comm):
            monkeypatch.setattr(type(comm), "start_all_reduce", begun)
            return collective_timing._later_sum(comm, 64, 2, 4)

        one, other = run_local(2, timed)
        assert one == other
        assert one.later
        # The last of four has nothing beside it: three of 2 ms, and one of 6.
        assert one.seconds == pytest.approx(0.003, rel=0.25)

    @pytest.mark.parametrize("latency_us", [2.0, 10.0, 60.0])
    def test_what_sums_add_to_computing_has_a_latency_of_its_own(self, latency_us):
        """Priced as awaited ones, the sums of a small GPT took 65 ms for 46 measured."""
        link = axis_link(Link("wire", 2.0, 10.0), False, 1)
        awaited = [
            CollectiveTiming(kind, n, 4, collective_time(kind, n, 4, link))
            for kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER)
            for n in (2**12, 2**16, 2**20, 2**24)
        ]
        own = replace(link, latency=latency_us * 1e-6)
        added = [
            CollectiveTiming(
                Collective.ALL_REDUCE,
                n,
                4,
                collective_time(Collective.ALL_REDUCE, n, 4, own),
                later=True,
            )
            for n in LATER_SIZES
        ]
        found = axis_link(fit_link([*awaited, *added], "wire"), False, 1, 4)
        assert found.latency == pytest.approx(10e-6, rel=0.01)
        assert found.later.latency == pytest.approx(latency_us * 1e-6, rel=0.02)
        kinds = Collective.ALL_REDUCE, Collective.ALL_GATHER
        for kind in kinds:
            begun, waited = found.later.of(kind), found.of(kind)
            assert begun.latency / waited.latency == pytest.approx(latency_us / 10, rel=0.02)
            assert begun.seconds_per_byte == waited.seconds_per_byte
        assert axis_link(fit_link(awaited, "wire"), False, 1, 4).later_factor == 1

    def test_sums_that_add_nothing_have_no_latency(self):
        link = axis_link(Link("wire", 2.0, 10.0), False, 1)
        kind = Collective.ALL_REDUCE
        awaited = [
            CollectiveTiming(kind, n, 2, collective_time(kind, n, 2, link))
            for n in (2**12, 2**20, 2**24)
        ]
        none = CollectiveTiming(kind, 2**18, 2, 1e-7, later=True)
        (figures,) = fit_link([*awaited, none], "wire").by_group_size
        assert figures.later == 0
        assert axis_link(fit_link([*awaited, none], "wire"), False, 1, 2).later.latency == 0

    def test_waits_of_a_group_become_the_links(self):
        timings = [
            CollectiveTiming(kind, n, size, 1e-5 + n * 1e-9, wait=wait)
            for kind in (Collective.ALL_REDUCE, Collective.BROADCAST)
            for n in (10**4, 10**7)
            for size, wait in ((2, 0.05), (8, 0.11))
        ]
        link = fit_link(timings, "wire")
        assert [figures.wait for figures in link.by_group_size] == pytest.approx([0.05, 0.11])
        assert link.wait(4) == pytest.approx(0.08)
        assert link.wait(1) == 0

    @pytest.mark.parametrize("size", [1, 3])
    def test_groups_that_are_not_there(self, size):
        with pytest.raises(ValueError, match=f"a group of {size} ranks cannot be timed"):
            run_local(2, lambda comm: time_collectives(comm, groups=(size,)))

    def test_kinds_that_are_not_timed(self):
        with pytest.raises(ValueError, match="scatter cannot be timed here"):
            run_local(2, lambda comm: time_collectives(comm, kinds=[Collective.SCATTER]))

    def test_one_rank_has_no_link(self):
        with pytest.raises(ValueError, match="at least 2"):
            run_local(1, lambda comm: time_collectives(comm))
        with pytest.raises(ValueError, match="at least 2"):
            measure_links(1)

    def test_a_measurement_that_takes_too_long(self):
        with pytest.raises(TimeoutError, match=r"took longer than 0\.1 s"):
            measure_links(2, timeout=0.1)

    @pytest.mark.slow
    def test_links_between_processes(self, monkeypatch):
        """Of the measurement that the command line's tests work with, too."""
        monkeypatch.setattr(executor_measurements, "measure_collectives", collectives_timed_once)
        link = measure_links(2)
        assert link.shares_compute
        assert link.bandwidth_gb_s > 0
