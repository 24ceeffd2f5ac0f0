"""Predicted against measured steps of eight plans on one device, with timelines of both.

Times of operators are kept in ``OUT/steps-MODEL.sqlite``.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from benchmarks.gpu.models import preset_here
from benchmarks.gpu.results import lines_of
from benchmarks.gpu.setting import Case, Figures, Setting, SkippedError
from benchmarks.local_fidelity import Compared, compared, line
from benchmarks.local_plans import Models, one_device
from stratagem.runs.predicted_and_measured import compare
from stratagem.simulator.graph.models import gpt, mlp, resnet

TURNS, TINY_TURNS = 4, 1
TINY_MODELS: Models = {
    "gpt": lambda: gpt(
        num_layers=1, hidden=32, num_heads=2, vocabulary=4096, sequence=16, batch=4
    ),
    "mlp": lambda: mlp([64, 128, 1024], batch=16),
    "resnet18": lambda: resnet(18, batch=8, image=32, classes=100),
}
KINDS = ("gpt", "mlp", "resnet")
STAGE = "steps"


def cases(setting: Setting) -> list[Case]:
    """The plans of a model take turns; then what all of them say together."""
    found = [Case(kind, partial(_plans, setting, kind), 300) for kind in KINDS]
    return [*found, Case("median", partial(_median, setting))]


def _plans(setting: Setting, kind: str) -> Figures:
    given = one_device(preset_here(setting))
    if setting.rehearse:
        given = replace(given, models=TINY_MODELS)
    plans = tuple(each for each in given.plans if each[0].startswith(kind))
    kept = setting.out / f"steps-{kind}.sqlite"
    kept.unlink(missing_ok=True)
    used = replace(given, plans=plans, turns=setting.size(TURNS, TINY_TURNS))
    found, cluster = compared(used, kept)
    lines = [line(each) for each in found]
    drawn = setting.size(len(found), 1)
    pictures = [_picture(setting, each) for each in found[:drawn]]
    pictures += ["none: one a model is drawn in a rehearsal"] * (len(found) - drawn)
    return {
        "plans": [
            {**told, "picture": picture} for told, picture in zip(lines, pictures, strict=True)
        ],
        "errors": [each["error"] for each in lines],
        "launch_us": cluster.calibration.launch_us,
    }


def _picture(setting: Setting, each: Compared) -> str:
    """The file with both timelines, or why there is none."""
    if find_spec("matplotlib") is None:
        return "none: matplotlib is not installed"
    name = re.sub(r"\W+", "-", each.plan.name) + ".png"
    compare(each.predicted, each.measured, setting.out / name)
    return name


def _median(setting: Setting) -> Figures:
    """Of all plans that were measured: half of them are predicted better than this."""
    errors = [
        abs(float(error))
        for each in lines_of(setting, STAGE)
        for error in each.get("errors", ())  # type: ignore[attr-defined]
    ]
    if not errors:
        raise SkippedError("no plan has been measured")
    return {"plans": len(errors), "median_error": statistics.median(errors)}
