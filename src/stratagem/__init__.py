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
from types import ModuleType
from typing import Any

_HOMES = {
    "Budget": "stratagem.search.result",
    "Options": "stratagem.search.space",
    "Comparison": "stratagem.comparison",
    "Calibration": "stratagem.simulator.cluster",
    "Choice": "stratagem.simulator.choice",
    "Cluster": "stratagem.simulator.cluster",
    "Constraints": "stratagem.search.constraints",
    "DeviceMesh": "stratagem.simulator.mesh",
    "DeviceType": "stratagem.simulator.device",
    "ExecutionResult": "stratagem.executor.result",
    "Export": "stratagem.exports.result",
    "KernelModelCosts": "stratagem.simulator.kernel_costs",
    "Link": "stratagem.simulator.cluster",
    "MeasuredCosts": "stratagem.profiler.costs",
    "MeshAxis": "stratagem.simulator.mesh",
    "OperatorGraph": "stratagem.simulator.graph",
    "Plan": "stratagem.simulator.plan",
    "RooflineCosts": "stratagem.simulator.costs",
    "SearchResult": "stratagem.search.result",
    "Simulation": "stratagem.simulator.simulation",
    "Stage": "stratagem.simulator.plan",
    "Timeline": "stratagem.simulator.timeline",
    "TimingCache": "stratagem.profiler.cache",
    "Training": "stratagem.simulator.training",
    "TrainingSetup": "stratagem.search.setup",
    "capture": "stratagem.simulator.torch_ops.capture",
    "check": "stratagem.executor.checking",
    "compare": "stratagem.comparison",
    "compare_schedules": "stratagem.face",
    "doctor": "stratagem.machine",
    "describe": "stratagem.simulator.describe",
    "diff_timelines": "stratagem.simulator.timeline_diff",
    "execute": "stratagem.face",
    "RateSchedule": "stratagem.executor.rates",
    "fit_links": "stratagem.face",
    "limit_capacity": "stratagem.simulator.torch_ops.module_rules",
    "load_checkpoint": "stratagem.executor.checkpoint_reader",
    "export": "stratagem.exports",
    "local_cluster": "stratagem.face",
    "local_statistics": "stratagem.simulator.local_statistics",
    "plot_memory": "stratagem.simulator.memory_plot",
    "plot_timelines": "stratagem.simulator.plot",
    "profile": "stratagem.face",
    "report": "stratagem.face",
    "search": "stratagem.face",
    "search_sizes": "stratagem.search.sizes",
    "simulate": "stratagem.face",
    "slice_tokens": "stratagem.search.slicing",
    "split_images": "stratagem.simulator.spatial",
    "Verdict": "stratagem.executor.verdict",
    "WhatIf": "stratagem.search.what_if",
    "write_trace": "stratagem.simulator.trace",
}

_MODULES = {
    "experts": "stratagem.simulator.torch_ops.experts",
    "models": "stratagem.simulator.models",
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


class _Face(ModuleType):
    """Keeps `stratagem.search` the function when the subpackage of that name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face

if "IPython" in sys.modules:
    importlib.import_module("stratagem.notebook").register_pictures()
