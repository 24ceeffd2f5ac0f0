"""Planners of other projects on their own profiled inputs, under their own objectives.

PipeDream (`pipedream`), Piper (`piper`) and *Device Placement of DNN Graph Operators*
(`dnn_partitioning`): readers, objectives and solvers that are exact where the peers' are not.
"""

from stratagem.searcher.planners.inputs.dnn_partitioning import (
    PartitionInput,
    read_partition_input,
    read_split,
    write_partition_input,
    write_split,
)
from stratagem.searcher.planners.inputs.pipedream import (
    PipeDreamGraph,
    read_pipedream_graph,
    write_pipedream_graph,
)
from stratagem.searcher.planners.inputs.piper import (
    PiperInput,
    read_piper_input,
    stage_seconds,
    write_piper_input,
)
from stratagem.searcher.planners.inputs.result import PlannedStage, PlannerResult
from stratagem.searcher.planners.solvers.max_load import device_loads, max_load, solve_max_load
from stratagem.searcher.planners.solvers.pipedream_solver import (
    HierarchyLevel,
    Replicated,
    antichain_sets,
    pipeline_seconds,
    solve_pipedream,
)
from stratagem.searcher.planners.solvers.piper_solver import solve_piper
from stratagem.searcher.planners.solvers.scattered import solve_scattered

__all__ = [
    "HierarchyLevel",
    "PartitionInput",
    "PipeDreamGraph",
    "PiperInput",
    "PlannedStage",
    "PlannerResult",
    "Replicated",
    "antichain_sets",
    "device_loads",
    "max_load",
    "pipeline_seconds",
    "read_partition_input",
    "read_pipedream_graph",
    "read_piper_input",
    "read_split",
    "solve_max_load",
    "solve_pipedream",
    "solve_piper",
    "solve_scattered",
    "stage_seconds",
    "write_partition_input",
    "write_pipedream_graph",
    "write_piper_input",
    "write_split",
]
