"""The quickest bound on a skeleton: computing alone, every operator sharded as suits it best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from stratagem.searcher.space.microbatch_graphs import MicrobatchModel, MicrobatchModels
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, operator_choices
from stratagem.simulator.base.arrays import Flags
from stratagem.simulator.graph.checkpoint_segments import run_again
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import local_sizes
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice, Touches
from stratagem.simulator.sharding.choice_options import priced_by


class ComputingBounds:
    """Bounds steps of a skeleton from below without pricing any communication.

    A rank computes all microbatches of its stages, one after the other, and each operator at
    least as long as under its fastest choice, twice forward if the skeleton recomputes it. Its
    first block is a forward pass of its first stage, and before it the microbatch goes through
    the stages that this one reads from; its last block is a backward pass of that stage, where
    backward is not split, and behind it gradients go back through them, stage after stage:

        step ≥ max over ranks r of  M · Σ_{s of r} (Fₛ + Bₛ) + max over paths to r's first stage
                                                               of Σ_{s on the path} (Fₛ + Bₛ)

    Branches of a model may be stages beside one another: neither waits for the other.

    Equal operators on equal meshes are priced once for all skeletons.

    Example:
        >>> from stratagem.searcher.space.skeletons import skeletons
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> cluster = Cluster.preset("dgx-a100", num_nodes=1)
        >>> graph = mlp([64, 64], batch=32)
        >>> bounds = ComputingBounds(Situation(graph, cluster, Training(), default_costs()))
        >>> bounds.seconds(next(skeletons(graph, cluster))) > 0
        True
    """

    def __init__(self, situation: Situation, options: Options = Options()) -> None:  # noqa: B008
        self._situation, self._options = situation, options.touching(Touches.PASSES)
        self._known: dict[Any, float] = {}
        self._priced: dict[Any, float] = {}
        self._shards: dict[Any, dict[Any, Choice]] = {}
        self._builders: list[TableBuilder] = []
        self.models = MicrobatchModels(situation)
        self._stages: dict[Any, float] = {}
        self._kinds: dict[Any, list[tuple[int, int, bool]]] = {}
        self._runs_again: dict[Any, Flags] = {}
        self._sources: dict[tuple[int, ...], list[frozenset[int]]] = {}

    def seconds(self, skeleton: Skeleton) -> float:
        """No plan of the skeleton takes less than so many seconds a step."""
        times = [self._stage(names, k, skeleton) for k, names in enumerate(skeleton.stages)]
        # Gradients of parameters that are made apart need not come before those of inputs.
        parts = skeleton.num_microbatches
        run = skeleton.run
        splits = run is None or run.splits_backward
        if skeleton.orders and skeleton.num_ranks < len(times):
            splits = True  # A rank may begin with any of its stages, and end with another.
        fills = [0.0] * len(times) if splits else self._fills(skeleton.stages, times)
        return max(parts * sum(times[s] for s in mine) + fills[mine[0]] for mine in skeleton.ranks)

    def _fills(self, stages: tuple[tuple[str, ...], ...], times: list[float]) -> list[float]:
        """Per stage, seconds of a microbatch on the longest path of stages to it and back."""
        found: list[float] = []
        for s, before in enumerate(self._read_from(stages)):
            found.append(max((found[p] + times[p] for p in before if p < s), default=0.0))
        return found

    def _read_from(self, stages: tuple[tuple[str, ...], ...]) -> list[frozenset[int]]:
        """Per stage, those from which it reads what a gradient goes back for."""
        key = tuple(self._situation.memory.number(names) for names in stages)
        if key not in self._sources:
            graph = self._situation.graph
            stage_of = {name: s for s, names in enumerate(stages) for name in names}
            place = [stage_of[name] for name in graph.names]
            pairs = {(place[a], place[b]) for a, b in graph.gradient_edges}
            self._sources[key] = [
                frozenset(a for a, b in pairs if b == s and a != s) for s in range(len(stages))
            ]
        return self._sources[key]

    def _stage(self, names: tuple[str, ...], k: int, skeleton: Skeleton) -> float:
        s, mesh = self._situation, skeleton.meshes[k]
        parts, policy = skeleton.num_microbatches, skeleton.policies[k]
        alike = self._price_number(mesh)
        key = (s.memory.number(names), alike, parts, policy)
        if key in self._stages:
            return self._stages[key]
        model = self.models[parts]
        builder: TableBuilder | None = None
        total = 0.0
        for first, count, again in self._operators(model, names, policy, parts):
            row = (model.kinds[first], alike, parts, again)
            if row not in self._known:
                if builder is None:
                    builder = s.builder(model.graph, mesh)
                    self._builders.append(builder)
                self._known[row] = self._fastest(builder, model, first, again)
            total += count * self._known[row]
        self._stages[key] = total
        return total

    def _operators(
        self, model: MicrobatchModel, names: tuple[str, ...], policy: str, parts: int
    ) -> list[tuple[int, int, bool]]:
        """What a stage runs: of equal operators the first, how many, and whether they run again.

        Stages that run as many of each kind, as those of equal layers do, take as long.
        """
        key = self._situation.memory.number(names), parts, policy
        if key not in self._kinds:
            graph = model.graph
            inside = np.array([graph.index[name] for name in names])
            kinds = 2 * model.kind_of[inside] + self._again(model, names, policy)
            found, count = np.unique(kinds, return_counts=True)
            first = model.first_of[found // 2]
            self._kinds[key] = list(
                zip(first.tolist(), count.tolist(), (found % 2 == 1).tolist(), strict=True)
            )
        return self._kinds[key]

    def _again(self, model: MicrobatchModel, names: tuple[str, ...], policy: str) -> Flags:
        """Which operators of a stage run again under a policy, however large microbatches are."""
        key = self._situation.memory.number(names), policy
        if key not in self._runs_again:
            graph, dropped = model.graph, model.recomputed(policy)
            inside = [graph.index[name] for name in names]
            may = [i for i in inside if graph.operators[i].name in dropped]
            found = run_again(graph, inside, may) if may else frozenset[int]()
            self._runs_again[key] = np.array([i in found for i in inside], dtype=np.bool_)
        return self._runs_again[key]

    def _price_number(self, mesh: DeviceMesh) -> int:
        """Equal for meshes on which everything costs the same."""
        return self._situation.memory.figures(mesh, self._situation.cluster).alike

    def _fastest(
        self, builder: TableBuilder, model: MicrobatchModel, i: int, recompute: bool
    ) -> float:
        graph, kind = model.graph, model.kinds[i]
        operator, shape = graph.operators[i], builder.mesh.shape
        inside = bool(kind_of(operator).inner(operator, operator.sizes))
        # All-reduces inside an operator depend on the mesh; everything else on local sizes only.
        where = (id(builder),) if inside else ()
        types = tuple(device.name for device in builder.devices)
        listed = (kind, shape)
        if listed not in self._shards:
            self._shards[listed] = self._different(graph, operator, shape, inside=inside)
        runs = {
            (kind, types, shard, recompute, *where): choice
            for shard, choice in self._shards[listed].items()
        }
        unknown = [same for same in runs if same not in self._priced]
        asked = [replace(runs[same], recompute=recompute) for same in unknown]
        self._priced.update(zip(unknown, builder.pass_seconds(i, asked), strict=True))
        return min((self._priced[same] for same in runs), default=float("inf"))

    def _different(
        self, graph: OperatorGraph, operator: Operator, shape: tuple[int, ...], *, inside: bool
    ) -> dict[Any, Choice]:
        """Choices of an operator by what takes another time: its shard and how that is run."""
        found: dict[Any, Choice] = {}
        passed_by = priced_by(Touches.PASSES)
        for choice in operator_choices(graph, operator, shape, (0,), self._options):
            sizes = tuple(sorted(local_sizes(operator, choice.config, shape).items()))
            config, *how = passed_by(choice)
            found.setdefault((sizes, tuple(how), config if inside else ()), choice)
        return found
