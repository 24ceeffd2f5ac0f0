"""Pricing operators: what every choice of one costs on one mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints
from stratagem.simulator.base.precision import DTYPE_BYTES
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import (
    REPLICATE,
    Placements,
    Shard,
    local_elements,
    local_sizes,
    weight_gradient_placements,
)
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.hardware.collective_times import collective_time
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh
from stratagem.simulator.hardware.resources import COMPUTE, HOST, link_mask
from stratagem.simulator.kernel_times.cost_model import Columns, Direction, tile_efficiency
from stratagem.simulator.kernel_times.kernel_prices import FEW_SHARDS, KernelPrices
from stratagem.simulator.kernel_times.memory_traffic import num_kernels
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.inner_collectives import InnerCollective
from stratagem.simulator.operators.kinds.operator_kinds import kind_of, saved_slots, saves_output
from stratagem.simulator.operators.operator import (
    Operator,
    Weight,
    factor_sizes,
    factors,
    shape_of,
)
from stratagem.simulator.pricing.bytes_per_device import Footprint, operator_footprint
from stratagem.simulator.pricing.cost_rows import (
    NO_COST,
    Latency,
    OperatorRow,
    timed_rows,
    to_ns,
)
from stratagem.simulator.sharding.choice import Choice, ParameterMessage, Touches
from stratagem.simulator.sharding.choice_options import JoinedInputs, priced_by
from stratagem.simulator.sharding.parameter_homes import (
    ParameterUse,
    Residence,
    home_placements,
    makes_input_gradients,
    residences,
    unsharded_gradient_bytes,
    weight_share,
)
from stratagem.simulator.sharding.pieces_and_fusion import piece_dim
from stratagem.simulator.sharding.resharding_paths import Resharder

Priced = tuple[float, int]
"""Seconds, and the mask of the resources that they occupy."""

IDLE: Priced = (0.0, 0)

_ELSEWHERE = Shard("a dim that parameters lack")

_Key = tuple[Any, ...]

_MUON = "bfloat16"
"""In which Muon multiplies matrices."""

_PASSED_BY, _MOVED_BY, _KEPT_BY = map(
    priced_by, (Touches.PASSES, Touches.PARAMETERS, Touches.STATE)
)


@dataclass(frozen=True, eq=False)
class OperatorPricer:
    """Prices the operators of `graph` on `mesh`, whose axes have `links`, by its `kernels`.

    What is `moved` to keep parameters up to date, those share whose meshes look the same.
    """

    graph: OperatorGraph
    mesh: DeviceMesh
    links: tuple[AxisLink, ...]
    resharder: Resharder
    kernels: KernelPrices
    moved: dict[Any, _Moved]

    def row(
        self,
        i: int,
        choices: tuple[Choice, ...],
        uses: tuple[ParameterUse, ...],
        *,
        runs_again: bool,
        joined: JoinedInputs = JoinedInputs(),  # noqa: B008
    ) -> OperatorRow:
        """The row of operator `i`; `uses` says what it is to each of its weights.

        Where it is recomputed it `runs_again`, or has only its inputs brought back. Its forward
        pass runs in the conversions of the inputs that are `joined`, where choices ask for it.
        """
        operator = self.graph.operators[i]
        # ZeRO changes nothing about passes, recompute and pieces nothing about parameters.
        passed = {_PASSED_BY(choice): choice for choice in reversed(choices)}
        placed = {_MOVED_BY(choice): choice for choice in reversed(choices)}
        passing = dict(zip(passed, self._all_passes(i, passed.values(), joined), strict=True))
        moving = self._moving(operator, uses, placed)
        passes = [passing[_PASSED_BY(choice)] for choice in choices]
        moved = [moving[_MOVED_BY(choice)] for choice in choices]
        kept = {_KEPT_BY(choice): choice for choice in choices}
        keeping = {key: self._footprint(operator, uses, c) for key, c in kept.items()}
        footprints = [keeping[_KEPT_BY(choice)] for choice in choices]
        again = [runs_again and choice.recompute for choice in choices]
        both = list(zip(passes, moved, choices, strict=True))
        launched = [self._launch(i, choice, Direction.FORWARD) for choice in choices]
        there = [
            IDLE if choice.in_sum and joined.summed is not None else launch
            for choice, launch in zip(choices, launched, strict=True)
        ]
        times = {
            "forward": [p.forward for p in passes],
            "backward": [self._adding(p.backward, m, c) for p, m, c in both],
            "input_gradient": [p.input_gradient for p in passes],
            "weight_gradient": [self._adding(p.weight_gradient, m, c) for p, m, c in both],
            "adding": [
                _copied(m.add_seconds / c.chunks) if self._on_cpus else IDLE for _, m, c in both
            ],
            "recompute": [p.recompute if a else IDLE for p, a in zip(passes, again, strict=True)],
            "launch_forward": there,
            "launch_backward": [self._launch(i, c, Direction.BACKWARD) for c in choices],
            "launch_recompute": [t if a else IDLE for t, a in zip(launched, again, strict=True)],
            "gather": [m.gather for m in moved],
            "sync": [m.sync for m in moved],
            "each_sync": [m.each_sync for m in moved],
            "update": [m.update for m in moved],
            "publish": [m.publish for m in moved],
            "stash": [self._copy(m.stash_bytes) for m in moved],
        }
        timed = timed_rows(list(times.values()))
        return OperatorRow(
            **dict(zip(times, timed, strict=True)),
            choices=choices,
            pieces=np.array([choice.chunks for choice in choices], dtype=np.int64),
            sync_latency=tuple(m.latency for m in moved),
            publish_latency=tuple(m.publish_latency for m in moved),
            gather_latency=tuple(m.gather_latency for m in moved),
            relative_error=np.array([p.relative_error for p in passes]),
            sources=tuple(p.source for p in passes),
            parameter_bytes=_column(footprints, "parameters"),
            stash_bytes=np.array([m.stash_bytes for m in moved], dtype=np.int64),
            gradient_bytes=_column(footprints, "gradients"),
            unsharded_gradient_bytes=unsharded_gradient_bytes(
                operator, uses, self.training.gradient_bytes
            ),
            optimizer_bytes=_column(footprints, "optimizer"),
            output_bytes=tuple(
                np.array([f.outputs[k] for f in footprints], dtype=np.int64)
                for k in range(len(operator.outputs))
            ),
            own_bytes=_column(footprints, "own"),
            input_gradient_bytes=_column(footprints, "input_gradients"),
            gathered_bytes=_column(footprints, "gathered"),
            whole_gradient_bytes=_column(footprints, "whole_gradients"),
            inner_forward=to_ns(np.array([p.inner_forward for p in passes])),
            inner_backward=to_ns(np.array([p.inner_backward for p in passes])),
            saved_slots=saved_slots(operator, fused=self.training.fused_elementwise),
            saves_output=saves_output(operator),
            runs_again=runs_again,
        )

    def _footprint(
        self, operator: Operator, uses: tuple[ParameterUse, ...], choice: Choice
    ) -> Footprint:
        sizes = local_sizes(operator, choice.config, self.mesh.shape)
        return operator_footprint(
            operator, choice, sizes, uses, self.mesh.shape, self.training, on_cpu=self._on_cpus
        )

    @property
    def training(self) -> Training:
        """Of the plan."""
        return self.kernels.training

    @cached_property
    def _on_cpus(self) -> bool:
        return all(device.is_cpu for device in self.kernels.devices)

    def forward_seconds(self, operator: Operator, choice: Choice) -> float:
        """Time of the whole forward pass, without collectives inside it."""
        sizes = local_sizes(operator, choice.config, self.mesh.shape)
        return self.kernels.of(operator, sizes, Direction.FORWARD)[0]

    def launch_seconds(self, i: int, choice: Choice) -> float:
        """What the host takes to launch a forward pass, where the cluster says so."""
        return self._launch(i, choice, Direction.FORWARD)[0]

    def pass_seconds(self, i: int, choices: Sequence[Choice]) -> list[float]:
        """Forward and backward pass, all pieces, and the forward pass that is repeated."""
        return list(map(_pass_seconds, self._all_passes(i, choices), choices))

    def shard_seconds(self, i: int, choice: Choice, sizes: Mapping[str, int]) -> float:
        """The same for a shard of some sizes, alone: nothing is exchanged inside the operator."""
        return _pass_seconds(self._passes(i, choice, sizes), choice)

    def all_shard_seconds(self, i: int, sizes: Columns) -> tuple[Floats, Floats] | None:
        """Forward and backward pass of many shards, each run whole: what `shard_seconds` adds up.

        None where they cannot be priced at once.
        """
        operator = self.graph.operators[i]
        there, back = (self.kernels.of_many(operator, sizes, each) for each in Direction)
        if there is None or back is None:
            return None
        return there, back * (self._backward_share(i) if self.graph.needs_gradient[i] else 0.0)

    def _all_passes(
        self,
        i: int,
        choices: Collection[Choice],
        joined: JoinedInputs = JoinedInputs(),  # noqa: B008
    ) -> list[_Passes]:
        """The passes of an operator under each of some choices."""
        operator = self.graph.operators[i]
        if operator.is_source:
            return [_Passes()] * len(choices)
        shards = [local_sizes(operator, choice.config, self.mesh.shape) for choice in choices]
        if len(shards) >= FEW_SHARDS:
            pieces = [
                self._piece_sizes(operator, sizes, choice)
                for sizes, choice in zip(shards, choices, strict=True)
            ]
            self.kernels.learn(operator, pieces, Direction.FORWARD)
            if self.graph.needs_gradient[i]:
                self.kernels.learn(operator, pieces, Direction.BACKWARD)
        both = zip(choices, shards, strict=True)
        return [self._passes(i, choice, sizes, joined) for choice, sizes in both]

    def _passes(
        self,
        i: int,
        choice: Choice,
        sizes: Mapping[str, int],
        joined: JoinedInputs = JoinedInputs(),  # noqa: B008
    ) -> _Passes:
        """The passes of an operator's shard of some sizes."""
        operator = self.graph.operators[i]
        piece = self._piece_sizes(operator, sizes, choice)
        seconds, error, source = self.kernels.of(operator, piece, Direction.FORWARD)
        comm, mask, back_comm = self._inner_collectives(operator, choice, sizes)
        share = choice.chunks // choice.num_products
        forward = (seconds / share + comm / choice.chunks, COMPUTE | mask)
        backward, weight = IDLE, IDLE
        if self.graph.needs_gradient[i]:
            spent = self.kernels.of(operator, piece, Direction.BACKWARD)[0] / share
            spent *= self._backward_share(i)
            backward = (spent + back_comm / choice.chunks, COMPUTE | mask)
            weight = (spent * weight_share(self.graph, i), COMPUTE)
        whole = IDLE
        if choice.recompute:
            again = self.kernels.of(operator, sizes, Direction.FORWARD)[0]
            whole = (again + comm, COMPUTE | mask)
        if joined.of(operator, choice) is not None:
            forward = IDLE
        return _Passes(
            forward=forward,
            backward=backward,
            input_gradient=(max(0.0, backward[0] - weight[0]), backward[1]),
            weight_gradient=weight,
            recompute=whole,
            inner_forward=comm / choice.chunks,
            inner_backward=back_comm / choice.chunks if self.graph.needs_gradient[i] else 0.0,
            relative_error=error,
            source=source,
        )

    def _backward_share(self, i: int) -> float:
        """The part of backward that runs: without gradients of inputs that of weights alone."""
        if makes_input_gradients(self.graph, i):
            return 1.0
        return kind_of(self.graph.operators[i]).weight_share or 1.0

    def _launch(self, i: int, choice: Choice, direction: Direction) -> Priced:
        """What the host takes to launch a pass, where the cluster says so."""
        operator, backward = self.graph.operators[i], direction is Direction.BACKWARD
        per_kernel = self.kernels.calibration.launch_us * 1e-6
        if not per_kernel or operator.is_source:
            return IDLE
        if backward and not self.graph.needs_gradient[i]:
            return IDLE
        if self.kernels.launch_times is not None:
            sizes = local_sizes(operator, choice.config, self.mesh.shape)
            piece = self._piece_sizes(operator, sizes, choice)
            known = self.kernels.launch_seconds(operator, piece, direction)
            if known is not None:
                return known * choice.num_products, HOST
        kernels = num_kernels(operator, self.training, backward=backward)
        return per_kernel * kernels * choice.num_products, HOST

    def _piece_sizes(
        self, operator: Operator, sizes: Mapping[str, int], choice: Choice
    ) -> Mapping[str, int]:
        """Sizes of one of the products that a pass is."""
        if choice.num_products == 1:
            return sizes
        dim = piece_dim(operator, sizes, choice.chunks)
        if dim is None:
            raise ValueError(f"operator {operator.name!r} cannot run in {choice.chunks} pieces")
        return {**sizes, dim: sizes[dim] // choice.chunks}

    def _inner_collectives(
        self, operator: Operator, choice: Choice, sizes: Mapping[str, int]
    ) -> tuple[float, int, float]:
        """Collectives inside the kernels: seconds forward, link mask, seconds backward."""
        forward, backward, mask = 0.0, 0.0, 0
        for inner in kind_of(operator).inner(operator, sizes):
            for axis, placement in enumerate(choice.config):
                if isinstance(placement, Shard) and placement.dim in inner.dims:
                    once = self._inner_seconds(operator, inner, axis)
                    if not once:
                        continue
                    forward += inner.forward * once
                    backward += inner.backward * once
                    mask |= link_mask(self.links[axis])
        return forward, mask, backward

    def _inner_seconds(self, operator: Operator, inner: InnerCollective, axis: int) -> float:
        """One collective inside a kernel; nothing where no device needs anything."""
        ways, link = self.mesh.shape[axis], self.links[axis]
        nbytes = inner.nbytes(ways, self.training.bytes_of(operator.outputs[0].dtype))
        kind = Collective(inner.collective)
        return collective_time(kind, nbytes, ways, link) if nbytes else 0.0

    # -- parameters -----------------------------------------------------------------------------

    def _moving(
        self, operator: Operator, uses: tuple[ParameterUse, ...], placed: Mapping[_Key, Choice]
    ) -> dict[_Key, _Moved]:
        """What becomes of parameters under each of some choices.

        Their sizes, and where they and their gradients lie, say it: not how large a microbatch is,
        nor which of the dims that they lack a mesh axis shards.
        """
        if not operator.weights:
            return dict.fromkeys(placed, UNMOVED)
        layouts = tuple(weight.layout for weight in operator.weights)
        own = {name: operator.sizes[name] for layout in layouts for name in factors(layout)}
        trained = self.training.costs_of([weight.parameter for weight in operator.weights])
        alike = layouts, tuple(own.values()), trained, uses
        found: dict[_Key, _Moved] = {}
        for key, choice in placed.items():
            config, *how = key
            lies = tuple(
                _ELSEWHERE if type(each) is Shard and each.dim not in own else each
                for each in config
            )
            same = (*alike, lies, *how)
            if same not in self.moved:
                self.moved[same] = self._parameters(operator, uses, choice)
            found[key] = self.moved[same]
        return found

    def _parameters(
        self, operator: Operator, uses: tuple[ParameterUse, ...], choice: Choice
    ) -> _Moved:
        sync, gather, update, used = IDLE, IDLE, IDLE, 0
        updated: Counter[tuple[object, ...]] = Counter()
        trained: dict[tuple[object, ...], Training] = {}
        latency: dict[str, tuple[int, float]] = {}
        gathering: dict[str, tuple[int, float]] = {}
        for lies in residences(operator, uses, choice, self.mesh.shape):
            sync = _add(sync, self._sent(operator, lies, ParameterMessage.GRADIENT, latency))
            gather = _add(gather, self._sent(operator, lies, ParameterMessage.VALUE, gathering))
            if lies.use is ParameterUse.OWNED:
                whole = factor_sizes(lies.weight.layout, operator.sizes)
                how = self.training.for_parameter(lies.weight.parameter)
                trained[how.kept] = how
                updated[how.kept] += local_elements(whole, lies.home, self.mesh.shape)
                if how.optimizer == "muon":
                    update = _add(update, self._orthogonalised(operator, lies, how))
                used += local_elements(whole, lies.used, self.mesh.shape)
        # Gradients of an operator that take the same path go in one message, in a bucket or not.
        sync = max(sync[0] - sum((n - 1) * each for n, each in latency.values()), 0.0), sync[1]
        latency = {name: (1, each) for name, (_, each) in latency.items()}
        for kept, count in updated.items():
            seconds = self.kernels.update_seconds(count, trained[kept])
            update = _add(update, (seconds, COMPUTE))
        each = sync if choice.zero >= 2 else IDLE
        if choice.fused and sync[0] > 0:
            sync, update = (max(sync[0], update[0]), sync[1]), IDLE
        return _Moved(
            sync=sync,
            each_sync=each,
            gather=gather if choice.zero == 3 else IDLE,
            publish=gather if choice.zero in (1, 2) else IDLE,
            update=update,
            stash_bytes=used * self.training.parameter_bytes,
            latency=latency,
            publish_latency=gathering if choice.zero in (1, 2) else {},
            gather_latency=gathering if choice.zero == 3 else {},
            add_seconds=self._add_seconds(operator, uses, choice),
        )

    def _adding(self, passed: Priced, moved: _Moved, choice: Choice) -> Priced:
        """A piece of a pass that makes gradients of weights, and its part of adding them up.

        Not on CPUs: there the executor takes those of the first microbatch as they are, and adds
        the others to them.
        """
        added = 0.0 if self._on_cpus else moved.add_seconds
        return passed[0] + added / choice.chunks, passed[1]

    def _add_seconds(
        self, operator: Operator, uses: tuple[ParameterUse, ...], choice: Choice
    ) -> float:
        """Adding the gradients of a microbatch to those before, where no product does it.

        On CPUs none ever does.
        """
        if self.training.fused_accumulation and not self._on_cpus:
            return 0.0
        added = 0
        for weight, use in zip(operator.weights, uses, strict=True):
            if use in (ParameterUse.OWNED, ParameterUse.TIED_HERE, ParameterUse.TIED_ELSEWHERE):
                whole = factor_sizes(weight.layout, operator.sizes)
                # From ZeRO-2 on, what is added is the shard that a reduction leaves.
                sharded = use is ParameterUse.OWNED and choice.zero >= 2
                lies = (
                    home_placements(weight, choice, self.mesh.shape)
                    if sharded
                    else weight_gradient_placements(weight, choice.config)
                )
                added += local_elements(whole, lies, self.mesh.shape)
        nbytes = added * (self.training.parameter_bytes + 2 * self.training.gradient_bytes)
        return self.kernels.moving(nbytes)

    def _orthogonalised(self, operator: Operator, lies: Residence, training: Training) -> Priced:
        """Bringing the direction of a matrix to every device, and Muon's products there."""
        shape = shape_of(lies.weight.layout, operator.sizes)
        if len(shape) != 2:
            return IDLE
        nbytes = DTYPE_BYTES[training.formats.states]
        whole = (REPLICATE,) * len(self.mesh.shape)
        gather = self._convert(operator, lies.weight, nbytes, lies.home, whole)
        flops = training.newton_schulz.flops(*shape)
        seconds = max(
            flops
            / (device.peak_flops(_MUON) * device.matmul_efficiency)
            / float(tile_efficiency(min(shape), max(shape), 1, device))
            for device in self.kernels.devices
        )
        return _add(gather, (seconds * self.kernels.calibration.scale(matmul=True), COMPUTE))

    def _copy(self, nbytes: int) -> Priced:
        """Reading and writing so many bytes once."""
        return _copied(self.kernels.moving(2 * nbytes))

    def _sent(
        self,
        operator: Operator,
        lies: Residence,
        what: ParameterMessage,
        latency: dict[str, tuple[int, float]],
    ) -> Priced:
        """Moving a gradient to its home, or a value from there, as links carry it.

        Where that is another format, devices convert to it before the links and back behind them.
        """
        way = lies.sending(what, self.training.formats)
        ends = way.source, way.target
        seconds, mask = self._convert(operator, lies.weight, way.nbytes, *ends, latency)
        if seconds and way.sent != way.held:
            sizes = factor_sizes(lies.weight.layout, operator.sizes)
            for placed in ends:
                count = local_elements(sizes, placed, self.mesh.shape)
                seconds += self.kernels.moving(count * (way.nbytes + DTYPE_BYTES[way.held]))
        return seconds, mask

    def _convert(
        self,
        operator: Operator,
        weight: Weight,
        itemsize: int,
        source: Placements,
        target: Placements,
        latency: dict[str, tuple[int, float]] | None = None,
    ) -> Priced:
        """Seconds and link mask of moving a parameter or its gradient.

        What notes its path's `latency` is begun, and goes on meanwhile.
        """
        later = latency is not None
        sizes = factor_sizes(weight.layout, operator.sizes)
        steps = self.resharder.path(sizes, itemsize, source, target)
        if latency is not None and steps:
            name = " ".join(f"{step.collective.value}@{step.axis}" for step in steps)
            count = latency.get(name, (0, 0.0))[0]
            latency[name] = (count + 1, self.resharder.seconds(steps, 0, later=later))
        return self.resharder.seconds(steps, itemsize, later=later), self.resharder.mask(steps)


@dataclass(frozen=True)
class _Passes:
    """The passes of an operator under one choice, by piece; `recompute` is whole.

    The collectives inside take `inner_forward` and `inner_backward` of them (seconds).
    """

    forward: Priced = IDLE
    backward: Priced = IDLE
    input_gradient: Priced = IDLE
    weight_gradient: Priced = IDLE
    recompute: Priced = IDLE
    inner_forward: float = 0.0
    inner_backward: float = 0.0
    relative_error: float = 0.0
    source: str = NO_COST


@dataclass(frozen=True)
class _Moved:
    """What happens to the parameters of an operator under one choice.

    A microbatch takes `add_seconds` to add their gradients to those before.
    """

    sync: Priced
    each_sync: Priced
    gather: Priced
    publish: Priced
    update: Priced
    stash_bytes: int
    latency: Latency
    publish_latency: Latency
    gather_latency: Latency
    add_seconds: float


UNMOVED = _Moved(IDLE, IDLE, IDLE, IDLE, IDLE, 0, {}, {}, {}, 0.0)
"""Of an operator without parameters."""


def _copied(seconds: float) -> Priced:
    """Seconds of moving bytes on a device itself."""
    return (seconds, COMPUTE) if seconds else IDLE


def _pass_seconds(passes: _Passes, choice: Choice) -> float:
    return choice.chunks * (passes.forward[0] + passes.backward[0]) + passes.recompute[0]


def _add(total: Priced, more: Priced) -> Priced:
    return total[0] + more[0], total[1] | more[1]


def _column(footprints: Sequence[Footprint], field: str) -> Ints:
    return np.array([getattr(f, field) for f in footprints], dtype=np.int64)
