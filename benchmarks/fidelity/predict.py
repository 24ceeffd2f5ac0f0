"""What the simulator says of measured runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.fidelity.runs import Run
from stratagem.searcher.space.situation import rank
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import GIB
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan


@dataclass(frozen=True)
class Outcome:
    """A run and what was predicted of it; `free` is the share of the fullest device's memory."""

    run: Run
    setup: TrainingSetup
    seconds: float
    relative_error: float
    peak_bytes: int
    fits: bool
    free: float = 1.0

    @property
    def error(self) -> float:
        """Relative error of the predicted step time."""
        assert self.run.seconds is not None
        return self.seconds / self.run.seconds - 1.0

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted peak."""
        assert self.run.peak_bytes is not None
        return self.peak_bytes / self.run.peak_bytes - 1.0


@dataclass
class Predictor:
    """Simulates runs; prices are shared between those of one cluster and training."""

    costs: CostModel = field(default_factory=default_costs)
    _memories: dict[Any, RowMemory] = field(default_factory=dict)

    def outcomes(self, runs: Iterable[Run]) -> Iterator[Outcome | tuple[Run, str]]:
        """The outcome of each run, or the run and why it cannot be simulated."""
        for run in runs:
            try:
                yield self.outcome(run)
            except ValueError as error:
                yield run, str(error)

    def outcome(self, run: Run) -> Outcome:
        """Of the setups that a run may have had, the fastest that fits.

        Raises:
            ValueError: no setup is a plan of this model on this cluster.
        """
        setup, best = min(self.simulations(run), key=lambda pair: rank(pair[1]))
        return Outcome(
            run,
            setup,
            best.step_time,
            best.relative_error,
            _peak_bytes(run, best),
            best.fits,
            min(1.0 - rank.peak / rank.capacity for rank in best.memory),
        )

    def simulations(self, run: Run) -> list[tuple[TrainingSetup, Simulation]]:
        """The setups that a run may have had, and a step of each.

        Raises:
            ValueError: no setup is a plan of this model on this cluster.
        """
        found, reason = [], "no plan that may have run fits batch, layers and devices"
        for setup in run.setups:
            try:
                plan = setup.plan(run.model.graph(), run.cluster)
                found.append((setup, self.simulate(run, plan)))
            except ValueError as error:
                reason = str(error)
        if not found:
            raise ValueError(reason)
        return found

    def simulate(self, run: Run, plan: Plan) -> Simulation:
        """A step of a run by a plan, on the run's cluster."""
        if plan.cluster != run.cluster:
            plan = replace(plan, cluster=run.cluster)
        memory = self._memory(run.cluster, plan.training)
        return simulate_plan(plan, run.model.graph(), self.costs, memory=memory)

    def _memory(self, cluster: Cluster, training: Training) -> RowMemory:
        types = tuple(device.name for device in cluster.device_types)
        key = (types, cluster.intra_node, cluster.inter_node, cluster.calibration, training)
        return self._memories.setdefault(key, RowMemory())


def _peak_bytes(run: Run, predicted: Simulation) -> int:
    """What is taken of the device that was measured, beside the tensors of a plan too."""
    rank = run.peak_rank
    tensors = predicted.peak_memory if rank is None else predicted.memory[rank].peak
    return tensors + round(run.cluster.calibration.reserved_gib * GIB)
