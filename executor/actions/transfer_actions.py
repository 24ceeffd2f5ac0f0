"""Running conversions, sends and receives; what is kept, put together and let go of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from stratagem.executor.actions.named_values import NamedValues
from stratagem.executor.actions.rank_state import RankState
from stratagem.executor.actions.registry import Action, runs
from stratagem.executor.communication.communicator import (
    Communicator,
    Poster,
    Shape,
    Untagged,
)
from stratagem.executor.program.instructions import (
    Bundle,
    Convert,
    Free,
    Join,
    Receive,
    Send,
    Stash,
)
from stratagem.executor.program.programs import part_shape
from stratagem.executor.program.receive_postings import Posting, common_order, early_postings
from stratagem.executor.resharding.conversions import Route, put_together, start_together
from stratagem.executor.resharding.seats import Seat, TensorSpec, box_shape, cut_part
from stratagem.simulator.sharding.mesh_transfers import Move
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype


@runs(Convert)
def convert(instruction: Convert, rank: RankState) -> Action:
    """The action of a conversion."""
    seat, comm, memory = rank.parts.seats[instruction.stage], rank.comm, rank.memory
    values, source, target = memory.values, instruction.source, instruction.target
    keep = _keeper(target, instruction.adds, memory)
    steps, begun, final = instruction.steps, _reader(instruction, seat), _finisher(instruction)
    route = _route(instruction, seat, comm)

    def read() -> Tensor | None:
        return None if source is None else begun(values[source])

    def run() -> None:
        tensor = read()
        if steps:
            tensor = route(tensor)
        if target is not None:
            assert tensor is not None
            keep(final(tensor))

    def begin() -> None:
        assert target is not None
        pending = route.start(read())
        memory.begun.append(pending.ending)
        memory.forget(target)
        memory.promise(target, lambda: final(pending.finish()))

    def begin_sum() -> None:
        assert target is not None
        memory.before_sum([target])
        pending = route.start(read())
        memory.begun.append(pending.ending)
        memory.promise_sum(target, lambda: final(pending.finish()), pending.is_over)

    if not (instruction.later and steps and target is not None):
        return run
    return begin_sum if instruction.adds else begin


@runs(Join)
def join(instruction: Join, rank: RankState) -> Action:
    """The action of putting pieces together."""
    values = rank.memory.values

    def run() -> None:
        pieces = [values[name] for name in instruction.pieces]
        values[instruction.value] = torch.cat(pieces, instruction.factor)

    return run


@runs(Stash)
def stash(instruction: Stash, rank: RankState) -> Action:
    """The action of keeping weights as they are now."""
    values = rank.memory.values

    def run() -> None:
        for value, copy in instruction.copies:
            values[copy] = values[value].clone()

    return run


@runs(Free)
def free(instruction: Free, rank: RankState) -> Action:
    """The action of letting go of values."""
    memory = rank.memory
    return lambda: memory.free(instruction.values)


def _reader(instruction: Convert, seat: Seat) -> Callable[[Tensor], Tensor]:
    """What makes of a value the part that is converted, in factors."""
    part, befores = _spec(instruction).part(seat), [e.before for e in instruction.treatments]
    if instruction.carried != instruction.dtype:
        carried = torch_dtype(instruction.carried)
        befores.append(lambda part: part.to(carried))

    def read(tensor: Tensor) -> Tensor:
        for before in befores:
            tensor = before(tensor)
        return tensor if part is None else tensor.reshape(part.shape)

    return read


def _finisher(instruction: Convert) -> Callable[[Tensor], Tensor]:
    """What makes a value of the part that results."""
    placed, afters = instruction.after, [e.after for e in reversed(instruction.treatments)]
    if instruction.carried != instruction.dtype:
        dtype = torch_dtype(instruction.dtype)
        afters.append(lambda part, placed: part.to(dtype))

    def finish(tensor: Tensor) -> Tensor:
        for after in afters:
            tensor = after(tensor, placed)
        return tensor

    return finish


def _spec(instruction: Convert) -> TensorSpec:
    return TensorSpec(instruction.sizes, torch_dtype(instruction.carried), instruction.before)


def _route(instruction: Convert, seat: Seat, comm: Communicator) -> Route:
    return Route(_spec(instruction), instruction.steps, seat, comm)


@runs(Bundle)
def bundle(instruction: Bundle, rank: RankState) -> Action:
    """The action of a bucket: its parts go through each step together.

    What they give is added to what is there, or takes its place.
    """
    memory, comm, parts = rank.memory, rank.comm, instruction.parts
    values, seat = memory.values, rank.parts.seats[parts[0].stage]
    routes = [_route(part, seat, comm) for part in parts]
    begins = [(part.source, _reader(part, seat)) for part in parts if part.source is not None]
    ends = [(part.target, _finisher(part)) for part in parts if part.target is not None]

    adds = parts[0].adds
    if any(part.adds != adds for part in parts):
        raise ValueError(
            f"bundle of {instruction}: some of its conversions add, and others do not"
        )

    def run() -> None:
        tensors = [read(values[source]) for source, read in begins]
        if adds:
            memory.before_sum([target for target, _ in ends])
        pending, finishes = start_together(routes, tensors)
        memory.begun.append(pending.ending)
        for (target, final), finish in zip(ends, finishes, strict=True):
            given = partial(_finished, final, finish)
            if adds:
                memory.promise_sum(target, given, pending.is_over)
            else:
                memory.forget(target)
                memory.promise(target, given)

    return run


def _finished(final: Callable[[Tensor], Tensor], finish: Callable[[], Tensor]) -> Tensor:
    return final(finish())


@runs(Send)
def send(instruction: Send, rank: RankState) -> Action:
    """The action of a send, which does not wait."""
    values, transfer = rank.memory.values, instruction.transfer
    device, label, ranks = rank.mine.device, instruction.label, rank.program.rank_of
    own = transfer.source_part(device)
    assert own is not None
    shape = own.shape
    moves, tag = transfer.moves_from(device), rank.program.tags[label]

    def run() -> None:
        tensor: Tensor = values[instruction.value].reshape(shape)
        for move in moves:
            piece = cut_part(tensor, own, move.box)
            if move.receiver == device:
                rank.kept.setdefault(label, deque()).append(piece)
            else:
                rank.comm.send(piece, ranks[move.receiver], tag)

    return run


@runs(Receive)
def receive(instruction: Receive, rank: RankState) -> Action:
    """The action of a receive: wait for the pieces and put them together."""
    dtype, transfer = torch_dtype(instruction.dtype), instruction.transfer
    label, device = instruction.label, rank.mine.device
    ranks, comm = rank.program.rank_of, rank.comm
    own, tag = transfer.target_part(device), rank.program.tags[label]
    assert own is not None
    keep, layout = _keeper(instruction.value, instruction.adds, rank.memory), instruction.layout
    final = own.shape if layout is None else part_shape(layout, own)
    expected = [(move, box_shape(move.box)) for move in transfer.moves_to(device)]

    def take(move: Move, size: Shape) -> Tensor:
        if move.sender == device:
            return rank.kept[label].popleft()
        return comm.recv(size, dtype, ranks[move.sender], tag)

    def run() -> None:
        pieces = [(move.box, take(move, size)) for move, size in expected]
        keep(put_together(pieces, own, dtype, comm.device).reshape(final))

    return run


def posters(rank: RankState) -> dict[int, list[Action]]:
    """By instruction what posts receives in front of it, for those who can begin them early."""
    program, comm = rank.program, rank.comm
    if isinstance(comm, Untagged):
        order = common_order(program)
        comm.open(order.pairs())
        postings = order.postings(comm.rank)
    elif isinstance(comm, Poster):
        postings = early_postings(program, comm.rank)
    else:
        return {}
    found: dict[int, list[Action]] = {}
    for each in postings:
        found.setdefault(each.before, []).append(_poster(rank, each))
    return found


def posted(
    actions: Mapping[int, Action], posting: Mapping[int, Sequence[Action]]
) -> dict[int, Action]:
    """Actions by the number of their instruction, with what posts receives in front of them."""
    found = {number: [*posting.get(number, ())] for number in sorted({*actions, *posting})}
    for number, action in actions.items():
        found[number].append(action)
    return {
        number: each[0] if len(each) == 1 else _in_turn(each) for number, each in found.items()
    }


def _poster(rank: RankState, posting: Posting) -> Action:
    """What posts the pieces that one sender has for a receive."""
    comm, ranks = rank.comm, rank.program.rank_of
    assert isinstance(comm, Poster)
    message = rank.mine.instructions[posting.needed].receives
    assert message is not None
    moves = message.transfer.moves_to(rank.mine.device)
    shapes = [box_shape(m.box) for m in moves if ranks[m.sender] == posting.sender]
    dtype, tag = torch_dtype(message.dtype), rank.program.tags[message.label]
    return partial(comm.post, shapes, dtype, posting.sender, tag)


def _in_turn(actions: Sequence[Action]) -> Action:
    def run() -> None:
        for action in actions:
            action()

    return run


def _keeper(target: str | None, adds: bool, memory: NamedValues) -> Callable[[Tensor], None]:
    """How a result becomes a value: it is added to it, or is it."""
    if target is None:
        return lambda tensor: None
    if adds:
        return lambda tensor: memory.add(target, tensor)
    return lambda tensor: memory.values.__setitem__(target, tensor)
