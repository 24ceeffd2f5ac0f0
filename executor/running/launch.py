"""Starting a run's ranks on this machine from another program, such as a notebook."""

from __future__ import annotations

import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from stratagem.basics.progress import Show, show_status
from stratagem.executor.backends.rank_stores import STORE_FOLDER
from stratagem.executor.checkpoints.folder import find_checkpoint
from stratagem.executor.cuda.own_gpu import check_gpus
from stratagem.executor.results.execution_result import ExecutionResult
from stratagem.executor.running.run_request import RunRequest
from stratagem.executor.running.separate_collectives import warn_of_separate_collectives
from stratagem.executor.running.world import default_backend
from stratagem.executor.state.weight_files import tensors_of
from stratagem.executor.training.training_loop import warn_not_finite
from stratagem.executor.watching import rank_starter
from stratagem.executor.watching.failures import STARTER_LOG, failure_of, first_ended, keep_logs
from stratagem.executor.watching.kept_imports import keeper_for
from stratagem.executor.watching.process_activity import ranks_in_folder
from stratagem.executor.watching.run_folder import Scratch
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.plan.provenance import ProcessBackend

P = TypeVar("P", Path, Path | None)

EXECUTOR = "stratagem.executor"
"""What the ranks of a plan run."""

LAST_SECONDS = 15.0
"""How long ranks may take to end once the result of their run is there."""


def launch(
    request: RunRequest,
    *,
    timeout: float | None = 600.0,
    folder: str | Path | None = None,
    show: Show | None = None,
) -> ExecutionResult:
    """Run a plan as processes on this machine, one a device, and return what was measured.

    Example:
        >>> request = RunRequest(plan=Path("plan.json"), model="mymodels:gpt", check=True)
        >>> result = launch(request)  # doctest: +SKIP
        >>> result.verdict.agrees, result.verdict.max_error  # doctest: +SKIP
        (True, 4.1e-07)

    Args:
        request: what to run, and how.
        timeout: seconds for the whole run; ranks are stopped after it. None waits to the end.
        folder: where the modules are found; the current directory by default.
        show: shows progress.

    Warns:
        SeparateCollectives: the plan streams pieces, or computes inside sums, and runs them apart.

    Raises:
        ValueError: when the plan file or the weights cannot be read, or there is no checkpoint to
            go on from.
        RuntimeError: when there are GPUs here, and CuPy or NCCL is missing or there are too few
            of them; when a rank fails, says which, where it was, and its last lines.
        TimeoutError: when the run takes longer than `timeout`.
    """
    plan = Plan.load(request.plan)
    warn_of_separate_collectives(plan)
    backend = request.backend or default_backend(plan)
    if backend == "nccl":
        check_gpus(plan.num_devices)
    if request.weights is not None:
        tensors_of(request.weights)  # Refused here, and not by every rank.
    with rank_scratch(EXECUTOR, plan.num_devices, backend) as scratch:
        out, status = scratch.folder / "result.json", scratch.folder / "status.json"
        file = scratch.folder / "request.json"
        resume = None if request.resume is None else find_checkpoint(request.resume)
        asked = replace(
            request,
            plan=_resolved(request.plan),
            weights=_resolved(request.weights),
            checkpoint=_resolved(request.checkpoint),
            resume=_resolved(resume),
            outputs=_resolved(request.outputs),
            backend=backend,
            out=out,
            status=status,
        )
        asked.save(file)

        def look() -> None:
            if show is not None:
                show_status(status, show)

        run_ranks(
            [EXECUTOR, str(asked.plan), "--request", str(file)],
            plan.num_devices,
            folder=folder,
            timeout=timeout,
            look=look,
            scratch=scratch,
            result=out,
            backend=backend,
        )
        result = ExecutionResult.load(out)
    if request.out is not None:
        result.save(request.out)
    warn_not_finite(result.losses, result.first_step)
    return result


def _resolved(path: P) -> P:
    """A path that holds in other folders too."""
    return path if path is None else path.resolve()


def rank_scratch(
    module: str, num_ranks: int, backend: ProcessBackend, *, others_follow: bool = False
) -> Scratch:
    """The folder of a run whose ranks run a module, one of ours, as a context.

    From the second run on that a process begins in the same environment, ranks that talk by
    ``gloo`` are forked from one that stays for a while with what they import; from the first on,
    where `others_follow`.

    Example:
        >>> with rank_scratch("stratagem.executor", 2, "gloo") as scratch:
        ...     scratch.folder.exists()
        True
    """
    if backend != "gloo":
        return Scratch()
    environment = _environment(num_ranks, ours=True)
    return Scratch(keeper_for(module, environment, others_follow=others_follow))


def run_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    *,
    folder: str | Path | None = None,
    timeout: float | None = 600.0,
    look: Callable[[], None] | None = None,
    scratch: Scratch | None = None,
    result: Path | None = None,
    backend: ProcessBackend = "gloo",
) -> None:
    """Run a module as ranks of this machine, to its end, in the environment that torchrun makes.

    They find one another in a folder that only this user may enter, and listen to this machine
    alone. When this process ends, however it does, they end too.

    Args:
        arguments: the module's name and its arguments.
        num_ranks: how many processes.
        folder: where they run; the current directory by default.
        timeout: seconds for the whole run; ranks are stopped after it. None waits to the end.
        look: is called now and then while they run.
        scratch: the run's folder; one for this call when left out.
        result: the file that rank 0 writes, whole, when all is done: with it the run has not
            failed any more, and ranks that then take long to end are stopped, with a warning.
        backend: what they talk by. Ranks of a module of ours that talk by ``gloo`` are forked from
            one process (`rank_starter`), all others are programs of their own.

    Raises:
        RuntimeError: when a rank fails, with its last lines, and where the logs of all are kept.
        TimeoutError: when the run takes longer than `timeout`.
    """
    if scratch is None:
        with Scratch() as own:
            return run_ranks(
                arguments,
                num_ranks,
                folder=folder,
                timeout=timeout,
                look=look,
                scratch=own,
                result=result,
                backend=backend,
            )
    logs, store = scratch.folder / "logs", scratch.folder / "store"
    logs.mkdir()
    store.mkdir()
    ending = _Ending(result, logs, store)
    ours = arguments[0].startswith("stratagem.")

    def over() -> bool:
        if look is not None:
            look()
        return ending.is_over()

    code = scratch.run(
        [*_starter(num_ranks, logs, store, forks=ours and backend == "gloo"), *arguments],
        log=logs / STARTER_LOG,
        folder=folder,
        environment=_environment(num_ranks, ours=ours) | {STORE_FOLDER: str(store)},
        timeout=timeout,
        look=over,
    )
    if ending.has_result():
        ending.warn(code)
    elif code is None:
        raise TimeoutError(
            f"the run of {num_ranks} ranks took longer than {timeout:g} s and was stopped; give "
            f"it a longer timeout if it was not stuck"
        )
    elif code != 0:
        failure = failure_of(logs, code)
        raise RuntimeError(f"a run of {num_ranks} ranks failed: {failure}\n{keep_logs(logs)}")
    return None


class _Ending:
    """The end of a run whose result is there: ranks get a while to end by themselves."""

    def __init__(self, result: Path | None, logs: Path, store: Path) -> None:
        self._result, self._logs, self._store = result, logs, store
        self._since: float | None = None
        self._late: list[int] = []

    def has_result(self) -> bool:
        """Whether rank 0 has written the result."""
        return self._result is not None and self._result.exists()

    def is_over(self) -> bool:
        """Whether ranks have had their time to end."""
        if not self.has_result():
            return False
        if self._since is None:
            self._since = time.monotonic()
        if time.monotonic() - self._since < LAST_SECONDS:
            return False
        self._late = sorted(ranks_in_folder(self._store))
        return bool(self._late)  # What the starter itself still has to do is its own.

    def warn(self, code: int | None) -> None:
        """Say of a run that has its result what was wrong at its end."""
        if self._late:
            named = ", ".join(map(str, self._late))
            warnings.warn(
                f"rank {named} did not end within {LAST_SECONDS:g} s of the run's result, which "
                f"is kept, and was stopped: something hangs at its exit (a hook, a thread)",
                stacklevel=4,
            )
        elif code != 0:
            ended = first_ended(self._logs)
            who = (
                f"the run ended with exit code {code}"
                if ended is None
                else (f"rank {ended.rank} failed at its exit (exit code {ended.code})")
            )
            warnings.warn(
                f"{who}, after the run's result was written, which is kept",
                stacklevel=4,
            )


def _starter(num_ranks: int, logs: Path, store: Path, *, forks: bool) -> list[str]:
    """The command of what starts the ranks, without their module and its arguments.

    Where it imports nothing for them it needs no more than Python's own library itself.
    """
    how = rank_starter.FORK if forks else rank_starter.EXEC
    flags = ["-u"] if forks else ["-u", "-I", "-S"]
    file = str(rank_starter.__file__)
    return [sys.executable, *flags, file, how, str(num_ranks), str(logs), str(store)]


def _environment(num_ranks: int, *, ours: bool) -> dict[str, str]:
    """What all ranks are told but for the folder where they meet: to stay on this machine.

    A module of `ours` looks for models in the current folder itself, after all else.
    """
    environment = dict(os.environ)
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("NCCL_DEBUG", "WARN")  # Else its errors say only that it has more.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return environment | {
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        **({"PYTHONSAFEPATH": "1"} if ours else {}),
    }
