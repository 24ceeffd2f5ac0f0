"""What can be asked of a simulated step, and who answers: the model that was played."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from stratagem.simulator.engine.event_engine import Times
from stratagem.simulator.simulation import predictions, rank_memory
from stratagem.simulator.simulation.device_memory import MemoryTimeline
from stratagem.simulator.simulation.priced_plan import PlanModel
from stratagem.simulator.timeline.step_critical_path import StepPath
from stratagem.simulator.timeline.timeline import Timeline


class SimulatedStep(ABC):
    """The parts of a simulation that take work, made when they are asked for."""

    @abstractmethod
    def stage_seconds(self) -> tuple[float, ...]:
        """What the passes of one microbatch take in each stage."""

    @abstractmethod
    def timeline(self) -> Timeline:
        """Every task of the step."""

    @abstractmethod
    def critical_path(self) -> StepPath:
        """The chain of tasks that the step time is made of."""

    @abstractmethod
    def communication_bytes(self) -> dict[str, int]:
        """Bytes per device that each communication moves once, by its name."""

    @abstractmethod
    def memory_timeline(self, rank: int) -> MemoryTimeline:
        """The memory of one device of a rank over the step."""


@dataclass(frozen=True, eq=False)
class PlayedStep(SimulatedStep):
    """A step that was played here.

    Attributes:
        model: the plan with its prices.
        times: of the blocks and transfers.
    """

    model: PlanModel
    times: Times

    def stage_seconds(self) -> tuple[float, ...]:
        """See `SimulatedStep`."""
        return predictions.stage_seconds(self.model)

    def timeline(self) -> Timeline:
        """See `SimulatedStep`."""
        return predictions.step_timeline(self.model, self.times)

    def critical_path(self) -> StepPath:
        """See `SimulatedStep`."""
        return predictions.critical_path(self.model, self.times)

    def communication_bytes(self) -> dict[str, int]:
        """See `SimulatedStep`."""
        return predictions.communication_bytes(self.model)

    def memory_timeline(self, rank: int) -> MemoryTimeline:
        """See `SimulatedStep`."""
        return rank_memory.memory_timeline(self.model, self.times, rank)
