"""Exports are read by the programs that they are for, where those are installed.

    pip install --no-deps accelerate deepspeed megatron-core torchtitan tyro …

Only their parsers are used, so nothing of them needs a GPU.
"""

from __future__ import annotations

import json
import shlex
import warnings
from dataclasses import field, make_dataclass
from pathlib import Path
from types import ModuleType

import pytest

from stratagem.exports import export
from stratagem.exports.megatron import layout
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.plan.plan import Plan

GRAPH = gpt(num_layers=4, hidden=64, num_heads=4, vocabulary=256, sequence=32, batch=16)
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1)
SETUPS = [
    TrainingSetup(),
    TrainingSetup(tensor=2, pipeline=2, zero=1, sequence_parallel=True, recompute="full"),
    TrainingSetup(tensor=2, zero=3, recompute="selective"),
    TrainingSetup(zero=2, recompute="full"),
    TrainingSetup(tensor=2, pipeline=2, virtual_stages=2, sequence_parallel=True),
    TrainingSetup(tensor=4, pipeline=2, schedule="gpipe"),
]
PLANS = [setup.plan(GRAPH, CLUSTER) for setup in SETUPS]

pytestmark = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)


def installed(name: str) -> ModuleType:
    """A module of another program; the test is skipped where it, or what it needs, is not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)


@pytest.mark.parametrize("plugin", ["fsdp", "deepspeed", "megatron"])
def test_accelerate_reads_its_file(plan: Plan, plugin: str, tmp_path: Path) -> None:
    reader = installed("accelerate.commands.config.config_args")
    made = export(plan, GRAPH, f"accelerate-{plugin}")
    made.save(tmp_path / "config.yaml")
    read = reader.load_config_from_file(str(tmp_path / "config.yaml"))
    assert read.num_processes == made.nearest.num_devices
    assert read.mixed_precision == "bf16"
    degrees = dict(read.parallelism_config)
    data, tensor = made.nearest.stages[0].mesh.shape
    if degrees:
        assert degrees["parallelism_config_dp_shard_size"] == data
        assert degrees["parallelism_config_tp_size"] == tensor
    if plugin == "megatron":
        assert read.megatron_lm_config["megatron_lm_tp_degree"] == tensor
        assert read.megatron_lm_config["megatron_lm_pp_degree"] == made.nearest.num_ranks


def test_deepspeed_reads_its_file(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    config = installed("deepspeed.runtime.config")
    made = export(plan, GRAPH, "deepspeed")
    data, tensor = made.nearest.stages[0].mesh.shape
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: data)
    read = config.DeepSpeedConfig(json.loads(made.text))
    choices = made.nearest.stages[0].choices
    assert read.zero_config.stage == max(choice.zero for choice in choices.values())
    assert read.gradient_accumulation_steps == made.nearest.num_microbatches
    assert max(1, read.tensor_parallel_config.autotp_size) == tensor


def test_torchtitan_reads_its_overrides(plan: Plan) -> None:
    tyro = installed("tyro")
    configs = installed("torchtitan.config.configs")
    checkpoint = installed("torchtitan.distributed.activation_checkpoint")
    job = make_dataclass(
        "Job",
        [
            ("training", configs.TrainingConfig, field(default_factory=configs.TrainingConfig)),
            (
                "parallelism",
                configs.ParallelismConfig,
                field(default_factory=configs.ParallelismConfig),
            ),
            (
                "activation_checkpoint",
                checkpoint.ActivationCheckpointingConfig,
                field(default_factory=checkpoint.SelectiveAC.Config),
            ),
        ],
    )
    made = export(plan, GRAPH, "torchtitan")
    read = tyro.cli(job, args=shlex.split(made.text, comments=True))
    parallel = read.parallelism
    data, tensor = made.nearest.stages[0].mesh.shape
    assert parallel.data_parallel_replicate_degree * parallel.data_parallel_shard_degree == data
    assert parallel.tensor_parallel_degree == tensor
    assert parallel.pipeline_parallel_degree == made.nearest.num_ranks
    recomputed = any(c.recompute for s in made.nearest.stages for c in s.choices.values())
    assert (read.activation_checkpoint is not None) == recomputed
    schedule = parallel.pipeline_parallel_schedule
    if made.nearest.num_ranks > 1:
        schedules = installed("torch.distributed.pipelining.schedules")
        assert schedules.get_schedule_class(schedule) is not None


def test_megatron_reads_its_layout(plan: Plan) -> None:
    layouts = installed("megatron.core.transformer.pipeline_parallel_layer_layout")
    enums = installed("megatron.core.transformer.enums")
    made = export(plan, GRAPH, "megatron")
    words = shlex.split(made.text, comments=True)
    ranks = int(words[words.index("--pipeline-model-parallel-size") + 1])
    assert ranks == made.nearest.num_ranks
    blocks = (1, 3, 2, 2)[:ranks]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = layouts.PipelineParallelLayerLayout(layout(blocks), ranks)
    decoders = [stage[0].count(enums.LayerType.decoder) for stage in read.layout]
    assert decoders == list(blocks)
