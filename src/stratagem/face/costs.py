"""Prices of operators, and how long to time each: what `costs` and `effort` of the verbs may be.

sg.simulate(plan, graph, costs=sg.costs.RooflineCosts())
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.basics.names_on_demand import names_on_demand

if TYPE_CHECKING:
    from stratagem.profiler.costs.measured_costs import MeasuredCosts as MeasuredCosts
    from stratagem.profiler.timing.operator_timing import Effort as Effort
    from stratagem.simulator.kernel_times.cost_model import RooflineCosts as RooflineCosts
    from stratagem.simulator.kernel_times.fitted_kernels import (
        KernelModelCosts as KernelModelCosts,
    )
else:
    __all__, __getattr__, __dir__ = names_on_demand(__name__)
