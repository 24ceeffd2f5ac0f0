"""What starts the ranks of a run on one machine: they find what torchrun would give them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.models import MLP
from stratagem.executor.running.launch import launch, run_ranks
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.watching import rank_starter
from stratagem.executor.watching.process_activity import ranks_in_folder, state_of
from stratagem.simulator.plan.provenance import ProcessBackend
from tests.executor.runs.test_faults import make_plan
from tests.executor.runs.test_run_ends import wait_for
from tests.support.processes import rank_of

ROOT = Path(__file__).parents[3]
STARTER = str(rank_starter.__file__)
WAIT_SECONDS = 60.0

RANK = '''
import atexit, json, os, random, signal, sys, tempfile, threading, time, uuid
from pathlib import Path

random.seed(7)
DRAWN = random.random()


def found():
    """What a program can see of how it was started."""
    handlers = {each.name: str(signal.getsignal(each)) for each in signal.Signals}
    return {
        "environment": dict(os.environ),
        "arguments": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "main": sys.modules["__main__"].__spec__.name,
        "leads its session": os.getsid(0) == os.getpid(),
        "signals": {name: each for name, each in handlers.items() if name != "SIGUSR2"},
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
        "input": os.readlink("/proc/self/fd/0"),
        "umask": os.umask(0o22),
        "threads": threading.active_count(),
        "is main": threading.current_thread() is threading.main_thread(),
    }


def drawn():
    numpy = sys.modules.get("numpy")
    return {
        "os": os.urandom(8).hex(),
        "random": random.random(),
        "numpy": None if numpy is None else numpy.random.random(),
        "uuid": str(uuid.uuid4()),
        "name": tempfile.mktemp(),
    }


def main():
    rank, (folder, what) = os.environ["RANK"], sys.argv[1:]
    seen = found() if what == "found" else {"forked": "rank_starter" in " ".join(sys.orig_argv)}
    if what == "drawn":
        seen |= drawn()
    Path(folder, rank + ".json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
'''

ENDS = """
import atexit, os, signal, sys, threading, time

sys.stdout.write("imported\\n")


def hook():
    print("hook")


def late():
    time.sleep(0.3)
    print("a thread that is waited for")


def fail():
    raise KeyError("a story")


def main():
    what = sys.argv[1]
    atexit.register(hook)
    print("begins", end="")
    if what == "thread":
        threading.Thread(target=late).start()
    elif what == "daemon":
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()
    elif what == "broken hook":
        atexit.register(fail)
    elif what == "exit":
        sys.exit()
    elif what == "number":
        sys.exit(259)
    elif what == "text":
        sys.exit("told")
    elif what == "error":
        fail()
    elif what == "at once":
        os._exit(7)
    elif what == "killed":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)


if __name__ == "__main__":
    main()
"""
ENDINGS = {
    "return": 0,
    "thread": 0,
    "daemon": 0,
    "broken hook": 0,
    "exit": 0,
    "number": 3,
    "text": 1,
    "error": 1,
    "at once": 7,
    "killed": -signal.SIGSEGV,
    "interrupted": -signal.SIGINT,
}

WAITS = """
import os, signal, sys, time
from pathlib import Path


def main():
    if os.environ["RANK"] == "1" and sys.argv[1] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.argv[2], os.environ["RANK"] + ".here").touch()
    while os.environ["RANK"] == "0" and sys.argv[1] != "wait":
        if Path(sys.argv[2], "1.here").exists():
            sys.exit(3)
        time.sleep(0.01)
    time.sleep(10**6)


if __name__ == "__main__":
    main()
"""


class Run:
    """A folder with modules, and a run of one of them as ranks, without anything else."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name, text in (("a_rank", RANK), ("ends", ENDS), ("waits", WAITS)):
            (place / f"{name}.py").write_text(text)
        self.settings = os.environ | {
            "PYTHONPATH": str(place),
            "PYTHONSAFEPATH": "1",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

    def start(
        self, how: str, *words: str, ranks: int = 2, before: tuple[str, ...] = ("-u", STARTER)
    ) -> subprocess.Popen[str]:
        """Begin a run, whose logs are in a new folder."""
        self.logs, self.store = (self.place / f"{name}-{secrets.token_hex(4)}" for name in "ls")
        self.logs.mkdir()
        self.store.mkdir()
        given = (how, str(ranks), str(self.logs), str(self.store))
        return self._run([sys.executable, *before, *given, *words])

    def start_torchrun(self, *words: str) -> subprocess.Popen[str]:
        """Begin one as torchrun has it."""
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={self.place / 'meeting'}")
        more = ("--rdzv-conf=store_type=file", "--local-addr=127.0.0.1", "--redirects=3")
        command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
        logs = f"--log-dir={self.place / 'torchrun'}"
        return self._run([*command, *meeting, *more, logs, "-m", *words])

    def _run(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.place,
            env=self.settings,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def seen(self) -> list[dict[str, Any]]:
        """What both ranks of `a_rank` have written."""
        return [json.loads((self.place / f"{rank}.json").read_text()) for rank in range(2)]

    def said(self, rank: int) -> tuple[str, str]:
        folder = self.logs / str(rank)
        return (folder / "stdout.log").read_text(), (folder / "stderr.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A place for runs, of which nothing is left in the end."""
    yield Run(tmp_path)
    wait_for(lambda: not processes(tmp_path), WAIT_SECONDS)


def processes(place: Path) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{name}/cmdline").read_text()
        except OSError:
            continue
        if str(place) in command and state_of(int(name)) not in "ZX":
            found.append(int(name))
    return found


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    _, told = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code, told
    return told


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "exec"])
def test_a_rank_finds_what_torchrun_gives_it(run: Run, how: str) -> None:
    """A secret, a port and the place of the logs are each run's own.

    Which signals torchrun itself heeds it only happens to tell its ranks.
    """
    finished(run.start_torchrun("a_rank", str(run.place), "found"))
    expected = run.seen()
    for each in expected:
        del each["environment"]["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    finished(run.start(how, "a_rank", str(run.place), "found"))
    ours = run.seen()
    for rank, (here, there) in enumerate(zip(ours, expected, strict=True)):
        settings = here["environment"], there["environment"]
        for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"):
            assert all(each.pop(name) for each in settings)
        assert settings[0] == settings[1]
        assert here == there
        assert settings[0]["RANK"] == str(rank)
    assert (run.logs / "0" / "stdout.log").exists()


def test_ranks_are_forked_though_numpy_has_threads(run: Run) -> None:
    """OpenBLAS ends its threads at a fork and starts them anew, in a rank of more cores too."""
    (run.place / "with_numpy.py").write_text("import numpy, threading\nfrom a_rank import main\n")
    run.settings["OPENBLAS_NUM_THREADS"] = "3"
    told = finished(run.start("fork", "with_numpy", str(run.place), "drawn"))
    assert told == ""
    assert all(each["forked"] for each in run.seen())


def test_beside_a_second_thread_ranks_are_not_forked(run: Run) -> None:
    (run.place / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(10**6,), daemon=True, name='idle').start()\n"
    )
    told = finished(run.start("fork", "a_rank", str(run.place), "forked"))
    assert "ranks are programs of their own" in told
    assert "not safe beside thread 'idle'" in told
    assert not any(each["forked"] for each in run.seen())


def test_forked_ranks_draw_numbers_of_their_own(run: Run) -> None:
    """What seeds itself from the system does so in each, as in programs of their own."""
    (run.place / "with_numpy.py").write_text("import numpy\nfrom a_rank import main\n")
    finished(run.start("fork", "with_numpy", str(run.place), "drawn"))
    one, two = run.seen()
    assert one.pop("forked")
    assert two.pop("forked")
    assert not [name for name in one if one[name] == two[name] or one[name] is None]


@pytest.mark.parametrize("case", ENDINGS)
def test_a_forked_rank_ends_as_a_program_does(run: Run, case: str) -> None:
    """By its exit code, by what it says, by hooks that run once, and by threads waited for."""
    alone = subprocess.run(
        [sys.executable, "-u", "-m", "ends", case],
        cwd=run.place,
        env=run.settings,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert alone.returncode == ENDINGS[case]
    finished(run.start("fork", "ends", case, ranks=1), code=int(alone.returncode != 0))
    out, err = run.said(0)
    # Modules are imported before the fork, so that what they say then is not said by a rank.
    assert out == alone.stdout.removeprefix("imported\n")
    assert err.splitlines()[-1:] == alone.stderr.splitlines()[-1:]
    if alone.returncode != 0:
        ended = json.loads((run.logs / "ended.json").read_text())
        assert ended == {"rank": 0, "code": alone.returncode}
    else:
        assert not (run.logs / "ended.json").exists()


DRIVER = """
import importlib.util, os, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("starter", {starter!r})
starter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(starter)
{change}
how, count, logs, store, *command = sys.argv[1:]
os._exit(starter.Starter(int(count), Path(logs), Path(store), command).main(forks=how == "fork"))
"""


@pytest.mark.parametrize("how", ["fork", "exec"])
@pytest.mark.parametrize("case", ["heeds", "deaf"])
def test_the_first_rank_that_fails_ends_the_others(run: Run, how: str, case: str) -> None:
    """One that does not heed SIGTERM is killed."""
    change = "starter.GRACE_SECONDS = 0.5"
    driver = DRIVER.format(starter=STARTER, change=change)
    told = finished(run.start(how, "waits", case, str(run.place), before=("-c", driver)), code=1)
    assert "rank 0" in told
    assert "ended with exit code 3" in told
    assert json.loads((run.logs / "ended.json").read_text()) == {"rank": 0, "code": 3}


@pytest.mark.parametrize("how", ["fork", "exec"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_their_starter(run: Run, how: str, number: int) -> None:
    """However it ends. That ranks were asked to end is no failure of one of them."""
    process = run.start(how, "waits", "wait", str(run.place))
    wait_for(lambda: all((run.place / f"{rank}.here").exists() for rank in range(2)))
    process.send_signal(number)
    finished(process, code=-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: not processes(run.place), WAIT_SECONDS)
    assert not (run.logs / "ended.json").exists()


def test_ranks_are_found_by_the_folder_and_by_what_the_system_says(run: Run) -> None:
    """A file that names somebody else's process, or one of another time, names no rank."""
    process = run.start("fork", "waits", "wait", str(run.place))
    wait_for(lambda: all((run.place / f"{rank}.here").exists() for rank in range(2)))
    try:
        found = ranks_in_folder(run.store, process.pid)
        assert sorted(found) == [0, 1]
        assert {rank: rank_of(pid) for rank, pid in found.items()} == {0: 0, 1: 1}
        assert ranks_in_folder(run.store, os.getpid()) == {}
        begun = int(rank_starter.begun_at(found[1]))
        (run.store / "rank-1").write_text(f"{found[1]} {begun - 1}")
        (run.store / "rank-5").write_text(f"{os.getpid()} {begun}")
        (run.store / "rank-6").write_text(str(os.getpid()))
        (run.store / "rank-7").write_text("")
        assert ranks_in_folder(run.store) == {0: found[0]}
    finally:
        process.terminate()
        finished(process, code=128 + signal.SIGTERM)


def test_a_rank_that_the_system_does_not_start_is_named(run: Run) -> None:
    """No more processes: those that run are ended."""
    change = (
        "real, calls = os.fork, []\n"
        "def fork():\n"
        "    calls.append(1)\n"
        "    if len(calls) > 1:\n"
        "        raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return real()\n"
        "os.fork = fork"
    )
    driver = DRIVER.format(starter=STARTER, change=change)
    finished(run.start("exec", "waits", "wait", str(run.place), before=("-c", driver)), code=1)
    said = json.loads((run.logs / "1" / "error.json").read_text())["message"]["message"]
    assert "could not be started: [Errno 11] Resource temporarily unavailable" in said


def test_a_run_that_fails_before_its_ranks_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        run_ranks(["stratagem.nowhere"], 2, timeout=WAIT_SECONDS)
    told = str(caught.value)
    assert "no rank said anything, and the rank starter ended with exit code 1" in told
    assert "ModuleNotFoundError: No module named 'stratagem.nowhere'" in told


class Told:
    """Stands for a run's folder, and keeps the command that is to be run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, command: list[str], **given: object) -> int:
        self.command = command
        return 0


@pytest.mark.parametrize(
    ("module", "backend", "how"),
    [
        ("stratagem.executor", "gloo", "fork"),
        ("stratagem.executor", "nccl", "exec"),
        ("somebody.elses", "gloo", "exec"),
    ],
)
def test_only_ranks_of_ours_on_cpus_are_forked(
    tmp_path: Path, module: str, backend: ProcessBackend, how: str
) -> None:
    """CUDA does not survive a fork, and what somebody else's module imports may not either."""
    told = Told(tmp_path)
    run_ranks([module, "plan.json"], 3, scratch=told, backend=backend)  # type: ignore[arg-type]
    after = told.command[told.command.index(STARTER) + 1 :]
    assert after[:2] == [how, "3"]
    assert after[4:] == [module, "plan.json"]


MODEL = """
import atexit, os, sys
from pathlib import Path

import torch
from examples.models import MLP


def build():
    before = set(sys.modules)

    def tell():
        forked = "forked" if "watching" in " ".join(sys.orig_argv) else "not forked"
        found = [forked, *sorted(set(sys.modules) - before)]
        Path(os.environ["RANK"] + ".txt").write_text("\\n".join(found))

    atexit.register(tell)
    return MLP([6, 8, 3]), {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
"""


@pytest.mark.slow
def test_forked_ranks_import_nothing_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch and numba load at the first capture, gradient and kernel is there by then."""
    (tmp_path / "loads.py").write_text(MODEL)
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    make_plan(MLP([6, 8, 3]), batch).save(tmp_path / "plan.json")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    monkeypatch.chdir(tmp_path)
    launch(RunRequest(plan=Path("plan.json"), model="loads:build", steps=2), timeout=180)
    for rank in range(2):
        how, *loaded = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert how == "forked"
        heavy = ("sympy", "networkx", "scipy", "numba", "torch._dynamo", "torch._functorch")
        assert not [each for each in loaded if each.startswith(heavy)]


@pytest.mark.parametrize("code", [0, 3])
def test_a_module_of_somebody_else_runs_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "theirs.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "if os.environ['RANK'] == '1':\n    sys.exit(int(sys.argv[1]))\n"
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    if code == 0:
        run_ranks(["theirs", "0"], 2, folder=tmp_path, timeout=WAIT_SECONDS)
        return
    with pytest.raises(RuntimeError, match=r"rank 1 ended with exit code 3 before it joined"):
        run_ranks(["theirs", str(code)], 2, folder=tmp_path, timeout=WAIT_SECONDS)


def test_nothing_waits_in_the_log_of_a_starter(run: Run) -> None:
    """What a module says while it is imported is said once, not by each rank again."""
    finished(run.start("fork", "ends", "return"))
    assert [run.said(rank)[0] for rank in range(2)] == ["beginshook\n"] * 2
