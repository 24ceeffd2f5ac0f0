"""The passes of lowering: each makes a program that ends of one that does."""

from __future__ import annotations

import pytest

from stratagem.executor import lower
from stratagem.executor.lowering.lower import PASSES
from stratagem.executor.lowering.passes.bundling import bundle
from stratagem.executor.lowering.passes.drafts import (
    BlockBegins,
    Fill,
    Gather,
    Ran,
    RankDraft,
    Step,
)
from stratagem.executor.lowering.passes.freeing import free
from stratagem.executor.lowering.passes.gathering_ahead import gather_ahead
from stratagem.executor.lowering.passes.unread_sources import drop_unread_sources
from stratagem.executor.program.instructions import Bundle, Convert, Free, Instruction, Source
from stratagem.executor.program.verify import verify
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.graph.placement import REPLICATE
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.sharding.resharding_paths import ReshardingStep
from tests.support.plans import cnn_case, gpt_case, mlp_case, random_plan

CASES = {"gpt": gpt_case, "mlp": mlp_case, "cnn": cnn_case}


def as_written(draft: RankDraft) -> list[Step]:
    """The conversions of all marks, each by itself and where it was written."""
    steps: list[Step] = []
    for step in draft.steps:
        if isinstance(step, Instruction):
            steps.append(step)
        elif isinstance(step, Gather | Fill):
            steps += step.converts
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("count", range(len(PASSES)))
@pytest.mark.parametrize("name", CASES)
def test_a_program_ends_after_every_pass(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the marks that are left carried out where they stand, and values freed."""
    passes = (*PASSES[:count], as_written, free)
    monkeypatch.setattr("stratagem.executor.lowering.lower.PASSES", passes)
    case = CASES[name]()
    for seed in range(12):
        verify(lower(random_plan(case, seed), case.graph))


def convert(source: str, *, collective: Collective | None = None) -> Convert:
    """One that makes `source whole` of `source`."""
    step = ReshardingStep(collective or Collective.ALL_REDUCE, 0, REPLICATE, REPLICATE, 2)
    return Convert(
        stage=0,
        task=source,
        kind=TaskKind.GRADIENT_SYNC,
        microbatch=0,
        source=source,
        target=f"{source} whole",
        sizes=(2,),
        dtype="float32",
        before=(REPLICATE,),
        steps=() if collective is None else (step,),
    )


def shown(steps: list[Step]) -> str:
    """The letters of conversions, those that move by themselves or with others in brackets."""
    return "".join(
        f"[{''.join(each.task for each in step.converts)}]"
        if isinstance(step, Gather)
        else f"({''.join(each.task for each in step.parts)})"
        if isinstance(step, Bundle)
        else step.task
        for step in steps
        if isinstance(step, Gather | Bundle | Convert)
    )


def one(letter: str, *, of_bucket: bool = False) -> Gather:
    return Gather(tuple(map(convert, letter)), of_bucket)


def test_weights_are_gathered_while_the_operator_in_front_runs() -> None:
    steps: list[Step] = [BlockBegins()]
    for letter in "abcd":
        steps += [one(letter.upper()), convert(letter), Ran(again=False)]
    assert shown(gather_ahead(RankDraft(tuple(steps), frozenset()))) == "[A][B]a[C]b[D]cd"


def test_buckets_are_gathered_while_the_bucket_in_front_is_read() -> None:
    steps: list[Step] = [BlockBegins()]
    for first, second in ("ab", "cd", "ef"):
        steps.append(one((first + second).upper(), of_bucket=True))
        for letter in (first, second):
            steps += [convert(letter), Ran(again=False)]
    assert shown(gather_ahead(RankDraft(tuple(steps), frozenset()))) == "[AB][CD]ab[EF]cdef"


def test_nothing_is_gathered_before_its_block() -> None:
    block = (BlockBegins(), one("A"), convert("a"), Ran(again=False))
    steps = gather_ahead(RankDraft((*block, convert("x"), *block), frozenset()))
    assert shown(steps) == "[A]ax[A]a"


def test_a_bucket_goes_together_when_it_is_full() -> None:
    a, b = (convert(letter, collective=Collective.ALL_REDUCE) for letter in "ab")
    c = convert("c")
    draft = RankDraft(
        (Fill(0, (a,), False), convert("x"), Fill(1, (c,), True), Fill(0, (b,), True)), frozenset()
    )
    assert shown(bundle(draft)) == "xc(ab)"


def test_sources_that_nobody_reads_are_left_out() -> None:
    sources = tuple(Source(name, f"{name} whole", "int64") for name in ("ids", "labels"))
    steps = drop_unread_sources(RankDraft((*sources, convert("labels whole")), frozenset()))
    assert [str(each) for each in steps] == ["labels source", "labels whole 0"]


def test_values_are_freed_behind_the_last_that_touches_them() -> None:
    draft = RankDraft((convert("a"), convert("a whole")), frozenset({"a"}))
    freed = [each.values for each in free(draft) if isinstance(each, Free)]
    assert freed == [("a whole", "a whole whole")]
