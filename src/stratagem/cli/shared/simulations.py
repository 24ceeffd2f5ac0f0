"""Simulations that the command line asks for: with the device model, or measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from stratagem.cli.shared.options import say_written
from stratagem.face import verbs
from stratagem.simulator.drawing.timeline_plot import plot_timelines
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.simulation import Simulation
from stratagem.simulator.timeline.chrome_trace import write_trace
from stratagem.simulator.timeline.step_critical_path import StepPath

if TYPE_CHECKING:
    from stratagem.simulator.kernel_times.cost_model import CostModel


def costs_for(
    graph: OperatorGraph, cluster: Cluster, training: Training, measure: bool
) -> CostModel | None:
    """Measured prices if they are asked for; None stands for the device model."""
    return verbs.profile(graph, cluster, training=training) if measure else None


def simulated(plan: Plan, graph: OperatorGraph, measure: bool) -> Simulation:
    """What the simulator says of a plan for a model."""
    graph = plan.on(graph)
    return verbs.simulate(plan, graph, costs_for(graph, plan.cluster, plan.training, measure))


def show_simulation(
    say: Console,
    simulation: Simulation,
    graph: OperatorGraph,
    plot: Path | None,
    trace: Path | None,
    critical_path: StepPath | None = None,
) -> None:
    """Describe a simulation, and write its picture and its trace."""
    say.print(describe(simulation, graph), soft_wrap=True)
    if plot is not None:
        plot_timelines([simulation.timeline], plot, critical_path=critical_path)
    if trace is not None:
        write_trace(trace, simulation.timeline)
    say_written(say, plot, trace)


def simulation_facts(simulation: Simulation) -> dict[str, Any]:
    """A simulation in numbers: seconds and bytes per device."""
    return {
        "step_time": simulation.step_time,
        "interval": simulation.interval,
        "is_calibrated": simulation.is_calibrated,
        "fits": simulation.fits,
        "peak_memory": [rank.peak for rank in simulation.memory],
        "capacity": [rank.capacity for rank in simulation.memory],
    }
