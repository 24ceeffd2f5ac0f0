"""Real processes that are killed, frozen, cut off or fail: the others stop and say why."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from examples.models import MLP
from stratagem.executor.checkpoints.folder import complete_checkpoints
from stratagem.executor.checkpoints.reader import load_checkpoint
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.watching.failures import failure_of
from stratagem.executor.watching.judges import Limits
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.processes import rank_of

ROOT = Path(__file__).parents[3]
STOP_SECONDS = 30.0
"""Within which every other rank must have stopped."""
FOREVER = 100_000
EVERY = 5

MODEL = """
import os, time
import torch
from examples.models import MLP

RANK = int(os.environ.get("RANK", "0"))


def build():
    return MLP([6, 8, 3]), {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}


class Rows:
    def __init__(self, at=None, then=None, seconds=0.0):
        self.at, self.then, self.seconds = at, then, seconds

    def __iter__(self):
        for number in range(10**6):
            if number == self.at and RANK == 1:
                self.then()
            time.sleep(self.seconds)
            made = torch.Generator().manual_seed(number)
            yield {
                "x": torch.randn(4, 6, generator=made),
                "target": torch.randint(0, 3, (4,), generator=made),
            }


def plain():
    return Rows()


def six(step):
    # The linear rate of a run of six steps.
    return 1 - step / 6


def slow():
    return Rows(seconds=0.02)


def failing():
    def fail():
        raise KeyError("a story")
    return Rows(12, fail, 0.02)


def hanging():
    def sleep_forever():
        torch.nn.functional.linear = lambda *given: time.sleep(10**6)
    return Rows(12, sleep_forever, 0.02)


def busy():
    def compute_forever():
        def forever(*given):
            while True:
                pass
        torch.nn.functional.linear = forever
    return Rows(12, compute_forever, 0.02)


def locking():
    def hold_the_lock():
        begun = time.monotonic()
        sum(range(10**7))
        sum(range(round(13e7 / (time.monotonic() - begun))))
    return Rows(2, hold_the_lock)


def never_built():
    if RANK == 1:
        time.sleep(10**6)
    return build()
"""

AT_START = """
import os, signal, time


def begin():
    if os.environ.get("RANK") == "{rank}":
        {does}


begin()
os.register_at_fork(after_in_child=begin)
"""


def make_plan(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Plan:
    graph = capture(model, kwargs=dict(batch))
    mesh = DeviceMesh((MeshAxis("data", 2),), (0, 1))
    choices = {
        each.name: Choice((Shard("sample"),), 1)
        if any(dim.name == "sample" and not dim.whole for dim in each.dims)
        else Choice((REPLICATE,))
        for each in graph.operators
    }
    return Plan(
        name="two ranks",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=2),
        training=Training(learning_rate=0.01),
        stages=(Stage(tuple(choices), mesh, choices),),
    )


def asked(build: str, folder: Path = Path(), **given: Any) -> RunRequest:
    """A run of this file's plan and model."""
    return RunRequest(plan=folder / "plan.json", model=f"faulty:{build}", **given)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a plan and a model, which no process uses any more in the end."""
    (tmp_path / "faulty.py").write_text(MODEL)
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    make_plan(MLP([6, 8, 3]), batch).save(tmp_path / "plan.json")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    before = set(shared_memory())
    yield tmp_path
    assert not ranks(tmp_path)
    assert set(shared_memory()) <= before


def shared_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "torch" in name]


def processes(folder: Path) -> list[tuple[int, list[str]]]:
    """Every process that names the plan of a folder, with its arguments."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            arguments = Path(f"/proc/{name}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(folder / "plan.json") in arguments:
            found.append((int(name), arguments))
    return found


def ranks(folder: Path) -> dict[int, int]:
    """The process of every rank of a run of the plan in a folder."""
    found = {pid: rank_of(pid) for pid, _ in processes(folder)}
    return {rank: pid for pid, rank in found.items() if rank is not None}


def wait_for(what: Callable[[], object], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.05)


def fail(data: str, hit: Callable[[dict[int, int]], None] | None = None, **more: object) -> str:
    """Launch a run that must fail, perhaps because something hits it; what the error says."""
    folder = Path.cwd()
    when: list[float] = []

    def disturb() -> None:
        wait_for(lambda: len(complete_checkpoints("saved")) > 0)
        found = ranks(folder)
        when.append(time.monotonic())
        if hit is not None:
            hit(found)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError) as caught:
        launch(
            asked(
                "build",
                folder,
                data=f"faulty:{data}",
                steps=FOREVER,
                checkpoint=Path("saved"),
                every=EVERY,
                **more,
            ),
            timeout=180,
        )
    thread.join()
    assert time.monotonic() - when[0] < STOP_SECONDS
    assert not ranks(folder)
    return str(caught.value)


def assert_checkpoint_is_whole() -> None:
    steps = list(complete_checkpoints("saved"))
    assert steps in ([EVERY], [steps[-1] - EVERY, steps[-1]])
    assert all(step % EVERY == 0 for step in steps)
    state = load_checkpoint("saved")
    assert set(state) == set(dict(MLP([6, 8, 3]).named_parameters()))


WHERE = r"(step \d+|instruction \d+|taking the batch|waiting for)"


@pytest.mark.slow
def test_a_killed_rank_is_named(place: Path) -> None:
    told = fail("slow", lambda found: os.kill(found[1], signal.SIGKILL))
    assert re.search(rf"rank 1 \(process \d+\) died; it was last at .*{WHERE}", told)
    assert re.search(rf"rank 0 stops at .*{WHERE}", told)
    assert "Traceback" not in told
    assert_checkpoint_is_whole()


@pytest.mark.slow
def test_a_frozen_rank_is_named_and_ended(place: Path) -> None:
    told = fail("slow", lambda found: os.kill(found[1], signal.SIGSTOP))
    assert re.search(rf"rank 1 has been silent for 4 s .*; it was last at .*{WHERE}", told)
    assert_checkpoint_is_whole()


@pytest.mark.long
def test_a_batch_that_holds_pythons_lock_is_waited_for(place: Path) -> None:
    """Such as a big file that json reads: the rank said nothing for 10 s, and was ended."""
    report = launch(asked("build", data="faulty:locking", steps=4))
    assert len(report.losses) == 4


@pytest.mark.slow
def test_an_exception_on_one_rank_is_the_error_of_the_run(place: Path) -> None:
    told = fail("failing")
    first = told.splitlines()[0]
    assert "rank 1 ended with KeyError: 'a story'" in first
    assert "rank 1 was at step 12, taking the batch" in first
    assert_checkpoint_is_whole()


def test_where_a_rank_was_is_known_before_its_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank that heard of the error ended the run, and this one before it had spoken."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stderr.log").touch()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    handler = ErrorHandler()
    handler.initialize()
    try:
        try:
            raise KeyError("a story")
        except KeyError as error:
            error.add_note("rank 1 was at step 12, taking the batch")
            raise
    except KeyError as error:
        handler.record_exception(error)
    told = failure_of(tmp_path, 1).splitlines()
    assert told[0].startswith("rank 1 ended with KeyError: 'a story'")
    assert told[0].endswith("; rank 1 was at step 12, taking the batch")
    assert "Traceback (most recent call last):" in told


@pytest.mark.slow
def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(place: Path) -> None:
    told = fail("hanging", limits=Limits(stalled=4.0))
    assert re.search(
        r"no rank has gone on for 4 s: rank 1 is at step 12, instruction \d+ '.* F0', while", told
    )
    assert_checkpoint_is_whole()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stalled",
    [4.0, pytest.param(20.0, marks=pytest.mark.long)],
)
def test_a_rank_that_computes_for_ever_is_named(place: Path, stalled: float) -> None:
    """With the limits that hold when none are given, too."""
    given = {} if stalled == Limits.stalled else {"limits": Limits(stalled=stalled)}
    told = fail("busy", **given)
    assert re.search(
        rf"no rank has gone on for {stalled:g} s: rank 1 is at step 12, instruction \d+ '.* F0'",
        told,
    )
    assert_checkpoint_is_whole()


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_builds_the_model_is_named(place: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        launch(asked("never_built", limits=Limits(stalled=4.0)), timeout=60)
    told = str(caught.value)
    assert "no rank has gone on for 4 s: rank 1 is at building the model, while the others" in told


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_never_comes_stops_the_others(
    place: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    (place / "sitecustomize.py").write_text(AT_START.format(rank=rank, does="time.sleep(10**6)"))
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
    with pytest.raises(RuntimeError, match=rf"rank {rank} has not joined the run 4 s after"):
        launch(asked("build", limits=Limits(stalled=4.0)), timeout=60)


@pytest.mark.slow
def test_a_rank_that_dies_before_it_comes_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    does = "time.sleep(6), os.kill(os.getpid(), signal.SIGKILL)"
    (place / "sitecustomize.py").write_text(AT_START.format(rank=1, does=does))
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
    either = "rank 1 (has not joined the run when|ended with exit code -9 before it joined)"
    with pytest.raises(RuntimeError, match=either):
        launch(asked("build"), timeout=60)


@pytest.mark.slow
def test_processes_go_on_bit_for_bit(place: Path) -> None:
    """Also by the command line, and with the learning rate as a function of one's own."""
    given = {"data": "faulty:plain", "every": 2}
    whole = launch(asked("build", steps=6, rate="linear", checkpoint=Path("all"), **given))
    launch(asked("build", steps=4, rate="faulty:six", checkpoint=Path("parts"), **given))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "stratagem.cli.app", "run", "plan.json", "faulty:build"),
            *("--data", "faulty:plain", "--steps", "6", "--rate", "linear", "--out", "rest.json"),
            *("--checkpoint", "parts", "--every", "2", "--resume", "parts"),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 steps, ")
    assert ExecutionResult.load("rest.json").losses == whole.losses[4:]
    one, two = load_checkpoint("all"), load_checkpoint("parts")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# -- several nodes ------------------------------------------------------------------------------


def start_node(
    place: Path, number: int, addresses: tuple[str, str], port: int, *before: str, **settings: str
) -> subprocess.Popen[bytes]:
    """torchrun of one of two nodes with a rank each, which meet at the first one's address."""
    is_host = str(int(number == 0))
    command = [
        *before,
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={addresses[0]}:{port}", "--rdzv-id=faults"),
        *(f"--rdzv-conf=is_host={is_host},read_timeout=20", f"--local-addr={addresses[number]}"),
        *("-m", "stratagem.executor", str(place / "plan.json"), "--model", "faulty:build"),
        *("--data", "faulty:slow", "--checkpoint", "saved", "--every", str(EVERY)),
    ]
    with (place / f"node{number}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--steps", str(FOREVER)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
        )


def end(nodes: list[subprocess.Popen[bytes]]) -> None:
    for node in nodes:
        node.kill()
        node.wait()


@pytest.mark.slow
def test_two_nodes_meet_and_one_that_dies_stops_the_other(place: Path) -> None:
    """Two loopback addresses as nodes; one loses torchrun and rank at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses = ("127.0.0.1", "127.0.0.2")
    nodes = [start_node(place, number, addresses, port) for number in (0, 1)]
    try:
        wait_for(lambda: len(complete_checkpoints("saved")) > 0)
        nodes[1].kill()
        wait_for(lambda: not ranks(place), STOP_SECONDS)
        told = [(place / f"node{number}.log").read_text() for number in (0, 1)]
        assert "RankError: torchrun, which started this rank, is gone" in told[1]
        assert re.search(r"RankError: rank 1 .*rank 0 stops at", told[0])
    finally:
        end(nodes)
    assert_checkpoint_is_whole()


NAMES = ("stratagem-a", "stratagem-b")


@pytest.fixture
def two_networks() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; their addresses."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    addresses = ("10.213.7.1", "10.213.7.2")

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0

    if not all(ip("netns", "add", name) for name in NAMES):
        pytest.skip("network namespaces cannot be made here")
    try:
        cable = ("link", "add", "one", "netns", NAMES[0], "type", "veth", "peer", "name", "two")
        assert ip(*cable, "netns", NAMES[1])
        for name, end, address in zip(NAMES, ("one", "two"), addresses, strict=True):
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            assert ip("-n", name, "link", "set", "lo", "up")
            assert ip("-n", name, "link", "set", end, "up")
        yield addresses
    finally:
        for name in NAMES:
            ip("netns", "del", name)


@pytest.mark.slow
def test_a_network_that_is_cut_stops_both_sides(
    place: Path, two_networks: tuple[str, str]
) -> None:
    nodes = [
        start_node(
            place,
            number,
            two_networks,
            29517,
            *("ip", "netns", "exec", NAMES[number]),
            GLOO_SOCKET_IFNAME=("one", "two")[number],
        )
        for number in (0, 1)
    ]
    try:
        wait_for(lambda: len(complete_checkpoints("saved")) > 0)
        assert len(ranks(place)) == 2
        cut = ["ip", "-n", NAMES[0], "link", "set", "one", "down"]
        subprocess.run(cut, check=True)
        wait_for(lambda: not ranks(place), STOP_SECONDS)
        told = [(place / f"node{number}.log").read_text() for number in (0, 1)]
        assert re.search(rf"RankError: rank 1 has been silent .* last at .*{WHERE}", told[0])
        assert re.search(rf"RankError: rank 1 has been cut off .* was at .*{WHERE}", told[1])
    finally:
        end(nodes)
    assert_checkpoint_is_whole()
