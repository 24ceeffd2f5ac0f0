"""How long an instruction may be expected to take, so that a long one is not held for a stuck one.

Predictions are rough on purpose: they are multiplied by `Limits.patience` before anybody acts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from stratagem.executor.program.instructions.instruction import Instruction, KernelPass
from stratagem.executor.program.programs import Program
from stratagem.simulator.graph.placement import local_sizes
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs

ROUNDS = 2
"""How often an all-reduce, the longest of the collectives, sends what it reduces."""


class Expected:
    """Predicted seconds of a rank's instructions, one at a time.

    Example:
        >>> expected = Expected(program, rank=0, on_cpu=True)  # doctest: +SKIP
        >>> expected.seconds(program.ranks[0].instructions[3])  # doctest: +SKIP
        0.012

    Args:
        program: what runs.
        rank: whose.
        on_cpu: whether the rank computes on a CPU, whatever devices the plan was made for: then
            an instruction takes as long as it would there, or as on the plan's cluster if that
            is longer.
    """

    def __init__(self, program: Program, rank: int, *, on_cpu: bool) -> None:
        mine = program.ranks[rank]
        training = program.plan.training
        clusters = [program.plan.cluster]
        devices = [(clusters[0].device_type(mine.device), training)]
        if on_cpu:
            clusters.append(Cluster.preset("local-cpu"))
            full = replace(training, precision="float32", gradient_precision="")
            devices.append((clusters[1].device_type(0), full))
        links = [link for each in clusters for link in (each.intra_node, each.inter_node)]
        self._program, self._mine, self._devices = program, mine, devices
        self._bandwidth = min(link.bandwidth_gb_s for link in links) * 1e9
        self._costs = default_costs()

    def seconds(self, instruction: Instruction) -> float:
        """Of one instruction; 0 for those that are always short."""
        work = instruction.work(self._program)
        seconds = sum(map(self._pass, work.passes)) + ROUNDS * work.moved / self._bandwidth
        return seconds + (self._update(work.updated) if work.updated else 0.0)

    @cached_property
    def whole_step(self) -> float:
        """Of all instructions together, one after the other."""
        return sum(map(self.seconds, self._mine.instructions))

    def _pass(self, each: KernelPass) -> float:
        plan, name = self._program.plan, each.operator
        operator = self._program.operator(name, each.microbatch)
        mesh = self._program.mesh(plan.stage_of[name])
        sizes: Mapping[str, int] = local_sizes(operator, plan.choice(name).config, mesh.shape)
        return max(
            self._costs.operator_cost(operator, sizes, each.direction, training, device).seconds
            for device, training in self._devices
        )

    def _update(self, parameters: Sequence[str]) -> float:
        shapes = self._program.graph.parameter_index
        count = sum(math.prod(shapes[each].shape) for each in parameters)
        return max(
            self._costs.update_cost(count, training, device).seconds
            for device, training in self._devices
        )
