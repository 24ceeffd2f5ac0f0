"""Bundled devices, and cost models by their fitted constants."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.simulator.base.files import encode
from stratagem.simulator.base.precision import PRECISIONS
from stratagem.simulator.graph.models import gpt, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.hardware.device_type import DeviceType, device_names
from stratagem.simulator.kernel_times._matrix_product_time import (
    TILE_COLUMNS,
    TILE_ROWS,
    product_seconds,
)
from stratagem.simulator.kernel_times.cost_model import (
    Cost,
    CostsByFormula,
    CostSource,
    Direction,
    RooflineCosts,
    as_sizes,
    formula_of,
)
from stratagem.simulator.kernel_times.fitted_kernels import KernelModelCosts, default_costs
from stratagem.simulator.kernel_times.kernel_prices import FEW_SHARDS
from stratagem.simulator.kernel_times.matrix_products import Multiplier, Product, forward_products
from stratagem.simulator.kernel_times.memory_traffic import backward_moved, forward_moved
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.pricing.cost_table import TableBuilder
from tests.support.examples import examples
from tests.support.operators.all_cases import CASES

BFLOAT16 = Training("bfloat16")
COSTS = KernelModelCosts()
MEASURED = ("V100-16GB", "A100-80GB", "H100-80GB", "A40")
ROOFLINES = ("K80", "P100-16GB", "cpu")
FITTED = tuple(name for name in device_names() if name not in ROOFLINES)


def small_gpt(*, hidden: int = 1024, num_heads: int = 16, batch: int = 4) -> OperatorGraph:
    return gpt(
        num_layers=1,
        hidden=hidden,
        num_heads=num_heads,
        vocabulary=1024,
        sequence=512,
        batch=batch,
    )


def first(graph: OperatorGraph, kind: str) -> Operator:
    return next(op for op in graph.operators if op.kind == kind)


def cost(
    operator: Operator,
    device: DeviceType,
    *,
    backward: bool = False,
    training: Training = BFLOAT16,
) -> Cost:
    direction = Direction.BACKWARD if backward else Direction.FORWARD
    return COSTS.operator_cost(operator, operator.sizes, direction, training, device)


# -- bundled devices ----------------------------------------------------------------------------


def test_bundled_devices() -> None:
    assert set(device_names()) == {
        "V100-16GB",
        "V100-32GB",
        "A100-40GB",
        "A100-80GB",
        "H100-80GB",
        "H200",
        "A40",
        "K80",
        "P100-16GB",
        "cpu",
    }


@pytest.mark.parametrize("name", device_names())
def test_bundled_device_is_named_like_its_file(name: str) -> None:
    assert DeviceType.preset(name).name == name


@pytest.mark.parametrize("name", FITTED)
def test_every_precision_has_constants_that_say_where_they_are_from(name: str) -> None:
    device = DeviceType.preset(name)
    assert set(device.products) == {each.products for each in PRECISIONS.values()}
    assert device.memory is not None
    assert device.attention is not None
    own = device.products["float16"]
    assert (own.derived_from == "") == (name in MEASURED)
    assert device.products["bfloat16"].relative_error > own.relative_error
    for constants in (device.memory, device.attention, *device.products.values()):
        assert 0.0 < constants.relative_error < 0.5


@pytest.mark.parametrize("name", ROOFLINES)
def test_devices_that_nobody_timed_are_rooflines(name: str) -> None:
    device = DeviceType.preset(name)
    assert (device.products, device.memory, device.attention) == ({}, None, None)
    graph = resnet(18, batch=8)
    for operator in (first(graph, "conv2d"), first(graph, "elementwise")):
        given = operator, operator.sizes, Direction.FORWARD, Training(), device
        assert COSTS.operator_cost(*given) == RooflineCosts().operator_cost(*given)


def test_sibling_differs_in_what_its_data_sheet_says() -> None:
    larger, smaller = DeviceType.preset("A100-80GB"), DeviceType.preset("A100-40GB")
    assert smaller.memory_bandwidth_gb_s < larger.memory_bandwidth_gb_s
    assert smaller.products["float16"].efficiency == larger.products["float16"].efficiency
    assert smaller.products["float16"].derived_from == "A100-80GB float16"


def test_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no bundled device 'B100'; there are A100-40GB"):
        DeviceType.preset("B100")


def test_cluster_file_may_name_a_bundled_device(tmp_path: Path) -> None:
    cluster = Cluster.preset("dgx-a100")
    given_ = json.loads(encode(cluster)) | {"device_types": ["A100-80GB"]}
    (tmp_path / "named.json").write_text(json.dumps(given_), encoding="utf-8")
    assert Cluster.load(tmp_path / "named.json") == cluster


def test_saved_cluster_is_complete() -> None:
    stored = json.loads(encode(Cluster.preset("dgx-a100")))
    assert stored["device_types"][0]["products"]["float16"]["efficiency"] > 0.5


def test_cluster_file_with_an_unknown_device_says_so(tmp_path: Path) -> None:
    given_ = json.loads(encode(Cluster.preset("dgx-a100"))) | {"device_types": ["A100"]}
    (tmp_path / "c.json").write_text(json.dumps(given_), encoding="utf-8")
    with pytest.raises(ValueError, match=r"cluster file .*c\.json is broken: no bundled device"):
        Cluster.load(tmp_path / "c.json")


# -- matrix products ----------------------------------------------------------------------------


def product_by_definition(device: DeviceType, product: Product, precision: str) -> float:
    """The documented formula over all tiles and splits, in plain Python."""
    c, item = device.products[precision], 2
    peak, bandwidth = device.peak_flops(precision), device.memory_bandwidth_gb_s * 1e9
    depth = 32 * math.ceil(product.depth / 32)
    best = math.inf
    for tall, wide in zip(TILE_ROWS, TILE_COLUMNS, strict=True):
        tiles = math.ceil(product.rows / tall) * math.ceil(product.columns / wide)
        for split in (1, 2, 4, 8, 16):
            waves = tiles * product.batch * split / device.num_units
            if split > 1 and (depth < 256 * split or waves / 2 > 2):
                break
            counted = c.quantisation * math.ceil(waves) + (1 - c.quantisation) * max(waves, 1)
            rate = peak / device.num_units * c.efficiency / (1 + c.reuse * (1 / tall + 1 / wide))
            compute = counted * 2 * tall * wide * (depth / split + c.prologue) / rate
            result = 8 * product.rows * product.columns * product.batch
            moved = item * product.elements + (split - 1) * c.split_traffic * result
            memory = moved / (bandwidth * c.memory_efficiency)
            p = c.sharpness
            largest = max(compute, memory)
            joined = largest * ((compute / largest) ** p + (memory / largest) ** p) ** (1 / p)
            best = min(best, joined + (c.split_us * 1e-6 if split > 1 else 0))
    return best + c.launch_us * 1e-6


def matrices(rows: int, columns: int, depth: int, batch: int = 1) -> Product:
    elements = batch * (rows * depth + depth * columns + rows * columns)
    return Product(rows, columns, depth, batch, elements)


def multiplier(name: str, precision: str = "float16") -> Multiplier:
    device = DeviceType.preset(name)
    return Multiplier(device, precision, 2, device.products[precision])


SIZES = st.integers(1, 600).map(lambda n: 8 * n)


@settings(max_examples=examples(60))
@given(SIZES, SIZES, SIZES, st.sampled_from(("A100-80GB", "H100-80GB", "A40")))
def test_product_is_as_documented(rows: int, columns: int, depth: int, name: str) -> None:
    product = matrices(rows, columns, depth)
    by_hand = product_by_definition(DeviceType.preset(name), product, "float16")
    assert multiplier(name).seconds(product) == pytest.approx(by_hand, rel=1e-9)


@settings(max_examples=examples(100))
@given(SIZES, SIZES, SIZES, st.integers(1, 64), st.sampled_from(FITTED))
def test_product_is_never_faster_than_the_data_sheet(
    rows: int, columns: int, depth: int, batch: int, name: str
) -> None:
    product, priced = matrices(rows, columns, depth, batch), multiplier(name)
    peak = 2 * rows * columns * depth * batch / priced.device.peak_flops("float16")
    moved = 2 * product.elements / (priced.device.memory_bandwidth_gb_s * 1e9)
    assert priced.seconds(product) > max(peak, moved)


@settings(max_examples=examples(60))
@given(SIZES, SIZES, SIZES, st.sampled_from(FITTED))
def test_wider_products_never_take_less_per_scalar_than_the_peak_allows(
    rows: int, columns: int, depth: int, name: str
) -> None:
    """Twice as many rows take more, and at most twice as long."""
    priced = multiplier(name)
    once = priced.seconds(matrices(rows, columns, depth))
    twice = priced.seconds(matrices(2 * rows, columns, depth))
    assert once * (1 - 1e-9) <= twice <= 2 * once * (1 + 1e-9)


def test_efficiency_rises_with_depth() -> None:
    priced = multiplier("A100-80GB")
    rates = [k / priced.seconds(matrices(4096, 4096, k)) for k in (256, 1024, 4096)]
    assert rates == sorted(rates)


def test_one_tile_more_than_a_wave_shows() -> None:
    priced = multiplier("A100-80GB")
    fits = priced.seconds(matrices(128 * 108, 256, 4096))
    more = priced.seconds(matrices(128 * 109, 256, 4096))
    assert more / fits > 109 / 108 + 0.005


def test_deep_products_of_few_tiles_are_split() -> None:
    """A gradient of a small weight over many tokens is no 81 times slower than one of 1/81."""
    priced = multiplier("A100-80GB")
    flops = 2 * 512 * 512 * 65536
    assert flops / priced.seconds(matrices(512, 512, 65536)) > 0.3 * 312e12


def heads(head_dim: int) -> Operator:
    """Scores of 16 heads as a batched product."""
    from stratagem.simulator.graph.building.graph_builder import GraphBuilder

    b = GraphBuilder("scores")
    q = b.input("q", (4, 16, 2048, head_dim))
    k = b.input("k", (4, 16, head_dim, 2048))
    labels = b.input("target", (4, 16, 2048), "int64")
    return first(b.build(b.cross_entropy(b.matmul(q, k), labels)), "matmul")


def test_misaligned_heads_run_on_vector_units() -> None:
    device = DeviceType.preset("A100-80GB")
    odd, even = cost(heads(108), device).seconds, cost(heads(144), device).seconds
    assert 3 < odd / even < 16
    whole = Training("float32")
    assert cost(heads(108), device, training=whole).seconds < 1.1 * (
        cost(heads(112), device, training=whole).seconds
    )


def test_gradients_are_priced_at_their_own_shapes() -> None:
    device = DeviceType.preset("A100-80GB")
    linear = first(mlp([8192, 512, 10], batch=1024), "linear")
    assert forward_products(linear, linear.sizes)[0][:4] == (1024, 512, 8192, 1)
    priced = multiplier("A100-80GB", "bfloat16")
    inputs = priced.seconds(matrices(1024, 8192, 512))
    weights = priced.seconds(matrices(8192, 512, 1024))
    backward = cost(linear, device, backward=True).seconds
    assert backward == pytest.approx(inputs + weights, rel=0.3)
    assert backward > inputs + weights, "the bias has a gradient too"


def test_convolutions_of_stride_one_save_multiplications() -> None:
    device, single = DeviceType.preset("V100-16GB"), Training("float32")
    graph = resnet(18, batch=64)
    by_name = {op.name: op for op in graph.operators if op.kind == "conv2d"}
    plain = [op for op in by_name.values() if forward_products(op, op.sizes)[0].depth > 500]
    rates = {
        tuple(op.attributes["stride"]): product.rows
        * product.columns
        * product.depth
        / cost(op, device, training=single).seconds
        for op in plain
        for product in forward_products(op, op.sizes)
    }
    assert rates[1, 1] > 1.5 * rates[2, 2]


# -- attention ----------------------------------------------------------------------------------


def attention(*, sequence: int, head_dim: int, causal: bool) -> Operator:
    graph = gpt(
        num_layers=1,
        hidden=32 * head_dim,
        num_heads=32,
        vocabulary=64,
        sequence=sequence,
        batch=8,
    )
    found = first(graph, "attention")
    return replace(found, attributes={**found.attributes, "causal": causal})


@pytest.mark.parametrize(("name", "tflops"), [("A100-80GB", 210), ("H100-80GB", 355)])
def test_attention_reaches_published_rates(name: str, tflops: float) -> None:
    """Dao 2023 and Shah et al. 2024: heads of 128, 8,192 positions, no mask."""
    operator = attention(sequence=8192, head_dim=128, causal=False)
    flops = 4.0 * 8 * 32 * 8192**2 * 128
    rate = flops / cost(operator, DeviceType.preset(name)).seconds
    assert rate == pytest.approx(tflops * 1e12, rel=0.1)


def test_causal_attention_takes_half() -> None:
    device = DeviceType.preset("A100-80GB")
    full = cost(attention(sequence=8192, head_dim=128, causal=False), device).seconds
    half = cost(attention(sequence=8192, head_dim=128, causal=True), device).seconds
    assert half / full == pytest.approx(0.5, rel=0.03)


def test_backward_attention_has_five_products() -> None:
    operator = attention(sequence=8192, head_dim=128, causal=True)
    device = DeviceType.preset("A100-80GB")
    ratio = cost(operator, device, backward=True).seconds / cost(operator, device).seconds
    assert 2.5 < ratio < 3.5


# -- operators that move bytes ------------------------------------------------------------------


def test_bytes_of_a_chain_are_those_of_its_steps() -> None:
    from stratagem.simulator.graph.building.graph_builder import GraphBuilder

    b = GraphBuilder("chain")
    x, y = b.input("x", (16, 32)), b.input("y", (16, 32))
    labels = b.input("target", (16,), "int64")
    steps = [
        ["add", [["in", 0], ["in", 1]]],
        ["gelu", [["step", 0], "none"]],
        ["dropout", [["step", 1], 0.1]],
    ]
    chain = first(b.build(b.cross_entropy(b.elementwise([x, y], steps), labels)), "elementwise")
    whole = 16 * 32 * 2
    eager = forward_moved(chain, chain.sizes, BFLOAT16)
    assert (eager.nbytes, eager.kernels) == ((3 + 2 + 2.5) * whole, 3)
    # The gradient of a sum is added to that of the residual's other path; that of a gelu reads
    # the argument, that of a dropout the mask.
    back = backward_moved(chain, chain.sizes, BFLOAT16)
    assert (back.nbytes, back.kernels) == ((3 + 3 + 2.5) * whole, 3)
    fused = forward_moved(chain, chain.sizes, replace(BFLOAT16, fused_elementwise=True))
    assert (fused.nbytes, fused.kernels) == ((2 + 1 + 0.5) * whole, 1)


def test_a_chain_without_a_kernel_takes_no_time() -> None:
    """An alias had one operation a value: 7 ns of a step that a committed plan did not have."""
    chain = first(small_gpt(batch=64), "elementwise")
    chain = replace(chain, attributes=dict(chain.attributes) | {"steps": []})
    device = DeviceType.preset("A100-80GB")
    for direction in Direction:
        given_ = (chain, chain.sizes, direction, BFLOAT16, device)
        assert KernelModelCosts().operator_cost(*given_).seconds == 0.0


@pytest.mark.parametrize("costs", [KernelModelCosts(), RooflineCosts()])
def test_fused_chains_are_faster(costs: KernelModelCosts | RooflineCosts) -> None:
    graph, device = small_gpt(batch=64), DeviceType.preset("A100-80GB")
    chain = max(
        (op for op in graph.operators if op.kind == "elementwise"),
        key=lambda op: len(op.attributes["steps"]),
    )
    chain = replace(
        chain, attributes={"steps": [*chain.attributes["steps"], ["neg", [["step", 0]]]]}
    )
    for direction in Direction:
        eager, fused = (
            costs.operator_cost(
                chain,
                chain.sizes,
                direction,
                replace(BFLOAT16, fused_elementwise=fuses),
                device,
            ).seconds
            for fuses in (False, True)
        )
        assert fused < eager


def test_large_norm_goes_at_its_share_of_the_bandwidth() -> None:
    device = DeviceType.preset("A100-80GB")
    assert device.memory is not None
    norm = first(small_gpt(hidden=8192, batch=64), "layer_norm")
    nbytes = 2 * 2 * 64 * 512 * 8192
    rate = nbytes / cost(norm, device).seconds
    share = device.memory.share("norm")
    assert share < rate / (device.memory_bandwidth_gb_s * 1e9) < 1.05 * share


def test_small_operators_wait_for_the_host() -> None:
    device = DeviceType.preset("H100-80GB")
    norm = first(small_gpt(hidden=64, num_heads=1, batch=1), "layer_norm")
    assert cost(norm, device).seconds == device.launch_us * 1e-6


def test_update_moves_every_state_once() -> None:
    device = DeviceType.preset("A100-80GB")
    seconds = COSTS.update_cost(10**9, BFLOAT16, device).seconds
    assert 30e9 / 2039e9 < seconds < 1.5 * 30e9 / 2039e9


def test_an_unfused_update_makes_the_passes_of_megatron_lm() -> None:
    """What its float16 optimizer reads and writes per parameter, pass by pass, in bytes."""
    passes = {
        "gradient to float32": 2 + 4,
        "unscale in place": 4 + 4,
        "norm": 4,
        "clip in place": 4 + 4,
        "Adam: gradient, master, mean and square": 4 + 2 * 12,
        "parameter from master": 4 + 2,
    }
    plain = replace(Training("float16"), fused_update=False)
    clipping = replace(plain, clip_norm=1.0)
    # A fused update is counted as 30: with one read of the parameter that it could do without.
    assert clipping.update_bytes == sum(passes.values()) + 2
    assert plain.update_bytes == clipping.update_bytes - passes["norm"] - passes["clip in place"]
    summed = replace(plain, precision="bfloat16", gradient_precision="float32")
    assert plain.update_bytes - summed.update_bytes == 2 + 4 + 2 + passes["unscale in place"]
    assert replace(Training(), fused_update=False).update_bytes == Training().update_bytes


@pytest.mark.parametrize("costs", [KernelModelCosts(), RooflineCosts()])
def test_passes_of_an_update_take_their_time(costs: KernelModelCosts | RooflineCosts) -> None:
    device, count = DeviceType.preset("A100-80GB"), 10**9
    plain, apart = (
        costs.update_cost(count, Training("float16", fused_update=fused), device).seconds
        for fused in (True, False)
    )
    assert apart / plain == pytest.approx(50 / 30, rel=0.01)


# -- where a cost comes from --------------------------------------------------------------------


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("backward", [False, True])
def test_every_operator_of_a_model_is_priced_by_fits(name: str, backward: bool) -> None:
    device = DeviceType.preset(name)
    for graph in (small_gpt(), resnet(18, batch=8)):
        for operator in graph.operators:
            if not operator.is_source:
                found = cost(operator, device, backward=backward)
                assert found.source is CostSource.FITTED, operator.kind
                assert found.seconds > 0
                assert found.relative_error > 0


def test_device_without_constants_is_priced_by_its_roofline() -> None:
    device = DeviceType.preset("cpu")
    linear = first(mlp([64, 64], batch=32), "linear")
    for direction in Direction:
        wanted = RooflineCosts().operator_cost(linear, linear.sizes, direction, Training(), device)
        found = default_costs().operator_cost(linear, linear.sizes, direction, Training(), device)
        assert found == wanted
    assert COSTS.update_cost(10, Training(), device).source is CostSource.ROOFLINE


def test_kernel_takes_scalars_and_one_vector() -> None:
    device = DeviceType.preset("A40")
    vector = device.products["float16"].vector
    plain = getattr(product_seconds, "py_func", product_seconds)
    args = (640.0, 512.0, 2048.0, 2.0, 1e7, (84.0, 1.5e14, 7e11), vector)
    assert plain(*args) == pytest.approx(product_seconds(*args), rel=1e-12)


# -- against the timings ------------------------------------------------------------------------


def kernels_folder() -> Path:
    folder = os.environ.get("STRATAGEM_DATA")
    if folder is None:
        pytest.skip("STRATAGEM_DATA does not name the folder of measured kernels")
    return Path(folder) / "kernels"


def test_refitting_gives_the_committed_constants() -> None:
    from benchmarks.fit_devices import fit_products
    from benchmarks.kernel_data import aceso_products

    measured = aceso_products(kernels_folder())
    device = DeviceType.preset("V100-16GB")
    rows = {k: s for k, s in measured.items() if k.precision == "float16"}
    committed = device.products["float16"]
    again = fit_products(rows, device)
    assert replace(again, relative_error=committed.relative_error) == committed


@pytest.mark.parametrize(
    ("name", "limit"), [("A100-80GB", 0.06), ("H100-80GB", 0.08), ("A40", 0.075)]
)
def test_committed_constants_agree_with_timed_products(name: str, limit: float) -> None:
    """Mean relative error; the roofline's is 0.3 to 0.4."""
    from benchmarks.fit_devices import Rows, mape
    from benchmarks.kernel_data import vidur_products

    measured = vidur_products(kernels_folder())
    rows = {key: seconds for key, seconds in measured.items() if key.device == name}
    device = DeviceType.preset(name)
    said = Rows(rows, device).predict(device.products["float16"])
    assert mape(said, list(rows.values())) < limit


# -- many shards at once ------------------------------------------------------------------------

ONE_BY_ONE = {"expert_linear", "generic_product", "selective_scan"}
"""Kinds whose functions look at a single number."""


@pytest.mark.parametrize("costs", [KernelModelCosts(), RooflineCosts()], ids=repr)
@pytest.mark.parametrize("name", sorted(CASES))
def test_many_shards_cost_what_each_of_them_costs(name: str, costs: CostsByFormula) -> None:
    operator, random = CASES[name]().operator, np.random.default_rng(0)
    sizes = {
        dim.name: np.ceil(dim.size / random.choice([1, 1, 2, 3, 4], 9)) for dim in operator.dims
    }
    shards = [{dim: int(column[k]) for dim, column in sizes.items()} for k in range(9)]
    for device in map(DeviceType.preset, ("A100-80GB", "cpu")):
        for training in (BFLOAT16, Training(fused_elementwise=True), Training("mixed bfloat16")):
            for direction in Direction:
                given = direction, training, device
                try:
                    found = costs.formula(operator, as_sizes(sizes), *given)
                except (TypeError, ValueError):
                    assert operator.kind in ONE_BY_ONE
                    continue
                each = [costs.operator_cost(operator, shard, *given) for shard in shards]
                seconds = np.full(9, found.seconds)
                assert [Cost(s, *found[1:]) for s in seconds.tolist()] == each


def test_prices_that_a_model_changes_are_asked_for_one_by_one() -> None:
    """A model of one's own that inherits from another would be passed over."""

    class Doubled(KernelModelCosts):
        def operator_cost(self, *given):  # type: ignore[no-untyped-def]
            cost = super().operator_cost(*given)
            return replace(cost, seconds=2 * cost.seconds)

    class Named(KernelModelCosts):
        """As its parent."""

    assert formula_of(KernelModelCosts())
    assert formula_of(Named())
    assert formula_of(Doubled()) is None
    graph, cluster = small_gpt(), Cluster.preset("dgx-a100", num_nodes=1)
    mesh = DeviceMesh((MeshAxis("axis", 8),), tuple(range(8)))
    layer = graph.index[first(graph, "linear").name]
    choices = operator_choices(graph, graph.operators[layer], mesh.shape, (0,), Options())
    doubled, plain = (
        TableBuilder(graph, mesh, cluster, BFLOAT16, costs).pass_seconds(layer, choices)
        for costs in (Doubled(), KernelModelCosts())
    )
    assert len(choices) >= FEW_SHARDS
    assert doubled == pytest.approx([2 * seconds for seconds in plain])
