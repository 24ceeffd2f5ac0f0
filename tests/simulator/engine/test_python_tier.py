"""What little is asked of a kernel before it is compiled is done by Python, to the same bits."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.searcher.problem._score_kernels import measure_stages
from stratagem.searcher.problem.priced_skeleton import make_problem
from stratagem.searcher.space.skeletons import skeletons
from stratagem.simulator.base import compiling
from stratagem.simulator.base.compiling import KernelCache, in_python, kernel
from stratagem.simulator.engine._event_queue import find_cycle_task
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.kernel_times._matrix_product_time import (
    all_product_seconds,
    product_seconds,
)
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.sharding._shortest_paths import shortest_paths


class Pair(NamedTuple):
    first: int
    second: float


@kernel(inner=True)
def doubled(x: int) -> int:
    return 2 * x


@kernel()
def through(x: int) -> int:
    return doubled(x) + 1


def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: Any) -> Any:
    """A kernel of a function whose calls take as many steps as they are given."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(KernelCache, "is_kept", False)
    return kernel(cache=True, steps=lambda x, *_: x)(function)


class TestWhoRuns:
    def test_python_does_a_small_call(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tripled = made(monkeypatch, tmp_path, lambda x: 3 * x)
        assert tripled(5) == 15
        assert not tripled.overloads

    def test_a_large_one_has_it_compiled(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tripled = made(monkeypatch, tmp_path, lambda x: 3 * x)
        assert tripled(compiling.MOST_STEPS + 1) == 3 * (compiling.MOST_STEPS + 1)
        assert len(tripled.overloads) == 1
        tier = tripled._compile_for_args
        monkeypatch.setattr(tier, "_run", None)  # Which a compiled kernel asks no more.
        assert tripled(5) == 15

    def test_so_have_small_ones_that_add_up(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tripled = made(monkeypatch, tmp_path, lambda x: 3 * x)
        monkeypatch.setattr(compiling, "PATIENCE", 1e-5)
        for _ in range(1000):
            assert tripled(7) == 21
        assert len(tripled.overloads) == 1

    def test_what_was_compiled_before_is_loaded(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tripled = made(monkeypatch, tmp_path, lambda x: 3 * x)
        monkeypatch.setattr(KernelCache, "is_kept", True)
        assert tripled(5) == 15
        assert len(tripled.overloads) == 1

    def test_what_a_kernel_calls_is_not_compiled_either(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        outer = made(monkeypatch, tmp_path, lambda x: through(x) * doubled(x))
        assert outer(3) == 7 * 6
        assert not any(each.overloads for each in (outer, through, doubled))
        assert in_python(through.py_func)(4) == 9
        with pytest.raises(TypeError, match="doubled is an inner kernel"):
            doubled(1)

    def test_it_gives_numbers_of_python(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Those of numpy cannot be written to files of JSON."""
        given = np.array([3, 4]), np.array([0.5])
        look_up = made(monkeypatch, tmp_path, lambda x, a, b: (a[x], Pair(a[0], b[0]), b[0] > 1))
        found = look_up(1, *given)
        assert json.dumps(found) == "[4, [3, 0.5], false]"
        assert isinstance(found[1], Pair)
        assert found == kernel()(look_up.py_func)(1, *given)

    def test_infinite_numbers_warn_of_nothing(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        difference = made(monkeypatch, tmp_path, lambda x, a: a[0] - a[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.isnan(difference(1, np.array([np.inf, np.inf])))

    def test_its_errors_are_raised(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def fails(x: int) -> int:
            if x > 0:
                raise ValueError("x is above 0")
            return x

        with pytest.raises(ValueError, match="x is above 0"):
            made(monkeypatch, tmp_path, fails)(1)


# -- the kernels that Python may run --------------------------------------------------------------

sizes = st.integers(1, 100_000).map(float)


@given(
    products=st.lists(st.tuples(sizes, sizes, sizes, sizes, sizes), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_seconds_of_products_are_equal_to_the_bit(
    products: list[tuple[float, ...]], seed: int
) -> None:
    draw = np.random.default_rng(seed)
    constants = draw.uniform(0.1, 2.0, 9)
    rates = draw.uniform(1e12, 1e15, len(products))
    whole = np.array(products), rates, 108.0, 2e12, constants
    in_numba, ours = (f(*whole) for f in (all_product_seconds, _python(all_product_seconds)))
    assert in_numba.tobytes() == ours.tobytes()
    for product, rate in zip(products, rates.tolist(), strict=True):
        asked = *product, (108.0, rate, 2e12), constants
        assert product_seconds(*asked) == _python(product_seconds)(*asked)


@given(count=st.integers(1, 9), seed=st.integers(0, 10_000))
def test_shortest_paths_are_equal_to_the_bit(count: int, seed: int) -> None:
    """Also where there is none, and where two are as short."""
    draw = np.random.default_rng(seed)
    weights = draw.choice([np.inf, 1.0, 2.0, 0.1, 0.2, 0.30000000000000004], (count, count))
    seconds = draw.uniform(0, 1, (count, count))
    links = draw.integers(0, 8, (count, count))
    asked = weights, seconds, links
    for one, other in zip(shortest_paths(*asked), _python(shortest_paths)(*asked), strict=True):
        assert one.tobytes() == other.tobytes()
        assert one.dtype == other.dtype


@given(count=st.integers(1, 8), edges=st.integers(0, 20), seed=st.integers(0, 10_000))
def test_tasks_on_cycles_are_the_same(count: int, edges: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ends = draw.integers(0, count, (edges, 2))
    ends = ends[np.argsort(ends[:, 0], kind="stable")]
    offsets = np.searchsorted(ends[:, 0], np.arange(count + 1)).astype(np.int64)
    counts = np.bincount(ends[:, 1], minlength=count).astype(np.int64)
    asked = offsets, ends[:, 1].astype(np.int64), counts
    assert find_cycle_task(*asked) == _python(find_cycle_task)(*asked)


@pytest.mark.parametrize("zeros", [(0,), (0, 1, 3)])
def test_tensors_of_stages_are_the_same(zeros: tuple[int, ...]) -> None:
    graph, cluster = mlp([64, 64, 32, 64], batch=32), sg.Cluster.preset("dgx-a100", num_nodes=1)
    for skeleton in itertools.islice(skeletons(graph, cluster), 20):
        training = sg.Training()
        problem = make_problem(graph, skeleton, cluster, training, default_costs(), zeros)
        choice = np.array([len(each) - 1 for each in problem.choices])
        found = [np.zeros((problem.num_stages, 6), dtype=np.int64) for _ in range(2)]
        measure_stages(choice, found[0], problem.tensors)
        _python(measure_stages)(choice, found[1], problem.tensors)
        assert found[0].any()
        assert found[0].tolist() == found[1].tolist()


def _python(of: Any) -> Any:
    return in_python(of.py_func)


# -- whole predictions ----------------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 3, "recompute": "full"},
    {"tensor": 4, "sequence_parallel": True},
    {"tensor": 2, "pipeline": 2, "microbatch": 4},
    {"pipeline": 4, "microbatch": 2, "schedule": "zb-h1"},
    {"pipeline": 2, "virtual_stages": 2, "microbatch": 4, "schedule": "interleaved"},
]

PREDICTS = """
import json, sys
import stratagem as sg
from stratagem.simulator.base import compiling
compiling.PATIENCE = compiling.MOST_STEPS = float("inf")
asked = []
compiled = compiling.PythonTier.__call__
def note(self, *given):
    asked.append(self._function.__name__)
    return compiled(self, *given)
compiling.PythonTier.__call__ = note
from tests.simulator.engine.test_python_tier import SHAPES, predicted
print(json.dumps([predicted(shape) for shape in SHAPES]))
print(json.dumps(sorted(set(asked))))
"""


def predicted(shape: dict[str, Any]) -> list[Any]:
    """Step, memory and every task of a plan, all bits of them."""
    graph = sg.models.gpt(
        num_layers=4, hidden=64, num_heads=4, vocabulary=512, sequence=64, batch=32
    )
    cluster = sg.Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2)
    plan = sg.TrainingSetup(**shape).plan(graph, cluster)
    found = sg.simulate(plan, graph)
    return [found.step_time.hex(), found.peak_memory, json.loads(found.timeline.to_json())]


def test_a_prediction_by_python_is_that_of_compiled_code(tmp_path: Path) -> None:
    """A first one took 8 seconds, of which 6 to compile; Python does it in less than one."""
    told = subprocess.run(
        [sys.executable, "-c", PREDICTS],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    ours, asked = map(json.loads, told.stdout.splitlines())
    assert {"simulate_tasks", "product_seconds", "shortest_paths"} <= set(asked)
    assert not list(tmp_path.rglob("*.nbc"))  # Nothing was compiled.
    for shape, found in zip(SHAPES, ours, strict=True):
        assert found == predicted(shape), shape
