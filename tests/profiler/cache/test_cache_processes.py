"""The timing cache between processes: many lose nothing, killed ones leave nothing half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import json, os, random, signal, sqlite3, sys, time
from stratagem.profiler import CollectiveKey, Environment, Measurement, TimingCache, TimingKey
from stratagem.profiler.cache.timing_keys import TimingEntry
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.operators.operator import Dim, DimKind, Input, Operator, Output

HERE = Environment("cpu", "2.13")
LAYOUT = (("sample",),)

def key(size, precision="float32"):
    dims = (Dim("sample", size, DimKind.SAMPLE),)
    operator = Operator("x", "softmax", dims, (Input("x", LAYOUT),), (), (Output(LAYOUT),), {})
    return TimingKey(HERE, operator, precision, Direction.FORWARD)

def collective(size):
    return CollectiveKey(HERE, Collective.ALL_REDUCE, size, 2, "gloo")

def measured(writer, size):
    # Every field follows from writer and size, so that a mixed row would show.
    text = f"writer {writer} size {size} " * 20
    return Measurement(size * 1e-6 * (writer + 1), writer / 128, size, "", text)

def check(size, found):
    writer = round(found.spread * 128)
    assert found == measured(writer, size), (size, found)
    return writer

def start(work, *arguments):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
            os._exit(0)
        except BaseException as error:
            print("failed:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child
"""

CROWD = (
    COMMON
    + """
path, writers, puts, readers = sys.argv[1], *map(int, sys.argv[2:])

def write(writer):
    with TimingCache(path) as cache:
        for i in range(puts):
            own = 2 + writer * puts + i
            cache.put(key(own), measured(writer, own))
            cache.put(key(2 + i, "bfloat16"), measured(writer, 2 + i))  # every writer's
            if i % 10 == 0:
                cache.put_collective(collective(own), measured(writer, own))

def read():
    before = 0
    with TimingCache(path) as cache:
        while before < writers * puts + puts:
            entries = cache.entries()
            assert len(entries) >= before, (len(entries), before)
            before = len(entries)
            for entry in entries:
                check(entry.key.operator.sizes["sample"], entry.measurement)

children = [start(write, i) for i in range(writers)] + [start(read) for _ in range(readers)]
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
with TimingCache(path) as cache:
    for writer in range(writers):
        for i in range(puts):
            size = 2 + writer * puts + i
            assert check(size, cache.get(key(size))) == writer
    shared = [check(2 + i, cache.get(key(2 + i, "bfloat16"))) for i in range(puts)]
    print(json.dumps({"codes": codes, "rows": len(cache), "shared": len(shared)}))
"""
)

KILLING = (
    COMMON
    + """
path, rounds, enough, seed = sys.argv[1], *map(int, sys.argv[2:])
draw = random.Random(seed)
BATCH = 20

def write(writer, first, pipe):
    with TimingCache(path) as cache:
        for size in range(first, first + 10**6):
            cache.put(key(size), measured(writer, size))
            cache.put_collective(collective(size), measured(writer, size))
            cache.merge(
                TimingEntry(key(one, "bfloat16"), measured(writer, one), 1.0)
                for one in range(size * BATCH, (size + 1) * BATCH)
            )
            os.write(pipe, b"%d\\n" % size)

stored, killed, turn = [], 0, 0
while turn < rounds or len(stored) < enough:  # A slow machine stores little in a round.
    ends = [os.pipe() for _ in range(3)]
    firsts = [2 + (3 * turn + i) * 10**6 for i in range(3)]
    children = [start(write, i, firsts[i], ends[i][1]) for i in range(3)]
    for _, theirs in ends:
        os.close(theirs)
    time.sleep(draw.uniform(0.0, 0.12))
    for child in children:
        os.kill(child, signal.SIGKILL)
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        time.sleep(draw.uniform(0.0, 0.01))
    for ours, _ in ends:
        with open(ours) as said:
            stored += [int(line) for line in said.read().split("\\n") if line]
    with TimingCache(path) as cache:
        # What was reported is there; what is there was written whole, and batches are complete.
        for size in stored:
            check(size, cache.get(key(size)))
            check(size, cache.get_collective(collective(size)))
        batches = {}
        for entry in cache.entries():
            size = entry.key.operator.sizes["sample"]
            check(size, entry.measurement)
            if entry.key.precision == "bfloat16":
                batches[size // BATCH] = batches.get(size // BATCH, 0) + 1
        assert set(batches.values()) <= {BATCH}, batches
        for entry in cache.collective_entries():
            check(entry.key.nbytes, entry.measurement)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    turn += 1
print(json.dumps({"rounds": turn, "killed": killed, "stored": len(stored)}))
"""
)


def run(script: str, *arguments: object) -> dict[str, object]:
    """What a script prints as JSON; it forks the processes, so that they start at once."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_many_writers_and_readers_lose_no_row_and_meet_no_lock(tmp_path: Path):
    writers, puts = 6, 150
    found = run(CROWD, tmp_path / "new" / "timings.sqlite", writers, puts, 2)
    assert found["codes"] == [0] * (writers + 2)
    assert found["rows"] == writers * puts + puts + writers * puts // 10


@pytest.mark.slow
def test_killed_writers_leave_every_row_whole(tmp_path: Path):
    found = run(KILLING, tmp_path / "timings.sqlite", 10, 40, 1)
    assert found["rounds"] >= 10
    assert found["killed"] == 3 * found["rounds"]
    assert found["stored"] >= 40
