"""What papers published: the page is made of the recorded lines, and these are measured again."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers.all_claims import CLAIMS
from benchmarks.papers.claims import Claim, Outcome, line_of
from benchmarks.papers.page import page_of
from benchmarks.papers.systems import SYSTEMS, System
from stratagem.searcher.methods.registry import METHODS
from stratagem.simulator.schedules.named_schedules import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs"
LINES = (DOCS / "papers.jsonl").read_text()
RECORDED = {line["name"]: line for line in map(json.loads, LINES.splitlines())}
BY_NAME = {claim.name: claim for claim in CLAIMS}
CHEAP = ("zero-states", "megatron-gpt3", "gshard-experts", "pipedream-vgg", "coconet-overlap")
"""Of different families; each takes less than five CPU seconds."""

SAME = 0.01


def test_the_page_has_the_lines_that_were_measured() -> None:
    assert page_of(LINES) == (DOCS / "papers.md").read_text(), (
        "python -m benchmarks.papers --page …"
    )


def test_every_claim_is_recorded_as_it_is_stated() -> None:
    assert list(RECORDED) == [claim.name for claim in CLAIMS]
    assert len(CLAIMS) == 22
    for claim in CLAIMS:
        line = RECORDED[claim.name]
        stated = (claim.paper, claim.claim, claim.source, claim.unit)
        assert (line["paper"], line["claim"], line["source"], line["unit"]) == stated
        assert line["published"] == pytest.approx(dict(claim.published), rel=1e-3)
        assert line["within"] == list(claim.within)
        assert line["ours"].keys() == claim.published.keys()


def test_what_is_said_of_a_line_follows_from_its_figures() -> None:
    for line in RECORDED.values():
        ratios = [line["ours"][each] / line["published"][each] for each in line["published"]]
        least, most = line["within"]
        assert line["agrees"] == all(least <= ratio <= most for ratio in ratios)
        assert any(line["ratio"] == pytest.approx(ratio, rel=2e-3) for ratio in ratios)
        has_figures = any(letter.isdigit() for letter in line["reason"])
        assert has_figures == (not line["agrees"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_cheap_claims_come_out_as_recorded(name: str) -> None:
    assert_as_recorded(BY_NAME[name])


@pytest.mark.long
@pytest.mark.parametrize(
    "claim",
    [each for each in CLAIMS if not each.is_timed and each.name not in CHEAP],
    ids=lambda claim: claim.name,
)
def test_other_claims_come_out_as_recorded(claim: Claim) -> None:
    assert_as_recorded(claim)


def assert_as_recorded(claim: Claim) -> None:
    ours = claim.measure().ours
    assert ours == pytest.approx(RECORDED[claim.name]["ours"], rel=SAME)


class TestLines:
    CLAIM = Claim(
        "a", "A", "somewhere", "b", "s", {"one": 2.0, "two": 4.0}, (0.9, 1.1), lambda: Outcome({})
    )

    def line(self, one: float, two: float, reason: str = "") -> dict[str, object]:
        outcome = Outcome({"one": one, "two": two}, reason)
        return line_of(replace(self.CLAIM, measure=lambda: outcome))

    def test_all_figures_must_be_in_the_range(self) -> None:
        assert self.line(2.1, 3.9)["agrees"]
        line = self.line(2.1, 3.0, "3 where 4 were published")
        assert (line["agrees"], line["ratio"]) == (False, 0.75)
        assert line["reason"] == "3 where 4 were published"

    def test_a_reason_is_told_only_of_what_does_not_agree(self) -> None:
        assert self.line(2.0, 4.0, "never mind")["reason"] == ""

    def test_what_does_not_agree_needs_one(self) -> None:
        with pytest.raises(ValueError, match=r"'a': ours are 0.75 to 1 of .* outside 0.9 to 1.1"):
            self.line(2.0, 3.0)

    def test_other_figures_than_published_are_refused(self) -> None:
        with pytest.raises(ValueError, match="one were measured, but one, two were published"):
            line_of(replace(self.CLAIM, measure=lambda: Outcome({"one": 2.0})))


class TestSystems:
    @pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
    def test_every_name_is_there(self, system: System) -> None:
        assert list(system.missing()) == []
        assert system.methods or system.schedules or system.names

    def test_names_that_nothing_has_are_told(self) -> None:
        system = System("x", "y", ("Alpha",), ("1f2b",), ("sg.serch", "sg.Choice.chunk"))
        assert list(system.missing()) == ["Alpha", "1f2b", "sg.serch", "sg.Choice.chunk"]

    def test_every_method_of_a_paper_is_in_the_table(self) -> None:
        told = Counter(name for system in SYSTEMS for name in system.methods)
        assert set(METHODS) - set(told) == {"random", "exhaustive"}
        assert max(told.values()) == 1

    def test_every_schedule_of_a_paper_is_in_the_table(self) -> None:
        told = {name for system in SYSTEMS for name in system.schedules}
        assert told == set(SCHEDULES)
