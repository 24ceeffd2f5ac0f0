"""Whole runs: how long, how often interrupted, and what for money and energy.

sg.forecasts.forecast_run(result.simulation, steps=500_000).table
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.basics.names_on_demand import names_on_demand

if TYPE_CHECKING:
    from stratagem.simulator.forecast.checkpoint_intervals import Checkpoints as Checkpoints
    from stratagem.simulator.forecast.hazards import Hazards as Hazards
    from stratagem.simulator.forecast.run_forecast import RunForecast as RunForecast
    from stratagem.simulator.forecast.run_forecast import forecast_run as forecast_run
else:
    __all__, __getattr__, __dir__ = names_on_demand(__name__)
