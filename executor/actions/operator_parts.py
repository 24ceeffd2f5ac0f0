"""Where a rank sits, and which part of each operator it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.program.instructions.numbered_meshes import numbers_of
from stratagem.executor.program.instructions.operands import Piece
from stratagem.executor.program.programs import Program
from stratagem.executor.resharding.operator_shards import operator_shards
from stratagem.executor.resharding.seats import Seat
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.sliding_windows import shard_bounds
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream
from stratagem.simulator.torch_ops.kernels.shards import FasterKernels, Shards


class OperatorParts:
    """A rank's seats by the number of a mesh, and its shards of operators.

    `flows` has per operator, for its inputs and then its weights, whether a gradient is wanted.
    """

    def __init__(
        self,
        program: Program,
        comm: Communicator,
        random: RandomStream,
        faster: FasterKernels | None = None,
    ) -> None:
        self.program = program
        self._comm, self._random = comm, random
        self._losses = None if faster is None else faster.losses
        mine = program.ranks[comm.rank]
        self.seats: Mapping[int, Seat] = {
            number: Seat(program.mesh(number, mine.device), mine.device, program.rank_of)
            for number in numbers_of(program.plan, mine.stages)
        }
        self.flows = _flows(program.graph)
        self._shards: dict[tuple[str, int], Shards] = {}

    def seat_of(self, operator: str) -> Seat:
        """The seat from which this rank sees an operator."""
        return self.seats[self.program.plan.stage_of[operator]]

    def shards_of(self, operator: Operator, microbatch: int, piece: Piece | None = None) -> Shards:
        """This rank's shards of an operator in a pass, or of a piece of it."""
        shards = self._part(operator, microbatch)
        if piece is None:
            return shards
        start, stop = shards.bounds[piece.dim]
        first, last = shard_bounds(stop - start, [piece.count], [piece.number])
        mine = start + first, start + last
        return replace(shards, bounds={**shards.bounds, piece.dim: mine})

    def entering(self, microbatch: int) -> Callable[[], None]:
        """What says which pass it is to those who draw random numbers."""
        random, number = self._random, microbatch // max(1, len(self.program.slices))

        def enter() -> None:
            random.microbatch = number

        return enter

    def before(self, operator: Operator, count: int) -> list[Shards]:
        """This rank's shards of an operator in the first `count` token slices."""
        slices = self.program.slices[:count]
        return [self._part(part.graph.operator(operator.name), part.number) for part in slices]

    def _part(self, operator: Operator, microbatch: int) -> Shards:
        part = self.program.slice_of(microbatch)
        key = operator.name, 0 if part is None else part.number
        if key not in self._shards:
            made = operator_shards(
                operator,
                self.program.plan.choice(operator.name).config,
                self.seat_of(operator.name),
                self._comm,
                self._random,
            )
            places = {} if part is None else part.places(operator.name)
            products = self.program.plan.training.formats.rounded_to
            self._shards[key] = replace(
                made, places=places, products=products, losses=self._losses
            )
        return self._shards[key]


def _flows(graph: OperatorGraph) -> dict[str, list[bool]]:
    """Per operator, for its inputs and then its weights, whether a gradient is wanted."""
    flows: dict[str, list[bool]] = {operator.name: [] for operator in graph.operators}
    for edge in graph.edges:
        name = graph.operators[edge.consumer].name
        flows[name].append(graph.edge_needs_gradient(edge))
    for operator in graph.operators:
        flows[operator.name] += [
            graph.parameter_index[weight.parameter].trainable for weight in operator.weights
        ]
    return flows
