"""Models as people train them, the cluster that each is planned for, and the plans found.

python -m examples.gallery              # search all again and write examples/plans/NAME.json
python -m examples.gallery vit t5       # only these

Each is a file of its own with a function ``build`` (the model as published, shapes only), a
function ``small`` (the same architecture, small enough to train here), and its `Job`.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import stratagem as sg
from examples.job import Job
from stratagem.simulator.base.units import format_duration
from stratagem.simulator.torch_ops.capture.capture import capture

NAMES = ("gpt2", "llama3", "vit", "t5", "resnet50", "wide_resnet", "translator", "mixtral")
PLANS = Path(__file__).parent / "plans"


def job(name: str) -> Job:
    """The job of an example.

    Raises:
        ValueError: there is no such example.
    """
    if name not in NAMES:
        raise ValueError(f"no example {name!r}; there are {', '.join(NAMES)}")
    found = importlib.import_module(f"examples.{name}").JOB
    assert isinstance(found, Job)
    return found


def graph_of(name: str, *, function: str = "build") -> sg.OperatorGraph:
    """The captured graph of an example, or of its ``small`` version."""
    model, inputs = getattr(importlib.import_module(f"examples.{name}"), function)()
    return capture(model, kwargs=inputs, name=name)


def plan_file(name: str) -> Path:
    """Where the plan of an example is kept."""
    return PLANS / f"{name}.json"


def main(names: Sequence[str]) -> None:
    """Search again for the plans of `names`, and write them."""
    console = Console(highlight=False)
    for name in names:
        result = job(name).search(graph_of(name), progress=True)
        result.plan.save(plan_file(name))
        console.print(
            f"{name}: {format_duration(result.simulation.step_time)} a step, "
            f"{result.simulation.peak_memory / 2**30:.1f} GiB, searched for {result.seconds:.0f} s"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Search again for plans and write them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)}; or all")
    names = parser.parse_args().names or NAMES
    try:
        for name in names:
            job(name)
    except ValueError as error:
        parser.error(str(error))
    main(names)
