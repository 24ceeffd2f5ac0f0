"""Runs whose caller, starter or network is not as it should be: nothing is open or left over."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.models import MLP
from stratagem.executor.backends.rank_stores import FolderStore
from stratagem.executor.running.launch import launch
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.watching.failures import failure_of
from stratagem.executor.watching.judges import Limits
from stratagem.executor.watching.kept_imports import keep_no_more
from stratagem.executor.watching.process_activity import ranks_with_setting, state_of
from stratagem.executor.watching.run_folder import Scratch
from stratagem.executor.watching.watch import RankError, Watch
from tests.executor.runs.test_faults import make_plan
from tests.support.processes import rank_of

ROOT = Path(__file__).parents[3]
END_SECONDS = 15.0
"""Within which a run must have ended."""
LISTENS, LOOPBACK = "0A", ("0100007F", "00000000000000000000000001000000")

MODEL = """
import atexit, os, time
import torch
from examples.models import MLP

RANK = int(os.environ.get("RANK", "0"))


def build():
    return MLP([6, 8, 3]), {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}


def hangs_at_its_exit():
    if RANK == 1:
        atexit.register(time.sleep, 10**6)
    return build()


class Rows:
    def __init__(self, late=None):
        self.late = late

    def __iter__(self):
        for number in range(10**6):
            time.sleep(8 if number == self.late and RANK == 1 else 0.01)
            yield build()[1] | {"x": torch.full((4, 6), float(number % 7))}


def rows():
    torch.manual_seed(0)
    return Rows()


def one_late():
    torch.manual_seed(0)
    return Rows(3)
"""


def asked(build: str, **given: Any) -> RunRequest:
    """A run of this file's plan and model."""
    return RunRequest(plan=Path("plan.json"), model=f"endings:{build}", **given)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a plan, a model and a place for temporary files, all its own."""
    (tmp_path / "endings.py").write_text(MODEL)
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    make_plan(MLP([6, 8, 3]), batch).save(tmp_path / "plan.json")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    keep_no_more()
    try:
        wait_for(lambda: not of_run(tmp_path), END_SECONDS)
    finally:
        for pid in of_run(tmp_path):
            os.kill(pid, signal.SIGKILL)


def of_run(place: Path) -> dict[int, str]:
    """Every process that has the folder of a test for its temporary files, with its command."""
    found = {}
    mark = f"TMPDIR={place / 'scratch'}".encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            settings = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if mark in settings and state_of(int(name)) not in "ZX" and int(name) != os.getpid():
            found[int(name)] = command
    return found


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.05)


def started(place: Path, *more: str) -> subprocess.Popen[bytes]:
    """A command line that trains for ever."""
    command = [sys.executable, "-m", "stratagem.cli.app", "run", "plan.json", "endings:build"]
    endless = ("--data", "endings:rows", "--steps", "100000", "--warmup", "0")
    with (place / "told.txt").open("wb") as log:
        return subprocess.Popen(
            [*command, *endless, *more], stdout=log, stderr=log, start_new_session=True
        )


def is_training(place: Path) -> bool:
    return "training: 0%" in (place / "told.txt").read_text()


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """The address and process of every socket that processes listen on."""
    owners = {}
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                owners[each.readlink().name] = pid
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            pid = owners.get(f"socket:[{words[9]}]")
            if pid is not None and (words[3] == LISTENS or table.startswith("udp")):
                found.append((words[1].partition(":")[0], pid))
    return found


@pytest.mark.slow
def test_a_run_listens_to_its_own_machine_only(place: Path) -> None:
    """torchrun's store took pickles from whoever reached the machine; now it listens nowhere."""
    caller = started(place)
    try:
        wait_for(lambda: is_training(place))
        run = of_run(place)
        assert len([each for each in run.values() if "stratagem.executor" in each]) >= 3
        sockets = listening(run)
        assert sockets, "the ranks of gloo connect by sockets"
        assert all(address in LOOPBACK for address, _ in sockets), sockets
        assert {rank_of(pid) for _, pid in sockets} == {0, 1}
        (folder,) = (place / "scratch").glob("stratagem-*")
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        caller.kill()
        caller.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
    ],
)
def test_a_caller_that_is_ended_takes_its_run_with_it(place: Path, number: int) -> None:
    """Ctrl-C is heard by all that share the caller's terminal, as the run's processes do not."""
    caller = started(place, "--checkpoint", "kept", "--every", "5")
    wait_for(lambda: is_training(place))
    os.killpg(caller.pid, number)
    caller.wait(END_SECONDS)
    wait_for(lambda: not of_run(place), END_SECONDS)
    wait_for(lambda: not list((place / "scratch").glob("stratagem-*")), END_SECONDS)


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(place: Path) -> None:
    """Of one process: each has a folder, a secret and a starter of its own."""
    found: dict[int, tuple[float, ...]] = {}

    def run(steps: int) -> None:
        report = launch(asked("build", data="endings:rows", steps=steps), timeout=120)
        found[steps] = report.losses

    threads = [threading.Thread(target=run, args=(steps,)) for steps in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found[5]) == 5
    assert found[3] == found[5][:3]


@pytest.mark.slow
def test_a_run_whose_starter_is_killed_at_its_start_leaves_no_rank(place: Path) -> None:
    caller = started(place)
    wait_for(lambda: {rank_of(pid) for pid in of_run(place)} >= {0, 1})
    for pid, command in of_run(place).items():
        if "rank_starter.py" in command and rank_of(pid) is None:
            os.kill(pid, signal.SIGKILL)
    assert caller.wait(END_SECONDS) == 2
    assert not of_run(place)
    assert "error: a run of 2 ranks failed" in (place / "told.txt").read_text()


@pytest.mark.slow
def test_a_keeper_that_is_killed_takes_the_run_with_it(place: Path) -> None:
    caller = started(place)
    wait_for(lambda: is_training(place))
    for pid, command in of_run(place).items():
        if "keeper.py" in command:
            os.kill(pid, signal.SIGKILL)
    assert caller.wait(END_SECONDS) == 2
    wait_for(lambda: not of_run(place), END_SECONDS)
    assert "the process that keeps the run was ended" in (place / "told.txt").read_text()
    assert not list((place / "scratch").glob("stratagem-*"))


@pytest.mark.slow
def test_a_rank_that_hangs_at_its_exit_keeps_the_result(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.executor.running.launch.LAST_SECONDS", 5.0)
    with pytest.warns(UserWarning, match=r"rank 1 did not end within 5 s of the run's result"):
        report = launch(asked("hangs_at_its_exit", steps=3), timeout=120)
    assert len(report.losses) == 3
    assert not of_run(place)


@pytest.mark.slow
def test_a_batch_that_is_late_ends_nothing(place: Path) -> None:
    """A new epoch or a slow network: the rank is idle for longer than it may be elsewhere."""
    limits = Limits(silent=4.0, stalled=3.0)
    request = asked("build", data="endings:one_late", steps=5, limits=limits)
    report = launch(request, timeout=120)
    assert len(report.losses) == 5


WATCHES = """
import os, sys, time
from stratagem.executor.watching.judges import Limits
from stratagem.executor.watching.watch import Watch

with Watch(0, 2, Limits(silent=2.0, stalled=60.0)) as watch, watch.guard():
    time.sleep(60)
"""


@pytest.mark.slow
def test_what_a_store_says_of_a_process_ends_no_process(tmp_path: Path) -> None:
    """A beat that names somebody else's stopped process as the rank that is silent."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(other.pid, signal.SIGSTOP)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    host = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    beat = f'{{"count": 1, "where": {{}}, "host": "{host}", "pid": {other.pid}}}'
    FolderStore(tmp_path / "watch-0-0").set("beat/1", beat)
    settings = {"STRATAGEM_STORE": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", WATCHES],
            env=os.environ | settings | {"TORCHELASTIC_RUN_ID": "a run"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "rank 1 has been silent for 2 s" in done.stderr
        assert state_of(other.pid) == "T"
    finally:
        other.kill()
        other.wait()


TOLD = """
import sys, time
from stratagem.executor.watching.judges import Limits
from stratagem.executor.watching.watch import Watch

with Watch(0, 2, Limits(silent=2.0, stalled=60.0)) as watch, watch.guard():
    watch.ask(lambda: sys.argv[1])
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "finding"),
    [
        ("NcclError: NCCL_ERROR_INVALID_USAGE: duplicate GPU", "NCCL_ERROR_INVALID_USAGE"),
        ("NcclError: NCCL_ERROR_REMOTE_ERROR: reset by peer", "rank 1 stopped: no disk left"),
    ],
)
def test_what_a_backend_finds_wrong_ends_a_rank_that_waits(
    told: str, finding: str, tmp_path: Path
) -> None:
    """Its own fault is told at once; of another rank's, what that one says of itself."""
    store = FolderStore(tmp_path / "watch-0-0")
    settings = {"STRATAGEM_STORE": str(tmp_path), "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        [sys.executable, "-c", TOLD, told],
        env=os.environ | settings,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        if "REMOTE" in told:
            wait_for(lambda: store.check(["beat/0"]))
            store.set("fault", "rank 1 stopped: no disk left")
        _, said = run.communicate(timeout=60)
    assert f"RankError: {'rank 0 failed at starting: ' if finding in told else ''}" in said
    assert finding in said
    assert store.get("fault").decode() in said


@pytest.mark.parametrize(
    "error", ["UNHANDLED_CUDA_ERROR", "INVALID_USAGE", "INVALID_ARGUMENT", "INTERNAL_ERROR"]
)
def test_a_fault_of_a_rank_is_not_taken_for_the_loss_of_another(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL says so of memory that it does not get, or of an address that is none."""
    monkeypatch.setenv("STRATAGEM_STORE", str(tmp_path))
    wrong = RuntimeError(f"NCCL_ERROR_{error}: unhandled (run with NCCL_DEBUG=INFO)")
    with (
        Watch(0, 2, Limits()) as watch,
        pytest.raises(RuntimeError, match=error) as told,
        watch.guard(),
    ):
        raise wrong
    assert not isinstance(told.value, RankError)
    (folder,) = tmp_path.glob("watch-*")
    fault = FolderStore(folder).get("fault").decode()
    assert fault.startswith(f"rank 0 failed at starting: RuntimeError: NCCL_ERROR_{error}")


def test_a_rank_leaves_its_error_before_others_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank that heard of it was faster, and the run's error had no traceback."""
    left = tmp_path / "1" / "error.json"
    left.parent.mkdir()
    monkeypatch.setenv("STRATAGEM_STORE", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(left))
    heard: list[str] = []
    accuse = Watch._accuse

    def hear(watch: Watch, text: str) -> None:
        heard.append(failure_of(tmp_path, 1))
        accuse(watch, text)

    monkeypatch.setattr(Watch, "_accuse", hear)
    with Watch(1, 2, Limits()) as watch:
        watch.place.enter(12, "taking the batch")
        with pytest.raises(KeyError), watch.guard():
            raise KeyError("a story")
    (told,) = heard
    first = told.splitlines()[0]
    assert first.startswith("rank 1 ended with KeyError: 'a story'")
    assert first.endswith("rank 1 was at step 12, taking the batch")


def test_a_rank_is_found_by_its_environment_and_its_parent() -> None:
    mark = f"STRATAGEM_MARK={os.urandom(8).hex()}"
    name, _, value = mark.partition("=")
    child = subprocess.Popen(["sleep", "60"], env=os.environ | {name: value, "RANK": "7"})
    try:
        wait_for(lambda: ranks_with_setting(mark) == {7: child.pid})
        assert ranks_with_setting(mark, os.getpid()) == {7: child.pid}
        assert ranks_with_setting(mark, os.getppid()) == {}
    finally:
        child.kill()
        child.wait()
    assert ranks_with_setting(mark) == {}


def test_a_store_of_files_keeps_the_first_of_two_faults(tmp_path: Path) -> None:
    one, two = FolderStore(tmp_path / "store"), FolderStore(tmp_path / "store")
    assert not one.check(["fault"])
    results: list[bytes] = []
    faults = [f"fault {number}" for number in range(16)]
    threads = [
        threading.Thread(
            target=lambda text=text: results.append(two.compare_set("fault", "", text))
        )
        for text in faults
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert one.get("fault").decode() in faults
    one.set("beat/0", "x" * 10_000)
    assert two.multi_get(["beat/0", "fault"]) == [b"x" * 10_000, results[0]]
    assert not list((tmp_path / "store").glob(".*.new"))


@pytest.mark.slow
def test_a_scratch_folder_ends_what_was_started_in_it(tmp_path: Path) -> None:
    """Also a process that has left its parents and their session."""
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' & while [ ! -s {pid} ]; do :; done"
    with Scratch() as scratch:
        code = scratch.run(["sh", "-c", script], log=scratch.folder / "log")
        assert code == 0
        assert state_of(int(pid.read_text())) == "X"
        assert scratch.folder.exists()
    assert not scratch.folder.exists()


def test_a_scratch_folder_in_which_nothing_runs_says_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As where the caller fails before: its own error is the one to read."""
    with Scratch() as scratch:
        assert scratch.folder.exists()
    assert not scratch.folder.exists()
    assert capfd.readouterr() == ("", "")


def test_a_command_is_stopped_when_time_is_over() -> None:
    with Scratch() as scratch:
        before = time.monotonic()
        code = scratch.run(["sleep", "600"], log=scratch.folder / "log", timeout=0.5)
        assert code is None
        assert time.monotonic() - before < END_SECONDS


def test_a_command_is_stopped_by_a_keeper_that_begins_late() -> None:
    """On a busy machine it hears what it is to run and that it is to stop in one breath."""
    with Scratch() as scratch:
        keeper = scratch._keeper.pid
        os.kill(keeper, signal.SIGSTOP)
        later = threading.Timer(0.5, os.kill, (keeper, signal.SIGCONT))
        later.start()
        log = scratch.folder / "log"
        assert scratch.run(["sleep", "1000"], log=log, timeout=0.0) is None
        later.join()


@pytest.mark.slow
def test_a_scratch_folder_goes_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from stratagem.executor.watching.run_folder import Scratch\n"
        "with Scratch() as scratch:\n"
        "    print(scratch.folder, flush=True)\n"
        "    scratch.run(['sleep', '600'], log=scratch.folder / 'log')\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None
    folder = Path(caller.stdout.readline().strip())
    assert re.fullmatch(r"stratagem-\w+", folder.name)
    wait_for((folder / "log").exists)
    caller.kill()
    caller.wait()
    caller.stdout.close()
    wait_for(lambda: not folder.exists(), END_SECONDS)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_faults_at_random_moments_lose_nothing() -> None:
    """Two of each kind, and every run gone on with to its end."""
    kinds, each = 11, 2
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--runs", str(kinds * each), "--seed", "3"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == kinds
    for fault in found:
        assert fault["runs"] == fault["equal"] == each, fault
        assert fault["left_processes"] == fault["left_files"] == 0, fault
