"""Stratagem: how should this PyTorch model be trained on that GPU cluster?

    import stratagem as sg

    graph = sg.capture(model, kwargs=batch)
    result = sg.search(graph, sg.Cluster.preset("dgx-a100"), training=sg.Training("bfloat16"))
    print(sg.describe(result.simulation, graph))

Everything here is imported when it is first used, so that a simulation does not wait for torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from stratagem.basics.version import __version__

_HOMES = {
    "Blocks": "stratagem.simulator.kernel_times.quantised_states",
    "Budget": "stratagem.searcher.driver.budget",
    "Headroom": "stratagem.simulator.hardware.headroom",
    "Checkpoints": "stratagem.simulator.forecast.checkpoint_intervals",
    "Choice": "stratagem.simulator.sharding.choice",
    "Cluster": "stratagem.simulator.hardware.cluster",
    "DeviceMesh": "stratagem.simulator.hardware.device_mesh",
    "DeviceType": "stratagem.simulator.hardware.device_type",
    "Effort": "stratagem.profiler.timing.operator_timing",
    "ExecutionResult": "stratagem.executor.results.execution_result",
    "FactoredSquares": "stratagem.simulator.kernel_times.factored_squares",
    "Hazards": "stratagem.simulator.forecast.hazards",
    "KernelModelCosts": "stratagem.simulator.kernel_times.fitted_kernels",
    "Link": "stratagem.simulator.hardware.cluster",
    "MeasuredCosts": "stratagem.profiler.costs.measured_costs",
    "MeshAxis": "stratagem.simulator.hardware.device_mesh",
    "NewtonSchulz": "stratagem.simulator.kernel_times.newton_schulz",
    "OperatorGraph": "stratagem.simulator.graph.operator_graph",
    "Plan": "stratagem.simulator.plan.plan",
    "Precision": "stratagem.simulator.base.precision",
    "RooflineCosts": "stratagem.simulator.kernel_times.cost_model",
    "RunForecast": "stratagem.simulator.forecast.run_forecast",
    "Rule": "stratagem.searcher.space.constraints",
    "Scaled": "stratagem.searcher.processes.search_effort",
    "SearchEffort": "stratagem.searcher.processes.search_effort",
    "SearchProgress": "stratagem.searcher.driver.incumbent",
    "SearchResult": "stratagem.searcher.driver.result",
    "Simulation": "stratagem.simulator.simulation.simulation",
    "Space": "stratagem.searcher.space.constraints",
    "Stage": "stratagem.simulator.plan.plan",
    "Timeline": "stratagem.simulator.timeline.timeline",
    "ParameterGroup": "stratagem.simulator.kernel_times.parameter_groups",
    "TorchRate": "stratagem.executor.training.learning_rates",
    "Training": "stratagem.simulator.kernel_times.training",
    "TrainingSetup": "stratagem.searcher.space.training_setup",
    "annotate": "stratagem.searcher.semi_automatic.annotated_plans",
    "annotation_regret": "stratagem.searcher.semi_automatic.regret",
    "capture": "stratagem.simulator.torch_ops.capture.capture",
    "check": "stratagem.executor.running.checking",
    "compare": "stratagem.runs.predicted_and_measured",
    "compare_schedules": "stratagem.face.verbs",
    "doctor": "stratagem.face.diagnosis",
    "describe": "stratagem.simulator.simulation.plan_in_words",
    "diff_timelines": "stratagem.simulator.timeline.step_difference",
    "execute": "stratagem.face.verbs",
    "RateSchedule": "stratagem.executor.training.learning_rates",
    "fit_links": "stratagem.face.verbs",
    "forecast_run": "stratagem.simulator.forecast.run_forecast",
    "forward_pass": "stratagem.simulator.graph.forward_pass",
    "limit_capacity": "stratagem.simulator.torch_ops.blocks.module_rules",
    "load_checkpoint": "stratagem.executor.checkpoints.reader",
    "export": "stratagem.exports",
    "local_cluster": "stratagem.face.verbs",
    "local_statistics": "stratagem.simulator.graph.local_statistics",
    "profile": "stratagem.face.verbs",
    "report": "stratagem.face.verbs",
    "robustness": "stratagem.searcher.report.robustness",
    "search": "stratagem.face.verbs",
    "search_sizes": "stratagem.searcher.report.cluster_sizes",
    "selective_scan": "stratagem.simulator.torch_ops.blocks.scans",
    "simulate": "stratagem.face.verbs",
    "slice_tokens": "stratagem.searcher.improvement.token_slicing",
    "WhatIf": "stratagem.searcher.problem.what_if",
    "write_trace": "stratagem.simulator.timeline.chrome_trace",
}

_MODULES = {
    "experts": "stratagem.simulator.torch_ops.blocks.experts",
    "models": "stratagem.simulator.graph.models",
    "placements": "stratagem.face.placements",
    "plots": "stratagem.face.plots",
}

__all__ = ["__version__", *sorted([*_HOMES, *_MODULES])]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "IPython" in sys.modules:
    importlib.import_module("stratagem.face.notebook").register_pictures()
