"""Instructions say what they do, and everybody who reads programs goes by that alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from stratagem.executor import grid, lower, model_state, verify
from stratagem.executor.actions import registry
from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.actions.registry import Action, runs
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.communication.process_member import Member
from stratagem.executor.interpreter.held_bytes import most_held_bytes
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program import instructions as known
from stratagem.executor.program.expected_seconds import Expected
from stratagem.executor.program.instructions import Free, Instruction, Update
from stratagem.executor.program.instructions.instruction import (
    ExpectedWork,
    HeldBytes,
    ValueStorage,
)
from stratagem.executor.program.instructions.operands import EVERYONE, Meeting
from stratagem.executor.program.instructions.plan_graphs import PlanGraphs
from stratagem.executor.program.live_bytes import peak_bytes
from stratagem.executor.program.programs import Program
from stratagem.executor.program.receive_postings import common_order, early_postings
from stratagem.executor.results.measured_timeline import timeline
from stratagem.simulator.base.task_kinds import TaskKind
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.optimizers.parameter_groups import ParameterGroup
from tests.executor.equality.test_models_executed import case_of
from tests.support.plans import Case, backward_of, make_plan, mlp_case, random_plan, sharding

SGD = Training(optimizer="sgd", learning_rate=0.1)
DECAY = 0.25


@dataclass(frozen=True)
class Decay(Instruction):
    """Add a share of a parameter to its gradient: weight decay, of which the package has no such.

    Where it says that it meets all ranks, it must be on all.
    """

    value: str
    gradient: str
    seen: bool = False

    task = "decay"
    kind = TaskKind.OTHER
    microbatch = -1

    def __str__(self) -> str:
        return f"decay {self.value}"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.value, self.gradient)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.gradient,)

    @property
    def adds_to(self) -> tuple[str, ...]:
        return self.writes

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return (Meeting(EVERYONE, 0, "decay"),) if self.seen else ()

    def memory(self, graphs: PlanGraphs, held: HeldBytes) -> Iterable[ValueStorage]:
        yield ValueStorage(self.gradient, held(self.value))

    def work(self, graphs: PlanGraphs) -> ExpectedWork:
        return ExpectedWork(moved=4_000_000)


@runs(Decay)
def decay(instruction: Decay, rank: RankState) -> Action:
    memory = rank.memory

    def run() -> None:
        memory.add(instruction.gradient, DECAY * memory.values[instruction.value])

    return run


class Undone(Decay):
    """The same, but nobody says how to run it."""


@pytest.fixture(scope="module")
def mlp() -> Case:
    return mlp_case()


Edit = Callable[[Update], list[Instruction]]


def before_updates(program: Program, edit: Edit) -> Program:
    """The program with something before every update."""

    def body(each: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for instruction in each:
            yield from edit(instruction) if isinstance(instruction, Update) else ()
            yield instruction

    made = {id(each.instructions): tuple(body(each.instructions)) for each in program.ranks}
    ranks = tuple(replace(e, instructions=made[id(e.instructions)]) for e in program.ranks)
    return replace(program, ranks=ranks)


def decays(update: Update) -> list[Instruction]:
    return [Decay(each.value, each.gradient) for each in update.parameters]


def trained(program: Program, case: Case, *, timed: bool) -> dict[str, Tensor]:
    """The parameters after three steps."""

    def rank(comm: Communicator) -> dict[str, Tensor]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        for _ in range(3):
            if timed:
                interpreter.step(case.batch)
            else:
                interpreter.issue(case.batch)
        return interpreter.parameters()

    return run_local(program.world_size, rank)[0]


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("zero", [0, 2])
def test_an_instruction_of_ones_own_trains_as_torch_does(
    mlp: Case, zero: int, timed: bool
) -> None:
    plan = make_plan(mlp, sharding("sample", zero=zero), (2,), training=SGD)
    program = before_updates(lower(plan, mlp.graph), decays)
    verify(program)
    found = trained(program, mlp, timed=timed)
    model = copy.deepcopy(mlp.model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=DECAY)
    for _ in range(3):
        optimizer.zero_grad()
        backward_of(model, mlp.batch, 1)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.data, rtol=1e-4, atol=1e-6)


def test_all_who_read_programs_go_by_what_it_says(mlp: Case) -> None:
    plan = make_plan(mlp, sharding("sample"), (2,), (1,), training=SGD, num_microbatches=2)
    plain = lower(plan, mlp.graph)
    program = before_updates(plain, decays)
    added = [sum(isinstance(e, Decay) for e in each.instructions) for each in program.ranks]
    assert all(added)
    verify(program)
    assert peak_bytes(program) == peak_bytes(plain)
    assert grid(program).count("decay") == sum(added)
    for rank, count in enumerate(added):
        before, after = (Expected(p, rank, on_cpu=True) for p in (plain, program))
        each = after.seconds(Decay("", ""))
        assert each > 0
        assert after.whole_step - before.whole_step == pytest.approx(count * each)
        # What is no pass parts no messages: receives are posted for passes as before.
        passes = [len(early_postings(p, rank)) for p in (plain, program)]
        assert passes[0] == passes[1]
        assert common_order(program).pairs() == common_order(plain).pairs()
    spans = {
        each.rank: [(1000 * n, 1000 * n + 500) for n in range(len(each.instructions))]
        for each in program.ranks
    }
    rows = timeline(program, spans)
    assert rows.names.count("decay") >= len(program.ranks)


def test_a_collective_of_ones_own_on_some_ranks_is_found_out(mlp: Case) -> None:
    plan = make_plan(mlp, sharding("sample"), (1,), (1,), training=SGD, num_microbatches=2)
    program = lower(plan, mlp.graph)

    def seen(update: Update) -> list[Instruction]:
        first = update.parameters[0]
        return [Decay(first.value, first.gradient, seen=True)]

    everywhere = before_updates(program, seen)
    counts = [sum(isinstance(e, Decay) for e in each.instructions) for each in everywhere.ranks]
    assert len(counts) == 2
    last = everywhere.ranks[1].instructions
    place = max(n for n, each in enumerate(last) if isinstance(each, Decay))
    short = replace(everywhere.ranks[1], instructions=(*last[:place], *last[place + 1 :]))
    uneven = replace(everywhere, ranks=(everywhere.ranks[0], short))
    if counts[0] == counts[1]:
        verify(everywhere)
    else:
        uneven = everywhere
    with pytest.raises(ValueError, match="waits for decay of ranks 0, 1"):
        verify(uneven)


# -- what nobody knows --------------------------------------------------------------------------


def test_what_nothing_runs_is_refused(mlp: Case) -> None:
    plan = make_plan(mlp, sharding("sample"), (2,), training=SGD)

    def undone(update: Update) -> list[Instruction]:
        return [Undone(each.value, each.gradient) for each in update.parameters]

    program = before_updates(lower(plan, mlp.graph), undone)
    verify(program)
    said = r"nothing runs 'decay .*no action is registered for Undone; .*@runs\(Undone\)"
    with pytest.raises(ValueError, match=said):
        run_local(2, lambda comm: Interpreter(program, comm, model_state(mlp.model)))


class Silent:
    """No instruction: it has their names, and says nothing of what it does."""

    task, kind, microbatch, reads, writes = "silent", TaskKind.OTHER, -1, (), ()


def test_what_is_no_instruction_comes_into_no_program(mlp: Case) -> None:
    """So none of its readers can pass over it."""
    plan = make_plan(mlp, sharding("sample"), (2,), training=SGD)
    program = lower(plan, mlp.graph)
    place = next(
        n for n, each in enumerate(program.ranks[0].instructions) if isinstance(each, Update)
    )
    said = f"rank 0, instruction {place}: Silent is not an instruction: derive it from Instruction"
    with pytest.raises(ValueError, match=said):
        before_updates(program, lambda update: [Silent()])  # type: ignore[list-item]


def test_an_instruction_that_does_not_say_all_of_itself_is_none() -> None:
    said = "instruction Half does not say its reads, memory, work: give it all of task, kind"
    with pytest.raises(TypeError, match=said):

        class Half(Instruction):
            task, kind, microbatch, writes = "half", TaskKind.OTHER, -1, ()


def test_every_instruction_of_the_package_is_run_by_something() -> None:
    kinds = {getattr(known, name) for name in known.__all__}
    kinds = {kind for kind in kinds if issubclass(kind, Instruction)} - {Instruction}
    assert Free in kinds
    assert kinds <= registry._MAKERS.keys()


# -- bytes --------------------------------------------------------------------------------------

RECIPES = {
    "clipped": Training(optimizer="sgd", clip_norm=1.0),
    "float16": Training(optimizer="sgd", precision="float16"),
    "lamb": Training(optimizer="lamb"),
    "adafactor": Training(optimizer="adafactor"),
    "adam8bit": Training(optimizer="adam8bit"),
    "muon": Training(groups=(ParameterGroup(("*.qkv.weight", "*.up.weight"), optimizer="muon"),)),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_peaks_of_all_recipes_are_those_of_the_storages(recipe: str) -> None:
    """Norms and numbers of whole parameters are freed as other values are."""
    case = case_of("gpt")
    plan = make_plan(case, sharding("sample"), (2,), training=RECIPES[recipe])
    program = lower(plan, case.graph)

    def rank(comm: Communicator) -> int:
        """In the second step, since an optimizer has no states before the first."""
        interpreter = Interpreter(program, comm, model_state(case.model))
        interpreter.step(case.batch)
        return most_held_bytes(interpreter, case.batch)

    assert list(peak_bytes(program)) == pytest.approx(run_local(2, rank), rel=0.1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_made_has_the_bytes_that_it_says(recipe: str) -> None:
    """Shards of all ranks count as the largest, tapes and views elsewhere."""
    case = case_of("gpt")
    plan = random_plan(case, 41, RECIPES[recipe])
    program = lower(plan, case.graph)

    def rank(comm: Communicator) -> dict[str, int]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        interpreter._begin(case.batch)
        there = interpreter._state.memory.values
        checked: dict[str, int] = {}
        with torch.no_grad():
            for instruction, action in zip(
                interpreter.mine.instructions, interpreter._actions, strict=True
            ):
                new = [value for value in instruction.writes if value not in there]
                held = {
                    name: each.nbytes for name, each in there.items() if hasattr(each, "nbytes")
                }
                action()
                if getattr(instruction, "later", False) or isinstance(instruction, known.Bundle):
                    continue  # What is on its way is not there.
                for value, nbytes, of in instruction.memory(program, held.__getitem__):
                    if value in new and nbytes is not None and not of:
                        made = there[value]
                        if isinstance(made, Tensor):
                            kind = type(instruction).__name__
                            assert made.numel() * made.element_size() <= nbytes, instruction
                            if kind in ("Norm", "Measure"):
                                assert made.nbytes == nbytes, instruction
                            checked[kind] = checked.get(kind, 0) + 1
        return checked

    for checked in run_local(program.world_size, rank):
        assert checked
        needed = {"clipped": "Norm", "float16": "Norm", "muon": "Direct"}.get(recipe, "Measure")
        assert needed in checked


def test_every_step_lets_go_of_what_was_sent(mlp: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between processes nothing else does, and memory and time of steps would grow."""
    let_go: list[int] = []
    monkeypatch.setattr(Member, "let_go", lambda comm: let_go.append(comm.rank))
    program = lower(make_plan(mlp, sharding("sample"), (2,)), mlp.graph)

    def rank(comm: Communicator) -> None:
        interpreter = Interpreter(program, comm, model_state(mlp.model))
        for run in (interpreter.step, interpreter.issue):
            run(mlp.batch)

    run_local(2, rank)
    assert sorted(let_go) == [0, 0, 1, 1]
