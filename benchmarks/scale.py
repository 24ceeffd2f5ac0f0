"""How long does one full simulation of a large plan take, and how does that grow?

    python -m benchmarks.scale

GPT-3 175B (96 layers of 12,288, 96 heads, sequence 2,048, vocabulary 51,200, batch 1,536) on 1,024
A100s as Megatron-LM runs it: 8 pipeline stages of 16 data × 8 tensor ways with sequence
parallelism, 1F1B, 96 microbatches; then with other numbers of layers, microbatches and GPUs, and
in one stage.

Prints one JSON object a line. `ms` is from priced tables to makespan and memory: building the
blocks of all stages, the macro graph, playing both, and the memory of every stage; `blocks_ms`,
`macro_ms`, `play_ms` and `memory_ms` are its parts. Not in it are `table_ms`, pricing the tables
with all rows known, as a search does it, and `plan_ms`, all of `simulate_plan` so. Each is the
best of several repeats. `extrapolating` is how many times longer blocks and memory take where
every layer is written out (see `repeated_layers`), in turns with the others. `tasks` are those of
all blocks and of the macro graph, `mb` the most memory that Python and numpy hold for one
simulation, tables included, in 10⁶ bytes.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from stratagem.searcher.space.strategies import tensor_parallel
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.pipeline import priced_pipeline
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.pricing import repeated_layers
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.schedules import macro_graph
from stratagem.simulator.simulation import priced_plan, simulation
from stratagem.simulator.simulation.simulated_step import PlayedStep
from stratagem.simulator.stage.equal_stages import StageShapes

REPEATS = 15


@dataclass(frozen=True)
class Case:
    """A size of model, batch and machine, stages and tensor ways; the rest is data parallel."""

    layers: int = 96
    microbatches: int = 96
    gpus: int = 1024
    stages: int = 8
    tensor: int = 8

    @property
    def name(self) -> str:
        """The case in words."""
        stages = f", {self.stages} stage" if self.stages == 1 else ""
        return f"{self.layers} layers, {self.microbatches} microbatches, {self.gpus} GPUs{stages}"

    @property
    def data(self) -> int:
        """Data-parallel ways of a stage."""
        return self.gpus // (self.stages * self.tensor)

    def build(self) -> tuple[OperatorGraph, Plan]:
        """The model and its plan; every data-parallel rank has one sample a microbatch."""
        graph = gpt(
            num_layers=self.layers,
            hidden=12288,
            num_heads=96,
            vocabulary=51200,
            sequence=2048,
            batch=self.data * self.microbatches,
            tied=False,
        )
        cluster = Cluster.preset("dgx-a100", num_nodes=self.gpus // 8)
        small = graph.microbatch(self.microbatches)
        choices = tensor_parallel(small, (self.data, self.tensor), 1, sequence_parallel=True)
        axes = (MeshAxis("data", self.data), MeshAxis("tensor", self.tensor))
        share = self.data * self.tensor
        stages = tuple(
            Stage(
                names,
                DeviceMesh(axes, tuple(range(s * share, (s + 1) * share))),
                {name: choices[name] for name in names},
            )
            for s, names in enumerate(self.stage_names(small))
        )
        plan = Plan(
            name=self.name,
            model=graph.name,
            fingerprint=graph.fingerprint,
            cluster=cluster,
            training=Training(precision="bfloat16"),
            stages=stages,
            num_microbatches=self.microbatches,
        )
        return graph, plan

    def stage_names(self, graph: OperatorGraph) -> list[tuple[str, ...]]:
        """Equally many layers a stage; embeddings in the first, the head in the last."""
        per_stage = self.layers // self.stages
        names: list[list[str]] = [[] for _ in range(self.stages)]
        stage = 0
        for operator in graph.operators:
            head, _, rest = operator.name.partition(".")
            if head == "h":
                stage = int(rest.partition(".")[0]) // per_stage
            names[0 if operator.is_source else stage].append(operator.name)
        return [tuple(found) for found in names]


class Stopwatch:
    """Seconds spent in some functions, each without what the others inside it spend."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._inside = 0.0

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its own time added to `part`."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                self.seconds[part] += spent - self._inside
                self._inside = outer + spent

        return wrapped


PARTS: dict[str, tuple[tuple[object, str], ...]] = {
    "table": ((TableBuilder, "__init__"), (TableBuilder, "build")),
    "blocks": ((StageShapes, "blocks"),),
    "macro": (
        (priced_pipeline, "macro_graph"),
        (priced_plan, "macro_graph"),
        (Plan, "make_schedule"),
    ),
    "play": ((priced_plan, "macro_durations"), (priced_plan, "simulate")),
    "memory": ((StageShapes, "lifetimes"), (simulation, "rank_memory")),
}
"""The functions of each part, timed where `simulate_plan` calls them."""


def run_once(plan: Plan, graph: OperatorGraph, memory: RowMemory) -> dict[str, float]:
    """Milliseconds of the parts of one simulation, and of `plan`, all of it."""
    watch = Stopwatch()
    macro_graph.macro_graph.cache_clear()
    with ExitStack() as stack:
        for part, places in PARTS.items():
            for owner, name in places:
                timed = watch.timed(part, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
        begin = time.perf_counter()
        simulation.simulate_plan(plan, graph, default_costs(), memory=memory)
        whole = time.perf_counter() - begin
    return {part: 1e3 * s for part, s in (watch.seconds | {"plan": whole}).items()}


def measure(case: Case) -> dict[str, object]:
    """Time one case."""
    graph, plan = case.build()
    memory = RowMemory()
    predicted = simulation.simulate_plan(plan, graph, default_costs(), memory=memory)
    runs: list[dict[str, float]] = []
    written: list[float] = []
    for _ in range(REPEATS):
        runs.append(run_once(plan, graph, memory))
        with patch.object(repeated_layers, "LEAST", case.layers + 1):
            other = run_once(plan, graph, memory)
        written.append(other["blocks"] + other["memory"])
    spared = min(run["blocks"] + run["memory"] for run in runs)
    best = {part: min(run[part] for run in runs) for part in runs[0]}
    simulated = min(sum(run[part] for part in PARTS if part != "table") for run in runs)
    tracemalloc.start()
    simulation.simulate_plan(plan, graph, default_costs())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "case": case.name,
        "ms": round(simulated, 2),
        **{f"{part}_ms": round(ms, 2) for part, ms in best.items()},
        "extrapolating": round(min(written) / spared, 2),
        "tasks": num_tasks(predicted),
        "mb": round(peak / 1e6, 1),
        "step_s": round(predicted.step_time, 3),
        "memory_gib": round(predicted.peak_memory / 2**30, 1),
    }


def num_tasks(predicted: simulation.Simulation) -> int:
    """Tasks of all blocks of a simulation and of its macro graph."""
    step = predicted._step
    assert isinstance(step, PlayedStep), "it was played here"
    model = step.model
    blocks = [block for stage in model.stages for block in stage.blocks.all]
    return model.macro.graph.num_tasks + sum(block.base.size for block in blocks)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    cases = [Case()]
    cases += [Case(layers=layers) for layers in (24, 48, 192)]
    cases += [Case(microbatches=count) for count in (64, 192, 384)]
    cases += [Case(gpus=gpus) for gpus in (256, 4096)]
    cases += [Case(stages=1)]
    for case in cases:
        if only in case.name:
            print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
