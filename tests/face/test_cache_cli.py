"""`stratagem cache`: each verb, what it says, and every wrong word with the nearest right one."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from stratagem.cli.app import app
from stratagem.profiler import (
    CACHE_VARIABLE,
    CollectiveKey,
    Environment,
    Measurement,
    TimingCache,
    TimingEntry,
    TimingKey,
    describe_environment,
)
from stratagem.profiler.cache.rows import row_of
from stratagem.profiler.cache.timing_keys import CacheEntry, CollectiveEntry
from stratagem.profiler.imports.importing import FileFormat, import_file
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction

HERE = Environment("AMD EPYC", "2.13")
GPU = Environment("NVIDIA H200", "2.11+cu128", driver="570.86", cuda="12.8")
GOOD = Measurement(1e-3, 0.1, 10)
FAILED = Measurement(0.0, 0.0, 0, "out of memory")
DAY = 86400.0
NOW = time.time()

NCCL = """# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#  Rank  0 Group  0 Pid 33391 on   node00 device  0 [0x00] NVIDIA H200
#  Rank  1 Group  0 Pid 33391 on   node00 device  1 [0x01] NVIDIA H200
#  size   count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
     8       2  float    sum    -1  29.35   0.00   0.00      0  29.61   0.00   0.00      0
"""


def timing(
    size: int, where: Environment = HERE, found: Measurement = GOOD, days: float = 0.0
) -> CacheEntry:
    operator = next(o for o in mlp([size, 8], batch=4).operators if o.kind == "linear")
    key = TimingKey(where, operator, "float32", Direction.FORWARD)
    return TimingEntry(key, found, NOW - days * DAY)


def collective(days: float = 0.0) -> CacheEntry:
    key = CollectiveKey(GPU, Collective.ALL_REDUCE, 2**20, 8, "nccl")
    return CollectiveEntry(key, GOOD, NOW - days * DAY)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def plain(result: Result) -> str:
    """Its output as one line of words."""
    return " ".join(result.output.split())


def fill(path: Path, *entries: CacheEntry) -> Path:
    with TimingCache(path) as cache:
        cache.merge(entries)
    return path


def content(path: Path) -> list[str]:
    with TimingCache(path) as cache:
        entries = [*cache.entries(), *cache.collective_entries()]
    return sorted(repr(row_of(entry)) for entry in entries)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache: five times of two environments."""
    path = tmp_path / "timings.sqlite"
    monkeypatch.setenv(CACHE_VARIABLE, str(path))
    return fill(
        path,
        timing(16, days=100),
        timing(32, days=3),
        timing(64, found=FAILED, days=3),
        timing(16, GPU, days=40),
        collective(days=0.1),
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded step of a linear layer, gzipped."""
    model, x = nn.Linear(8, 16), torch.randn(4, 8, requires_grad=True)
    with torch.profiler.profile(record_shapes=True) as profiler:
        torch.relu(model(x)).sum().backward()
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profiler.export_chrome_trace(str(path))
    packed = path.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


class TestListing:
    def test_groups_by_environment(self, cache):
        shown = call("ls", "--json")
        assert shown.exit_code == 0, shown.output
        groups = json.loads(shown.stdout)["environments"]
        assert [group["device"] for group in groups] == ["AMD EPYC", "NVIDIA H200"]
        first, second = groups
        assert (first["times"], first["failures"], first["collectives"]) == (3, 1, 0)
        assert (second["times"], second["failures"], second["collectives"]) == (2, 0, 1)
        assert second["kinds"] == {"all-reduce": 1, "linear": 1}
        assert first["oldest"] == pytest.approx(NOW - 100 * DAY)
        assert first["bytes"] > 3 * 100

    def test_as_a_table(self, cache):
        for arguments in ((), ("ls",)):
            shown = plain(call(*arguments))
            assert "5 times" in shown
            assert "3d" in shown
            assert "100d" in shown
            assert "NVIDIA" in shown

    @pytest.mark.parametrize(
        ("given", "count"),
        [
            (("--environment", "h200"), 2),
            (("-e", "driver 570"), 2),
            (("--kind", "all-reduce"), 1),
            (("-k", "linear"), 4),
            (("--older-than", "30d"), 2),
            (("--older-than", "1w", "-e", "amd"), 1),
            (("--failures",), 1),
        ],
    )
    def test_conditions(self, cache, given, count):
        groups = json.loads(call("ls", "--json", *given).stdout)["environments"]
        assert sum(group["times"] for group in groups) == count

    def test_another_file(self, cache, tmp_path):
        other = fill(tmp_path / "other.sqlite", collective())
        assert "1 times" in plain(call("ls", "--cache", other))


class TestMerging:
    def test_several_files(self, cache, tmp_path):
        one = fill(tmp_path / "1.sqlite", timing(16, days=1), timing(128))
        two = fill(tmp_path / "2.sqlite", timing(128))
        shown = call("merge", one, two)
        assert shown.exit_code == 0, shown.output
        assert "1 added, 0 already there, 1 measured twice (1 replaced, 0 kept" in plain(shown)
        assert f"{two}: 0 added, 1 already there" in plain(shown)
        assert len(content(cache)) == 6

    def test_a_file_that_is_not_there_is_not_made(self, cache, tmp_path):
        shown = call("merge", tmp_path / "timing.sqlite")
        assert shown.exit_code == 2
        assert f"did you mean {cache}?" in plain(shown)
        assert not (tmp_path / "timing.sqlite").exists()


class TestFiles:
    @pytest.mark.parametrize("suffix", ["csv", "json"])
    def test_out_and_in_again(self, cache, tmp_path, suffix):
        file, other = tmp_path / f"all.{suffix}", tmp_path / "other.sqlite"
        assert "5 times written" in plain(call("export", file))
        assert "5 added" in plain(call("import", file, "--cache", other))
        assert content(other) == content(cache)
        assert "0 added, 5 already there" in plain(call("import", file))

    def test_a_part(self, cache, tmp_path):
        assert "2 times written" in plain(call("export", tmp_path / "x.csv", "-e", "h200"))

    def test_a_suffix_that_says_nothing(self, cache, tmp_path):
        shown = call("export", tmp_path / "x.txt")
        assert shown.exit_code == 2
        assert "ends in '.txt'; call it .csv or .json" in plain(shown)

    def test_a_damaged_file_leaves_the_cache_as_it_was(self, cache, tmp_path):
        good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
        other = fill(tmp_path / "other.sqlite", timing(256), timing(512))
        call("export", good, "--cache", other)
        bad.write_text(good.read_text().replace("0.001", "0.002", 1))
        before = content(cache)
        shown = call("import", good, bad)
        assert shown.exit_code == 2
        assert "bad.csv line 2, field check" in plain(shown)
        assert content(cache) == before

    def test_output_of_nccl_tests(self, cache, tmp_path):
        (tmp_path / "log.txt").write_text(NCCL)
        shown = call("import", tmp_path / "log.txt", "--link", "NVLink", "--driver", "570.86")
        assert "1 added" in plain(shown)
        with TimingCache() as timings:
            (entry,) = [e for e in timings.collective_entries() if e.key.nbytes == 8]
        assert entry.key.link == "NVLink"
        expected = Environment("NVIDIA H200", "", driver="570.86", nccl="2.28.7")
        assert entry.key.environment == expected

    def test_a_trace_of_this_machine(self, cache, trace):
        shown = call("import", trace, "--here", "cpu")
        assert shown.exit_code == 0, shown.output
        assert "2 added" in plain(shown)
        assert "1 × aten::relu: no operator that is read" in plain(shown)
        with TimingCache() as timings:
            assert len(timings.entries(describe_environment("cpu"))) == 2

    def test_a_trace_of_another_machine(self, cache, trace):
        told = ("--device", "Xeon", "--torch", "2.12", "--threads", "4")
        assert "2 added" in plain(call("import", trace, *told))
        with TimingCache() as timings:
            assert len(timings.entries(Environment("Xeon", "2.12", threads=4))) == 2

    def test_a_trace_does_not_say_which(self, cache, trace):
        shown = call("import", trace)
        assert shown.exit_code == 2
        assert "does not say its device; give --device, or --here cpu" in plain(shown)

    def test_many_reasons_are_counted(self, cache, tmp_path, monkeypatch):
        from collections import Counter

        from stratagem.profiler.imports import importing

        left_out = Counter({f"aten::op{i}: why": 30 - i for i in range(15)})
        found = importing.Imported(FileFormat.KINETO, [], left_out)
        monkeypatch.setattr(importing, "import_file", lambda *given, **options: found)
        shown = plain(call("import", tmp_path / "x"))
        assert "30 × aten::op0: why" in shown
        assert "and 3 other reasons" in shown


class TestFormats:
    def test_the_content_says_which(self, cache, tmp_path, trace):
        call("export", tmp_path / "x.csv")
        call("export", tmp_path / "x.json")
        (tmp_path / "log").write_text(NCCL)
        here = Environment("Xeon", "2.12")
        found = [
            import_file(tmp_path / "x.csv"),
            import_file(tmp_path / "x.json"),
            import_file(tmp_path / "log"),
            import_file(trace, environment=here),
        ]
        assert [each.format.value for each in found] == ["csv", "json", "nccl-tests", "kineto"]

    def test_what_is_told_counts(self, cache, trace):
        shown = call("import", trace, "--format", "json")
        assert shown.exit_code == 2
        assert "missing required field `format`" in plain(shown)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("x", b"anything", "x holds no timings of a known form (csv, json, kineto"),
            ("x", b"\xff\xfe", "x cannot be read: it is no UTF-8 text"),
            ("x.gz", gzip.compress(b"{}" * 100)[:-12], "x.gz cannot be unpacked"),
            ("x", None, "x cannot be read: No such file"),
        ],
        ids=["unknown", "binary", "cut", "missing"],
    )
    def test_what_is_none(self, cache, tmp_path, name, content, message):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        shown = call("import", tmp_path / name)
        assert shown.exit_code == 2
        assert message in plain(shown)

    def test_options_that_do_not_apply(self, cache, tmp_path, trace):
        call("export", tmp_path / "x.csv")
        shown = call("import", tmp_path / "x.csv", "--torch", "2.12", "--link", "NVLink")
        assert "x.csv is csv and says its own --torch, --link; leave them out" in plain(shown)
        shown = call("import", trace, "--here", "cpu", "--kind", "all_reduce")
        assert "is kineto and says its own --kind" in plain(shown)


class TestPruning:
    @pytest.mark.parametrize(
        ("given", "removed"),
        [
            (("--older-than", "30d"), 2),
            (("--environment", "amd"), 3),
            (("--failures",), 1),
            (("--failures", "--older-than", "30d"), 0),
            (("--kind", "all-reduce"), 1),
        ],
    )
    def test_it_removes_what_it_said(self, cache, given, removed):
        before = content(cache)
        tried = plain(call("prune", *given, "--dry-run"))
        assert f"{removed} times would be removed, {5 - removed} stay" in tried
        assert content(cache) == before
        done = plain(call("prune", *given))
        assert f"{removed} times removed, {5 - removed} stay" in done
        assert len(content(cache)) == 5 - removed
        assert set(content(cache)) < set(before) or not removed

    def test_not_without_a_condition(self, cache):
        shown = call("prune")
        assert shown.exit_code == 2
        assert "would remove everything" in plain(shown)
        assert len(content(cache)) == 5


class TestWrongWords:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("prnue",), "prune"),
            (("ls", "--jsno"), "--json"),
            (("ls", "--kind", "linaer"), "no kind 'linaer' (did you mean 'linear'?)"),
            (("ls", "-e", "NVIDA H200"), "did you mean 'NVIDIA H200'?"),
            (("ls", "--older-than", "3y"), "--older-than is '3y'; give a number and m, h, d or w"),
            (("import", "x", "--format", "kinto"), "no format 'kinto' (did you mean 'kineto'?)"),
            (("import", "x", "--here", "gpu"), "no device for --here 'gpu'"),
        ],
        ids=lambda value: value if isinstance(value, str) else " ".join(value),
    )
    def test_the_nearest_is_named(self, cache, arguments, message):
        shown = call(*arguments)
        assert shown.exit_code == 2
        assert message in plain(shown)

    @pytest.mark.parametrize("verb", ["ls", "merge", "export", "import", "prune"])
    def test_help_has_an_example(self, verb):
        assert f"Example: stratagem cache {verb}" in plain(call(verb, "--help"))
