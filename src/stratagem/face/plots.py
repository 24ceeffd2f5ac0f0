"""Pictures of what is predicted and measured, by matplotlib.

sg.plots.timelines([simulation.timeline], "step.png")
"""

from __future__ import annotations

from stratagem.simulator.drawing.forecast_plot import plot_forecast as forecast
from stratagem.simulator.drawing.memory_plot import plot_memory as memory
from stratagem.simulator.drawing.timeline_plot import plot_timelines as timelines

__all__ = ["forecast", "memory", "timelines"]
