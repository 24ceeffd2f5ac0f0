"""The actions of sources and of the passes of operators, ordinary ones and prefixes."""

from __future__ import annotations

from stratagem.executor.actions import operator_actions, prefix_actions
from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.actions.registry import Action, runs
from stratagem.executor.program.instructions import Backward, Forward, Source
from stratagem.executor.program.programs import Program, RankProgram
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import role_of
from stratagem.simulator.operators.operator import factor_sizes
from stratagem.simulator.operators.step_programs import inputs_of
from stratagem.simulator.torch_ops.kernels.step_programs import prepare_source, torch_dtype


@runs(Source)
def source(instruction: Source, rank: RankState) -> Action:
    """The action of computing a source of the inputs of the batch."""
    operator = rank.program.whole.operator(instruction.operator)
    shape = factor_sizes(operator.outputs[0].layout, operator.sizes)
    values, dtype = rank.memory.values, torch_dtype(instruction.dtype)
    make = prepare_source(operator, rank.comm.device)

    def run() -> None:
        values[instruction.value] = make(rank.batch).to(dtype).reshape(shape)

    return run


@runs(Forward)
def forward(instruction: Forward, rank: RankState) -> Action:
    """The action of a forward pass, at its microbatch."""
    microbatch, parts = instruction.microbatch, rank.parts
    operator = rank.program.operator(instruction.operator, microbatch)
    seat = parts.seat_of(operator.name)
    if role_of(operator) is OperatorRole.PREFIX:
        before = parts.before(operator, len(instruction.inputs))
        return prefix_actions.forward(instruction, operator, before, seat, rank.memory)
    shards = parts.shards_of(operator, microbatch, instruction.piece)
    flows, enter = parts.flows[operator.name], parts.entering(microbatch)
    run = operator_actions.forward(instruction, operator, shards, flows, seat, rank.memory)

    def at_its_microbatch() -> None:
        enter()
        run()

    return at_its_microbatch


@runs(Backward)
def backward(instruction: Backward, rank: RankState) -> Action:
    """The action of a backward pass."""
    operator = rank.program.operator(instruction.operator, instruction.microbatch)
    shards = rank.parts.shards_of(operator, instruction.microbatch, instruction.piece)
    if role_of(operator) is OperatorRole.PREFIX:
        slices = rank.program.slices
        return prefix_actions.backward(instruction, operator, shards, slices, rank.memory)
    seat = rank.parts.seat_of(operator.name)
    return operator_actions.backward(instruction, operator, shards, seat, rank.memory)


def batch_inputs(program: Program, mine: RankProgram) -> set[str]:
    """The inputs of the batch that a rank reads: in a pipeline few stages read any."""
    sources = [name for each in mine.instructions for name in each.batch_operators]
    steps = [program.whole.operator(source).attributes["steps"] for source in sources]
    return {name for each in steps for name in inputs_of(each)}
