"""A schedule is a record: nothing else asks for its name, and a user's own gets all there is."""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from benchmarks.schedules import bubble_line, cases
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.named_schedules import (
    SCHEDULES,
    one_f_one_b,
    plain_schedules,
    register_schedule,
    schedule_by_name,
    with_rounds,
)
from stratagem.simulator.schedules.schedule_player import StageTimes, play_schedule
from stratagem.simulator.schedules.schedule_record import PassTimes, ScheduleRecord, Sizes
from stratagem.simulator.schedules.steady_state import steady_state
from tests.simulator.operators.test_operator_kinds import ROOT, modules, strings

RECORDS = "simulator/schedules/named_schedules.py"
BEYOND = ("benchmarks/", "examples/", RECORDS)


def asks(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[int]:
    """Lines that compare something with the name of a schedule, or have a table by such names."""
    for node in ast.walk(tree):
        told: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            told = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            told = list(node.keys)
        elif isinstance(node, ast.Subscript):
            told = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            told = node.args if node.func.attr in {"startswith", "endswith", "get"} else []
        elif isinstance(node, ast.match_case):
            told = [node.pattern]
        if any(SCHEDULES.keys() & strings(each, names) for each in told if each is not None):
            yield node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


@pytest.mark.parametrize(
    "line",
    [
        'plan.schedule == "chimera"',
        '"1f1b" != setup.schedule',
        'name in ("gpipe", "terapipe")',
        "name in TABLE",
        "plan.schedule == ONE",
        'WORDS = {"gpipe": "a GPipe"}',
        'SCHEDULES["zb-h1"]',
        'words.get("interleaved")',
        'name.startswith("pipedream")',
        'match name:\n    case "chimera":\n        pass',
    ],
)
def test_a_question_is_found_in_every_way_to_ask_it(line: str) -> None:
    assert list(asks(ast.parse(line), {"TABLE": ("gpipe", "mine"), "ONE": "chimera"}))


@pytest.mark.parametrize(
    "line",
    [
        'replace(plan, schedule="gpipe")',
        "record_of(plan.schedule).words",
        'schedule: str = "1f1b"',
        "plan.schedule in searched_schedules()",
        'kind == "linear"',
    ],
)
def test_to_choose_a_schedule_is_no_question(line: str) -> None:
    assert not list(asks(ast.parse(line), {}))


@pytest.mark.slow
def test_no_module_beyond_the_records_asks_for_a_name() -> None:
    """A schedule was known by name in 22 comparisons in 10 modules, and in 7 tables."""
    found = []
    for file, module in modules():
        if not file.startswith(BEYOND) and "__main__" not in module:
            known = vars(importlib.import_module(module))
            names = {name: value for name, value in known.items() if value is not SCHEDULES}
            source = (ROOT / file).read_text("utf-8")
            found += [f"{file}:{line}" for line in asks(ast.parse(source), names)]
    assert found == []


def bubble(schedule: Schedule, times: PassTimes) -> Fraction:
    """As it is played; of what never flushes, once it has settled."""
    played = StageTimes(*times)
    if schedule.update_every is None:
        return play_schedule(schedule, played).bubble
    return steady_state(schedule, played).bubble


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("times", [(6, 6, 3, 3), (6, 12, 6, 6), (6, 12, 8, 4), (6, 15, 8, 7)])
def test_the_bubble_of_a_record_is_that_of_its_actions(
    name: str, times: tuple[int, int, int, int]
) -> None:
    record, known = SCHEDULES[name], 0
    for ranks, parts, rounds, slices in itertools.product((2, 4), (4, 32), (1, 2), (1, 3)):
        sizes = Sizes(ranks * rounds, parts, ranks, slices)
        made, told = record.made(sizes), record.bubble(sizes, PassTimes(*times))
        settles = parts == 32 or (made is not None and made.update_every is None)
        if made and settles and made.num_slices == slices and told is not None:
            assert bubble(made, PassTimes(*times)) == told, sizes
            known += 1
    assert known or times not in {(6, 6, 3, 3), (6, 12, 6, 6)}


def test_the_benchmark_holds_every_record_to_its_formula() -> None:
    listed = cases()
    assert all(bubble_line(case)["equal"] for case in listed)
    assert {case.schedule.name for case in listed} >= set(SCHEDULES)


def test_a_mirrored_schedule_is_known_by_where_its_stages_are() -> None:
    own = Schedule.parse("rank 0: 0F0 1F1 1B1 0B0\nrank 1: 0F1 1F0 1B0 0B1")
    assert own.is_mirrored
    assert own.homes == (0, 1)
    for name in ("gpipe", "1f1b", "pipedream"):
        assert not schedule_by_name(name, 4, 4).is_mirrored
    assert schedule_by_name("interleaved", 4, 4, num_ranks=2).homes == (0, 1, 0, 1)
    thrice = "rank 0: 0F0 0B0\nrank 1: 0F1 0B1\nrank 2: 0F2 0B2 1F0 1B0 1F1 1B1 1F2 1B2"
    assert not Schedule.parse(thrice).is_mirrored


def test_which_schedule_has_several_stages_a_rank_is_said_by_the_records() -> None:
    assert with_rounds("1f1b", 3) == with_rounds("interleaved", 3) == "interleaved"
    assert with_rounds("zb-h1", 2) == ""
    assert "interleaved" not in plain_schedules()
    with pytest.raises(ValueError, match="no schedule '1f1'"):
        with_rounds("1f1", 2)


@pytest.mark.parametrize(
    "record", [r for r in SCHEDULES.values() if r.check], ids=lambda r: r.name
)
def test_what_a_check_refuses_is_what_cannot_be_made(record: ScheduleRecord) -> None:
    """Exports asked of thousands of sizes, and each was made: a minute for GPT-3 on 1,024 GPUs."""
    for stages, parts, ranks in itertools.product(range(9), range(9), range(5)):
        sizes = Sizes(stages, parts, ranks)
        assert record.accepts(sizes) == (record.made(sizes) is not None), sizes


class TestWhatARecordMakes:
    """What a user's record makes was believed: half of a batch was trained, and called proved."""

    @pytest.fixture(autouse=True)
    def _none_is_left(self) -> Iterator[None]:
        before = dict(SCHEDULES)
        yield
        SCHEDULES.clear()
        SCHEDULES.update(before)

    def test_fewer_microbatches_than_asked_for_are_refused(self) -> None:
        record = ScheduleRecord(
            "four at most", lambda s: one_f_one_b(s.num_stages, min(4, s.num_microbatches))
        )
        register_schedule(record)
        assert schedule_by_name("four at most", 2, 4).num_microbatches == 4
        assert not record.accepts(Sizes(2, 8, 2))
        with pytest.raises(ValueError, match="asked for 8 microbatches and made 4"):
            schedule_by_name("four at most", 2, 8)

    def test_so_are_fewer_stages(self) -> None:
        record = ScheduleRecord("two stages", lambda s: one_f_one_b(2, s.num_microbatches))
        register_schedule(record)
        with pytest.raises(ValueError, match="asked for 4 stages and made 2"):
            schedule_by_name("two stages", 4, 4)

    @pytest.mark.parametrize(("every", "stashes"), [(4, False), (2, True), (1, False), (8, True)])
    def test_updates_by_which_no_plan_trains_are_refused(self, every: int, stashes: bool) -> None:
        """Parameters moved four times as far as by one step, and nobody told."""

        def make(sizes: Sizes) -> Schedule:
            usual = one_f_one_b(sizes.num_stages, sizes.num_microbatches)
            return replace(usual, update_every=every, stashes_weights=stashes)

        with pytest.raises(ValueError, match=f"updates weights every {every} microbatches"):
            register_schedule(ScheduleRecord("mine", make))
        assert "mine" not in SCHEDULES

    def test_updates_behind_each_microbatch_are_taken_with_stashes(self) -> None:
        def make(sizes: Sizes) -> Schedule:
            usual = one_f_one_b(sizes.num_stages, sizes.num_microbatches)
            return replace(usual, update_every=1, stashes_weights=True)

        register_schedule(ScheduleRecord("mine", make))
        assert schedule_by_name("mine", 2, 4).update_every == 1

    def test_what_is_made_is_called_as_the_record_is(self) -> None:
        """Two rows of a comparison of schedules were called 1f1b."""
        register_schedule(
            ScheduleRecord("mine", lambda s: one_f_one_b(s.num_stages, s.num_microbatches))
        )
        assert schedule_by_name("mine", 2, 4).name == "mine"
        assert schedule_by_name("mine", 2, 4) is schedule_by_name("mine", 2, 4)
