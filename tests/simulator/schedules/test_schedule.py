"""Pipeline schedules: drawn grids, what is refused, and what holds for every size."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest

from stratagem.simulator.schedules.actions import (
    Action,
    ActionKind,
    Held,
    Schedule,
    grid,
    peak_in_flight,
    validate,
)
from stratagem.simulator.schedules.named_schedules import gpipe, one_f_one_b, schedule_by_name

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 8), (4, 2), (4, 4), (4, 9), (8, 16), (12, 11)]
every_name = pytest.mark.parametrize("name", ["gpipe", "1f1b"])
every_size = pytest.mark.parametrize(("num_stages", "num_microbatches"), SIZES)


def parse(text: str, num_stages: int, num_microbatches: int) -> Schedule:
    """A schedule from one line of actions a rank."""
    lines = textwrap.dedent(text).strip().splitlines()
    orders = tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)
    return Schedule("mine", num_stages, num_microbatches, orders)


def drawn(text: str) -> str:
    return textwrap.dedent(text).strip()


class TestGrids:
    """The schedules as their papers draw them."""

    def test_gpipe(self):
        assert grid(gpipe(3, 4)) == drawn(
            """
            rank 0  0F0 0F1 0F2 0F3 ... ... ... ... 0B0 0B1 0B2 0B3
            rank 1  ... 1F0 1F1 1F2 1F3 ... ... 1B0 1B1 1B2 1B3 ...
            rank 2  ... ... 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 ... ...
            """
        )

    def test_one_f_one_b(self):
        assert grid(one_f_one_b(3, 4)) == drawn(
            """
            rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 ... 0B2 ... 0B3
            rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 ... 1B3 ...
            rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 ... ...
            """
        )

    def test_columns_are_aligned_when_names_are_not(self):
        lines = grid(gpipe(2, 11)).splitlines()
        assert lines[0].index("0F10") == lines[1].index("1F9 ")
        assert not any(line.endswith(" ") for line in lines)

    def test_ranks_are_aligned_too(self):
        assert grid(gpipe(11, 1)).splitlines()[1].startswith("rank 1   ...  1F0")


class TestActions:
    """An action prints and parses back."""

    @pytest.mark.parametrize("text", ["0F0", "2F0", "12B345", "0I7", "3W1", "2F0.3", "1B2.10"])
    def test_round_trip(self, text):
        assert str(Action.parse(text)) == text

    def test_parts(self):
        assert Action.parse("2B7") == Action(2, ActionKind.BACKWARD, 7)

    @pytest.mark.parametrize(
        "text", ["", "F0", "2F", "2G0", "-1F0", "2F0 ", "2f0", "2F0\n", "٢F0", "2F0.", "2F0.x"]
    )
    def test_nonsense(self, text):
        with pytest.raises(ValueError, match="is not an action: write stage, F, B, I or W"):
            Action.parse(text)


@every_name
@every_size
class TestEverySchedule:
    """What holds for every named schedule of every size."""

    def test_is_valid(self, name, num_stages, num_microbatches):
        schedule = schedule_by_name(name, num_stages, num_microbatches)
        validate(schedule)
        assert schedule.name == name
        assert schedule.num_ranks == num_stages

    def test_takes_as_many_steps_as_fill_and_drain(self, name, num_stages, num_microbatches):
        first_rank = grid(schedule_by_name(name, num_stages, num_microbatches)).splitlines()[0]
        num_steps = len(first_rank.split()) - 2
        assert num_steps == 2 * (num_microbatches + num_stages - 1)

    def test_prints_and_parses_back(self, name, num_stages, num_microbatches):
        schedule = schedule_by_name(name, num_stages, num_microbatches)
        text = "\n".join(" ".join(map(str, order)) for order in schedule.orders)
        assert parse(text, num_stages, num_microbatches).orders == schedule.orders


@every_size
def test_gpipe_holds_all_microbatches(num_stages, num_microbatches):
    schedule = gpipe(num_stages, num_microbatches)
    assert peak_in_flight(schedule) == (num_microbatches,) * num_stages


@every_size
def test_one_f_one_b_holds_as_many_as_stages_are_left(num_stages, num_microbatches):
    expected = tuple(min(num_stages - stage, num_microbatches) for stage in range(num_stages))
    assert peak_in_flight(one_f_one_b(num_stages, num_microbatches)) == expected


class TestOwnSchedules:
    """Schedules that users write."""

    def test_several_stages_a_rank(self):
        schedule = parse("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", 4, 1)
        validate(schedule)
        assert grid(schedule) == drawn(
            """
            rank 0  0F0 ... 2F0 ... ... 2B0 ... 0B0
            rank 1  ... 1F0 ... 3F0 3B0 ... 1B0 ...
            """
        )

    def test_a_rank_without_work(self):
        schedule = Schedule("mine", 1, 1, ((), gpipe(1, 1).orders[0]))
        validate(schedule)
        assert grid(schedule) == "rank 0  ... ...\nrank 1  0F0 0B0"

    def test_deadlock_marks_the_step(self):
        schedule = parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", 2, 2)
        with pytest.raises(ValueError, match="'mine' deadlocks at step 2") as caught:
            validate(schedule)
        message = str(caught.value)
        assert "rank 0 wants 0B0, which needs 1B0; rank 1 wants 1F1, which needs 0F1" in message
        assert message.endswith("\nrank 0  0F0  ...  !0B0\nrank 1  ...  1F0  !1F1")
        assert message.endswith(grid(schedule))

    def test_backward_before_forward(self):
        with pytest.raises(ValueError, match="at step 0: rank 0 wants 0B0, which needs 0F0"):
            validate(parse("0B0 0F0", 1, 1))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("0F0 0F1 0B0 0B1 0F1", "0F1 is scheduled 2 times"),
            ("0F0 0B0 0F1", "1 of 4 actions of 1 stages and 2 microbatches .* such as 0B1"),
            ("0F0 0F1 0F2 0B0 0B1", "0F2 is not in a schedule of 1 stages and 2 microbatches"),
            ("0F0 0F1 0B0 0B1 1F0", "1F0 is not in a schedule"),
            ("0F0 0F1 0B0\n0B1", "0B1 is on rank 1, but its stage is on rank 0"),
            ("", "4 of 4 actions"),
            ("0F0 0F1 0I0 0B1", "1 of 5 actions .* such as 0W0"),
            ("0F0 0F1 0W0 0B1", "1 of 5 actions .* such as 0I0"),
            ("0F0 0F1 0B0 0B1 0I1", "0B1 is scheduled whole and 0I1 as a part of it"),
            ("0F0 0F0.1 0F1 0B0 0B1", "0F0.1 is not in a schedule"),
            ("0F0 0F1 0W0 0I0 0B1", "wants 0W0, which needs 0I0"),
        ],
    )
    def test_refusals(self, text, message):
        with pytest.raises(ValueError, match=message):
            validate(parse(text, 1, 2))


class TestRequirements:
    """What must be over before an action."""

    @pytest.mark.parametrize(
        ("action", "needs"),
        [
            ("0F0", []),
            ("1F0", ["0F0"]),
            ("1F0.2", ["1F0.1", "0F0.2"]),
            ("1B0.2", ["1F0.2"]),
            ("1B0", ["1F0", "1B0.1"]),
            ("0I0", ["0F0", "0I0.1", "1B0"]),
            ("0W0", ["0I0"]),
        ],
    )
    def test_slices_and_parts(self, action, needs):
        schedule = Schedule.parse(
            "rank 0: 0F0 0F0.1 0F0.2 0I0.2 0I0.1 0I0 0W0.2 0W0.1 0W0\n"
            "rank 1: 1F0 1F0.1 1F0.2 1B0.2 1B0.1 1B0"
        )
        validate(schedule)
        found = schedule.requirements(Action.parse(action))
        assert [str(need) for need in found] == needs

    def test_slices_go_back_in_the_opposite_order(self):
        schedule = Schedule.parse("rank 0: 0F0 0F0.1 0B0 0B0.1")
        with pytest.raises(ValueError, match=r"rank 0 wants 0B0, which needs 0B0\.1"):
            validate(schedule)


class TestText:
    """Lists of actions that users write."""

    def test_round_trip(self):
        text = "rank 0: 0F0 0F1 0I0 0W0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
        schedule = Schedule.parse(text, name="mine")
        assert schedule.to_text() == text
        assert (schedule.num_stages, schedule.num_microbatches) == (2, 2)
        assert schedule.splits_backward
        validate(schedule)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rank 1: 0F0 0B0", "is not the order of rank 0: write 'rank 0: 0F0 0B0 …'"),
            ("0F0 0B0", "'0F0 0B0' is not the order of rank 0"),
            ("rank 0: 0F0 0B", "'0B' is not an action"),
            ("rank 0:", "at least one action"),
            ("", "at least one action"),
        ],
    )
    def test_refusals(self, text, message):
        with pytest.raises(ValueError, match=message):
            Schedule.parse(text)


class TestHeld:
    """Situations in which a rank's memory may be fullest."""

    def test_the_fullest_of_each_stage_and_kind(self):
        schedule = Schedule.parse("rank 0: 0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1")
        validate(schedule)
        found = {(each.stage, each.kind.value): each.held for each in schedule.situations[0]}
        waiting = {key: {held.stage: held.waiting for held in all} for key, all in found.items()}
        assert waiting == {
            (0, "F"): {0: 1, 1: 1},
            (1, "F"): {0: 1, 1: 0},
            (1, "B"): {0: 2, 1: 0},
            (0, "B"): {0: 1, 1: 0},
        }
        assert len(schedule.situations[0]) == 4

    def test_a_split_backward_is_held_until_its_weight_gradient(self):
        schedule = Schedule.parse("rank 0: 0F0 0I0 0F1 0W0 0I1 0W1")
        kinds = {each.kind.value: each.held[0] for each in schedule.situations[0]}
        assert kinds == {"F": Held(0, 0, 1), "I": Held(0, 0, 0), "W": Held(0, 1, 0)}
        assert peak_in_flight(schedule) == (2,)

    @every_name
    @every_size
    def test_no_action_holds_more(self, name, num_stages, num_microbatches):
        """Counted action by action, without situations."""
        schedule = schedule_by_name(name, num_stages, num_microbatches)
        for stage, order in enumerate(schedule.orders):
            held = most = 0
            for action in order:
                held += action.kind is ActionKind.FORWARD
                most = max(most, held)
                held -= action.kind is ActionKind.BACKWARD
            assert peak_in_flight(schedule)[stage] == most


def test_weights_are_updated_once_or_every_few_microbatches():
    schedule = gpipe(2, 5)
    assert {str(action) for action in schedule.updates} == {"0B4", "1B4"}
    often = dataclasses.replace(schedule, update_every=2)
    assert {str(a) for a in often.updates if a.stage == 0} == {"0B1", "0B3"}
    with pytest.raises(ValueError, match="updates every 0 microbatches"):
        validate(dataclasses.replace(schedule, update_every=0))


def test_a_microbatch_passes_a_stage_on_one_rank():
    copies = Schedule.parse("rank 0: 0F0 0B0\nrank 1: 0F1 0B1")
    validate(copies)
    assert copies.ranks_of(0) == (0, 1)
    with pytest.raises(ValueError, match="0F1 is on rank 1, but its stage is on rank 0"):
        validate(Schedule.parse("rank 0: 0F0 0B1\nrank 1: 0F1 0B0"))


@every_name
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0), (-2, 4), (2, -1)])
def test_sizes_below_one_are_refused(name, num_stages, num_microbatches):
    message = f"{num_stages} stages and {num_microbatches} microbatches"
    with pytest.raises(ValueError, match=message):
        schedule_by_name(name, num_stages, num_microbatches)
    broken = dataclasses.replace(
        gpipe(1, 1), num_stages=num_stages, num_microbatches=num_microbatches
    )
    with pytest.raises(ValueError, match=message):
        validate(broken)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"no schedule 'dapple'.*; there are gpipe, 1f1"):
        schedule_by_name("dapple", 2, 2)
    with pytest.raises(ValueError, match="did you mean 'interleaved'"):
        schedule_by_name("interleave", 2, 2)
