"""Planners of other projects on their own profiled inputs, under their own objectives.

PipeDream (`pipedream`), Piper (`piper`) and *Device Placement of DNN Graph Operators*
(`dnn_partitioning`): readers, objectives and solvers that are exact where the peers' are not.
"""

from stratagem.search.planners.dnn_partitioning import (
    PartitionInput,
    read_partition_input,
    read_split,
    write_partition_input,
    write_split,
)
from stratagem.search.planners.max_load import device_loads, max_load, solve_max_load
from stratagem.search.planners.pipedream import (
    PipeDreamGraph,
    read_pipedream_graph,
    write_pipedream_graph,
)
from stratagem.search.planners.pipedream_solver import (
    Level,
    Replicated,
    antichain_sets,
    pipeline_seconds,
    solve_pipedream,
)
from stratagem.search.planners.piper import (
    PiperInput,
    read_piper_input,
    stage_seconds,
    write_piper_input,
)
from stratagem.search.planners.piper_solver import solve_piper
from stratagem.search.planners.result import PlannedStage, PlannerResult
from stratagem.search.planners.scattered import solve_scattered

__all__ = [
    "Level",
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
