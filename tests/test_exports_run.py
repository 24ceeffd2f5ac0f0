"""What DTensor and FSDP2 exports compute is what one process of torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.models import MLP, SmallGPT
from stratagem.executor.launch import run_ranks
from stratagem.exports import export
from stratagem.search.setup import TrainingSetup
from stratagem.search.strategies import data_parallel, tensor_parallel
from stratagem.simulator.cluster import Cluster
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.mesh import DeviceMesh, MeshAxis
from stratagem.simulator.placement import Shard
from stratagem.simulator.plan import Choice, Plan, Stage
from stratagem.simulator.torch_ops.capture import capture
from stratagem.simulator.training import Training
from tests_support import make

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
