"""From a caller's second run on, its ranks are forked from one process that has their imports."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.executor.watching import kept_imports
from stratagem.executor.watching.kept_imports import (
    ForkedKeeper,
    keep_no_more,
    keeper_for,
    spawned_keeper,
)
from stratagem.executor.watching.process_activity import ranks_in_folder, state_of
from stratagem.executor.watching.run_folder import Scratch
from tests.executor.runs.test_rank_starter import ROOT, STARTER, Run, finished, processes
from tests.executor.runs.test_run_ends import wait_for

END_SECONDS = 30.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A place for runs, of which nothing is left in the end."""
    made = Run(tmp_path)
    made.settings["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'src'}"
    yield made
    keep_no_more()
    wait_for(lambda: not processes(tmp_path) and not servers(), END_SECONDS)


def servers() -> list[int]:
    """The fork servers of this process, whichever of its threads has started them."""
    told = [each.read_text() for each in Path("/proc/self/task").glob("*/children")]
    return [
        pid
        for pid in map(int, " ".join(told).split())
        if "fork_server" in Path(f"/proc/{pid}/cmdline").read_text() and state_of(pid) not in "ZX"
    ]


def keep(run: Run, module: str = "a_rank") -> None:
    """Come to where the next run of a module is forked."""
    with Scratch(keeper_for(module, run.settings)) as scratch:
        assert isinstance(scratch._keeper, subprocess.Popen)
    assert not servers()


def begun(run: Run, module: str, *words: str, look: Path | None = None) -> int | None:
    """Run a module as two ranks; the exit code. It is stopped when a file is there."""
    begin = keeper_for(module, run.settings)
    with Scratch(begin) as scratch:
        run.logs, run.store = scratch.folder / "logs", scratch.folder / "store"
        run.logs.mkdir()
        run.store.mkdir()
        ranks = ["fork", "2", str(run.logs), str(run.store), module, *words]
        code = scratch.run(
            [sys.executable, "-u", STARTER, *ranks],
            log=run.place / "log.txt",
            folder=run.place,
            environment=run.settings,
            timeout=60.0,
            look=None if look is None else look.exists,
        )
    assert not scratch.folder.exists()
    return code


def test_a_first_run_that_others_follow_is_forked_too(run: Run) -> None:
    """A link was measured by one program and the plan run by another: both imported torch."""
    with Scratch(keeper_for("a_rank", run.settings, others_follow=True)) as scratch:
        assert isinstance(scratch._keeper, ForkedKeeper)
    (server,) = servers()
    assert begun(run, "a_rank", str(run.place), "drawn") == 0
    assert servers() == [server]


@pytest.mark.slow
def test_a_rank_finds_what_a_first_run_gives_it(run: Run) -> None:
    """The environment, arguments, paths, signals and files of a program of its own."""
    finished(run.start("fork", "a_rank", str(run.place), "found"))
    expected = run.seen()
    keep(run)
    run.settings["PYTEST_CURRENT_TEST"] = "another one"
    assert begun(run, "a_rank", str(run.place), "found") == 0
    assert len(servers()) == 1
    for here, there in zip(run.seen(), expected, strict=True):
        settings = here["environment"], there["environment"]
        assert settings[0].pop("PYTEST_CURRENT_TEST") == "another one"
        settings[1].pop("PYTEST_CURRENT_TEST")
        for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"):
            assert all(each.pop(name) for each in settings)
        assert here == there


@pytest.mark.slow
def test_the_first_run_keeps_nothing_and_later_ones_share_a_process(run: Run) -> None:
    """Which imports a module once; another environment lets go of it."""
    (run.place / "counts.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "Path(sys.argv[-1] if 'fork' in sys.argv else 'imports', 'x').parent\n"
        "with open(Path(__file__).with_name('imports'), 'a') as file: file.write('x')\n"
        "from a_rank import main\n"
    )
    keep(run, "counts")
    for _ in range(3):
        assert begun(run, "counts", str(run.place), "drawn") == 0
        (server,) = servers()
    assert (run.place / "imports").read_text() == "x"
    one, two = run.seen()
    assert one["os"] != two["os"]
    assert one["uuid"] != two["uuid"]
    assert begun(run, "a_rank", str(run.place), "drawn") == 0
    assert servers() == [server]
    run.settings["SOME_OPTION"] = "1"
    assert begun(run, "counts", str(run.place), "drawn") == 0
    assert not servers()


def test_paths_that_depend_on_the_folder_are_read_anew(run: Run) -> None:
    run.settings["PYTHONPATH"] += f"{os.pathsep}."
    for _ in range(2):
        with Scratch(keeper_for("a_rank", run.settings)) as scratch:
            assert isinstance(scratch._keeper, subprocess.Popen)


@pytest.mark.slow
def test_a_process_that_was_killed_or_had_nothing_to_do_is_begun_anew(run: Run) -> None:
    keep(run)
    for _ in range(2):
        assert begun(run, "a_rank", str(run.place), "drawn") == 0
        (server,) = servers()
        os.kill(server, signal.SIGKILL)
        wait_for(lambda: not servers())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("raise ImportError('broken')", "ImportError: broken"),
        pytest.param(None, "not safe beside thread", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_forked_runs_as_before_and_says_why(
    run: Run, change: str | None, said: str
) -> None:
    """A module that does not import, and one that starts a thread."""
    thread = (
        "import sys, threading, time\n"
        "is_rank = 'watching' not in ' '.join(sys.orig_argv)\n"
        "threading.Thread(target=time.sleep, args=(1e6,), daemon=is_rank).start()\n"
    )
    (run.place / "broken.py").write_text(f"{change or thread}\nfrom a_rank import main\n")
    keep(run, "broken")
    tried = kept_imports.keeper_for("broken", run.settings)
    assert tried is spawned_keeper
    assert not servers() or change is None
    code = begun(run, "broken", str(run.place), "drawn")
    assert said in (run.place / "log.txt").read_text()
    assert code == (0 if change is None else 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "let go of"])
def test_a_run_outlives_the_process_that_it_was_forked_from(run: Run, how: str) -> None:
    """Also when nothing is kept any more while it goes on."""
    keep(run, "waits")
    done: list[int | None] = []
    stop = run.place / "stop"
    words = ("waits", "wait", str(run.place))
    with_stop = threading.Thread(target=lambda: done.append(begun(run, *words, look=stop)))
    with_stop.start()
    wait_for(lambda: all((run.place / f"{rank}.here").exists() for rank in range(2)))
    ranks = ranks_in_folder(run.store)
    assert sorted(ranks) == [0, 1]
    if how == "killed":
        os.kill(servers()[0], signal.SIGKILL)
        wait_for(lambda: not servers())
    else:
        keep_no_more()
    assert all(state_of(pid) not in "ZX" for pid in ranks.values())
    stop.touch()
    with_stop.join(END_SECONDS)
    assert done == [128 + signal.SIGTERM]
    assert all(state_of(pid) in "ZX" for pid in ranks.values())


CALLER = """
import os, sys
from pathlib import Path
from stratagem.executor.watching.kept_imports import keeper_for
from stratagem.executor.watching.run_folder import Scratch

place, starter = sys.argv[1:]
for what in ("first", "waits"):
    with Scratch(keeper_for("waits", os.environ)) as scratch:
        if what == "waits":
            logs, store = scratch.folder / "logs", scratch.folder / "store"
            logs.mkdir()
            store.mkdir()
            ranks = ["fork", "2", str(logs), str(store), "waits", "wait", place]
            log = Path(place, "log.txt")
            scratch.run([sys.executable, "-u", starter, *ranks], log=log, folder=place)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["caller", "keeper"])
def test_nothing_stays_of_a_run_whose_caller_or_keeper_is_killed(run: Run, killed: str) -> None:
    """Not the ranks, nor the process that they were forked from, nor the folder."""
    (run.place / "scratch").mkdir()
    run.settings["TMPDIR"] = str(run.place / "scratch")
    caller = run._run([sys.executable, "-c", CALLER, str(run.place), STARTER])
    wait_for(lambda: all((run.place / f"{rank}.here").exists() for rank in range(2)))
    (folder,) = (run.place / "scratch").glob("stratagem-*")
    (server,) = map(
        int, Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    )
    (keeper,) = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
    ranks = ranks_in_folder(folder / "store")
    assert sorted(ranks) == [0, 1]
    os.kill(caller.pid if killed == "caller" else keeper, signal.SIGKILL)
    told = finished(caller, code=-signal.SIGKILL if killed == "caller" else 1)
    everything = [server, keeper, *ranks.values()]
    wait_for(lambda: all(state_of(pid) in "ZX" for pid in everything), END_SECONDS)
    wait_for(lambda: not folder.exists(), END_SECONDS)
    assert killed == "caller" or "the process that keeps the run was ended" in told


@pytest.mark.slow
def test_a_fork_of_a_caller_begins_runs_of_its_own(run: Run) -> None:
    """It shares no connection: two that ask one process would read each other's answers."""
    keep(run)
    assert begun(run, "a_rank", str(run.place), "drawn") == 0
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with Scratch(keeper_for("a_rank", run.settings)) as scratch:
                code = int(isinstance(scratch._keeper, ForkedKeeper))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert begun(run, "a_rank", str(run.place), "drawn") == 0
    assert json.loads((run.place / "0.json").read_text())


RUNS = """
import os, resource, sys, threading, time
from pathlib import Path
from stratagem.executor.watching.kept_imports import keeper_for
from stratagem.executor.watching.run_folder import Scratch

place, starter = sys.argv[1:]
told = open(Path(place, "told"), "w")
os.dup2(told.fileno(), 50)


def go(module="a_rank", what="drawn", log="log.txt"):
    with Scratch(keeper_for(module, os.environ)) as scratch:
        logs, store = scratch.folder / "logs", scratch.folder / "store"
        logs.mkdir()
        store.mkdir()
        ranks = ["fork", "2", str(logs), str(store), module, place, what]
        command = [sys.executable, "-u", starter, *ranks]
        code = scratch.run(command, log=Path(place, log), folder=place, timeout=60.0)
    say(f"{code} {type(scratch._keeper).__name__}")


def say(text):
    os.write(50, f"{text}\\n".encode())


"""
FORKED, SPAWNED = "0 ForkedKeeper", "0 Popen"


def told_by(run: Run, program: str) -> list[str]:
    """What a caller of its own says of its runs."""
    command = [sys.executable, "-c", RUNS + program, str(run.place), STARTER]
    subprocess.run(command, env=run.settings, timeout=60.0, check=True)
    return (run.place / "told").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0", "2", "1, 2", "0, 1, 2"])
def test_a_caller_may_have_closed_its_streams(run: Run, closed: str) -> None:
    """Their numbers then went to the connection, in whose place the child's own streams came."""
    close = f"for number in ({closed},): os.close(number)\n"
    assert told_by(run, f"{close}go()\ngo()\ngo()") == [SPAWNED, FORKED, FORKED]


@pytest.mark.slow
def test_a_caller_may_have_more_files_than_select_knows(run: Run) -> None:
    """A run of such a caller failed at once: "filedescriptor out of range in select()"."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000:
        pytest.skip("this system allows too few files")
    many = (
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (2000, most))\n"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]\n"
    )
    assert told_by(run, f"{many}go()\ngo()") == [SPAWNED, FORKED]


@pytest.mark.slow
def test_a_fork_made_while_another_thread_imports_does_not_wait_for_it(run: Run) -> None:
    """The lock was held, in the fork for ever, by a thread that is not in there."""
    (run.place / "slow.py").write_text("import time\ntime.sleep(3)\nfrom a_rank import main\n")
    program = (
        "go('slow')\n"
        "thread = threading.Thread(target=go, args=('slow',))\n"
        "thread.start()\n"
        "time.sleep(1.0)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    go(log='log2.txt')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "say('waited')\n"
        "thread.join()\n"
    )
    told = told_by(run, program)
    assert sorted(told) == sorted([SPAWNED, SPAWNED, "waited", FORKED])


@pytest.mark.slow
def test_ranks_have_the_cores_and_limits_that_their_caller_has_now(run: Run) -> None:
    """A forked rank had those of when the process was begun that it is forked from."""
    change = "go(what='found')\ngo(what='found')\nos.umask(0o027)\ngo(what='found')\n"
    assert told_by(run, change) == [SPAWNED, FORKED, SPAWNED]
    assert {each["umask"] for each in run.seen()} == {0o027}


@pytest.mark.slow
def test_a_run_is_not_forked_from_a_process_of_another_environment(run: Run) -> None:
    """Which another thread has begun between a run's first question and its beginning."""
    keep(run)
    begin = keeper_for("a_rank", run.settings)
    run.settings["SOME_OPTION"] = "1"
    keep(run)
    other = keeper_for("a_rank", run.settings)
    with Scratch(begin) as scratch, Scratch(other) as another:
        assert isinstance(scratch._keeper, subprocess.Popen)
        assert isinstance(another._keeper, ForkedKeeper)
