"""What an export is: the text, the plan that it says, and what it cannot say."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

from stratagem.simulator.base.files import write_text
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.plan.plan import Plan


@dataclass(frozen=True)
class ExportDraft:
    """What a format makes of a plan, before it is priced.

    Attributes:
        text: of the file.
        nearest: the plan that the text says.
        missing: what else the format leaves to the user, in sentences.
        comment: what a line of comment begins with; empty where the format has none.
    """

    text: str
    nearest: Plan
    missing: tuple[str, ...] = ()
    comment: str = "# "


@dataclass(frozen=True, repr=False)
class Export:
    """A plan in the words of another program.

    Example:
        >>> export(plan, graph, "megatron").save("megatron.args")  # doctest: +SKIP

    Attributes:
        target: the format, such as ``megatron``.
        text: of the file.
        missing: what the format cannot say of the plan, in sentences; empty where it says all.
        plan: the plan that was exported.
        nearest: the plan that the text says.
        time: predicted seconds a step of the plan.
        nearest_time: predicted seconds a step of the nearest plan.
        fits: whether the nearest plan fits into memory.
    """

    target: str
    text: str
    missing: tuple[str, ...]
    plan: Plan
    nearest: Plan
    time: float
    nearest_time: float
    fits: bool

    @property
    def ratio(self) -> float:
        """Predicted time of the nearest plan over that of the plan."""
        return self.nearest_time / self.time

    @property
    def summary(self) -> str:
        """In one sentence what the export costs."""
        said = f"{self.target} says all of plan {self.plan.name!r}"
        if self.missing:
            things = "1 thing" if len(self.missing) == 1 else f"{len(self.missing)} things"
            said = f"{self.target} cannot say {things} of plan {self.plan.name!r}"
        fits = "" if self.fits else ", and does not fit into memory"
        return (
            f"{said}: predicted {format_duration(self.nearest_time)} a step, where the plan takes "
            f"{format_duration(self.time)} ({self.ratio:.2f} times){fits}."
        )

    def save(self, path: str | Path) -> None:
        """Write the text, whole or not at all."""
        write_text(path, self.text)

    def __repr__(self) -> str:
        return f"<Export: {self.summary}>"

    def _repr_html_(self) -> str:
        listed = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in self.missing)
        return (
            f"<p>{html.escape(self.summary)}</p><ul>{listed}</ul>"
            f"<pre>{html.escape(self.text)}</pre>"
        )
