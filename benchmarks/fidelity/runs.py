"""A measured training run, stated as a model, a cluster and a training setup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.graph import models
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType, device_names

Row = Mapping[str, str]


@dataclass(frozen=True)
class Model:
    """A builder of `graph.models` by name, and what it is called with."""

    builder: str
    sizes: tuple[tuple[str, int | bool | float | str], ...]

    @classmethod
    def of(cls, builder: str, **sizes: int | bool | float | str) -> Model:
        """The model with these sizes."""
        return cls(builder, tuple(sorted(sizes.items())))

    def graph(self) -> OperatorGraph:
        """Its operator graph; equal models share one."""
        return _graph(self)


@lru_cache(maxsize=256)
def _graph(model: Model) -> OperatorGraph:
    build: Callable[..., OperatorGraph] = getattr(models, model.builder)
    return build(**dict(model.sizes))


@dataclass(frozen=True)
class Run:
    """One row of a measured set.

    Attributes:
        row: its number in the file, from 1.
        group: what the plans to choose among have in common: model and number of devices.
        setups: one where the plan is known. Where its authors tuned what they do not tell, all
            that they chose from: the one that is predicted to be fastest counts.
        seconds: of a step, None where it was not measured or is not to be trusted.
        peak_bytes: of device memory, None where it was not measured.
        ran: False where memory did not suffice, None where that is not known.
        peak_rank: the pipeline rank whose device the peak was measured on; None: the fullest.
    """

    row: int
    label: str
    group: tuple[str, int]
    model: Model
    cluster: Cluster
    setups: tuple[TrainingSetup, ...]
    seconds: float | None
    peak_bytes: float | None = None
    ran: bool | None = None
    peak_rank: int | None = None


@dataclass
class Reading:
    """The runs of a file, and why rows are left out of it."""

    runs: list[Run] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


class LeftOutError(Exception):
    """A row that cannot be stated; its text is the reason."""


def device_named(text: str) -> DeviceType:
    """The bundled device that a set calls so: ``a100_80gb``, ``H100-80GB-SXM``.

    Raises:
        LeftOutError: there is none.
    """
    wanted = text.upper().replace("_", "-").removesuffix("-SXM")
    for name in device_names():
        if name.upper() == wanted:
            return DeviceType.preset(name)
    raise LeftOutError(f"device {text} is not bundled")


def whole(row: Row, name: str) -> int:
    """A whole number of a row.

    Raises:
        LeftOutError: the row does not say it.
    """
    if not row[name]:
        raise LeftOutError(f"{name} is not given")
    return round(float(row[name]))
