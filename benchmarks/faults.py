"""What is lost when something hits a training run? Runs are hit at random and gone on with.

    python -m benchmarks.faults --runs 60 [--seed 0] [--fault NAME]

Each run trains a small model by two ranks from the command line, is hit once at a random moment by
one of `FAULTS`, and then resumed until it is done. Prints one JSON object for each fault:

runs                how many runs were hit by it
equal               how many ended bit for bit as the undisturbed run did
seconds_to_error    of runs that failed the longest from the hit until all processes had ended
left_processes      processes of all these runs that were left 15 s after their command line's end
left_files          temporary folders and half files that were left then

A hit before there is any process to aim at, or after the end, counts as a run like any other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from examples.models import MLP
from stratagem.executor.checkpoints.folder import checkpoint_path, complete_checkpoints
from stratagem.executor.checkpoints.index import CheckpointIndex
from stratagem.simulator.graph.placement import REPLICATE, Shard
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.torch_ops.capture.capture import capture

ROOT = Path(__file__).parents[1]
STEPS, EVERY = 60, 5
LIMIT_SECONDS = 120.0
"""After which a run that does not end is given up, and counts as that long."""
LEFT_SECONDS = 15.0
"""After the end of the command line, until which what it started must have ended."""

MODEL = """
import atexit
import os
import time

import torch
from examples.models import MLP

RANK = int(os.environ.get("RANK", "-1"))


def build():
    return MLP([6, 8, 3]), {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}


def build_and_hang():
    if RANK == 1:
        atexit.register(time.sleep, 10**6)
    return build()


class Rows:
    def __init__(self, late):
        self.late = late

    def __iter__(self):
        for number in range(10**6):
            time.sleep(25 if number == self.late and RANK == 1 else 0.05)
            made = torch.Generator().manual_seed(number)
            x = torch.randn(4, 6, generator=made)
            yield {"x": x, "target": torch.randint(0, 3, (4,), generator=made)}


def rows():
    return Rows(None)


def one_late():
    return Rows(7)
"""


@dataclass
class Found:
    """What runs that one fault hit came to."""

    runs: int = 0
    equal: int = 0
    seconds_to_error: float = 0.0
    left_processes: int = 0
    left_files: int = 0


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run: a signal to a process, or a model that misbehaves."""

    hit: Callable[[Site], None] = lambda site: None
    model: str = "build"
    data: str = "rows"


def _heed_signals() -> None:
    """Even where this program runs in the background, which ignores some of them."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Site:
    """The folder of one run, with a place of its own for temporary files."""

    folder: Path
    command_line: subprocess.Popen[bytes] | None = field(default=None)

    def start(self, fault: Fault, *more: str) -> None:
        """Begin to train, or go on."""
        command = [
            sys.executable,
            "-m",
            "stratagem.cli.app",
            "run",
            "plan.json",
            f"hit:{fault.model}",
        ]
        given = ["--data", f"hit:{fault.data}", "--steps", str(STEPS), "--warmup", "0"]
        kept = ["--checkpoint", "kept", "--every", str(EVERY)]
        settings = {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "temporary"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }
        with (self.folder / "told.txt").open("ab") as told:
            self.command_line = subprocess.Popen(
                [*command, *given, *kept, *more],
                cwd=self.folder,
                env=os.environ | settings,
                stdout=told,
                stderr=told,
                start_new_session=True,
                preexec_fn=_heed_signals,
            )

    def processes(self) -> dict[int, tuple[str, str]]:
        """Every process of the run: its command, and its rank if it is one."""
        found = {}
        mark = f"TMPDIR={self.folder / 'temporary'}".encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                settings = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                command = Path(f"/proc/{name}/cmdline").read_text().replace("\0", " ")
                if mark in settings and command:
                    said = Path(f"/proc/{name}/fd/1").readlink()
                    is_rank = said.name == "stdout.log"  # Among the logs, in a folder of its own.
                    found[int(name)] = (command, said.parent.name if is_rank else "")
        return found

    def signal(self, number: int, words: str, rank: str = "") -> None:
        """Send a signal to every process of the run with these words in its command."""
        for pid, (command, own) in self.processes().items():
            if words in command and own == rank:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait(self, since: float) -> float:
        """Seconds from then until the command line and all that it started have ended."""
        assert self.command_line is not None
        until = since + LIMIT_SECONDS
        try:
            self.command_line.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return LIMIT_SECONDS
        ended = time.monotonic()
        while self.processes() and time.monotonic() < ended + LEFT_SECONDS:
            time.sleep(0.05)
        return time.monotonic() - since

    def failed(self) -> bool:
        """Whether the command line did not end well."""
        return self.command_line is not None and self.command_line.returncode != 0

    def clear(self) -> int:
        """End what is left; how many processes that were."""
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.command_line is not None:
            self.command_line.wait()
        return len(left)

    def left_files(self) -> int:
        """Temporary folders, and files that were to get another name."""
        temporary = [*(self.folder / "temporary").glob("stratagem-*")]
        return len(temporary) + len([*self.folder.glob(".*.tmp")])

    def result(self) -> list[str]:
        """The hashes of what was trained in the end; nothing without an end."""
        path = checkpoint_path(self.folder / "kept", STEPS)
        if STEPS not in complete_checkpoints(self.folder / "kept"):
            return []
        return [file.sha256 for file in CheckpointIndex.load(path).files]


def _to_command_line(*numbers: int) -> Callable[[Site], None]:
    def hit(site: Site) -> None:
        assert site.command_line is not None
        for number in numbers:
            site.command_line.send_signal(number)
            time.sleep(0.2)

    return hit


FAULTS: dict[str, Fault] = {
    "rank killed": Fault(lambda site: site.signal(signal.SIGKILL, "stratagem.executor", "1")),
    "rank stopped": Fault(lambda site: site.signal(signal.SIGSTOP, "stratagem.executor", "0")),
    "starter killed": Fault(lambda site: site.signal(signal.SIGKILL, "rank_starter.py")),
    "keeper killed": Fault(lambda site: site.signal(signal.SIGKILL, "keeper.py")),
    "command line killed": Fault(_to_command_line(signal.SIGKILL)),
    "command line terminated": Fault(_to_command_line(signal.SIGTERM)),
    "terminal closed": Fault(_to_command_line(signal.SIGHUP)),
    "interrupted": Fault(_to_command_line(signal.SIGINT)),
    "interrupted twice": Fault(_to_command_line(signal.SIGINT, signal.SIGINT)),
    "late batch": Fault(data="one_late"),
    "rank hangs at its exit": Fault(model="build_and_hang"),
}
"""What may happen to a run, by name."""


def make_site(folder: Path) -> Site:
    """A folder with a plan for two ranks and the model."""
    (folder / "temporary").mkdir(parents=True)
    (folder / "hit.py").write_text(MODEL)
    batch = {"x": torch.randn(4, 6), "target": torch.randint(0, 3, (4,))}
    graph = capture(MLP([6, 8, 3]), kwargs=batch)
    mesh = DeviceMesh((MeshAxis("data", 2),), (0, 1))
    choices = {
        each.name: Choice((Shard("sample"),), 1)
        if any(dim.name == "sample" and not dim.whole for dim in each.dims)
        else Choice((REPLICATE,))
        for each in graph.operators
    }
    Plan(
        name="two ranks",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("local-cpu", devices_per_node=2),
        training=Training(learning_rate=0.01),
        stages=(Stage(tuple(choices), mesh, choices),),
    ).save(folder / "plan.json")
    return Site(folder)


def undisturbed(folder: Path) -> tuple[list[str], float]:
    """What a run comes to that nothing hits, and the seconds that it takes."""
    site, begun = make_site(folder), time.monotonic()
    site.start(Fault())
    seconds = site.wait(begun)
    if not site.result():
        raise RuntimeError(f"the undisturbed run failed: {(folder / 'told.txt').read_text()}")
    return site.result(), seconds


def hit_once(folder: Path, fault: Fault, moment: float, wanted: list[str], found: Found) -> None:
    """Train, be hit after so many seconds, go on until it is done; add what was seen."""
    site = make_site(folder)
    site.start(fault)
    time.sleep(moment)
    hit = time.monotonic()
    fault.hit(site)
    seconds = site.wait(hit)
    if site.failed():
        found.seconds_to_error = max(found.seconds_to_error, round(seconds, 1))
    found.left_processes += site.clear()
    found.left_files += site.left_files()
    if not site.result():
        resumed = complete_checkpoints(folder / "kept")
        site.start(Fault(), *(["--resume", "kept"] if resumed else []))
        site.wait(time.monotonic())
        found.left_processes += site.clear()
    found.runs += 1
    found.equal += site.result() == wanted


def main() -> None:
    """Hit runs by all faults in turn, and print what each came to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--runs", type=int, default=60, help="runs of all faults together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--fault", choices=FAULTS, help="only this one")
    arguments = parser.parse_args()
    names = [arguments.fault] if arguments.fault else list(FAULTS)
    found = {name: Found() for name in names[: arguments.runs]}
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        wanted, seconds = undisturbed(Path(folder, "undisturbed"))
        for number in range(arguments.runs):
            name = names[number % len(names)]
            moment = rng.uniform(0.0, seconds) if FAULTS[name].hit is not Fault.hit else 0.0
            hit_once(Path(folder, str(number)), FAULTS[name], moment, wanted, found[name])
    for name, each in found.items():
        print(json.dumps({"fault": name, **vars(each)}), flush=True)


if __name__ == "__main__":
    main()
