"""The benchmark of large plans times the functions that a simulation calls."""

from __future__ import annotations

import pytest

from benchmarks import scale


def test_every_part_takes_its_time_of_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "REPEATS", 1)
    line = scale.measure(scale.Case(layers=2, microbatches=2, gpus=8, stages=2, tensor=2))
    assert all(float(str(line[f"{part}_ms"])) > 0 for part in scale.PARTS), line
    assert int(str(line["tasks"])) > 0
