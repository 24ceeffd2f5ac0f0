"""Every schedule of the literature: valid at every size, as drawn, as long as its paper says."""

from __future__ import annotations

import textwrap
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.engine.reference_engines import simulate_plain, simulate_simpy
from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Schedule,
    grid,
    peak_in_flight,
    validate,
)
from stratagem.simulator.schedules.ampnet import ampnet
from stratagem.simulator.schedules.dual_pipe import dualpipe
from stratagem.simulator.schedules.macro_graph import macro_graph
from stratagem.simulator.schedules.named_schedules import (
    SCHEDULES,
    chimera,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    schedule_by_name,
    terapipe,
    zb_h1,
)
from stratagem.simulator.schedules.schedule_player import StageTimes, duration_table, play_schedule
from stratagem.simulator.schedules.steady_state import steady_state
from tests.support.examples import examples

SMALL = st.integers(1, 6)
COUNT = st.integers(1, 14)
NS = st.integers(1, 9)
check = settings(max_examples=examples(60))


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    """A named schedule of any size that it can have."""
    name = draw(st.sampled_from([*SCHEDULES, "ampnet"]))
    stages, count, part = draw(SMALL), draw(COUNT), draw(st.integers(1, 3))
    match name:
        case "interleaved":
            return interleaved(stages * part, stages * draw(st.integers(1, 3)), stages)
        case "chimera":
            return chimera(2 * draw(st.integers(1, 4)), max(2, count))
        case "dualpipe":
            stages = 2 * draw(st.integers(1, 4))
            return dualpipe(stages, 2 * stages + 2 * count)
        case "terapipe":
            return terapipe(stages, count, part)
        case "ampnet":
            times = StageTimes(draw(st.lists(NS, min_size=stages, max_size=stages)), draw(NS))
            return ampnet(stages, count, times, max_active=part, update_every=draw(SMALL))
        case _:
            return schedule_by_name(name, stages, count)


@st.composite
def any_times(draw: st.DrawFn, schedule: Schedule) -> StageTimes:
    """Random times of every stage, slice and transfer."""

    def drawn(count: int, least: int) -> list[list[int]]:
        one = st.integers(least, 9)
        slices = st.lists(one, min_size=schedule.num_slices, max_size=schedule.num_slices)
        return draw(st.lists(slices, min_size=count, max_size=count))

    stages = schedule.num_stages
    passes = [drawn(stages, 1) for _ in range(4)]
    transfer = drawn(stages - 1, 0)
    return StageTimes(*passes, transfer, update=draw(NS), replica_sync=draw(NS))


@check
@given(any_schedule())
def test_every_schedule_is_valid_and_parses_back(schedule: Schedule) -> None:
    validate(schedule)
    assert Schedule.parse(schedule.to_text()).orders == schedule.orders
    assert "!" not in grid(schedule)


@check
@given(st.data())
def test_played_times_respect_every_need_and_every_rank(data: st.DataObject) -> None:
    schedule = data.draw(any_schedule())
    times = data.draw(any_times(schedule))
    play = play_schedule(schedule, times)
    spans = {action: play.span(action) for action in schedule.rank_of}
    sent = {action: int(play._times.end[task]) for action, task in play._macro.number.items()}
    transfer = np.reshape(times.transfer, (-1, schedule.num_slices))  # type: ignore[arg-type]
    for action, (start, _) in spans.items():
        for need in schedule.requirements(action):
            if schedule.rank_of[need] != schedule.rank_of[action]:
                travels = int(transfer[min(need.stage, action.stage), action.slice])
                assert sent[need] + travels <= start
            else:
                assert spans[need][1] <= start
    for order in schedule.orders:
        for first, second in pairwise(order):
            assert spans[first][1] <= spans[second][0]
    assert play.makespan == int(play.timeline.end.max())


@check
@given(st.data())
def test_the_oracles_play_the_same(data: st.DataObject) -> None:
    schedule = data.draw(any_schedule())
    pairs = tuple((s, s + 1) for s in range(schedule.num_stages - 1))
    macro = macro_graph(schedule, pairs)
    times = data.draw(any_times(schedule))
    graph = macro.with_durations(duration_table(macro, times)[0])
    play = play_schedule(schedule, times)
    for oracle in (simulate_plain, simulate_simpy):
        expected = oracle(graph)
        assert expected.makespan == play.makespan
        for action, task in macro.number.items():
            ended = expected.end[macro.end(task)]
            assert play.span(action) == (expected.start[task], ended)


@check
@given(SMALL, COUNT, NS, NS)
def test_gpipe_and_1f1b_have_one_bubble(stages: int, count: int, f: int, b: int) -> None:
    """(S − 1) / (M + S − 1): Huang et al. 2019, Narayanan et al. 2021."""
    for make in (gpipe, one_f_one_b):
        play = play_schedule(make(stages, count), StageTimes(f, b))
        assert play.bubble == Fraction(stages - 1, count + stages - 1)


@check
@given(SMALL, st.integers(1, 4), st.integers(1, 3), NS, NS)
def test_interleaving_divides_the_bubble(
    ranks: int, groups: int, per_rank: int, f: int, b: int
) -> None:
    """(1 / v)(S − 1) / M of the ideal time: Narayanan et al., SC 2021."""
    count = ranks * groups
    play = play_schedule(interleaved(ranks * per_rank, count, ranks), StageTimes(f, b))
    ideal = count * per_rank * (f + b)
    assert Fraction(play.makespan - ideal, ideal) == Fraction(ranks - 1, count * per_rank)


@check
@given(SMALL, st.integers(1, 4), st.integers(1, 3), NS, NS, NS)
def test_updates_of_several_stages_come_behind_the_pipeline(
    ranks: int, groups: int, per_rank: int, f: int, b: int, update: int
) -> None:
    """They stood in the drain, on the way of every gradient, and cost S − 1 updates more."""
    schedule = interleaved(ranks * per_rank, ranks * groups, ranks)
    without = play_schedule(schedule, StageTimes(f, b))
    play = play_schedule(schedule, StageTimes(f, b, update=update))
    assert play.makespan == without.makespan + per_rank * update
    assert sum(play.busy) == sum(without.busy) + schedule.num_stages * update
    line = play.timeline
    updates = np.array([kind is TaskKind.UPDATE for kind in line.kinds])
    for rank in range(ranks):
        mine = line.lane == line.lanes.index(f"rank {rank} · compute")
        assert line.start[mine & updates].min() >= line.end[mine & ~updates].max()


@check
@given(SMALL, COUNT, NS, NS, NS)
def test_zb_h1_hides_weight_gradients(stages: int, more: int, f: int, i: int, w: int) -> None:
    """(S − 1)(F + I − W): Qi et al. 2023, table 1; memory not over the most of 1F1B."""
    count, w = stages + more, min(w, f, i)
    schedule = zb_h1(stages, count)
    times = StageTimes(f, input_gradient=i, weight_gradient=w)
    play = play_schedule(schedule, times)
    assert play.makespan == count * (f + i + w) + (stages - 1) * (f + i - w)
    assert max(peak_in_flight(schedule)) == max(peak_in_flight(one_f_one_b(stages, count)))


@check
@given(st.integers(1, 5), st.integers(1, 4), NS)
def test_chimera_halves_the_bubble(half: int, units: int, f: int) -> None:
    """(S − 2) / (2 M + S − 2) with F = B, S / 2 + 1 to S microbatches: Li & Hoefler, table 2."""
    stages = 2 * half
    play = play_schedule(chimera(stages, units * stages), StageTimes(f, f))
    assert play.bubble == Fraction(stages - 2, 2 * units * stages + stages - 2)
    one_unit = play_schedule(chimera(stages, stages), StageTimes(f, 2 * f))
    assert one_unit.bubble == Fraction(2 * (stages - 2), 3 * stages + 2 * (stages - 2))
    assert (min(play.peak_held), max(play.peak_held)) == (half + 1, stages)


HALF, MORE = st.integers(1, 5), st.integers(0, 8)


@check
@given(HALF, MORE, st.lists(NS, min_size=3, max_size=3))
def test_dualpipe_is_idle_for_what_its_middle_ranks_wait(
    half: int, more: int, times: list[int]
) -> None:
    """(S / 2 − 1)(F + I − W), where W ≤ I ≤ F ≤ B; S + 1 held: DeepSeek-AI 2024, table 2."""
    weights, inputs, forward = sorted(times)
    forward = min(forward, inputs + weights)
    schedule = dualpipe(2 * half, 4 * half + 2 * more)
    whole = inputs + weights
    play = play_schedule(schedule, StageTimes(forward, whole, inputs, weights))
    ideal = schedule.num_microbatches * (forward + whole)
    assert play.makespan == ideal + (half - 1) * (forward + inputs - weights)
    assert set(play.peak_held) == {2 * half + 1}


@check
@given(HALF, MORE, NS, NS, NS)
def test_dualpipe_is_never_longer_than_1f1b_or_chimera(
    half: int, more: int, f: int, i: int, w: int
) -> None:
    """Of balanced stages, whatever their times; with F = I = W it waits less than ZB-H1, too."""
    sizes, times = (2 * half, 4 * half + 2 * more), StageTimes(f, i + w, i, w)
    takes = play_schedule(dualpipe(*sizes), times).makespan
    for make in (one_f_one_b, chimera):
        assert takes <= play_schedule(make(*sizes), times).makespan
    equal = StageTimes(f, 2 * f, f, f)
    bubble = play_schedule(dualpipe(*sizes), equal).bubble
    assert bubble < play_schedule(zb_h1(*sizes), equal).bubble


def test_dualpipe_as_its_authors_order_it() -> None:
    """Rank 1 of 8 with 20 microbatches, step by step as in the code that they published."""
    assert dualpipe(8, 20).to_text().splitlines()[1] == (
        "rank 1: 1F0 1F1 1F2 1F3 "  # F0
        "1F4 6F10 1F5 6F11 "  # F0 F1
        "6I10 6W10 6F12 6I11 6W11 6F13 "  # I1 W F1
        "1F6 6B12 6F14 1B0 1F7 6B13 6F15 1B1 1F8 6B14 6F16 1B2 1F9 6B15 6F17 1B3 "  # F0 B1 F1 B0
        "6B16 6F18 1B4 6B17 6F19 1B5 "  # B1 F1 B0
        "6B18 1B6 6I19 1I7 "  # B1 B0, the second half of them split
        "6W19 1I8 1W7 1I9 "  # W B0
        "1W8 1W9"  # W
    )


@check
@given(SMALL, st.lists(st.tuples(NS, NS), min_size=1, max_size=4), st.integers(1, 4))
def test_terapipe_takes_its_equations_time(
    stages: int, slices: list[tuple[int, int]], count: int
) -> None:
    """Σ t + (S − 1) max t, forward and backward: Li et al. 2021, section 3.3."""
    forward, backward = ([pair[k] for pair in slices] for k in (0, 1))
    times = StageTimes([forward] * stages, [backward] * stages)
    play = play_schedule(terapipe(stages, count, len(slices)), times)
    passes = (count * sum(t) + (stages - 1) * max(t) for t in (forward, backward))
    assert play.makespan == sum(passes)
    equal = play_schedule(terapipe(stages, count, len(slices)), StageTimes(3, 5))
    parts = count * len(slices)
    assert equal.bubble == Fraction(stages - 1, parts + stages - 1)


def test_interleaved_as_megatron_draws_it() -> None:
    assert grid(interleaved(4, 4, num_ranks=2)) == _drawn(
        """
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...
        """
    )


def test_zb_h1_as_its_paper_draws_it() -> None:
    assert grid(zb_h1(3, 4)) == _drawn(
        """
        rank 0  0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        rank 1  ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        rank 2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: interleaved(4, 6, 4), "6 microbatches are no multiple of 4 ranks; choose 4 mic"),
        (lambda: interleaved(6, 8, 4), "6 stages are no multiple of 4 ranks; choose 4 stages"),
        (lambda: chimera(5, 4), "5 stages is odd.* choose 6 stages"),
        (lambda: dualpipe(3, 8), "3 stages is odd.* choose 4 stages"),
        (lambda: dualpipe(4, 6), "6 microbatches on 4 stages.* choose 8 microbatches"),
        (lambda: dualpipe(4, 9), "9 microbatches on 4 stages.* choose 10 microbatches"),
        (lambda: terapipe(2, 2, 0), "0 token slices"),
        (lambda: schedule_by_name("1f1b", 4, 4, num_slices=2), "'1f1b' does not slice tokens"),
        (lambda: schedule_by_name("gpipe", 4, 4, num_ranks=2), "on 4 ranks, not on 2"),
        (lambda: ampnet(2, 2, StageTimes(1, 1), max_active=0), "max_active is 0"),
    ],
)
def test_refusals(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


class TestPlay:
    """Playing a schedule."""

    def test_updates_and_copies_are_in_the_timeline(self) -> None:
        times = StageTimes(10, 20, transfer=3, update=5, replica_sync=4)
        timeline = play_schedule(chimera(2, 2), times).timeline
        for what, kind in (("sync", TaskKind.GRADIENT_SYNC), ("update", TaskKind.UPDATE)):
            found = [n for n, k in zip(timeline.names, timeline.kinds, strict=True) if k is kind]
            assert sorted(found) == sorted(2 * [f"{what} of stage {s}" for s in (0, 1)])
        plain = play_schedule(gpipe(2, 2), times).timeline
        assert plain.kinds.count(TaskKind.UPDATE) == 2
        assert plain.kinds.count(TaskKind.COMMUNICATION) == 4
        assert set(plain.lanes) == {
            "rank 0 · compute",
            "rank 1 · compute",
            "rank 0 · to rank 1",
            "rank 1 · to rank 0",
        }

    def test_timelines_are_drawn(self) -> None:
        from stratagem.simulator.drawing.timeline_plot import plot_timelines

        times = StageTimes(10, 20, 10, 10, transfer=3, update=5, replica_sync=4)
        schedules = (zb_h1(4, 6), chimera(4, 4), interleaved(4, 4, 2), terapipe(2, 2, 3))
        timelines = [play_schedule(schedule, times).timeline for schedule in schedules]
        titles = [ax.get_title(loc="left") for ax in plot_timelines(timelines).axes]
        assert [title.split(":")[0] for title in titles] == [s.name for s in schedules]

    def test_a_gradient_leaves_before_the_update_of_its_stage(self) -> None:
        """Two stages' updates run at once, but on a rank with other stages they come first."""
        times = StageTimes(10, 20, transfer=3, update=50)
        play = play_schedule(gpipe(2, 1), times)
        assert play.span(Action.parse("1B0")) == (23, 93)
        assert play.span(Action.parse("0B0")) == (46, 116)
        same = play_schedule(Schedule.parse("rank 0: 0F0 1F0 1B0 0B0"), times)
        assert same.makespan == 2 * (10 + 20 + 50)

    def test_stages_of_one_rank_send_nothing(self) -> None:
        schedule = Schedule.parse("rank 0: 0F0 1F0 1B0 0B0")
        play = play_schedule(schedule, StageTimes(1, 1, transfer=100))
        assert (play.makespan, play.bubble) == (4, 0)

    @pytest.mark.parametrize(
        ("times", "message"),
        [
            (StageTimes(-1), "forward has the time -1"),
            (StageTimes(1, 2.5), r"backward has the time 2\.5"),  # type: ignore[arg-type]
            (StageTimes([1, 2, 3]), "forward has 3 times, but there are 2 stages"),
            (StageTimes(1, transfer=[1, 1]), "2 times, but there are 1 transfers"),
            (StageTimes([[1, 2], 1]), "forward of stage 0 has 2 times, but there are 1 token"),
        ],
    )
    def test_wrong_times_are_named(self, times: StageTimes, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            play_schedule(gpipe(2, 2), times)

    def test_an_unknown_action(self) -> None:
        with pytest.raises(ValueError, match="has no action 5F0"):
            play_schedule(gpipe(1, 1), StageTimes(1, 1)).span(Action.parse("5F0"))


class TestAsynchronous:
    """Schedules without flushes: PipeDream and AMPNet."""

    @check
    @given(st.data(), st.integers(1, 5))
    def test_pipedreams_period_is_that_of_a_long_play(
        self, data: st.DataObject, stages: int
    ) -> None:
        def per_stage(count: int, least: int) -> list[int]:
            one = st.integers(least, 9)
            return data.draw(st.lists(one, min_size=count, max_size=count))

        times = StageTimes(
            per_stage(stages, 1),
            per_stage(stages, 1),
            transfer=per_stage(stages - 1, 0),
            update=per_stage(stages, 0),
        )
        state = steady_state(pipedream(stages, 6 * stages), times)
        assert state.weight_versions == tuple(range(stages, 0, -1))
        assert state.staleness == tuple(reversed(range(stages)))
        # A period in whole numbers after as many microbatches as the cycles it may be made of.
        laps = 60 * 7
        play = play_schedule(pipedream(stages, 720), times)
        starts = [play.span(Action(0, ActionKind.BACKWARD, m))[0] for m in (280, 280 + laps)]
        assert Fraction(starts[1] - starts[0], laps) == state.period

    @check
    @given(SMALL, NS, NS)
    def test_a_balanced_pipedream_has_no_bubble(self, stages: int, f: int, b: int) -> None:
        state = steady_state(pipedream(stages, 8 * stages), StageTimes(f, b))
        assert (state.period, state.bubble) == (f + b, 0)
        assert state.throughput == pytest.approx(1e9 / (f + b))

    def test_the_period_of_almost_equal_stages_is_exact(self) -> None:
        """No play of moderate length shows which of two stages is the slower one."""
        times = StageTimes([1_000_000, 1_000_001], 2_000_000)
        assert steady_state(pipedream(2, 16), times).period == 3_000_001

    @check
    @given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
    def test_ampnet_never_waits_with_a_message_and_keeps_its_bound(
        self, data: st.DataObject, stages: int, active: int, every: int
    ) -> None:
        lists = st.lists(NS, min_size=stages, max_size=stages)
        times = StageTimes(data.draw(lists), data.draw(lists), update=data.draw(lists))
        schedule = ampnet(stages, 30, times, max_active=active, update_every=every)
        play = play_schedule(schedule, times)
        assert peak_in_flight(schedule)[0] <= active
        ends = {action: play.span(action)[1] for action in schedule.rank_of}
        sent = {action: int(play._times.end[task]) for action, task in play._macro.number.items()}
        for order in schedule.orders:
            for before, action in pairwise(order):
                arrived = max((sent[need] for need in schedule.requirements(action)), default=0)
                waited = play.span(action)[0]
                if action.stage == 0 and action.kind is ActionKind.FORWARD:
                    continue
                assert waited == max(arrived, ends[before])

    def test_ampnet_with_all_stages_busy(self) -> None:
        times = StageTimes(10, 20)
        state = steady_state(ampnet(4, 96, times, max_active=4, update_every=2), times)
        assert (state.period, state.bubble) == (30, 0)
        assert state.weight_versions == (1, 1, 1, 1)
        assert state.staleness[-1] == 0
        one = steady_state(ampnet(4, 96, times, max_active=1), times)
        assert (one.period, one.bubble, one.staleness) == (120, Fraction(3, 4), (0, 0, 0, 0))

    def test_what_has_no_steady_state_is_refused(self) -> None:
        with pytest.raises(ValueError, match="'gpipe' is synchronous"):
            steady_state(gpipe(2, 8), StageTimes(1, 1))
        with pytest.raises(ValueError, match="every time is 0 ns"):
            steady_state(pipedream(2, 16), StageTimes(0, 0))
        with pytest.raises(ValueError, match="nothing repeats in the middle half of 2 micro"):
            steady_state(pipedream(2, 2), StageTimes(1, 1))


def _drawn(text: str) -> str:
    return textwrap.dedent(text).strip()


def test_a_schedule_asked_for_again_is_the_same_and_so_is_its_macro_graph() -> None:
    pairs = ((0, 1),)
    first, again = (schedule_by_name("1f1b", 2, 4) for _ in range(2))
    assert first is again
    assert macro_graph(first, pairs) is macro_graph(again, pairs)
    assert macro_graph(first, pairs) is not macro_graph(first, pairs, blocking=(True,))


def test_orders_that_differ_are_not_taken_for_one_another() -> None:
    # Their hashes are equal, as these do not go over all actions.
    one, other = (
        Schedule.parse(f"rank 0: {order}") for order in ("0F0 0F1 0B0 0B1", "0F0 0F1 0B1 0B0")
    )
    assert hash(one) == hash(other)
    assert one != other
    taken = [macro_graph(each, ()).microbatch.tolist() for each in (one, other)]
    assert taken[0] != taken[1]
