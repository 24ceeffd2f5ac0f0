"""A bound on all pipelines of a model, wherever they are cut and whatever their meshes.

A search lists pipelines of equal stages, and meets others. This is what holds for every one.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from stratagem.searcher.space.microbatch_graphs import MicrobatchModel, MicrobatchModels
from stratagem.searcher.space.skeletons import Options, Skeleton, all_stage_sizes, axes_of
from stratagem.simulator.graph.placement import Shard, local_sizes
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
            self._models.situation.clock.check()
            whole = self._models[1].kinds[i]
            self._known[key] = min(
                ways * self._shard(model, i, sizes, recompute, whole)
                for ways, sizes in self._divisions(model.graph.operators[i], most)
            )
        return self._known[key]

    def _quickest(self, model: MicrobatchModel, i: int, recompute: bool, most: int) -> float:
        """Seconds of the quickest shard of an operator."""
        key = ("quickest", model.kinds[i], recompute, most)
        if key not in self._known:
            whole = self._models[1].kinds[i]
            self._known[key] = min(
                self._shard(model, i, sizes, recompute, whole)
                for _, sizes in self._divisions(model.graph.operators[i], most)
            )
        return self._known[key]

    def _divisions(self, operator: Operator, most: int) -> Iterator[tuple[int, dict[str, int]]]:
        """Into how many shards an operator may be cut, and the sizes of the largest of them."""
        cluster = self._models.situation.cluster
        lengths = {dim.name: dim.size for dim in operator.dims if not dim.whole and dim.size > 1}
        sizes = tuple(size for size in all_stage_sizes(cluster) if size <= most)
        for cut in _cuts(tuple(lengths.items()), sizes, axes_of(cluster)):
            config, shape = tuple(Shard(name) for name, _ in cut), tuple(ways for _, ways in cut)
            yield math.prod(shape), local_sizes(operator, config, shape)

    def _shard(
        self, model: MicrobatchModel, i: int, sizes: dict[str, int], recompute: bool, whole: Any
    ) -> float:
        """Seconds of a shard; one of a microbatch is as long as one of the batch of its sizes."""
        key = (whole, tuple(sizes.values()), recompute)
        if key not in self._known:
            self._known[key] = self._shard_seconds(model, i, sizes, recompute)
        return self._known[key]

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


Cut = tuple[tuple[str, int], ...]
"""Dims and into how many parts each is cut."""


def _cuts(lengths: Cut, sizes: tuple[int, ...], most: int) -> Iterator[Cut]:
    """How dims of some lengths may be cut on meshes of some sizes, at most so many at once.

    Of cuts that leave a dim equally long the one into fewest parts is enough.
    """
    if not lengths or most == 0:
        yield ()
        return
    (name, length), *rest = lengths
    yield from _cuts(tuple(rest), sizes, most)
    known = {length}
    for ways in sorted({d for size in sizes for d in range(2, size + 1) if size % d == 0}):
        left = -(-length // ways)
        if ways <= length and left not in known:
            known.add(left)
            inside = tuple({size // ways for size in sizes if size % ways == 0})
            for cut in _cuts(tuple(rest), inside, most - 1):
                yield ((name, ways), *cut)
