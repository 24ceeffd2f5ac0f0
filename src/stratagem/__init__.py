"""Stratagem: how should this PyTorch model be trained on that GPU cluster?

    import stratagem as sg

    graph = sg.capture(model, kwargs=batch)
    result = sg.search(graph, sg.Cluster.preset("dgx-a100"), training=sg.Training("bfloat16"))
    print(sg.describe(result.simulation, graph))

Everything here is imported when it is first used, so that a simulation does not wait for torch.
What few calls need lies in modules of it: `costs`, `experts`, `forecasts`, `hardware`, `models`,
`optimizers`, `placements`, `plots`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from stratagem.basics.names_on_demand import names_on_demand

if TYPE_CHECKING:
    from stratagem.basics.version import __version__ as __version__
    from stratagem.executor.checkpoints.reader import load_checkpoint as load_checkpoint
    from stratagem.executor.results.execution_result import ExecutionResult as ExecutionResult
    from stratagem.executor.running.checking import check as check
    from stratagem.exports import export as export
    from stratagem.face import costs as costs
    from stratagem.face import experts as experts
    from stratagem.face import forecasts as forecasts
    from stratagem.face import hardware as hardware
    from stratagem.face import optimizers as optimizers
    from stratagem.face import placements as placements
    from stratagem.face import plots as plots
    from stratagem.face.diagnosis import doctor as doctor
    from stratagem.face.verbs import compare_schedules as compare_schedules
    from stratagem.face.verbs import execute as execute
    from stratagem.face.verbs import local_cluster as local_cluster
    from stratagem.face.verbs import profile as profile
    from stratagem.face.verbs import report as report
    from stratagem.face.verbs import search as search
    from stratagem.face.verbs import simulate as simulate
    from stratagem.runs.predicted_and_measured import compare as compare
    from stratagem.searcher.driver.budget import Budget as Budget
    from stratagem.searcher.driver.incumbent import SearchProgress as SearchProgress
    from stratagem.searcher.driver.result import SearchResult as SearchResult
    from stratagem.searcher.improvement.token_slicing import slice_tokens as slice_tokens
    from stratagem.searcher.problem.what_if import WhatIf as WhatIf
    from stratagem.searcher.processes.search_effort import Scaled as Scaled
    from stratagem.searcher.processes.search_effort import SearchEffort as SearchEffort
    from stratagem.searcher.report.cluster_sizes import search_sizes as search_sizes
    from stratagem.searcher.report.robustness import robustness as robustness
    from stratagem.searcher.semi_automatic.annotated_plans import annotate as annotate
    from stratagem.searcher.semi_automatic.regret import annotation_regret as annotation_regret
    from stratagem.searcher.space.constraints import Rule as Rule
    from stratagem.searcher.space.constraints import Space as Space
    from stratagem.searcher.space.training_setup import TrainingSetup as TrainingSetup
    from stratagem.simulator.base.precision import Precision as Precision
    from stratagem.simulator.graph import models as models
    from stratagem.simulator.graph.forward_pass import forward_pass as forward_pass
    from stratagem.simulator.graph.local_statistics import local_statistics as local_statistics
    from stratagem.simulator.graph.operator_graph import OperatorGraph as OperatorGraph
    from stratagem.simulator.hardware.cluster import Cluster as Cluster
    from stratagem.simulator.kernel_times.training import Training as Training
    from stratagem.simulator.plan.plan import Plan as Plan
    from stratagem.simulator.plan.plan import Stage as Stage
    from stratagem.simulator.sharding.choice import Choice as Choice
    from stratagem.simulator.simulation.plan_in_words import describe as describe
    from stratagem.simulator.simulation.simulation import Simulation as Simulation
    from stratagem.simulator.timeline.step_difference import diff_timelines as diff_timelines
    from stratagem.simulator.timeline.timeline import Timeline as Timeline
    from stratagem.simulator.torch_ops.blocks.scans import selective_scan as selective_scan
    from stratagem.simulator.torch_ops.capture.capture import capture as capture
else:
    __all__, __getattr__, __dir__ = names_on_demand(__name__)

if "IPython" in sys.modules:
    importlib.import_module("stratagem.face.notebook").register_pictures()
