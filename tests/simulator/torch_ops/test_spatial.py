"""Images split along heights and widths: halos are exchanged, priced, and change no result."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from examples.models import SmallCNN, SmallResNet
from stratagem.executor import execute, lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.program.verify import verify
from stratagem.searcher.space.skeletons import operator_choices
from stratagem.simulator.graph import models
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.image_splits import split_images
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard, check_config, local_sizes
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import RooflineCosts, local_operator
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator, shape_of
from stratagem.simulator.operators.sliding_windows import Window, shard_bounds, window_of
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from stratagem.simulator.torch_ops.kernels.run_kernel import run_kernel
from stratagem.simulator.torch_ops.kernels.shards import whole
from tests.support.plans import (
    Case,
    assert_equal_to_torch,
    assert_runs_like_torch,
    few,
    is_legal,
    make_plan,
    one_stage,
    random_plan,
    sharding,
)
from tests.support.small_models import SmallInception

torch.set_num_threads(1)


def split_case(model: nn.Module, *size: int, batch: int = 2, classes: int = 6) -> Case:
    given = {
        "images": torch.randn(batch, 3, *size),
        "labels": torch.randint(0, classes, (batch,)),
    }
    return Case(model, given, split_images(capture(model, (), given)))


MODELS: dict[str, Callable[[], Case]] = {
    "cnn": lambda: split_case(SmallCNN(channels=4, image=8, classes=6), 8, 8),
    "resnet": lambda: split_case(SmallResNet(channels=(4, 6), classes=6), 10, 9),
    "inception": lambda: split_case(SmallInception(), 17, 13),
}


@functools.cache
def case_of(model: str) -> Case:
    torch.manual_seed(0)
    return MODELS[model]()


# -- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_halos_are_what_windows_read_beyond_their_shard(seed: int) -> None:
    """Against the set of inputs that each result reads, one by one."""
    rng = random.Random(seed)
    size, stride, dilation = rng.randint(1, 5), rng.randint(1, 4), rng.randint(1, 3)
    span = dilation * (size - 1) + 1
    padding = rng.randint(0, span)
    extent = rng.randint(span, 40)
    window = Window(size, stride, padding, dilation, extent)
    results = (extent + 2 * padding - span) // stride + 1
    ways = rng.randint(1, results)
    most = 0
    for i in range(ways):
        own = range(*shard_bounds(results, [ways], [i]))
        read = {
            o * stride - padding + t * dilation
            for o in own
            for t in range(size)
            if 0 <= o * stride - padding + t * dilation < extent
        }
        first, last = window.inside(own.start, own.stop) if own else (0, 0)
        assert read <= set(range(first, last))
        if read and stride <= size and dilation == 1:
            assert (first, last) == (min(read), max(read) + 1)
        held = range(*shard_bounds(extent, [ways], [i]))
        if own:
            most = max(most, len(set(range(first, last)) - set(held)))
    if results >= ways and shard_bounds(results, [ways], [ways - 1])[0] < results:
        assert window.halo(results, ways) == most


def test_only_images_are_split() -> None:
    assert split_images(models.gpt(num_layers=1)) == models.gpt(num_layers=1)
    graph = models.resnet(18, batch=4)
    split = split_images(graph)
    assert split_images(split) == split
    assert split.fingerprint != graph.fingerprint
    assert OperatorGraph.from_json(split.to_json()) == split
    stem = split.operator("conv1")
    assert stem.windows == {"height": "in_height", "width": "in_width"}
    assert window_of(stem, "height") == Window(7, 2, 3, 1, 224)
    assert stem.dim("in_height").whole == "it is split as height is"
    assert [o.name for o in split.operators] == [o.name for o in graph.operators]


# -- equality -----------------------------------------------------------------------------------


class Stack(nn.Module):
    """One convolution or pooling between two that are not split, and a mean."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.middle = middle
        self.last = nn.LazyLinear(6)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.gelu(self.middle(self.first(images)))
        return functional.cross_entropy(self.last(x.flatten(1)), labels)


def drawn_layer(rng: random.Random, size: tuple[int, int]) -> nn.Module:
    kernel = rng.randint(1, 4), rng.randint(1, 4)
    stride = rng.randint(1, 3), rng.randint(1, 3)
    if rng.random() < 0.4:
        padding = rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2)
        kind = rng.choice([nn.MaxPool2d, nn.AvgPool2d])
        return kind(kernel, stride, padding)
    padding = rng.randint(0, 4), rng.randint(0, 4)
    dilation = rng.randint(1, 2), rng.randint(1, 2)
    groups = rng.choice([1, 1, 2])
    return nn.Conv2d(4, 4, kernel, stride, padding, dilation, groups)


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(16), 4))
def test_any_window_along_any_dim(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    size = rng.randint(8, 17), rng.randint(8, 17)
    model = Stack(drawn_layer(rng, size))
    model(torch.zeros(1, 3, *size), torch.zeros(1, dtype=torch.int64))
    case = split_case(model, *size)
    ran = 0
    for dims, shape in (
        (("height",), (2,)),
        (("width",), (3,)),
        (("height",), (5,)),
        (("height", "width"), (2, 2)),
        (("width", "height"), (2, 3)),
        (("sample", "height"), (2, 2)),
    ):
        plan = make_plan(case, sharding(*dims), shape)
        middle = plan.choice("middle").config
        ran += Shard(dims[-1]) in middle
        assert_equal_to_torch(case, plan)
    assert ran >= 3


class Signal(nn.Module):
    """Convolutions of a signal or a volume: grouped, strided, depthwise and transposed ones."""

    def __init__(self, places: int) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 3: nn.Conv3d}[places]
        spread = {1: nn.ConvTranspose1d, 3: nn.ConvTranspose3d}[places]
        self.first = conv(3, 4, 3, padding="same")
        self.grouped = conv(4, 8, 3, stride=2, padding=1, groups=2)
        self.depthwise = conv(8, 8, 4, padding=2, dilation=1, groups=8, bias=False)
        self.normed = weight_norm(conv(8, 8, 3, padding=1, groups=4))
        self.spread = spread(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.last = nn.LazyLinear(6)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.gelu(self.grouped(functional.gelu(self.first(images))))
        x = functional.gelu(self.normed(functional.gelu(self.depthwise(x))))
        x = functional.gelu(self.spread(x))
        return functional.cross_entropy(self.last(x.flatten(1)), labels)


@functools.cache
def signal(places: int) -> Case:
    torch.manual_seed(places)
    model, size = Signal(places), (9, 6, 7)[:places]
    model(torch.zeros(1, 3, *size), torch.zeros(1, dtype=torch.int64))
    return split_case(model, *size, batch=6)


def test_every_convolution_of_a_signal_has_a_rule() -> None:
    for places in (1, 3):
        kinds = [o.kind for o in signal(places).graph.operators if not o.is_source]
        assert [each for each in kinds if each[-1] == "d" and each[-2].isdigit()] == [
            *[f"conv{places}d"] * 3, f"filter{places}d", f"conv_transpose{places}d"
        ]  # fmt: skip
        assert kinds.count("generic") == 1  # the norm of the weights of one


_DIMS = {1: ("length",), 3: ("depth", "height", "width")}


@pytest.mark.slow
@pytest.mark.parametrize("ways", few([2, 3], 1))
@pytest.mark.parametrize(
    ("places", "dim"),
    [
        (places, dim)
        for places, image in _DIMS.items()
        for dim in ("sample", "group", "in_channel", "out_channel", *image)
    ],
)
def test_signals_train_like_torch_along_every_dim(places: int, dim: str, ways: int) -> None:
    """Other operators are split likewise where they have such a dim."""
    case = signal(places)
    named = [dim, f"{dim}0", f"{dim}1"]

    def choose(operator: Operator, shape: tuple[int, ...]) -> Choice:
        found = (Shard(each) for each in named if each in operator.sizes)
        legal = (each for each in found if is_legal(operator, (each,), shape))
        return Choice((next(legal, REPLICATE),))

    plan = make_plan(case, choose, (ways,))
    split = [name for name in case.graph.names if plan.choice(name).config != (REPLICATE,)]
    convolutions = [each for each in split if "conv" in case.graph.operator(each).kind]
    assert convolutions or (dim, ways) == ("group", 3)  # there are two of them
    assert_equal_to_torch(case, plan)


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 3])
@pytest.mark.parametrize("seed", few(range(12), 1))
def test_random_plans_of_signals_equal_torch(places: int, seed: int) -> None:
    assert_equal_to_torch(signal(places), random_plan(signal(places), seed))


@pytest.mark.slow
@pytest.mark.parametrize("model", few(MODELS, 1))
@pytest.mark.parametrize(
    ("dims", "shape", "num_microbatches"),
    [
        (("height",), (2,), 1),
        (("width",), (3,), 1),
        (("height",), (4,), 2),
        (("height", "width"), (2, 2), 1),
        (("sample", "height", "width"), (2, 2, 2), 1),
    ],
)
def test_split_images_train_like_torch(
    model: str, dims: tuple[str, ...], shape: tuple[int, ...], num_microbatches: int
) -> None:
    """Batch norms sum over the shards, poolings and flattened layers follow."""
    case = case_of(model)
    training = Training(optimizer="sgd", learning_rate=0.02)
    plan = make_plan(
        case, sharding(*dims), shape, num_microbatches=num_microbatches, training=training
    )
    windows = [o.name for o in case.graph.operators if o.windows]
    assert any(Shard(dims[-1]) in plan.choice(name).config for name in windows)
    verify(lower(plan, case.graph))
    assert_runs_like_torch(case, plan)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", few(range(4), 1))
def test_random_plans_of_split_images_equal_torch(model: str, seed: int) -> None:
    case = case_of(model)
    assert_equal_to_torch(case, random_plan(case, seed))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", few(range(1000, 1040), 0))
def test_many_random_plans_of_split_images_equal_torch(model: str, seed: int) -> None:
    case = case_of(model)
    assert_equal_to_torch(case, random_plan(case, seed))


def test_the_models_own_graph_runs_and_simulates_such_plans() -> None:
    case = case_of("resnet")
    plan = make_plan(case, sharding("height"), (2,))
    own = capture(case.model, (), case.batch)
    assert own.fingerprint != plan.fingerprint
    result = execute(plan, own, model_state(case.model), case.batch)
    assert result.losses == execute(plan, case.graph, model_state(case.model), case.batch).losses
    times = [simulate_plan(plan, g, RooflineCosts()).step_time for g in (own, case.graph)]
    assert times[0] == times[1]


# -- cost ---------------------------------------------------------------------------------------


def convolution(height: int, *, kernel: int = 3, stride: int = 1, batch: int = 2) -> OperatorGraph:
    b = GraphBuilder("convolution")
    images, labels = (
        b.input("images", (batch, 4, height, 12)),
        b.input("labels", (batch,), "int64"),
    )
    # Without a layer before it no gradient of its input would be asked for.
    x = b.conv2d(images, b.parameter("first", (4, 4, 1, 1)), name="first")
    pad = kernel // 2
    weight = b.parameter("weight", (5, 4, kernel, kernel))
    x = b.conv2d(x, weight, stride=(stride, stride), padding=(pad, pad), name="conv")
    logits = b.linear(b.mean(x, [2, 3], name="mean"), b.parameter("last", (3, 5)))
    return split_images(b.build(b.cross_entropy(logits, labels)))


@pytest.mark.parametrize(
    ("height", "kernel", "stride", "ways", "rows"),
    [
        (12, 3, 1, 2, 1),
        (12, 3, 1, 3, 2),
        (13, 5, 1, 4, 4),
        (12, 4, 2, 2, 1),
        (12, 1, 1, 3, 0),
        (12, 3, 2, 3, 1),
    ],
)
def test_a_halo_costs_what_its_bytes_take(
    height: int, kernel: int, stride: int, ways: int, rows: int
) -> None:
    """The device with the most rows to get decides; forward and backward each take it once."""
    graph = convolution(height, kernel=kernel, stride=stride)
    plan = make_plan(Case(nn.Module(), {}, graph), sharding("height"), (ways,))
    mesh = plan.stages[0].mesh
    builder = TableBuilder(graph, mesh, plan.cluster, Training(), RooflineCosts())
    link = mesh.link(0, plan.cluster)
    seconds = []
    for far in (False, True):
        slow = replace(plan.cluster.intra_node, latency_us=1000.0, bandwidth_gb_s=1e-3)
        cluster = replace(plan.cluster, intra_node=slow) if far else plan.cluster
        builder = TableBuilder(graph, mesh, cluster, Training(), RooflineCosts())
        link = mesh.link(0, cluster)
        seconds.append(
            builder.pass_seconds(graph.index["conv"], [plan.choice("conv")])[0]
            - (2 * (link.latency + rows * 2 * 4 * 12 * 4 * link.seconds_per_byte) if rows else 0)
        )
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)


@pytest.mark.parametrize(("height", "ways", "rows"), [(12, 2, 2), (12, 3, 4), (13, 4, 6)])
def test_only_halos_are_sent(height: int, ways: int, rows: int) -> None:
    """Rows in all that neighbours send each other, and as many rows of gradients."""
    graph = convolution(height)
    plan = make_plan(Case(nn.Module(), {}, graph), sharding("height"), (ways,))
    program = lower(plan, graph)
    torch.manual_seed(0)
    state = {each.name: torch.randn(each.shape) for each in graph.parameters}
    batch = {"images": torch.randn(2, 4, height, 12), "labels": torch.tensor([0, 2])}

    def rank(comm: Communicator) -> int:
        Interpreter(program, comm, state).step(batch)
        return comm.sent[Collective.ALL_TO_ALL.value]

    assert sum(run_local(ways, rank)) == 2 * rows * 2 * 4 * 12 * 4


@pytest.mark.parametrize("model", MODELS)
def test_what_a_device_runs_is_timed_with_its_halos(model: str) -> None:
    """The local operator makes the local result, however small its share of the image is."""
    graph = case_of(model).graph
    ran = 0
    for operator in graph.operators:
        for config in product((Shard("height"), REPLICATE), (Shard("width"), REPLICATE)):
            if not operator.windows or not is_legal(operator, config, (3, 2)):
                continue
            sizes = local_sizes(operator, config, (3, 2))
            local = local_operator(operator, sizes)
            inputs, weights = (
                [torch.randn(shape_of(each.layout, local.sizes)) for each in given]
                for given in (local.inputs, local.weights)
            )
            (made,) = run_kernel(local, whole(local), inputs, weights)
            assert made.shape == shape_of(operator.outputs[0].layout, sizes)
            ran += 1
    assert ran >= 8


def test_the_search_space_has_heights_and_widths_once_an_axis() -> None:
    graph = convolution(16)
    conv = graph.operator("conv")
    configs = [c.config for c in operator_choices(graph, conv, (2, 2), (0,))]
    assert (Shard("height"), Shard("width")) in configs
    assert (Shard("height"), Shard("height")) not in configs
    assert all(is_legal(conv, config, (2, 2)) for config in configs)
    named = {str(placement) for config in configs for placement in config}
    assert named <= {"R", *(f"S({d.name})" for d in conv.dims if not d.whole)}


@pytest.mark.parametrize(("image", "pays"), [(256, False), (2048, True)])
def test_more_devices_than_images_are_of_use_for_large_ones(image: int, pays: bool) -> None:
    """Two images on four devices: small ones take longer to exchange halos than to compute."""
    graph = split_images(models.resnet(18, batch=2, image=image))
    whole_images, split = (
        simulate_plan(
            one_stage(graph, {o.name: choose(o, (2, 2)) for o in graph.operators}, (2, 2)),
            graph,
            RooflineCosts(),
        ).step_time
        for choose in (sharding("sample", None), sharding("sample", "height"))
    )
    assert (split < 0.75 * whole_images) == pays


# -- refusals -----------------------------------------------------------------------------------


def test_impossible_splits_are_refused() -> None:
    conv = convolution(12).operator("conv")
    check_config(conv, (Shard("height"), Shard("width")), (2, 2))
    with pytest.raises(ValueError, match="'height' of size 12 is split by 2 axes; halos are"):
        check_config(conv, (Shard("height"), Shard("height")), (2, 2))
    with pytest.raises(ValueError, match="'in_height' of size 12 cannot be split: it is split as"):
        check_config(conv, (Shard("in_height"),), (2,))
    with pytest.raises(ValueError, match="without an empty shard"):
        check_config(conv, (Shard("height"),), (13,))
    whole = models.resnet(18, batch=2).operator("conv1")
    with pytest.raises(ValueError, match=r"'height' of size 112 cannot be split: .*split_images"):
        check_config(whole, (Shard("height"),), (2,))


def test_a_shard_of_the_image_may_not_be_empty() -> None:
    """Padding may leave more rows in the result than there are in the image."""
    b = GraphBuilder("padded")
    images, labels = b.input("images", (2, 3, 5, 6)), b.input("labels", (2,), "int64")
    x = b.conv2d(images, b.parameter("w", (4, 3, 1, 1)), padding=(3, 0), name="conv")
    logits = b.linear(b.mean(x, [2, 3]), b.parameter("last", (3, 4)))
    conv = split_images(b.build(b.cross_entropy(logits, labels))).operator("conv")
    assert conv.sizes["height"] == 11
    with pytest.raises(ValueError, match="a shard of 'in_height' of size 5, over"):
        check_config(conv, (Shard("height"),), (4,))
