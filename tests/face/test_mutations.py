"""Files with bytes and values changed at random: read as they are, or refused in one error.

Where a file has checksums no change may pass unseen.
"""

from __future__ import annotations

import gzip
import json
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import stratagem as sg
from examples.models import MLP
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.results.verdict import Verdict
from stratagem.executor.running.execute import execute
from stratagem.executor.state.parameter_parts import model_state
from stratagem.profiler import CollectiveKey, Environment, Measurement, TimingCache, TimingKey
from stratagem.profiler.cache.csv_and_json import to_csv, to_json
from stratagem.profiler.imports import importing
from stratagem.profiler.imports.importing import import_file
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base import files
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.executor.runs.test_faults import make_plan

LIMIT_SECONDS = 10
"""That any file of this size may take: what has no end must fail, not stop all tests."""

FEW, MANY = 25, 600
"""Mutations of every kind of file: of all runs, and of `make test-all`."""

ENVIRONMENT = Environment("cpu", "2.13", threads=1)
SMALL = {"hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16, "batch": 16}
GRAPH = gpt(num_layers=1, **SMALL)
CLUSTER = sg.Cluster.preset("dgx-a100", num_nodes=1)
PLAN = TrainingSetup(tensor=2, pipeline=1, zero=1).plan(GRAPH, CLUSTER)


@dataclass(frozen=True)
class Kind:
    """A kind of file: its content, who reads it, and whether checksums see every change."""

    content: Callable[[Path], bytes]
    read: Callable[[Path], Any]
    sums: bool = False
    json: bool = False


def _plan(path: Path) -> object:
    """Read and play it, as `stratagem simulate` does."""
    plan = sg.Plan.load(path)
    return simulate_plan(plan, GRAPH, default_costs()).step_time


def _cluster(path: Path) -> object:
    cluster = sg.Cluster.load(path)
    return simulate_plan(TrainingSetup(tensor=2).plan(GRAPH, cluster), GRAPH, default_costs())


def _simulation(path: Path) -> object:
    """Read and show it."""
    found = sg.Simulation.load(path)
    curves = [found.memory_timeline(rank).peak for rank in range(len(found.memory))]
    shown = [repr(found), found._repr_html_(), found.critical_path._repr_html_()]
    tables = [found.groups, found.operators, found.collectives, *(m.table for m in found.memory)]
    return curves, shown, [str(table) for table in tables]


def _forecast(folder: Path) -> bytes:
    hazards = sg.forecasts.Hazards(
        node_mtbf_hours=10,
        restart_seconds=20,
        node_slow_hours=9,
        slow_minutes=2,
        slow_factor=1.5,
    )
    simulation = simulate_plan(PLAN, GRAPH, default_costs())
    return (
        sg.forecasts.forecast_run(simulation, steps=10**7, hazards=hazards, runs=4)
        .to_json()
        .encode()
    )


def _forecast_shown(path: Path) -> object:
    """Read and show it."""
    found = sg.forecasts.RunForecast.load(path)
    return repr(found), str(found), found._repr_html_(), found.interval, found.costs.tolist()


def _found(folder: Path) -> bytes:
    quick = {"budget": sg.Budget(0, bounded=0), "progress": False}
    two = replace(CLUSTER, devices_per_node=2)
    return sg.search(GRAPH, two, **quick).to_json().encode()


def _result(path: Path) -> object:
    """Read and show it."""
    found = sg.SearchResult.load(path)
    return found.rows, str(found), found._repr_html_(), str(found.space_table)


def _trained(folder: Path) -> Path:
    """A checkpoint of two steps."""
    model = MLP([6, 8, 3])
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    plan = make_plan(model, batch)
    graph = capture(model, kwargs=batch)
    execute(plan, graph, model_state(model), batch, steps=2, checkpoint=folder / "kept")
    return folder / "kept" / "step-00000002"


def _checkpoint(path: Path) -> object:
    state = sg.load_checkpoint(path.parent)
    return {name: tensor.tolist() for name, tensor in state.items()}


def _run(folder: Path) -> bytes:
    model = MLP([6, 8, 3])
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    plan, graph = make_plan(model, batch), capture(model, kwargs=batch)
    result = execute(plan, graph, model_state(model), batch, steps=2)
    return replace(result, verdict=Verdict({"loss": 1e-7}, {"loss": 1e-4})).to_json().encode()


def _shown(path: Path) -> object:
    """Read and show it."""
    found = ExecutionResult.load(path)
    return repr(found), found._repr_html_()


def _filled(path: Path) -> list[Any]:
    with TimingCache(path) as cache:
        weighted = [each for each in GRAPH.operators if each.weights][:6]
        for number, operator in enumerate(weighted):
            key = TimingKey(ENVIRONMENT, operator, "float32", Direction.FORWARD)
            cache.put(key, Measurement(1e-3 * (number + 1), 0.01, 30))
        key = CollectiveKey(ENVIRONMENT, Collective.ALL_REDUCE, 1024, 4, "gloo")
        cache.put_collective(key, Measurement(2e-4, 0.02, 20))
        return [*cache.entries(), *cache.collective_entries()]


def _costs(folder: Path) -> sg.costs.MeasuredCosts:
    entries = [each for each in _filled(folder / "costs") if isinstance(each.key, TimingKey)]
    return sg.costs.MeasuredCosts(
        SimpleNamespace(entries=lambda: entries), {"cpu": ENVIRONMENT}, default_costs()
    )


def _cache(path: Path) -> object:
    """Every time that is there, under its key."""
    for beside in ("-wal", "-shm"):
        path.with_name(path.name + beside).unlink(missing_ok=True)
    with TimingCache(path) as cache:
        entries = [*cache.entries(), *cache.collective_entries()]
    return {entry.key.digest: entry.measurement for entry in entries}


def _cache_file(folder: Path) -> bytes:
    _filled(folder / "made.sqlite")
    return (folder / "made.sqlite").read_bytes()


def _trace(folder: Path) -> bytes:
    """A layer's forward and backward pass as torch.profiler records them."""
    layer, x = torch.nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, record_shapes=True) as profiler:
        layer(x).sum().backward()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    content = json.loads((folder / "trace.json").read_text())
    content["deviceProperties"] = [{"id": 0, "name": "a device"}]
    return json.dumps(content).encode()


NCCL = """# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid 33391 on  node01 device  0 [0x0f] NVIDIA A100-SXM4-40GB
#  Rank  1 Group  0 Pid 33391 on  node01 device  1 [0x15] NVIDIA A100-SXM4-40GB
#
#                                                      out-of-place             in-place
#     size     count    type  redop  root     time  algbw  busbw #wrong     time  algbw  busbw
#      (B)  (elements)                        (us)  (GB/s)  (GB/s)            (us)  (GB/s)
        1024       256   float    sum    -1    12.35   0.08   0.08      0    12.61   0.08   0.08
     1048576    262144   float    sum    -1    52.10  20.13  20.13      0    51.99  20.17  20.17
"""


def _imported(path: Path) -> object:
    """What a file gives; a trace does not say all of where it was recorded."""
    told = {"kineto": ENVIRONMENT, "nccl-tests": Environment("", "2.13")}
    found = import_file(path, environment=told.get(path.name))
    return {entry.key.digest: entry.measurement for entry in found.entries}


KINDS = {
    "plan": Kind(lambda folder: PLAN.to_json().encode(), _plan, json=True),
    "graph": Kind(
        lambda folder: GRAPH.to_json().encode(),
        sg.OperatorGraph.load,
        json=True,
    ),
    "cluster": Kind(lambda folder: CLUSTER.to_json().encode(), _cluster, json=True),
    "timeline": Kind(
        lambda folder: simulate_plan(PLAN, GRAPH, default_costs()).timeline.to_json().encode(),
        lambda path: sg.Timeline.load(path).to_dict(),
        json=True,
    ),
    "simulation": Kind(
        lambda folder: simulate_plan(PLAN, GRAPH, default_costs()).to_json().encode(),
        _simulation,
        json=True,
    ),
    "forecast": Kind(_forecast, _forecast_shown, json=True),
    "search result": Kind(_found, _result, json=True),
    "run": Kind(_run, _shown, json=True),
    "kineto": Kind(_trace, _imported, json=True),
    "nccl-tests": Kind(lambda folder: NCCL.encode(), _imported),
    "costs": Kind(
        lambda folder: _costs(folder).to_json().encode(),
        lambda path: repr(sg.costs.MeasuredCosts.load(path)),
        json=True,
    ),
    "csv": Kind(lambda folder: to_csv(_filled(folder / "c")).encode(), _imported, sums=True),
    "json": Kind(
        lambda folder: to_json(_filled(folder / "c")).encode(), _imported, sums=True, json=True
    ),
    "cache": Kind(_cache_file, _cache),
    "index": Kind(
        lambda folder: (_trained(folder) / "index.json").read_bytes(),
        _checkpoint,
        sums=True,
        json=True,
    ),
    "shard": Kind(
        lambda folder: (_trained(folder) / "rank-00000.safetensors").read_bytes(),
        _checkpoint,
        sums=True,
    ),
}


# -- mutations ----------------------------------------------------------------------------------

VALUES = [
    *(None, True, -1, 0, 1.5, 2**31, 2**63, 10**30, 1e308, -1e-308, "", "x", "[/b]\x1b[2J"),
    *([], {}, [1], {"x": 1}, [[]], "é\u2028", "9" * 5000),
]


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, cut out, doubled or put in."""
    made = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place = rng.randrange(max(1, len(made)))
        length = rng.choice((1, 1, 2, 8, 64, 1024))
        match rng.randrange(5):
            case 0:
                made[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del made[place : place + length]
            case 2:
                made[place:place] = made[place : place + length]
            case 3:
                made[place:place] = rng.randbytes(min(length, 8))
            case _:
                made[place : place + 1] = str(rng.randrange(10)).encode()
    return bytes(made)


def changed_value(content: bytes, rng: random.Random) -> bytes:
    """One value somewhere in JSON replaced by another kind or size, left out, or renamed."""
    value = json.loads(content)
    places: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, (dict, list)):
            keys = list(each) if isinstance(each, dict) else range(len(each))
            places.extend((each, key) for key in keys)
            left.extend(each[key] for key in keys)
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    elif rng.random() < 0.1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(value).encode()


class TooLong(BaseException):
    """A file was read for longer than any may be."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def mutate(kind: Kind, name: str, folder: Path, count: int, seed: int) -> None:
    content = kind.content(folder)
    place = folder / name
    if kind.read is _checkpoint:
        where = {"index": "index.json", "shard": "rank-00000.safetensors"}
        place = folder / "kept" / "step-00000002" / where[name]
    place.write_bytes(content)
    whole = kind.read(place)
    rng = random.Random(f"{name} {seed}")
    for number in range(count):
        change = changed_value if kind.json and number % 2 else changed_bytes
        changed = change(content, rng)
        place.write_bytes(changed)
        story = f"{name}, mutation {number} of seed {seed}"
        try:
            with limited(), warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", ".*damaged rows.*")
                found = kind.read(place)
        except ValueError:
            continue
        except BaseException as error:
            raise AssertionError(f"{story}: {type(error).__name__}: {error}") from error
        if kind.sums:
            assert found == whole, f"{story} passed unseen"
        if name == "cache":
            assert all(whole[key] == value for key, value in found.items()), f"{story}: other time"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "search result")) for name in KINDS],
)
def test_a_changed_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    mutate(KINDS[name], name, tmp_path, FEW, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", [7, 11])
@pytest.mark.parametrize("name", KINDS)
def test_many_changed_files_are_read_or_refused(tmp_path: Path, name: str, seed: int) -> None:
    mutate(KINDS[name], name, tmp_path, MANY, seed)


# -- files that are small and ask for much -------------------------------------------------------


def refused(read: Callable[[Path], object], path: Path, words: str) -> None:
    with limited(), pytest.raises(ValueError, match=words):
        read(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_microbatches": 2**63}, "num_microbatches is 9223372036854775808; at most"),
        ({"num_microbatches": 10**6}, "num_microbatches is 1000000; at most 16,384"),
        ({"token_slices": 2**40}, "slice"),
        ({"bucket_bytes": -1}, "bucket_bytes is -1"),
    ],
)
def test_a_plan_that_asks_for_too_much_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    (tmp_path / "plan").write_text(json.dumps(json.loads(PLAN.to_json()) | change))
    refused(_plan, tmp_path / "plan", words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices_per_node": 10**9}, "at most 131,072 can be planned for; take fewer"),
        ({"compute_slowdown": 1e308}, r"compute_slowdown is 1e\+308; 0 or 1e-09 to 1e\+09"),
        ({"node_price_per_hour": 1e-300}, "node_price_per_hour is 1e-300"),
    ],
)
def test_a_cluster_beyond_all_bounds_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    (tmp_path / "cluster").write_text(json.dumps(json.loads(CLUSTER.to_json()) | change))
    refused(_cluster, tmp_path / "cluster", words)
    with pytest.raises(ValueError, match="at most 131,072"):
        sg.Cluster.preset("dgx-a100", num_nodes=10**9)


@pytest.mark.parametrize("figure", [1e308, 1e12])
def test_figures_of_devices_and_links_have_bounds(tmp_path: Path, figure: float) -> None:
    for part, name in (("device_types", "memory_gib"), ("intra_node", "latency_us")):
        content = json.loads(CLUSTER.to_json())
        holder = content[part][0] if isinstance(content[part], list) else content[part]
        holder[name] = figure
        (tmp_path / "cluster").write_text(json.dumps(content))
        refused(_cluster, tmp_path / "cluster", f"{name} is {figure:g}".replace("+", r"\+"))


def test_a_small_packed_file_may_not_hold_very_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "MOST_UNPACKED", 2**20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 2**21))
    refused(
        import_file, tmp_path / "bomb.json.gz", "unpacks to more than 1 MiB; unpack it yourself"
    )
    (tmp_path / "fits.csv.gz").write_bytes(gzip.compress(to_csv(_filled(tmp_path / "c")).encode()))
    assert len(import_file(tmp_path / "fits.csv.gz").entries) == len(_filled(tmp_path / "c"))


def test_a_file_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 2**20)
    refused(
        sg.Plan.load, Path("/dev/zero"), "plan file /dev/zero cannot be read: it has more than"
    )


def test_calls_in_calls_are_read_however_deep(tmp_path: Path) -> None:
    """Deeper than Python's own calls may be."""
    depth = 5000
    content = json.loads(_trace(tmp_path))
    event = next(e for e in content["traceEvents"] if e.get("cat") == "cpu_op")
    around = [
        {**event, "name": "around", "ts": event["ts"] - n, "dur": event["dur"] + 2 * n, "args": {}}
        for n in range(1, depth)
    ]
    (tmp_path / "kineto").write_text(json.dumps(content | {"traceEvents": [*around, event]}))
    with limited():
        found = import_file(tmp_path / "kineto", environment=ENVIRONMENT)
    assert not found.entries
    assert found.left_out


@pytest.mark.parametrize(
    "change",
    [
        {"deviceProperties": 3},
        {"deviceProperties": [3]},
        {"baseTimeNanoseconds": [1]},
        {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "pid": [], "tid": 1, "ts": 0}]},
    ],
)
def test_a_trace_with_values_of_the_wrong_kind_is_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    content = json.loads(_trace(tmp_path)) | change
    for event in content["traceEvents"]:
        event.setdefault("dur", 1)
    (tmp_path / "kineto").write_text(json.dumps(content))
    refused(_imported, tmp_path / "kineto", "kineto is broken: .*; record the trace again")
