"""A bound on all pipelines of a model, wherever they are cut and whatever their meshes.

A search lists pipelines of equal stages, and meets others. This is what holds for every one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stratagem.searcher.space.microbatch_graphs import MicrobatchModel, MicrobatchModels
from stratagem.searcher.space.skeletons import Options, Skeleton, all_stage_sizes, axes_of
from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice, Touches
from stratagem.simulator.sharding.choice_options import asked_of, ways_to_run


class _Path(NamedTuple):
    """Operators of which each reads from the one before.

    Attributes:
        seconds: of a microbatch there and back, under the quickest shards.
        work: seconds of all devices together.
    """

    seconds: float = 0.0
    work: float = 0.0


_NO_PATH = _Path()


class PipelineWork:
    """Bounds the step of every pipeline by the work there is and the devices that share it.

    However an operator is sharded, its devices work on a microbatch for at least `w` seconds
    together, the least over all shards of (number of shards × time of one). Ranks of n₀, n₁, …
    devices take Tᵣ seconds for a microbatch, forward and backward, so Σ nᵣ Tᵣ ≥ W = Σ w. A step
    of z seconds has time for M microbatches on each, hence z ≥ M · W / devices. A plan that leaves
    devices idle has fewer.

    Where backward is whole and ranks have one stage each, a rank waits before and behind its M
    microbatches for one on every rank that it reads from (see `compute_bound`). In a chain, where
    each operator reads from the one before, that is every rank before:

        M · Tᵣ + Σ_{q < r} T_q ≤ z,   hence   Tᵣ ≤ z/M · (1 − 1/M)ʳ   at the largest Σ nᵣ Tᵣ

    and z ≥ M · W / Σ nᵣ (1 − 1/M)ʳ, where the first rank has all devices but one for each other.
    In a model with branches stages may lie beside one another; if all operators lead to the last
    one, only the last rank L surely waits for each of the others: M · T_L + T_q ≤ z. The largest
    Σ nᵣ Tᵣ has T_q = z/M and one device in L, which is what two ranks of a chain come to.

    And a microbatch goes through all operators on a path and back, each taking at least as long
    as its quickest shard: P seconds, and z ≥ P. Ranks that have operators of the path wait for one
    another as those of a chain do, and the others have none of its work W', so of R ranks

        z ≥ M · W' / Σ nᵣ (1 − 1/M)ʳ    and, as Σ Tᵣ ≥ P,    z ≥ P / (1 − (1 − 1/M)ᴿ)

    Nothing of this is said where operators may be on parts of a mesh: what is on one of them need
    not wait for the others, and so not for all of the microbatch before.

    Args:
        models: of the situation, at each number of microbatches.
        options: of choices.
        policies: of recomputing, one of which every stage has.
    """

    def __init__(
        self, models: MicrobatchModels, options: Options, policies: Sequence[str]
    ) -> None:
        self._models, self._policies = models, policies
        self._places = options.place
        self._knows_no_path = options.place and options.inputs_first
        self._asked = asked_of(options.touching(Touches.PASSES))
        self._sizes = tuple(sorted(all_stage_sizes(models.situation.cluster)))
        self._cuts: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
        self._priced: dict[Any, _Shards] = {}
        self._known: dict[Any, float] = {}
        self._paths: dict[tuple[int, int], _Path] = {}
        self._made: dict[int, list[TableBuilder]] = {}

    def seconds(self, num_microbatches: int, num_ranks: int, *, fills: bool) -> float:
        """No pipeline of at least so many ranks takes less than so many seconds a step.

        Args:
            num_microbatches: of the batch.
            num_ranks: least number of sets of devices; 1 is no pipeline, but counts as one.
            fills: whether ranks have one stage each and make both gradients of a microbatch at
                once, so that those behind the first wait.
        """
        parts, devices = num_microbatches, self._models.situation.cluster.num_devices
        if not fills:
            return parts * self._work(parts, devices - num_ranks + 1) / devices
        # With more ranks there is more work for fewer devices, but less of it is in line.
        least = math.inf
        for ranks in range(num_ranks, devices + 1):
            busy = self._busy(devices, parts, ranks, devices - ranks + 1)
            least = min(least, max(busy, self._in_line(parts, ranks, devices - ranks + 1)))
            if busy >= least:
                break
        return least

    def _busy(self, num_devices: int, parts: int, num_ranks: int, most: int) -> float:
        """What the work comes to on the devices of ranks that wait, `most` of them on a stage."""
        waiting = min(num_ranks, self._most_waiting)
        found = self._work(parts, most) / _shares(num_devices, waiting, parts)
        if not self._places:
            path = self._path(parts, most).work / _shares(num_devices, num_ranks, parts)
            found = max(found, path)
        return parts * found

    def _in_line(self, parts: int, num_ranks: int, most: int) -> float:
        """What a path comes to, of whose ranks each makes all microbatches."""
        path = self._path(parts, most).seconds
        if self._places:
            return path
        return path / (1.0 - (1.0 - 1.0 / parts) ** num_ranks)

    def mirrored_seconds(
        self, num_microbatches: int, num_ranks: int, *, whole: bool = True
    ) -> float:
        """The same of pipelines in two opposite directions (Chimera, DualPipe).

        Each microbatch passes through all operators, on one home of each or the other, so devices
        still work on it for W seconds together, and z ≥ M · W / devices; and it goes through them
        there and back. But a rank has stages of both directions, and those of one fill its time
        while it would wait in the other.

        Args:
            num_microbatches: of the batch, of both directions together.
            num_ranks: least number of sets of devices.
            whole: whether both gradients are made at once; else one goes back before all of a
                stage's work on it is done.
        """
        parts, devices = num_microbatches, self._models.situation.cluster.num_devices
        most = devices - num_ranks + 1
        path = self._path(parts, most).seconds if whole else 0.0
        return max(parts * self._work(parts, most) / devices, path)

    def placed_seconds(self, num_microbatches: int) -> float:
        """The same of plans of one stage, operators of which may be on parts of its mesh.

        Devices work on a microbatch for W seconds together, whichever do; and microbatches go
        through all operators on a path and back one after the other: z ≥ M · the longest path.
        Inside of pipelines, too, operators may be on parts: nothing above says that they are not.

        Args:
            num_microbatches: of the batch.
        """
        parts, devices = num_microbatches, self._models.situation.cluster.num_devices
        path = self._path(parts, devices).seconds
        return max(parts * self._work(parts, devices) / devices, parts * path)

    def seconds_on(self, skeleton: Skeleton) -> float:
        """The same for the plans of one skeleton: no quick bound is quicker, and most are above.

        Of its stages it knows their number alone.
        """
        fills = skeleton.fills
        return self.seconds_on_part(
            skeleton.num_devices, skeleton.num_microbatches, skeleton.num_ranks, fills=fills
        )

    def seconds_on_part(
        self, num_devices: int, num_microbatches: int, num_ranks: int = 1, *, fills: bool = False
    ) -> float:
        """No plan on so few devices of the cluster takes less, pipeline or not."""
        parts, most = num_microbatches, self._models.situation.cluster.num_devices
        if fills:
            return self._busy(num_devices, parts, num_ranks, most)
        return parts * self._work(parts, most) / num_devices

    @cached_property
    def _most_waiting(self) -> int:
        """How many ranks at most surely wait for one another, wherever the model is cut."""
        graph = self._models.situation.graph
        working = [i for i, op in enumerate(graph.operators) if not op.is_source]
        if all(pair in graph.gradient_edges for pair in itertools.pairwise(working)):
            return len(working)
        leading = {working[-1]}
        for producer, consumer in sorted(graph.gradient_edges, reverse=True):
            if consumer in leading:
                leading.add(producer)
        return 2 if leading.issuperset(working) else 1

    def _path(self, parts: int, most: int) -> _Path:
        """The longest path of a microbatch, there and back, with `most` devices on a stage.

        With operators on parts of a mesh, what makes the gradient of an input need not wait for
        that of parameters where it is made apart: then nothing is known.
        """
        if self._knows_no_path:
            return _NO_PATH
        if (parts, most) not in self._paths:
            model = self._models[parts]
            again = self._again(model)
            longest: dict[int, _Path] = {}
            for i, operator in enumerate(model.graph.operators):
                if not operator.is_source:
                    led = (longest.get(p, _NO_PATH) for p in self._flows_from[i])
                    before = max(led, key=lambda path: path.seconds, default=_NO_PATH)
                    longest[i] = _Path(
                        before.seconds + self._quickest(model, i, operator.name in again, most),
                        before.work + self._least(model, i, operator.name in again, most),
                    )
            self._paths[parts, most] = max(longest.values(), key=lambda path: path.seconds)
        return self._paths[parts, most]

    @cached_property
    def _flows_from(self) -> dict[int, list[int]]:
        """By operator, those that it sends a gradient back to."""
        found: dict[int, list[int]] = defaultdict(list)
        for producer, consumer in self._models.situation.graph.gradient_edges:
            found[consumer].append(producer)
        return found

    def _again(self, model: MicrobatchModel) -> frozenset[str]:
        """What is recomputed under every policy."""
        return frozenset.intersection(*map(model.recomputed, self._policies))

    def _work(self, parts: int, most: int) -> float:
        """Seconds of a microbatch on all devices together, `most` of them on a stage (W)."""
        if (parts, most) not in self._known:
            model = self._models[parts]
            again = self._again(model)
            self._known[parts, most] = sum(
                self._least(model, i, operator.name in again, most)
                for i, operator in enumerate(model.graph.operators)
                if not operator.is_source
            )
        return self._known[parts, most]

    def _least(self, model: MicrobatchModel, i: int, recompute: bool, most: int) -> float:
        """Seconds of an operator on all its devices together, cut as suits it best."""
        key = (model.kinds[i], recompute, most)
        if key not in self._known:
            shards = self._shards(model, i, recompute)
            self._known[key] = float((shards.ways * shards.seconds)[shards.needed <= most].min())
        return self._known[key]

    def _quickest(self, model: MicrobatchModel, i: int, recompute: bool, most: int) -> float:
        """Seconds of the quickest shard of an operator."""
        key = ("quickest", model.kinds[i], recompute, most)
        if key not in self._known:
            shards = self._shards(model, i, recompute)
            self._known[key] = float(shards.seconds[shards.needed <= most].min())
        return self._known[key]

    def _shards(self, model: MicrobatchModel, i: int, recompute: bool) -> _Shards:
        """Every shard that an operator may be cut into, priced."""
        key = (model.kinds[i], recompute)
        if key not in self._priced:
            self._models.situation.clock.check()
            operator = model.graph.operators[i]
            ways, needed, sizes = self._divisions(operator)
            seconds = self._all_seconds(model, i, recompute, sizes)
            if seconds is None:
                seconds = self._each_seconds(model, i, recompute, sizes)
            self._priced[key] = _Shards(ways, needed, seconds)
        return self._priced[key]

    def _divisions(self, operator: Operator) -> tuple[Floats, Ints, dict[str, Floats]]:
        """Into how many shards an operator may be cut, on how many devices, and the largest's
        sizes."""
        free = [dim for dim in operator.dims if not dim.whole and dim.size > 1]
        largest = self._sizes[-1]
        lengths = tuple(min(dim.size, largest) for dim in free)
        if lengths not in self._cuts:
            most = axes_of(self._models.situation.cluster)
            self._cuts[lengths] = _cuts(lengths, self._sizes, most)
        cuts, needed = self._cuts[lengths]
        sizes = {dim.name: np.full(len(cuts), float(dim.size)) for dim in operator.dims}
        for dim, ways in zip(free, cuts.T, strict=True):
            for name in operator.cut_by.get(dim.name, ()):
                sizes[name] = np.ceil(sizes[name] / ways)
        return cuts.prod(axis=1).astype(np.float64), needed, sizes

    def _all_seconds(
        self, model: MicrobatchModel, i: int, recompute: bool, sizes: dict[str, Floats]
    ) -> Floats | None:
        """Seconds of shards on the device that does best, priced at once; None where they cannot
        be: which ways to run there are depends on a shard's sizes.
        """
        if self._asked:
            return None
        found: list[Floats] = []
        for builder in self._builders(model):
            both = builder.all_shard_seconds(i, sizes)
            if both is None:
                return None
            there, back = both
            found.append(there + back + (there if recompute else 0.0))
        least: Floats = np.minimum.reduce(found)
        return least

    def _each_seconds(
        self, model: MicrobatchModel, i: int, recompute: bool, sizes: dict[str, Floats]
    ) -> Floats:
        """The same one by one; a shard of a microbatch is as long as one of the batch."""
        kind = self._models[1].kinds[i], recompute
        # Of an operator without dims there is one shard, which has no sizes.
        lines = [tuple(map(int, line)) for line in zip(*sizes.values(), strict=True)] or [()]
        for line in lines:
            if (*kind, line) not in self._known:
                shard = dict(zip(sizes, line, strict=True))
                self._known[*kind, line] = self._shard_seconds(model, i, shard, recompute)
        return np.array([self._known[*kind, line] for line in lines])

    def _shard_seconds(
        self, model: MicrobatchModel, i: int, sizes: dict[str, int], recompute: bool
    ) -> float:
        """Seconds of a shard of some sizes, under the options and on the device that do best."""
        operator = model.graph.operators[i]
        # What becomes of its parameters takes no part in a pass.
        choices = ways_to_run(Choice((), 0, recompute), operator, sizes, self._asked, trains=False)
        return min(
            builder.shard_seconds(i, choice, sizes)
            for builder in self._builders(model)
            for choice in choices
        )

    def _builders(self, model: MicrobatchModel) -> list[TableBuilder]:
        """One on a single device of each type."""
        if id(model) not in self._made:
            s = self._models.situation
            meshes = [DeviceMesh((MeshAxis("device", 1),), (d,)) for d in self._devices]
            self._made[id(model)] = [s.builder(model.graph, mesh) for mesh in meshes]
        return self._made[id(model)]

    @cached_property
    def _devices(self) -> tuple[int, ...]:
        """The first device of each type."""
        cluster = self._models.situation.cluster
        first: dict[str, int] = {}
        for device in range(cluster.num_devices):
            first.setdefault(cluster.device_type(device).name, device)
        return tuple(first.values())


def _shares(num_devices: int, num_ranks: int, num_microbatches: int) -> float:
    """By how much the work of a microbatch is divided, at most: Σ nᵣ (1 − 1/M)ʳ.

    `num_ranks` are those that wait for one another; 1 where none does.
    """
    later = [(1.0 - 1.0 / num_microbatches) ** r for r in range(1, num_ranks)]
    return num_devices - num_ranks + 1 + sum(later)


class _Shards(NamedTuple):
    """The shards that an operator may be cut into.

    Attributes:
        ways: into how many it is cut, for each.
        needed: the fewest devices of a stage on which it may be.
        seconds: of one shard.
    """

    ways: Floats
    needed: Ints
    seconds: Floats


def _cuts(lengths: tuple[int, ...], sizes: tuple[int, ...], most: int) -> tuple[Ints, Ints]:
    """How dims of some lengths may be cut, at most so many at once, on meshes of some sizes.

    A cut's parts divide the devices of a mesh. Returns the parts of each dim, a line for each cut,
    and the smallest mesh for it.
    """
    needed = {
        parts: next(size for size in sizes if size % parts == 0)
        for parts in sorted({d for size in sizes for d in range(1, size + 1) if size % d == 0})
    }
    found: list[tuple[tuple[int, ...], int]] = [((), 1)]
    for length in lengths:
        may_be = [ways for ways in needed if ways <= length]
        found = [
            ((*cut, ways), ways * parts)
            for cut, parts in found
            for ways in (may_be if len(cut) - cut.count(1) < most else (1,))
            if ways * parts in needed
        ]
    cuts = np.array([cut for cut, _ in found], dtype=np.int64).reshape(len(found), len(lengths))
    return cuts, np.array([needed[parts] for _, parts in found])
