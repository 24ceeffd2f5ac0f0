"""A run as it is asked for: one record, its file, and the flags by which torchrun gives it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self, get_args, get_type_hints

from stratagem.executor.running.named_functions import check_function, make_rate
from stratagem.executor.training.training_loop import RunOptions, RunSettings
from stratagem.executor.watching.judges import Limits
from stratagem.simulator.base.files import atomic_path
from stratagem.simulator.plan.provenance import PROCESS_BACKENDS, ProcessBackend


@dataclass(frozen=True, kw_only=True)
class RunRequest(RunSettings):
    """A run of processes, whose model and data are made by functions that are named.

    Example:
        >>> request = RunRequest(plan=Path("plan.json"), model="mymodels:gpt", steps=10)
        >>> request.steps, request.rate
        (10, 'constant')

    Attributes:
        plan: plan file.
        model: ``module:function``; the function returns (model, dict of example inputs).
        weights: a file of safetensors, or a folder of them, that has the model's parameters and
            buffers; ranks read their parts of it (see `weight_files`), so that the function may
            build a model without values. The model's own when left out.
        data: ``module:function``; the function returns an iterable of batches, the same on every
            rank. The example inputs are the batch of every step when left out.
        rate: ``constant``, ``linear`` or ``cosine``, or ``module:function`` of the step from 0,
            whose results the plan's learning rate is multiplied by.
        rate_warmup: steps in which the learning rate rises.
        check: whether to compare a first step with that of one device, see `judge`.
        backend: ``gloo`` or ``nccl``; that of `default_backend` when left out.
        limits: how long ranks wait for one another.
        out: file for the result.
        outputs: file for what a forward pass gives back in the last step (safetensors).
        parameters: whether to bring the parameters together, of which the file of a result has
            none.
        status: file to keep progress in, instead of showing it.

    Raises:
        ValueError: see `RunSettings`; a model or data that is no function's name.
    """

    plan: Path
    model: str
    weights: Path | None = None
    data: str | None = None
    rate: str = "constant"
    rate_warmup: int = 0
    check: bool = False
    backend: ProcessBackend | None = None
    limits: Limits = field(default_factory=Limits)
    out: Path | None = None
    outputs: Path | None = None
    parameters: bool = False
    status: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function(self.model, "model")
        if self.data is not None:
            check_function(self.data, "--data")

    @property
    def options(self) -> RunOptions:
        """How every rank runs."""
        return self.with_rate(make_rate(self.rate, self.rate_warmup, self.steps))

    def save(self, path: Path) -> None:
        """Write it to a file."""
        with atomic_path(path) as written:
            written.write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read it from a file.

        Raises:
            ValueError: when the file holds no request.
        """
        try:
            return cls.from_json(path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no request of a run: {error}") from error

    @classmethod
    def of_flags(cls, flags: Sequence[str]) -> Self:
        """What a command line asks for: `plan.json --model module:function …`.

        Or `plan.json --request request.json`, a file of all of it: the plan is named there for
        those who look at the processes of a machine.
        """
        if flags[1:2] == ["--request"]:
            return cls.load(Path(flags[2]))
        given = vars(_parser().parse_args(flags))
        limits = {name: given.pop(flag.replace("-", "_")) for name, flag in LIMITS.items()}
        return cls(**given, limits=Limits(**limits))


FLAGS = {
    "model": "module:function; returns (model, inputs)",
    "weights": "safetensors, or a folder of them: what the model's parameters are at first",
    "data": "module:function; returns an iterable of batches, the same on every rank",
    "steps": "training steps, all in all",
    "warmup": "steps to run and undo first",
    "rate": "learning rate: constant, linear, cosine, or module:function of the step",
    "rate_warmup": "steps in which the rate rises",
    "checkpoint": "folder for checkpoints, seen by all nodes",
    "every": "steps between two checkpoints",
    "resume": "checkpoint, or folder of them, to go on from",
    "keep": "checkpoints that stay",
    "finite": "fail at a loss that is not finite",
    "backend": "nccl where torch sees GPUs and the plan is not one of CPUs, else gloo",
    "memory": "find the most bytes that each rank holds, in a step that is undone",
    "cuda_graph": "run the steps but a few as one CUDA graph (nccl); those few are timed",
    "check": "compare with one process of torch",
    "out": "result file (JSON)",
    "outputs": "file for what a forward pass gives back (safetensors), of the last step",
    "status": "file to keep progress in, not to show it",
}
"""Fields that torchrun may give, and what each is."""

LIMITS = {"stalled": "timeout", "patience": "patience", "preparing": "preparing"}
"""Of `Limits`, and under which flags."""

_LIMIT_HELP = {
    "stalled": "seconds after which a run in which no rank goes on is stopped",
    "patience": "how many times as long as expected an instruction may take, if that is longer",
    "preparing": "seconds for building the model, reading or writing a checkpoint and the like",
}


def _parser() -> argparse.ArgumentParser:
    """A flag for each field, as it is typed."""
    made = argparse.ArgumentParser(prog="python -m stratagem.executor")
    made.add_argument("plan", type=Path, help="plan file")
    types = get_type_hints(RunRequest)
    defaults = {each.name: each.default for each in fields(RunRequest)}
    for name, text in FLAGS.items():
        flag, kind = f"--{name.replace('_', '-')}", types[name]
        if kind is bool:
            made.add_argument(flag, action="store_true", help=text)
            continue
        plain = next((each for each in (int, float, Path) if each in (kind, *get_args(kind))), str)
        made.add_argument(
            flag,
            type=plain,
            default=None if name == "model" else defaults[name],
            required=name == "model",
            choices=PROCESS_BACKENDS if name == "backend" else None,
            help=text,
        )
    for name, flag in LIMITS.items():
        default = getattr(Limits, name)
        made.add_argument(f"--{flag}", type=float, default=default, help=_LIMIT_HELP[name])
    return made
