"""Are other planners' inputs solved as well as they solve them, and better where they guess?

    python -m benchmarks.planners --data DIR

Reads every input under DIR, whatever it is called: PipeDream's `*.txt`, Piper's and
dnn-partitioning's JSON, and human experts' splits. Prints one JSON object a line: `input`;
`objective`; `peer`, the value that the planner's own plan has (a published figure where there is
one, otherwise what its rule gives when followed here); `parity`, how far our formula is from that
value for that plan, relatively, beyond the digits published, null where the plan is not known;
`ours`; `exact`, whether ours is proved to be best; `bound`; `seconds`; and `mb`, the peak memory
of a process that solves this one input. Without the inputs a graph like Inception v3 is solved.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.inception import inception_input, inception_profile
from stratagem.searcher.planners import (
    HierarchyLevel,
    PartitionInput,
    PipeDreamGraph,
    PiperInput,
    PlannerResult,
    antichain_sets,
    read_partition_input,
    read_pipedream_graph,
    read_piper_input,
    read_split,
    solve_max_load,
    solve_pipedream,
    solve_piper,
    solve_scattered,
)
from stratagem.searcher.planners.inputs.piper import PiperNode, RunOption
from stratagem.searcher.planners.solvers.max_load import max_load

PIPEDREAM_LEVELS = (HierarchyLevel(4, 1e9),)
NESTED_LEVELS = (HierarchyLevel(4, 1e10), HierarchyLevel(4, 1e9))
PIPER_SETTINGS = ((8, 8 * 2**30), (64, 8 * 2**30))
PIPER_BANDWIDTH = 25 * 2**30
EXACT, EXPERT, GUESSED = "contiguous", "human expert", "any nodes"

PUBLISHED: dict[tuple[str, str], str] = {
    ("bert24_inference", EXACT): "17.7899",
    ("bert24_training", EXACT): "41.7458",
    ("resnet50_inference", EXACT): "33.7747",
    ("resnet50_training", EXACT): "78.6318",
    ("bert_l-3_inference", EXACT): "27.918568",
    ("bert_l-3_training", EXACT): "65.3031",
    ("bert24_inference", EXPERT): "20.08",
    ("bert24_training", EXPERT): "49.40",
    ("resnet50_inference", EXPERT): "43.92",
    ("resnet50_training", EXPERT): "112.11",
    ("bert24_inference", GUESSED): "17.778",
    ("bert24_training", GUESSED): "39.943",
    ("bert32a100", "8"): "0.165856",
    ("bert32a100", "64"): "0.0202006",
    ("vgg16", "flat"): "0.20552",
    ("resnet50", "flat"): "0.16288",
    ("gnmt", "flat"): "0.02587",
    ("alexnet", "flat"): "0.03422",
    ("densenet121", "flat"): "0.08998",
}
"""Values of the planners' plans on their inputs, as published digits."""


@dataclass(frozen=True)
class Case:
    """One line: how to solve an input, and what its planner makes of it.

    Attributes:
        solve: our plan.
        published: the published value.
        theirs: value of the planner's own plan under our formula, and by its own recurrence.
    """

    solve: Callable[[], PlannerResult]
    published: str | None = None
    theirs: Callable[[], tuple[float, float]] | None = None
    remark: str = ""


def main() -> None:
    """Print a line a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with inputs, searched through")
    folder = parser.parse_args().data
    if folder is not None and not folder.is_dir():
        parser.error(f"--data {folder} is no folder")
    _warm_up()
    for case in [*(_cases(folder) if folder else ()), *_generated()]:
        print(json.dumps(_in_a_process(case)), flush=True)


def _cases(folder: Path) -> Iterator[Case]:
    """Cases of every input under a folder."""
    for path in sorted(folder.rglob("*.txt")):
        if "forward_compute_time" in path.read_text(errors="ignore")[:10_000]:
            yield from _pipedream_cases(read_pipedream_graph(path))
    splits = {p.stem.removesuffix("_expert"): p for p in folder.rglob("*_expert.json")}
    for path in sorted(folder.rglob("*.json")):
        text = path.read_text(errors="ignore")
        if '"TMPCs"' in text:
            yield from _piper_cases(path)
        elif '"maxFPGAs"' in text:
            name = path.stem
            split = splits.get(name, splits.get(name.replace("training", "inference")))
            if "LayerGraphs" not in path.parts:
                split = None
            yield from _partition_cases(read_partition_input(path), split)
            if "LayerGraphs" in path.parts:
                yield from _partition_cases(read_partition_input(path, corrected=True), split)


def _partition_cases(graph: PartitionInput, split: Path | None) -> Iterator[Case]:
    def solve() -> PlannerResult:
        return solve_max_load(graph)

    def contiguous() -> tuple[float, float]:
        result = solve_max_load(graph)
        return result.value, result.recurrence

    yield Case(solve, PUBLISHED.get((graph.name, EXACT)), contiguous)
    if split is not None:
        expert = max_load(graph, read_split(split, graph))
        digits = PUBLISHED.get((graph.name, EXPERT))
        yield Case(solve, digits, lambda: (expert, expert), "against the human expert")
    yield Case(lambda: solve_scattered(graph), PUBLISHED.get((graph.name, GUESSED)))


def _piper_cases(path: Path) -> Iterator[Case]:
    settings: list[tuple[int | None, float | None, float | None]] = [(None, None, None)]
    settings += [(k, memory, PIPER_BANDWIDTH) for k, memory in PIPER_SETTINGS]
    for devices, memory, bandwidth in settings:
        graph = read_piper_input(
            path, num_devices=devices, memory_bytes=memory, bandwidth=bandwidth
        )

        def solve(graph=graph) -> PlannerResult:  # type: ignore[no-untyped-def]
            return solve_piper(graph)

        def greedy(graph=graph) -> tuple[float, float]:  # type: ignore[no-untyped-def]
            result = solve_piper(graph, greedy=True)
            return result.value, result.recurrence

        yield Case(solve, PUBLISHED.get((graph.name, str(devices))), greedy)


def _pipedream_cases(graph: PipeDreamGraph) -> Iterator[Case]:
    def theirs() -> tuple[float, float]:
        result = solve_pipedream(graph, PIPEDREAM_LEVELS, sets=antichain_sets(graph))
        return result.value, result.recurrence

    flat = PUBLISHED.get((graph.name, "flat"))
    yield Case(lambda: solve_pipedream(graph, PIPEDREAM_LEVELS), flat, theirs)
    yield Case(lambda: solve_pipedream(graph, NESTED_LEVELS))


def _generated() -> Iterator[Case]:
    """A graph like the one on which both peers give up."""
    for training in (False, True):
        graph = inception_input(training=training)
        yield Case(lambda graph=graph: solve_max_load(graph))  # type: ignore[misc]
    yield Case(lambda: solve_pipedream(inception_profile(), PIPEDREAM_LEVELS))


def _warm_up() -> None:
    """Compile, or load, every kernel, so that no case waits for it."""
    profile = inception_profile()
    small = PipeDreamGraph("small", profile.layers[:4], profile.edges[:3])
    solve_pipedream(small, NESTED_LEVELS)
    whole = inception_input(training=False)
    some = PartitionInput("small", whole.nodes[:8], whole.edges[:7], 2, 1, 1e9)
    solve_scattered(some, num_moves=10, proof_seconds=1.0)
    way = RunOption("once", 1.0, 1.0, 1.0, 1.0, {}, {})
    solve_piper(PiperInput("small", (PiperNode(0, {1: (way,)}),), (), 1, 10.0, 1.0, 1))


def _in_a_process(case: Case) -> dict[str, object]:
    """Solve a case in a process of its own, for the sake of its peak memory."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(case, theirs))
    worker.start()
    theirs.close()
    try:
        line: dict[str, object] = ours.recv()
    except EOFError:
        worker.join()
        raise RuntimeError(f"a case ended with status {worker.exitcode}") from None
    worker.join()
    return line


def _work(case: Case, pipe: Connection) -> None:
    # HiGHS sometimes writes to the standard output, which belongs to the lines.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    begin = time.perf_counter()
    result = case.solve()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    peer, parity = float(case.published) if case.published else None, None
    if case.theirs is not None:
        formula, recurrence = case.theirs()
        peer = peer or formula
        parity = max(
            abs(formula - recurrence) / recurrence, _beyond_digits(formula, case.published)
        )
    pipe.send(
        {
            "input": result.input,
            "objective": f"{result.objective}{', ' * bool(case.remark)}{case.remark}",
            "peer": peer,
            "parity": parity,
            "ours": result.value,
            "exact": result.exact,
            "bound": result.bound,
            "seconds": round(seconds, 3),
            "mb": round(peak),
        }
    )


def _beyond_digits(value: float, published: str | None) -> float:
    """How far a value is from a published one, relatively, if its digits are not the same."""
    if published is None:
        return 0.0
    decimals = len(published.partition(".")[2])
    if math.isclose(round(value, decimals), float(published), rel_tol=1e-12):
        return 0.0
    return abs(value - float(published)) / float(published)


if __name__ == "__main__":
    main()
