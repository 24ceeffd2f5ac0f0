"""Training runs stated by their degrees of parallelism become the plans that frameworks run."""

import math
from dataclasses import replace

import pytest
import torch

from stratagem.executor import execute
from stratagem.searcher.driver.search import search
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.stage_cuts import layer_stages
from stratagem.searcher.space.strategies import LeftWhole
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph.models import gpt, mlp, moe, resnet
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.priced_plan import plan_model
from stratagem.simulator.simulation.simulation import simulate_plan
from tests.support.plans import crossed

SMALL = {"hidden": 64, "num_heads": 4, "vocabulary": 256, "sequence": 32}
CLUSTER = Cluster.preset("dgx-a100", num_nodes=2)


def blocks_by_stage(stages):
    """The numbers of the layers in each stage."""
    return [
        sorted({int(n.split(".")[1]) for n in names if n.startswith("h.")}) for names in stages
    ]


def test_layers_are_dealt_out_evenly_and_the_ends_go_to_the_ends():
    graph = gpt(num_layers=6, batch=4, **SMALL)
    stages = layer_stages(graph, 3)
    assert blocks_by_stage(stages) == [[0, 1], [2, 3], [4, 5]]
    assert {"wte", "wpe"} < set(stages[0])
    assert {"ln_f", "lm_head", "cross_entropy"} < set(stages[2])


def test_counting_the_ends_as_layers_leaves_one_layer_less_to_the_first_and_last_stage():
    graph = gpt(num_layers=6, batch=4, **SMALL)
    assert blocks_by_stage(layer_stages(graph, 4, "layers and ends")) == [
        [0],
        [1, 2],
        [3, 4],
        [5],
    ]


def test_a_heavy_vocabulary_takes_layers_off_the_last_stage():
    """12 layers of 12·64² weights and a head of 4 layers' worth: 16 units in 4 stages of 4.

    A stage ends with the layer that takes it *past* its share, so the first has 5 layers.
    """
    graph = gpt(
        num_layers=12, batch=4, hidden=64, num_heads=4, sequence=32, vocabulary=4 * 12 * 64
    )
    assert blocks_by_stage(layer_stages(graph, 4, "parameters")) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11],
        [],
    ]


@pytest.mark.parametrize("by", ["layers", "layers and ends"])
def test_layers_that_do_not_divide_are_refused_with_both_numbers(by):
    graph = gpt(num_layers=6, batch=4, **SMALL)
    with pytest.raises(ValueError, match=r"6 repeated blocks.*5 stages"):
        layer_stages(graph, 5, by)


def test_more_stages_than_layers_are_refused():
    graph = gpt(num_layers=2, batch=4, **SMALL)
    with pytest.raises(ValueError, match=r"2 repeated blocks.*8 stages"):
        layer_stages(graph, 8, "parameters")


def test_tensor_parallel_devices_are_neighbours_and_stages_are_contiguous():
    graph = gpt(num_layers=4, batch=16, **SMALL)
    plan = TrainingSetup(microbatch=2, tensor=4, pipeline=2).plan(graph, CLUSTER)
    plan.check(graph)
    assert [stage.mesh.devices for stage in plan.stages] == [tuple(range(8)), tuple(range(8, 16))]
    assert plan.stages[0].mesh.shape == (2, 4)
    assert plan.stages[0].mesh.groups(1)[0] == (0, 1, 2, 3)
    assert plan.num_microbatches == 16 // (2 * 2)


def test_virtual_stages_take_turns_on_the_ranks():
    graph = gpt(num_layers=8, batch=16, **{**SMALL, "num_heads": 8})
    plan = TrainingSetup(tensor=8, pipeline=2, virtual_stages=2).plan(graph, CLUSTER)
    assert plan.schedule == "interleaved"
    assert plan.rank_of == (0, 1, 0, 1)
    assert blocks_by_stage([stage.operators for stage in plan.stages]) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (TrainingSetup(tensor=3), "3 tensor × 1 pipeline.*16 of cluster"),
        (TrainingSetup(microbatch=5, tensor=8), "batch of 16.*10 samples.*microbatch 5 × 2"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_numbers(setup, message):
    with pytest.raises(ValueError, match=message):
        setup.plan(gpt(num_layers=4, batch=16, **SMALL), CLUSTER)


@pytest.mark.parametrize(
    "wrong",
    [
        {"microbatch": 0},
        {"partition": "evenly"},
        {"recompute": "some"},
        {"expert": 0},
        {"zero": 4},
    ],
)
def test_a_setup_that_nobody_can_run_is_refused(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        TrainingSetup(**wrong)


def test_gradients_reduced_at_the_end_take_longer_than_overlapped_ones():
    graph = gpt(num_layers=4, batch=256)
    times = [
        simulate_plan(
            TrainingSetup(microbatch=16, overlap_gradients=overlap).plan(graph, CLUSTER),
            graph,
            RooflineCosts(),
        ).step_time
        for overlap in (True, False)
    ]
    assert times[0] < times[1]


def test_gradients_added_up_in_float32_take_twice_the_memory():
    graph = gpt(num_layers=4, batch=16, **SMALL)
    setup = TrainingSetup(training=Training(precision="bfloat16"))
    wide = replace(setup, training=Training(precision="bfloat16", gradient_precision="float32"))
    gradients = []
    for each in (setup, wide):
        simulation = simulate_plan(each.plan(graph, CLUSTER), graph, RooflineCosts())
        alive = simulation.memory[0].alive
        gradients.append(sum(a.total for a in alive if a.use.value == "gradients"))
    assert gradients[1] == 2 * gradients[0] == 4 * graph.num_parameters


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_buckets_hold_every_gradient_in_the_precision_of_the_parameters(zero):
    graph = gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=64, sequence=16, batch=8)
    training = Training(precision="bfloat16", gradient_precision="float32")
    setup = TrainingSetup(tensor=2, training=training, zero=zero)
    bucketed = replace(setup, training=replace(training, bucketed_gradients=True))
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
    plain, more = (
        simulate_plan(each.plan(graph, cluster), graph, RooflineCosts()).memory[0]
        for each in (setup, bucketed)
    )
    parameters = sum(a.total for a in plain.alive if a.use.value == "parameters")
    assert more.state - plain.state == parameters  # Both in bfloat16.
    assert more.peak - plain.peak == parameters


def test_an_unknown_gradient_precision_is_refused():
    with pytest.raises(ValueError, match="no gradient_precision 'float64'"):
        Training(gradient_precision="float64")


def test_part_of_a_node_is_a_cluster_too():
    assert CLUSTER.with_devices(4).devices_per_node == 4
    assert CLUSTER.with_devices(32).num_nodes == 4
    with pytest.raises(ValueError, match=r"12 devices.*have 8"):
        CLUSTER.with_devices(12)


def test_gradients_of_weights_run_beside_the_all_reduce_of_those_of_inputs():
    """Megatron-LM's asynchronous all-reduce: a pass takes the longer of the two, not both."""
    graph = gpt(num_layers=4, num_heads=16, batch=16)
    setup = TrainingSetup(microbatch=4, tensor=8, training=Training(precision="bfloat16"))
    one_node = CLUSTER.with_devices(8)
    plain, beside = (
        simulate_plan(each.plan(graph, one_node), graph, RooflineCosts())
        for each in (setup, replace(setup, inputs_first=True))
    )
    assert beside.step_time < plain.step_time
    timeline = beside.timeline
    weight, moved = (
        next(k for k, name in enumerate(timeline.names) if name.startswith(start))
        for start in ("h.1.mlp.up weight", "h.1.ln_2 ← h.1.mlp.up")
    )
    assert timeline.start[weight] < timeline.end[moved]
    assert timeline.start[moved] < timeline.end[weight]


def test_the_order_of_gradients_changes_nothing_where_nothing_is_converted():
    graph = gpt(num_layers=2, batch=8)
    setup = TrainingSetup(microbatch=8)
    one = CLUSTER.with_devices(1)
    times = [
        simulate_plan(each.plan(graph, one), graph, RooflineCosts()).step_time
        for each in (setup, replace(setup, inputs_first=True))
    ]
    assert times[1] == pytest.approx(times[0], rel=1e-6)


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 1), (2, 8), (3, 8)])
@pytest.mark.parametrize(("precision", "moved"), [("", 2 + 2 + 2), ("float32", 2 + 4 + 4)])
def test_gradients_that_no_product_adds_up_are_added_in_every_microbatch(
    zero, share, precision, moved
):
    """They are read, and their sum read and written: of a shard where ZeRO has scattered them.

    The head is tied: it adds its gradient to that of the embedding, before that is scattered.
    """
    graph = gpt(num_layers=2, batch=16, **SMALL)
    cluster = CLUSTER.with_devices(8)
    apart, fused = (
        TrainingSetup(
            zero=zero,
            training=Training("bfloat16", gradient_precision=precision, fused_accumulation=fuses),
        ).plan(graph, cluster)
        for fuses in (False, True)
    )
    tables = [
        plan_model(plan, graph, RooflineCosts(), RowMemory()).stages[0].table
        for plan in (apart, fused)
    ]
    device = cluster.device_types[0]
    rate = device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency
    weighing = 0
    for i, operator in enumerate(graph.operators):
        names = {weight.parameter for weight in operator.weights}
        scalars = sum(math.prod(p.shape) for p in graph.parameters if p.name in names)
        part = scalars if operator.name == "lm_head" else scalars / share
        expected = 1e9 * (part * moved / rate + device.launch_us * 1e-6)
        weighing += scalars > 0
        rows = [table.row(i) for table in tables]
        for each in ("backward", "weight_gradient"):
            more, less = (int(getattr(row, each).ns[0]) for row in rows)
            assert more - less == pytest.approx(expected if scalars else 0, abs=1.5), operator.name
    assert weighing > 10


# -- degrees that do nothing --------------------------------------------------------------------

MIXTURE = {**SMALL, "num_layers": 2, "experts": 4}


@pytest.mark.parametrize(
    ("setup", "graph", "message"),
    [
        (
            TrainingSetup(tensor=4, pipeline=4, zero=1),
            gpt(num_layers=4, batch=16, **SMALL),
            r"ZeRO-1 has nothing to shard over: 4 tensor × 4 pipeline ways leave 1 data-parallel "
            r"way of the 16 devices",
        ),
        (TrainingSetup(tensor=16), mlp([8, 8], batch=16), "no operator of 'mlp' can be cut 16"),
        (
            TrainingSetup(expert=3),
            moe(batch=16, **MIXTURE),
            "3 expert-parallel ways do not divide the 16 data-parallel ways",
        ),
        (
            TrainingSetup(expert=8),
            moe(batch=16, **MIXTURE),
            r"the 4 experts of 'h.1.moe.up' cannot be shared out 8 ways.*one of \(1, 2, 4\)",
        ),
        (
            TrainingSetup(expert=2),
            gpt(num_layers=4, batch=16, **SMALL),
            "expert is 2, but 'gpt' has no experts",
        ),
    ],
)
def test_degrees_that_do_nothing_are_refused(setup, graph, message):
    with pytest.raises(ValueError, match=message):
        setup.plan(graph, CLUSTER)


def test_heads_that_cannot_be_cut_are_told_of():
    """12 heads are no 8 shards: what attention does, every tensor-parallel rank would do."""
    graph = gpt(num_layers=2, batch=16)
    with pytest.warns(LeftWhole, match=r"'h\.0\.attn\.qkv' and 5 more are.*'head' of size 12"):
        plan = TrainingSetup(tensor=8).plan(graph, CLUSTER)
    for name, choice in plan.stages[0].choices.items():
        assert (choice.config[1] == REPLICATE) >= (".attn." in name)
    with pytest.warns(LeftWhole, match="tensor is 16"):
        Space(tensor=16).check_degrees(graph, 16)


@pytest.mark.parametrize(("devices", "pipeline"), [(1, None), (4, 4)])
def test_a_search_for_zero_needs_devices_to_shard_over(devices, pipeline):
    graph = mlp([8, 8], batch=4)
    wishes = Space(zero_stages=(1, 3), pipeline=pipeline)
    with pytest.raises(ValueError, match=rf"{devices} devices in .* nothing to shard over"):
        search(graph, CLUSTER.with_devices(devices), space=wishes)
    Space(zero_stages=(0, 3), pipeline=pipeline).check_degrees(graph, devices)
    wishes.check_degrees(graph, 2 * devices)


# -- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("expert", [2, 4])
def test_experts_are_shared_out_inside_data_parallelism(expert, tensor):
    """Whatever the tensor ways, so many devices have other experts, and all others copies."""
    graph = moe(batch=16, **MIXTURE)
    plan = TrainingSetup(expert=expert, tensor=tensor, zero=1).plan(graph, CLUSTER)
    (stage,) = plan.stages
    assert stage.mesh.shape == (16 // (expert * tensor), expert, tensor)
    assert [axis.name for axis in stage.mesh.axes] == ["data", "expert", "tensor"]
    for name in ("h.1.moe.up", "h.1.moe.act", "h.1.moe.down"):
        config = stage.choices[name].config
        assert config[:2] == (Shard("sample"), Shard("expert"))
        assert config[2] != Shard("expert")
    assert stage.choices["h.1.attn.qkv"].config[:2] == (Shard("sample"), Shard("sample"))
    assert f"expert {expert}" in plan.name


def test_experts_that_are_shared_out_leave_their_share_of_the_state():
    """8 experts: each of 8 devices has one, and what is no expert's as before."""
    graph = moe(num_layers=2, experts=8, hidden=64, num_heads=4, vocabulary=64, batch=16)
    own = sum(math.prod(p.shape) for p in graph.parameters if ".moe.up" in p.name)
    own += sum(math.prod(p.shape) for p in graph.parameters if ".moe.down" in p.name)
    state = [
        simulate_plan(TrainingSetup(expert=ways).plan(graph, CLUSTER), graph, RooflineCosts())
        .memory[0]
        .state
        for ways in (1, 8)
    ]
    assert state[0] - state[1] == 16 * own * 7 // 8


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "zero"), crossed([1, 2], [0, 1, 3], every=2))
def test_shared_experts_train_like_one_process(zero, tensor):
    """Two ways of experts inside four or two of data, and tensor parallelism inside experts."""
    graph = moe(
        num_layers=2, experts=4, hidden=16, num_heads=4, vocabulary=11, sequence=6, batch=8
    )
    torch.manual_seed(0)
    state = {each.name: 0.3 * torch.randn(each.shape) for each in graph.parameters}
    batch = {each.name: torch.randint(11, each.shape) for each in graph.inputs}
    cluster = CLUSTER.with_devices(4 * tensor)
    training = Training(learning_rate=0.01)
    plans = [
        TrainingSetup(training=training, expert=2, tensor=tensor, zero=zero).plan(graph, cluster),
        TrainingSetup(training=training, microbatch=8).plan(graph, CLUSTER.with_devices(1)),
    ]
    parted, one = (execute(plan, graph, state, batch, steps=3, timeout=60) for plan in plans)
    assert parted.losses == pytest.approx(one.losses, rel=1e-5)


def test_buckets_of_gradients_can_be_stated():
    """DistributedDataParallel's 25 MiB: a bucket pays the latency of its collectives once."""
    graph = resnet(50, batch=2048)
    cluster = CLUSTER.with_devices(32)
    each, buckets = (
        TrainingSetup(
            microbatch=64, training=Training("float16", optimizer="sgd"), bucket_bytes=nbytes
        )
        for nbytes in (0, 25 * 2**20)
    )
    assert buckets.plan(graph, cluster).bucket_bytes == 25 * 2**20
    assert "buckets of 25 MiB" in buckets.describe()
    steps = [
        simulate_plan(setup.plan(graph, cluster), graph, RooflineCosts()).step_time
        for setup in (each, buckets)
    ]
    assert steps[1] < steps[0]
    with pytest.raises(ValueError, match="overlap_gradients is False: set bucket_bytes to 0"):
        replace(buckets, overlap_gradients=False)
    with pytest.raises(ValueError, match="bucket_bytes is -1"):
        replace(buckets, bucket_bytes=-1)
