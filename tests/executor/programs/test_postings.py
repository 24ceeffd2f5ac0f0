"""Receives without tags: posted in the order of sends, so that nothing waits for ever."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from examples.models import MLP, SmallGPT
from stratagem.executor import lower
from stratagem.executor.program.instructions import (
    Backward,
    Forward,
    Receive,
    Send,
    Update,
)
from stratagem.executor.program.programs import Program
from stratagem.executor.program.receive_postings import (
    AHEAD,
    Posting,
    common_order,
    early_postings,
)
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import Case, crossed, make_case, make_plan, random_plan, sharding, whole

Op = tuple[str, object, object]


@pytest.fixture(scope="module")
def gpt() -> Case:
    torch.manual_seed(0)
    model = SmallGPT(num_layers=2, hidden=24, num_heads=4, vocabulary=50, sequence=10)
    labels = torch.randint(0, 50, (4, 10))
    return make_case(model, input_ids=torch.randint(0, 50, (4, 10)), labels=labels)


@pytest.fixture(scope="module")
def mlp() -> Case:
    torch.manual_seed(1)
    model = MLP([10, 13, 9, 7])
    return make_case(model, x=torch.randn(8, 10), target=torch.randint(0, 7, (8,)))


def targets(program: Program, sender: int, instruction: Send) -> tuple[int, ...]:
    """The other ranks that a rank sends to, in order."""
    moves = instruction.transfer.moves_from(program.ranks[sender].device)
    ranks = dict.fromkeys(program.rank_of[move.receiver] for move in moves)
    return tuple(rank for rank in ranks if rank != sender)


def postings(program: Program) -> list[tuple[Posting, ...]]:
    """What every rank posts."""
    order = common_order(program)
    found = [order.postings(rank) for rank in range(program.world_size)]
    sent = {(each.sender, rank) for rank, posted in enumerate(found) for each in posted}
    assert order.pairs() == sent
    return found


def operations(program: Program, rank: int, posted: tuple[Posting, ...]) -> list[Op]:
    """What a rank issues, in order."""
    before: defaultdict[int, list[Posting]] = defaultdict(list)
    for each in posted:
        before[each.before].append(each)
    found: list[Op] = []
    instructions = program.ranks[rank].instructions
    for number, instruction in enumerate(instructions):
        for each in before[number]:
            needed = instructions[each.needed]
            assert isinstance(needed, Receive)
            found.append(("receive", each.sender, needed.label))
        if isinstance(instruction, Send):
            to = targets(program, rank, instruction)
            found += [("send", target, instruction.label) for target in to]
        found += [
            ("meet", program.group(meeting, rank), meeting.what)
            for meeting in instruction.meetings
        ]
    return found


def run_in_lockstep(operations: list[list[Op]]) -> list[str]:
    """Run what ranks issue, each strictly one after the other, sends waiting for receives.

    Returns where ranks are stuck; nothing when all come to their end. Labels of a send and the
    receive that it meets must be equal.
    """
    left = [deque(each) for each in operations]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(left):
            if queue and _happens(rank, queue[0], left):
                moved = True
    return [f"rank {rank} at {queue[0]}" for rank, queue in enumerate(left) if queue]


def _happens(rank: int, op: Op, left: list[deque[Op]]) -> bool:
    kind, whom, label = op
    if kind == "send":
        assert isinstance(whom, int)
        other = left[whom]
        if not other or other[0][:2] != ("receive", rank):
            return False
        assert other[0][2] == label, f"{label!r} of rank {rank} meets {other[0][2]!r}"
        other.popleft()
        left[rank].popleft()
        return True
    if kind == "meet":
        assert isinstance(whom, tuple)
        if any(not left[member] or left[member][0] != op for member in whom):
            return False
        for member in whom:
            left[member].popleft()
        return True
    return False


def check(program: Program) -> list[tuple[Posting, ...]]:
    posted = postings(program)
    for rank, found in enumerate(posted):
        for each in found:
            assert each.before <= each.needed
        received = sum(
            len({m.sender for m in i.transfer.moves_to(program.ranks[rank].device)} - {own})
            for i in program.ranks[rank].instructions
            if isinstance(i, Receive)
            for own in [program.ranks[rank].device]
        )
        assert len(found) == received
    ops = [operations(program, rank, found) for rank, found in enumerate(posted)]
    assert run_in_lockstep(ops) == []
    return posted


@pytest.mark.parametrize("seed", crossed([*range(14), 24], every=2))
def test_random_plans_end_in_lockstep(gpt: Case, seed: int) -> None:
    check(lower(random_plan(gpt, seed), gpt.graph))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("shapes", [((1,), (1,)), ((1,), (2,), (1,)), ((2,), (3,)), ((1,),) * 3])
def test_pipelines_end_in_lockstep(
    mlp: Case, schedule: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    plan = make_plan(mlp, sharding("parameter"), *shapes, num_microbatches=4, schedule=schedule)
    check(lower(plan, mlp.graph))


CROSSING = [("gpt", 434), ("lstm", 249)]
"""Interleaved plans whose stages send both ways while they convert along two axes.

Where such a conversion may be left half done, their replay does not end.
"""


@pytest.mark.parametrize(("model", "seed"), CROSSING)
def test_plans_with_traffic_both_ways_over_two_axes_end_in_lockstep(model: str, seed: int) -> None:
    case = case_of(model)
    check(lower(random_plan(case, seed), case.graph))


def test_one_message_of_a_sender_is_set_aside_at_a_time(mlp: Case) -> None:
    plan = make_plan(mlp, whole, (1,), (1,), num_microbatches=4, schedule="gpipe")
    program = lower(plan, mlp.graph)
    forwards = [each for each in check(program)[1] if each.sender == 0]
    assert len(forwards) == 4
    for one, following in pairwise(forwards):
        assert one.needed < following.before <= following.needed


def test_receiving_only_when_needed_would_hang(mlp: Case) -> None:
    """Interleaved stages send to and fro, so the lockstep machine tells a wrong order."""
    hung = 0
    for seed in range(12):
        plan = random_plan(mlp, seed)
        program = lower(plan, mlp.graph)
        late = [
            tuple(sorted((Posting(p.needed, p.needed, p.sender) for p in found), key=_needed))
            for found in postings(program)
        ]
        try:
            ops = [operations(program, rank, found) for rank, found in enumerate(late)]
            hung += bool(run_in_lockstep(ops))
        except AssertionError:
            hung += 1
    assert hung


def _needed(posting: Posting) -> int:
    return posting.needed


def test_ranks_that_do_the_same_are_played_as_one(mlp: Case) -> None:
    """However many they are: two stages of four ranks play as two of one."""
    few, many = (
        lower(make_plan(mlp, sharding("sample"), (n,), (n,), num_microbatches=2), mlp.graph)
        for n in (1, 4)
    )
    orders = common_order(few), common_order(many)
    assert len(orders[0].messages) == len(orders[1].messages) > 0
    assert {len(each.senders) for each in orders[1].messages} == {4}
    check(many)


def test_ranks_that_send_one_another_something_are_played_apart(mlp: Case) -> None:
    """Two stages on the same ranks, cut otherwise: each is in the middle of its own sends."""
    plan = make_plan(mlp, sharding("sample"), (2,), (2,), num_microbatches=2)
    first, second = plan.stages
    swapped = replace(second, mesh=replace(second.mesh, devices=first.mesh.devices[::-1]))
    plan = replace(plan, stages=(first, swapped), schedule="interleaved")
    order = common_order(lower(plan, mlp.graph))
    assert {len(each.senders) for each in order.messages} == {1}
    check(lower(plan, mlp.graph))


def taking(program: Program, rank: int) -> list[int]:
    """Per instruction the passes that come before it."""
    found = [0]
    for each in program.ranks[rank].instructions:
        found.append(found[-1] + isinstance(each, Forward | Backward | Update))
    return found


@pytest.mark.parametrize("seed", range(14))
def test_with_tags_receives_are_posted_two_passes_ahead(gpt: Case, seed: int) -> None:
    """Each once, before it is needed; of a sender never more than the messages of two passes."""
    program = lower(random_plan(gpt, seed), gpt.graph)
    for rank, with_order in enumerate(postings(program)):
        found, passes = early_postings(program, rank), taking(program, rank)
        assert sorted((p.needed, p.sender) for p in found) == sorted(
            (p.needed, p.sender) for p in with_order
        )
        assert [each.before for each in found] == sorted(each.before for each in found)
        for sender in {each.sender for each in found}:
            mine = [each for each in found if each.sender == sender]
            for each in mine:
                assert each.before <= each.needed
                # Awaited while it is posted: it, and those needed before it.
                open_passes = {
                    passes[other.needed]
                    for other in mine
                    if other.before <= each.before and other.needed >= each.before
                }
                assert len(open_passes) <= AHEAD
            first = min(passes[each.needed] for each in mine)
            assert all(each.before == 0 for each in mine if passes[each.needed] == first)


def test_the_next_receive_is_posted_behind_the_pass_that_took_one(mlp: Case) -> None:
    """Posted at once, it would find the sender amid the message before, on cores that compute."""
    plan = make_plan(mlp, whole, (1,), (1,), num_microbatches=4, schedule="gpipe")
    program = lower(plan, mlp.graph)
    passes = taking(program, 1)
    one, two, three, four = (each for each in early_postings(program, 1) if each.sender == 0)
    assert one.before == two.before == 0
    assert passes[three.before] == passes[one.needed] + 1
    assert passes[four.before] == passes[two.needed] + 1
    assert three.before < three.needed
