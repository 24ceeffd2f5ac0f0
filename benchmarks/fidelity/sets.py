"""The measured sets, recognised by their columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fidelity import alpa, clusters, megatron, mpt, nanotron
from benchmarks.fidelity.runs import LeftOutError, Reading, Row, Run


@dataclass(frozen=True)
class MeasuredSet:
    """A kind of file: the columns that tell it, and how a row is stated."""

    name: str
    columns: frozenset[str]
    read: Callable[[int, Row], Iterator[Run]]


SETS = (
    MeasuredSet("megatron table 5", megatron.SEQUENCE_PARALLEL, megatron.sequence_parallel),
    MeasuredSet("megatron weak scaling", megatron.WEAK_SCALING, megatron.weak_scaling),
    MeasuredSet("vtrain", clusters.VTRAIN, clusters.vtrain),
    MeasuredSet("bigscience", clusters.BIGSCIENCE, clusters.bigscience),
    MeasuredSet("nanotron", nanotron.COLUMNS, nanotron.nanotron),
    MeasuredSet("mpt", mpt.COLUMNS, mpt.mpt),
    MeasuredSet("alpa", alpa.COLUMNS, alpa.alpa),
)


def set_of(path: Path) -> MeasuredSet | None:
    """The set that a file belongs to, by its columns."""
    with path.open(newline="") as file:
        header = set(next(csv.reader(file), []))
    return next((each for each in SETS if each.columns <= header), None)


def read_runs(path: Path, measured: MeasuredSet) -> Reading:
    """The runs of a file, and why the others are left out."""
    reading = Reading()
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            try:
                reading.runs.extend(measured.read(number, row))
            except (LeftOutError, ValueError) as reason:
                reading.left_out[str(reason)] += 1
    return reading
