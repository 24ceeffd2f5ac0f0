"""The profiler: what is timed, what the cache answers, and the links that times are fitted to."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from stratagem.calibration.executor_measurements import executor_update
from stratagem.profiler import (
    Effort,
    Environment,
    MeasuredCosts,
    Measurement,
    TimingCache,
    TimingKey,
    describe_environment,
    local_operators,
    plan_operators,
    profile_operators,
    profile_updates,
    time_operator,
)
from stratagem.profiler.cache.timing_keys import PaceOf, operator_digest, summarise, update_key
from stratagem.profiler.machine.background_load import BackgroundLoad
from stratagem.profiler.timing import operator_timing
from stratagem.profiler.timing.operator_timing import OperatorTrial, operator_work
from stratagem.profiler.timing.random_operands import random_operands, viewed
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import permute, reshape, select
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.graph.token_slices import token_slices
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import (
    SUMMED,
    CostSource,
    Direction,
    RooflineCosts,
    local_operator,
)
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.operator_kinds import KINDS as OPERATOR_KINDS
from stratagem.simulator.operators.kinds.operator_kinds import kind_of
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture

QUICK = Effort(seconds=0.0, min_repeats=3, evict_bytes=0, max_drift=math.inf)
CPU = torch.device("cpu")
DEVICE = Cluster.preset("local-cpu").device_type(0)
ENVIRONMENT = Environment("cpu", "2.13")
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
ROOFLINE = RooflineCosts()


def transformer() -> OperatorGraph:
    """One layer of a language model, small, with a fused query-key-value projection."""
    build = GraphBuilder("transformer")
    ids = build.input("ids", (2, 8), "int64")
    target = build.input("target", (2, 8), "int64")
    table = build.parameter("table", (32, 16))
    x = build.embedding(ids, table)
    x = build.layer_norm(x, build.parameter("ln.w", (16,)), build.parameter("ln.b", (16,)))
    fused = build.linear(x, build.parameter("qkv.w", (48, 16)), build.parameter("qkv.b", (48,)))
    heads = permute(reshape(fused, (2, 8, 3, 4, 4)), (2, 0, 3, 1, 4))
    q, k, v = (select(heads, 0, i) for i in range(3))
    mixed = build.attention(q, k, v, causal=True)
    scores = build.softmax(build.matmul(q, permute(k, (0, 1, 3, 2))))
    mixed = build.pointwise("add", mixed, build.matmul(scores, v))
    angles = (build.input(name, (8, 4), sample_dim=None) for name in ("cos", "sin"))
    mixed = build.rotary(mixed, *angles)
    merged = reshape(permute(mixed, (0, 2, 1, 3)), (2, 8, 16))
    x = build.pointwise("gelu", merged, "tanh")
    x = build.rms_norm(x, build.parameter("rms.w", (16,)))
    logits = build.linear(x, table)
    return build.build(build.cross_entropy(logits, target))


def convolutional() -> OperatorGraph:
    """A convolution with what usually surrounds it, and a masked chain."""
    build = GraphBuilder("convolutional")
    image = build.input("image", (2, 4, 8, 8))
    x = build.conv2d(image, build.parameter("conv.w", (8, 4, 3, 3)), padding=(1, 1))
    statistics = [build.parameter(f"bn.{n}", (8,), trainable=n in "wb") for n in "wbmv"]
    x = build.batch_norm(x, *statistics)
    x = build.group_norm(x, build.parameter("gn.w", (8,)), None, groups=2)
    halves = [build.narrow(x, dim=1, start=start, length=4) for start in (0, 4)]
    x = build.cat(halves[::-1], dim=1)
    x = build.pool2d(x, mode="max", kernel=(2, 2), stride=(2, 2))
    positive = build.pointwise("gt", x, 0.0)
    x = build.pointwise("where", positive, x, 0.0)
    return build.build(build.mean(x))


def experts() -> OperatorGraph:
    """Tokens sent to experts by number, and by masks."""
    build = GraphBuilder("experts")
    x = build.input("x", (2, 8, 6))
    gates = build.softmax(build.linear(x, build.parameter("gate.w", (4, 6))))
    slots = build.moe_dispatch(x, gates, top_k=2, capacity=4)
    weight, bias = build.parameter("up.w", (4, 6, 6)), build.parameter("up.b", (4, 6))
    x = build.moe_combine(build.expert_linear(slots, weight, bias), gates, top_k=2)
    both = [build.parameter(f"sum.w{i}", (6, 6)) for i in range(2)]
    x = build.linear_sum([x, build.pointwise("relu", x)], both)
    weights = build.moe_weights(gates, top_k=2, capacity=4)
    states = [build.linear(x, build.parameter(f"{n}.w", (3, 6))) for n in "bc"]
    decay = build.pointwise("neg", build.pointwise("exp", build.parameter("a", (6, 3))))
    x = permute(x, (0, 2, 1))
    x = build.selective_scan(x, x, decay, *(permute(each, (0, 2, 1)) for each in states))
    return build.build(build.pointwise("mul", build.mean(x), build.mean(weights)))


def sliced():
    """The second half of the tokens of a causal model, whose attention has keys before its own."""
    model = gpt(num_layers=1, hidden=8, num_heads=2, vocabulary=32, sequence=6, batch=2)
    return token_slices(model, 2)[1].graph


def without_rules() -> OperatorGraph:
    """A sorted product of three, as torch has it."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * self.scale
            return torch.einsum("bij,bkj,bkj->bik", h, h, h).sort().values.mean()

    return capture(Sorted(), (torch.zeros(2, 4, 6),))


def windows() -> OperatorGraph:
    """Convolutions over one, two and three dims, back again, and of computed weights."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            there, back = CONVOLUTIONS, TRANSPOSED
            self.there = nn.ModuleList(make(2, 4, 3, padding=1) for make in there)
            self.computed = nn.ModuleList(weight_norm(make(4, 4, 1)) for make in there)
            self.back = nn.ModuleList(make(4, 2, 2, stride=2) for make in back)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = []
            for k in range(3):
                h = x.reshape(2, 2, *(8,) * k, -1)
                parts.append(self.back[k](self.computed[k](self.there[k](h))).mean())
            return parts[0] + parts[1] + parts[2]

    return capture(Windows(), (torch.zeros(2, 2, 8 * 8 * 4),))


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
GRAPHS = (transformer(), convolutional(), experts(), sliced(), without_rules(), windows())
OPERATORS = [o for graph in GRAPHS for o in graph.operators if not o.is_source]
LINEAR = GRAPHS[0].operator("linear")
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: f"{o.kind}-{o.name}")


@pytest.fixture
def cache(tmp_path):
    with TimingCache(tmp_path / "timings.sqlite") as opened:
        yield opened


def scaled(operator: Operator, samples: int) -> dict[str, int]:
    """The operator's sizes with another number of samples."""
    first = operator.dims[0].name
    return {**operator.sizes, first: samples}


def put(cache, operator, sizes, direction, seconds, *, spread=0.05):
    local = local_operator(operator, sizes)
    cache.put(TimingKey(ENVIRONMENT, local, "float32", direction), Measurement(seconds, spread, 9))


class TestTensors:
    def test_every_kind_is_here(self):
        assert {o.kind for o in OPERATORS} == set(OPERATOR_KINDS) - {"source"}

    def test_ids_and_targets_are_within_range(self):
        embedding, loss = GRAPHS[0].operator("embedding"), GRAPHS[0].operator("cross_entropy")
        (ids,) = random_operands(embedding, Training(), CPU).inputs
        assert ids.dtype == torch.int64
        assert 0 <= ids.min() <= ids.max() < 32
        logits, target, _ = random_operands(loss, Training(), CPU).inputs
        assert logits.requires_grad
        assert 0 <= target.min() <= target.max() < 32

    def test_a_mask_that_is_read_is_bool(self):
        build = GraphBuilder("masked")
        x = build.input("x", (4, 3))
        mask = build.input("mask", (4, 3), "bool")
        x = build.pointwise("masked_fill", build.pointwise("exp", x), mask, 0.0)
        graph = build.build(build.mean(x))
        chain = next(o for o in graph.operators if o.kind == "elementwise")
        dtypes = {t.dtype for t in random_operands(chain, Training(), CPU).inputs}
        assert dtypes == {torch.float32, torch.bool}

    def test_running_statistics_get_no_gradient(self):
        norm = next(o for o in OPERATORS if o.kind == "batch_norm")
        weights = random_operands(norm, Training(), CPU).weights
        assert [w.requires_grad for w in weights] == [True, True, False, False]
        assert weights[3].min() >= 0

    def test_tables_of_angles_get_no_gradient(self):
        """Backwards of rotary positions were timed 2.4 times too long, with sums for both."""
        (rotary,) = (each for each in transformer().operators if each.kind == "rotary")
        operands = random_operands(rotary, Training(), CPU)
        assert [tensor.requires_grad for tensor in operands.inputs] == [True, False, False]

    def test_floating_tensors_take_the_precision(self):
        operands = random_operands(LINEAR, Training(precision="bfloat16"), CPU)
        assert {t.dtype for t in operands.leaves} == {torch.bfloat16}

    def test_views_are_not_contiguous(self):
        attention = next(o for o in OPERATORS if o.kind == "attention")
        read = attention.inputs[0]
        assert read.select
        tensor = random_operands(attention, Training(), CPU).inputs[0]
        seen = viewed(tensor, read, attention.sizes)
        assert seen.shape == (2, 4, 8, 4)
        assert not seen.is_contiguous()


class TestTiming:
    @every_operator
    def test_every_kind_has_both_passes(self, operator):
        timing = time_operator(operator, Training(), effort=QUICK)
        passes = [timing.forward, *([timing.backward] if timing.backward else [])]
        assert all(p.median_s > 0 and p.repeats == 3 and not p.error for p in passes)
        assert (timing.backward is None) == (not operator.outputs[0].differentiable)

    def test_backward_gives_every_leaf_a_gradient(self):
        trial = OperatorTrial(LINEAR, Training(), CPU)
        gradients = trial.backward(trial.forward())
        shapes = [tuple(g.shape) for g in gradients if g is not None]
        assert shapes == [tuple(leaf.shape) for leaf in trial.leaves]
        assert len(shapes) == 3

    @pytest.mark.parametrize("warm_code", [True, False])
    def test_another_instance_runs_between_the_eviction_and_the_clock(
        self, monkeypatch, warm_code
    ):
        """A step leaves code in caches and no tensors: evicting both made small operators slow.

        The results of the other instance stay meanwhile, so that those timed lie elsewhere.
        """
        did, kept = [], []

        class Noted(OperatorTrial):
            def __init__(self, *given):
                super().__init__(*given)
                self.name = f"trial {len(made)}"
                made.append(self)

            def forward(self):
                outputs = super().forward()
                if hasattr(self, "name"):
                    did.append(f"{self.name} forward")
                    kept.append((self.name, outputs[0].data_ptr()))
                return outputs

            def backward(self, outputs):
                did.append(f"{self.name} backward")
                return super().backward(outputs)

        made = []
        monkeypatch.setattr(operator_timing, "OperatorTrial", Noted)
        monkeypatch.setattr(operator_timing, "evictor", lambda *g: lambda: did.append("evict"))
        time_operator(LINEAR, Training(), effort=dataclasses.replace(QUICK, warm_code=warm_code))
        timed, *others = made
        assert len(others) == warm_code
        between = [[f"{o.name} {what}" for o in others] for what in ("forward", "backward")]
        once = [
            *("evict", *between[0], f"{timed.name} forward"),
            *("evict", *between[1], f"{timed.name} backward"),
        ]
        assert did == once * (1 + QUICK.min_repeats)
        for one, following in itertools.pairwise(kept):
            if one[0] != timed.name and following[0] == timed.name:
                assert one[1] != following[1]

    def test_what_fits_in_memory_only_once_is_timed_by_itself(self, monkeypatch):
        checked = []

        def check(operator, training, *, copies=1):
            checked.append(copies)
            if copies == 2:
                raise MemoryError("needs more")

        monkeypatch.setattr(operator_timing, "check_memory", check)
        assert not time_operator(LINEAR, Training(), effort=QUICK).forward.error
        assert checked == [1, 2]

    def test_repeats_go_on_until_the_median_is_sure(self):
        effort = Effort(seconds=60.0, relative_error=1e9, min_repeats=4, evict_bytes=0)
        assert time_operator(LINEAR, Training(), effort=effort).forward.repeats == 4

    @pytest.mark.parametrize("kind", ["batch_norm", "cross_entropy"])
    def test_what_ranks_sum_inside_is_timed_as_they_run_it(self, monkeypatch, kind):
        """A batch norm over ranks takes four times what that of one device does, of which its
        price was: steps of a ResNet under data parallelism were predicted 20 % too short."""
        operator = next(each for each in OPERATORS if each.kind == kind)
        (inner,) = kind_of(operator).inner(operator, operator.sizes)
        summed = next(name for name in inner.dims if operator.sizes[name] > 1)
        half = {**operator.sizes, summed: operator.sizes[summed] // 2}
        split = local_operator(operator, half)
        place = [dim.name for dim in operator.dims].index(summed)
        assert split.attributes[SUMMED] == (place,)
        assert local_operator(split, split.sizes) == split
        alone = dataclasses.replace(split, attributes=dict(operator.attributes))
        assert operator_digest(split) != operator_digest(alone)
        assert SUMMED not in local_operator(operator, operator.sizes).attributes
        summing = []
        monkeypatch.setattr(
            "stratagem.simulator.torch_ops.kernels.shards._alone",
            lambda tensor, dims, op: summing.append(dims) or tensor,
        )
        for each, sums in ((alone, False), (split, True)):
            summing.clear()
            OperatorTrial(each, Training(), CPU).run()
            assert bool(summing) == sums

    def test_the_number_of_threads_is_set_back(self):
        before = torch.get_num_threads()
        time_operator(LINEAR, Training(), threads=before + 1, effort=QUICK)
        assert torch.get_num_threads() == before

    def test_sources_have_no_kernel(self):
        source = GRAPHS[0].operators[0]
        with pytest.raises(ValueError, match="has no kernel"):
            time_operator(source, Training(), effort=QUICK)

    def test_what_does_not_fit_is_an_error_in_the_measurement(self):
        huge = local_operator(LINEAR, scaled(LINEAR, 10**12))
        timing = time_operator(huge, Training(), effort=QUICK)
        assert "out of memory: needs" in timing.forward.error
        assert timing.backward == timing.forward

    def test_other_errors_name_the_operator(self):
        broken = dataclasses.replace(LINEAR, attributes={"transposed": True})
        with pytest.raises(RuntimeError) as caught:
            time_operator(broken, Training(), effort=QUICK)
        assert "while timing operator 'linear' (linear)" in caught.value.__notes__

    @pytest.mark.parametrize("device", ["meta", "cuda"])
    def test_devices_that_cannot_be_timed(self, device):
        if device == "cuda" and torch.cuda.is_available():
            pytest.skip("there is a CUDA device")
        with pytest.raises(ValueError, match="cannot be timed here"):
            time_operator(LINEAR, Training(), device, effort=QUICK)

    def test_spread_ignores_a_few_interruptions(self):
        assert summarise([1.0] * 9 + [50.0]).spread == 0.0
        assert summarise([1.0, 2.0, 3.0, 4.0, 5.0]).spread == pytest.approx(2 / 1.349 / 3)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    @every_operator
    def test_cuda(self, operator):
        timing = time_operator(operator, Training(), "cuda", effort=QUICK)
        assert timing.forward.median_s > 0


def two_ways(graph: OperatorGraph) -> Plan:
    """Every operator on two devices, split along samples where it has them."""
    mesh = DeviceMesh((MeshAxis("data", 2),), (0, 1))
    names = tuple(operator.name for operator in graph.operators)
    choices = {o.name: Choice((_split(o),)) for o in graph.operators}
    return Plan(
        name="two ways",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu"),
        training=Training(),
        stages=(Stage(names, mesh, choices),),
    )


def _split(operator: Operator):
    names = [d.name for d in operator.dims if d.name == "sample" and not d.whole]
    return Shard("sample") if names and not operator.is_source else REPLICATE


class TestProfile:
    def test_each_distinct_operator_is_timed_once(self, cache):
        operators = [(LINEAR, LINEAR.sizes), (LINEAR, scaled(LINEAR, 4)), (LINEAR, LINEAR.sizes)]
        seen = []
        first = profile_operators(operators, Training(), cache, effort=QUICK, progress=seen.append)
        assert (first.num_timed, first.num_cached) == (2, 0)
        assert [(p.done, p.total, p.cached) for p in seen] == [(1, 2, False), (2, 2, False)]
        assert seen[0].operator.startswith("linear: ")
        assert len(cache) == 4 + len(PaceOf)
        again = profile_operators(operators, Training(), cache, effort=QUICK)
        assert (again.num_timed, again.num_cached) == (0, 2)

    def test_an_interrupted_profile_goes_on(self, cache):
        operators = [(LINEAR, scaled(LINEAR, samples)) for samples in (1, 2, 3)]

        def interrupt(progress):
            if progress.done == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            profile_operators(operators, Training(), cache, effort=QUICK, progress=interrupt)
        report = profile_operators(operators, Training(), cache, effort=QUICK)
        assert (report.num_timed, report.num_cached) == (1, 2)

    def test_a_plan_is_profiled_in_its_local_sizes(self, cache):
        graph = GRAPHS[0]
        operators = plan_operators(graph, two_ways(graph))
        assert len(operators) == len(graph.operators)
        by_name = {operator.name: sizes for operator, sizes in operators}
        assert by_name["linear"] == {**LINEAR.sizes, "sample": 1}

    def test_configs_of_a_mesh(self):
        configs = {GRAPHS[0].index["linear"]: [(Shard("sample"),), (REPLICATE,)]}
        found = local_operators(GRAPHS[0], configs, (2,))
        assert [sizes["sample"] for _, sizes in found] == [1, 2]

    def test_what_does_not_fit_is_reported_and_tried_again(self, cache):
        operators = [(LINEAR, scaled(LINEAR, 10**12)), (LINEAR, LINEAR.sizes)]
        report = profile_operators(operators, Training(), cache, effort=QUICK)
        assert report.num_timed == 2
        assert len(report.failures) == 1
        assert "out of memory" in report.failures[0]
        costs = MeasuredCosts(cache, {"cpu": describe_environment()}, ROOFLINE)
        cost = costs.operator_cost(LINEAR, operators[0][1], FORWARD, Training(), DEVICE)
        assert cost.source is CostSource.CORRECTED
        again = profile_operators(operators, Training(), cache, effort=QUICK)
        assert (again.num_timed, again.num_cached) == (1, 1)

    @pytest.mark.slow
    def test_load_is_another_environment(self, cache):
        report = profile_operators(
            [(LINEAR, LINEAR.sizes)], Training(), cache, load=1, effort=QUICK
        )
        assert report.num_timed == 1
        assert {e.key.environment.load for e in cache.entries()} == {1}

    def test_background_processes_report_errors_and_end(self):
        broken = dataclasses.replace(LINEAR, attributes={"transposed": True})
        with BackgroundLoad(1, threads=1) as others:
            with pytest.raises(RuntimeError, match="background load: mat1 and mat2"):
                others.run(_work(broken))
            others.run(_work(LINEAR))
            (process,) = [process for process, _ in others._workers]
            assert process.poll() is None
        assert process.poll() is not None

    @pytest.mark.parametrize("load", [-1, 1])
    def test_a_load_that_cannot_be(self, load):
        device = "cpu" if load < 0 else "cuda"
        with pytest.raises(ValueError, match=r"load is -1|cannot be timed|load is 1"):
            describe_environment(device, load=load)


def _work(operator: Operator):
    return functools.partial(operator_work, operator, Training())


class TestMeasuredCosts:
    def costs(self, cache) -> MeasuredCosts:
        return MeasuredCosts(cache, {"cpu": ENVIRONMENT}, ROOFLINE)

    def test_without_measurements_the_fallback_answers(self, cache):
        given = (LINEAR, LINEAR.sizes, FORWARD, Training(), DEVICE)
        assert self.costs(cache).operator_cost(*given) == ROOFLINE.operator_cost(*given)
        assert self.costs(cache).update_cost(10, Training(), DEVICE).source is CostSource.ROOFLINE

    def test_what_was_measured_is_preferred(self, cache):
        put(cache, LINEAR, LINEAR.sizes, FORWARD, 0.125, spread=0.07)
        cost = self.costs(cache).operator_cost(LINEAR, LINEAR.sizes, FORWARD, Training(), DEVICE)
        assert (cost.seconds, cost.source) == (0.125, CostSource.MEASURED)
        # Of nine runs that are 7 % apart: the standard error of their median.
        assert cost.relative_error == pytest.approx(1.25 * 0.07 / 3)

    def test_another_device_type_is_the_fallbacks(self, cache):
        put(cache, LINEAR, LINEAR.sizes, FORWARD, 0.125)
        other = dataclasses.replace(DEVICE, name="other")
        cost = self.costs(cache).operator_cost(LINEAR, LINEAR.sizes, FORWARD, Training(), other)
        assert cost.source is CostSource.ROOFLINE

    def test_the_fallback_is_corrected_by_the_mean_ratio(self, cache):
        for samples, ratio in ((1, 2.0), (4, 8.0)):
            sizes = scaled(LINEAR, samples)
            plain = ROOFLINE.operator_cost(LINEAR, sizes, BACKWARD, Training(), DEVICE).seconds
            put(cache, LINEAR, sizes, BACKWARD, ratio * plain)
        asked = (LINEAR, scaled(LINEAR, 2), BACKWARD, Training(), DEVICE)
        cost = self.costs(cache).operator_cost(*asked)
        assert cost.seconds == pytest.approx(4.0 * ROOFLINE.operator_cost(*asked).seconds)
        assert cost.source is CostSource.CORRECTED
        assert cost.relative_error == pytest.approx(math.log(4.0))

    def test_corrections_keep_to_kind_direction_and_precision(self, cache):
        put(cache, LINEAR, LINEAR.sizes, FORWARD, 0.125)
        matmul = next(o for o in OPERATORS if o.kind == "matmul")
        costs = self.costs(cache)
        for operator, direction, training in (
            (matmul, FORWARD, Training()),
            (LINEAR, BACKWARD, Training()),
            (LINEAR, FORWARD, Training(precision="bfloat16")),
        ):
            cost = costs.operator_cost(operator, operator.sizes, direction, training, DEVICE)
            assert cost.source is CostSource.ROOFLINE

    def test_updates_follow_a_line(self, cache):
        training = Training(optimizer="sgd")
        for size in (10**3, 10**5, 10**7):
            key = update_key(size, training, ENVIRONMENT)
            cache.put(key, Measurement(1e-5 + size * 1e-9, 0.01, 9))
        costs = self.costs(cache)
        measured = costs.update_cost(10**5, training, DEVICE)
        assert measured.source is CostSource.MEASURED
        fitted = costs.update_cost(10**6, training, DEVICE)
        assert fitted.source is CostSource.CORRECTED
        assert fitted.seconds == pytest.approx(1e-5 + 1e-3)
        assert costs.update_cost(10**6, Training(), DEVICE).source is CostSource.ROOFLINE

    def test_one_update_corrects_the_fallback(self, cache):
        plain = ROOFLINE.update_cost(10**6, Training(), DEVICE).seconds
        key = update_key(10**6, Training(), ENVIRONMENT)
        cache.put(key, Measurement(3 * plain, 0.01, 9))
        cost = self.costs(cache).update_cost(10**4, Training(), DEVICE)
        assert cost.source is CostSource.CORRECTED
        assert cost.seconds == pytest.approx(
            3 * ROOFLINE.update_cost(10**4, Training(), DEVICE).seconds
        )

    def test_a_profile_is_what_costs_answer_from(self, cache):
        operators = [(o, o.sizes) for o in OPERATORS[:4]]
        profile_operators(operators, Training(), cache, effort=QUICK)
        costs = MeasuredCosts(cache, {"cpu": describe_environment()}, ROOFLINE)
        for operator, sizes in operators:
            for direction in Direction:
                cost = costs.operator_cost(operator, sizes, direction, Training(), DEVICE)
                assert cost.source is CostSource.MEASURED


class TestUpdates:
    @pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
    def test_what_is_timed_is_what_runs(self, precision, monkeypatch):
        """Below float32 that is a float32 parameter, a gradient in the precision, and a copy."""
        given = []
        monkeypatch.setattr(
            "stratagem.calibration.executor_measurements.make_optimizer",
            lambda *_: lambda *each: given.append(each),
        )
        executor_update(8, Training(precision), torch.device("cpu"))()
        ((_, parameter, gradient, copy),) = given
        assert parameter.dtype == torch.float32
        assert gradient.dtype == getattr(torch, precision)
        assert (copy is None) == (precision == "float32")
        assert copy is None or copy.dtype == gradient.dtype

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_updates_are_timed_once(self, cache, optimizer, precision):
        training = Training(precision=precision, optimizer=optimizer)
        sizes = (100, 1000)
        first = profile_updates(training, cache, executor_update, sizes=sizes, effort=QUICK)
        assert all(m.median_s > 0 for m in first)
        again = profile_updates(training, cache, executor_update, sizes=sizes, effort=QUICK)
        assert again == first
        assert len(cache) == 2 + len(PaceOf)
