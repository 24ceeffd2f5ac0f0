"""Pictures of what is predicted and measured, by matplotlib, and traces for a browser's viewer.

sg.plots.timelines([simulation.timeline], "step.png")
"""

from __future__ import annotations

from stratagem.simulator.drawing.forecast_plot import plot_forecast as forecast
from stratagem.simulator.drawing.memory_plot import plot_memory as memory
from stratagem.simulator.drawing.timeline_plot import plot_timelines as timelines
from stratagem.simulator.timeline.chrome_trace import write_trace as trace

__all__ = ["forecast", "memory", "timelines", "trace"]
