"""What running a plan gave, and its file: losses, step times, the measured timeline, errors."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import msgspec
from torch import Tensor

from stratagem.executor.results.verdict import Verdict
from stratagem.simulator.base.files import reading
from stratagem.simulator.base.hostile_texts import printable
from stratagem.simulator.base.numbers_in_json import marked, unmarked
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_bytes, format_duration
from stratagem.simulator.plan.provenance import Provenance
from stratagem.simulator.timeline.timeline import Timeline

RUN_FORM = FileForm(version=1, remedy="run again")


@dataclass(frozen=True, eq=False)
class ExecutionResult(SavedValue):
    """What running a plan gave.

    Example:
        >>> result = sg.execute(plan, model, batch, steps=10)  # doctest: +SKIP
        >>> result.save("run.json")  # doctest: +SKIP
        >>> sg.compare(simulation, sg.ExecutionResult.load("run.json"))  # doctest: +SKIP

    A loaded result has all that was measured, and is printed, drawn, compared and learned from as
    the first one. Tensors are not in the file: those after the steps are in checkpoints.

    Attributes:
        plan: its name.
        losses: of every step of this run.
        step_times: of every step in seconds, that of the slowest rank: from the barrier before it
            to its last instruction; of steps whose instructions are not timed, as `wall_times`.
        timeline: of a step with the median time, measured.
        whole_parameters: see `parameters`; None in a loaded result.
        whole_averages: see `averages`; None in a loaded result, and where none are kept.
        provenance: what ran it: backend, devices, precision and versions; None in files from
            before they said it.
        gradients: whole gradients of the last step, by name; None unless asked for, and in a
            loaded result.
        outputs: what the last step of a forward pass gave back, whole, by name, on rank 0; None of
            training, and in a loaded result.
        first_step: how many steps the checkpoint had made that the run went on from.
        peak_bytes: per rank the most bytes that it held at once; empty unless asked for.
        no_graph: why steps were run one by one though a CUDA graph was asked for; empty otherwise.
        wall_times: of every step in seconds, from the end of the one before it on the host: with
            taking the batch, writing checkpoints and all else; that of the slowest rank. Files
            from before they were told have none.
        step_paces: of every step, per rank, the seconds that the reference kernel took around it
            (see `hardware.core_pace`); empty on GPUs and where ranks are threads.
        verdict: whether a first step was that of one device, if it was checked.
    """

    FILE: ClassVar[str] = "result file"

    plan: str
    losses: tuple[float, ...]
    step_times: tuple[float, ...]
    timeline: Timeline
    whole_parameters: Mapping[str, Tensor] | None = None
    provenance: Provenance | None = None
    gradients: Mapping[str, Tensor] | None = None
    first_step: int = 0
    peak_bytes: tuple[int, ...] = ()
    no_graph: str = ""
    wall_times: tuple[float, ...] = ()
    verdict: Verdict | None = None
    outputs: Mapping[str, Tensor] | None = None
    whole_averages: Mapping[str, Tensor] | None = None
    step_paces: tuple[tuple[float, ...], ...] = ()

    @property
    def tensors(self) -> dict[str, dict[str, Tensor] | None]:
        """What a result file leaves out, by field: tensors by name, or nothing."""
        fields = ("whole_parameters", "whole_averages", "gradients", "outputs")
        found = {field: getattr(self, field) for field in fields}
        return {field: None if each is None else dict(each) for field, each in found.items()}

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """Whole parameters and buffers after the steps, by name.

        Raises:
            ValueError: of a loaded result, whose file has none, or of a run that did not bring
                them together.
        """
        if self.whole_parameters is None:
            raise ValueError(
                f"the result of plan {self.plan!r} has no parameters, as it was loaded from a "
                "file or came of parameters=False; load a checkpoint of the run: "
                "sg.load_checkpoint(folder)"
            )
        return self.whole_parameters

    @property
    def averages(self) -> Mapping[str, Tensor]:
        """Whole averages of the trained parameters after the steps, by name.

        Raises:
            ValueError: of a loaded result, whose file has none, or where the training keeps none.
        """
        if self.whole_averages is None:
            raise ValueError(
                f"the result of plan {self.plan!r} has no averages of parameters: train with "
                'sg.Training(average="exponential"), and take those of a loaded result from a '
                "checkpoint: sg.load_checkpoint(folder, averages=True)"
            )
        return self.whole_averages

    @property
    def backend(self) -> str:
        """What the ranks talked by: ``local`` (threads of one process), ``gloo`` or ``nccl``.

        Empty in files from before they said it.
        """
        return "" if self.provenance is None else self.provenance.backend

    @property
    def step_time(self) -> float:
        """Median step time in seconds."""
        return self.step_times[median_index(self.step_times)]

    @property
    def table(self) -> Table:
        """Loss and time of every step; a forward pass has no loss."""
        heading = f"{self.num_steps} steps of plan {self.plan}"
        if not self.losses:
            times = enumerate(self.step_times, start=self.first_step)
            return Table(heading, {"step": Unit.COUNT, "time": Unit.SECONDS}, tuple(times))
        columns = {"step": Unit.COUNT, "loss": Unit.TEXT, "time": Unit.SECONDS}
        pairs = enumerate(zip(self.losses, self.step_times, strict=False), start=self.first_step)
        rows = tuple((number, f"{loss:.6g}", time) for number, (loss, time) in pairs)
        return Table(heading, columns, rows)

    @property
    def num_steps(self) -> int:
        """How many steps were made in this run."""
        return len(self.losses) or len(self.step_times)

    def __repr__(self) -> str:
        where = "" if self.provenance is None else f" by {self.provenance}"
        loss = f", loss {self.losses[-1]:.4g}" if self.losses else ""
        time = f" of {format_duration(self.step_time)}" if self.step_times else ""
        return f"<ExecutionResult of {self.plan!r}: {self.num_steps} steps{time}{where}{loss}>"

    def _repr_html_(self) -> str:
        notes = [] if self.verdict is None else [self.verdict.sentence()]
        notes += [f"{format_bytes(max(self.peak_bytes))} a device"] if self.peak_bytes else []
        notes += [self.no_graph] if self.no_graph else []
        more = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        return f"<p>{html.escape(repr(self))}</p>{self.table._repr_html_()}{more}"

    def to_json(self) -> str:
        """The text of a result file; tensors are left out."""
        fields: dict[str, Any] = {
            **RUN_FORM.head,
            "plan": self.plan,
            "losses": marked(list(self.losses)),
            "step_times": self.step_times,
            "wall_times": self.wall_times,
            "timeline": self.timeline.to_dict(),
            "verdict": None if self.verdict is None else _told(self.verdict),
            "first_step": self.first_step,
            "peak_bytes": self.peak_bytes,
            "no_graph": self.no_graph,
            "step_paces": self.step_paces,
            "provenance": None if self.provenance is None else asdict(self.provenance),
        }
        return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> ExecutionResult:
        """Read the text of a result file; earlier ones lack some fields."""
        what = what or cls.FILE
        with reading(what):
            fields = json.loads(text)  # Earlier files name what is no number as Python does.
            fields["version"], fields["plan"]
        RUN_FORM.check_head(fields, what)
        with reading(what):
            return _read(fields)


def _told(verdict: Verdict) -> dict[str, Any]:
    """A verdict for a file; an error may be no number."""
    fields = asdict(verdict)
    return {**fields, "errors": {name: marked(each) for name, each in verdict.errors.items()}}


def _heard(fields: Mapping[str, Any]) -> Verdict:
    """The verdict of a file."""
    errors = {name: unmarked(each) for name, each in fields["errors"].items()}
    return msgspec.convert({**fields, "errors": errors}, Verdict)


def _read(fields: Mapping[str, Any]) -> ExecutionResult:
    def numbers(name: str) -> tuple[float, ...]:
        return msgspec.convert(unmarked(fields.get(name, [])), tuple[float, ...])

    times = numbers("step_times")
    paces = msgspec.convert(fields.get("step_paces", []), tuple[tuple[float, ...], ...])
    least = min((pace for step in paces for pace in step), default=0.0)
    if paces and (len(paces) != len(times) or len(set(map(len, paces))) > 1 or not least > 0):
        raise ValueError(
            f"step_paces are those of {len(paces)} of {len(times)} steps, the least {least:g} s; "
            "give each step one above 0 of every rank, or none any"
        )
    return ExecutionResult(
        plan=printable(msgspec.convert(fields["plan"], str)),
        losses=numbers("losses"),
        step_times=times,
        timeline=Timeline.from_dict(fields["timeline"]),
        verdict=_heard(fields["verdict"]) if fields.get("verdict") else None,
        first_step=msgspec.convert(fields.get("first_step", 0), int),
        peak_bytes=msgspec.convert(fields.get("peak_bytes", []), tuple[int, ...]),
        no_graph=msgspec.convert(fields.get("no_graph", ""), str),
        provenance=msgspec.convert(fields.get("provenance"), Provenance | None),
        wall_times=numbers("wall_times"),
        step_paces=paces,
    )


def median_index(values: tuple[float, ...]) -> int:
    """Where the (lower) median is."""
    return sorted(range(len(values)), key=lambda i: (values[i], i))[(len(values) - 1) // 2]


def not_graphed(reason: str) -> str:
    """That steps are run one by one though a graph was asked for, in words."""
    return f"steps are not run as a CUDA graph: {reason}"
