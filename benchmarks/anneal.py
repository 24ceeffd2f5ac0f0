"""How many proposals a second does annealing decide, and against simulating each in full?

    python -m benchmarks.anneal

Prints one JSON object a line. `evals_per_s` is of all cores together, a chain a core, in the last
phase of a long chain, where moves of single operators prevail; `one_core` is that of a single
chain, `class_moves` the same in its first phase, where most moves change a class of repeated
operators. `ratio_full` is `one_core` against scoring as many plans in full, every block, the
pipeline and memory, in turns with it. `checked` says whether the scores of all chains and those of
their choices from nothing were equal at the end.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from stratagem.searcher.annealing.chains import WIDE_EVALUATIONS, AnnealingChain
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.processes.worker_processes import usable_cores
from stratagem.searcher.space.skeletons import ZERO_STAGES, Skeleton, stage_meshes
from stratagem.searcher.space.stage_cuts import balanced_stages
from stratagem.searcher.space.strategies import data_parallel, tensor_parallel
from stratagem.simulator.graph.models import gpt, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training

REPEATS = 40
"""Short ones: the best of them falls into a moment in which the machine does nothing else."""
NUM_EVALUATIONS = 4000
"""Decided by each chain in one repeat."""
NUM_EARLY = WIDE_EVALUATIONS // REPEATS
"""The same of the chain in its first phase, which all repeats fill."""
NUM_FULL = 10
"""Plans scored in full in one repeat."""
TOTAL = 10**9
"""Evaluations of the course that chains follow: longer than they run."""


def gpt3(batch: int) -> OperatorGraph:
    """GPT-3 175B (Brown et al. 2020)."""
    return gpt(
        num_layers=96, hidden=12288, num_heads=96, sequence=2048, vocabulary=51200, batch=batch
    )


def whole(graph: OperatorGraph, shape: tuple[int, int], microbatches: int) -> Skeleton:
    """One stage on a mesh of data × tensor."""
    axes = MeshAxis("data", shape[0]), MeshAxis("tensor", shape[1])
    mesh = DeviceMesh(axes, tuple(range(shape[0] * shape[1])))
    return Skeleton((tuple(op.name for op in graph.operators),), (mesh,), microbatches, "1f1b")


def pipelined(graph: OperatorGraph, cluster: Cluster, stages: int, microbatches: int) -> Skeleton:
    """Stages of equal numbers of devices."""
    share = cluster.num_devices // stages
    ranges = [range(s * share, (s + 1) * share) for s in range(stages)]
    meshes = tuple(stage_meshes(devices, cluster)[0] for devices in ranges)
    names = tuple(balanced_stages(graph, cluster, stages))
    return Skeleton(names, meshes, microbatches, "1f1b")


def cases() -> Iterator[tuple[str, Callable[[], tuple[OperatorGraph, Cluster, Skeleton]]]]:
    """Names of cases, and what makes them."""

    def single(
        graph: OperatorGraph, nodes: int, shape: tuple[int, int], microbatches: int
    ) -> tuple[OperatorGraph, Cluster, Skeleton]:
        cluster = Cluster.preset("dgx-a100", num_nodes=nodes)
        return graph, cluster, whole(graph, shape, microbatches)

    def pipeline() -> tuple[OperatorGraph, Cluster, Skeleton]:
        graph, cluster = gpt3(1536), Cluster.preset("dgx-a100", num_nodes=128)
        return graph, cluster, pipelined(graph, cluster, 8, 96)

    yield "GPT-2 124M on 16", lambda: single(gpt(batch=64), 2, (2, 8), 1)
    yield "GPT-3 175B on 1,024, one stage", lambda: single(gpt3(1536), 128, (128, 8), 4)
    yield "GPT-3 175B on 1,024, 8 stages, 96 microbatches", pipeline
    yield "ResNet-152 on 16", lambda: single(resnet(152, batch=512), 2, (2, 8), 1)


def settled(problem: Problem, seed: int) -> AnnealingChain:
    """A chain that is through with its first two phases."""
    shapes = [mesh.shape for mesh in problem.skeleton.meshes]
    start = data_parallel(problem.graph, shapes[0], zero=2)
    if problem.graph.name.startswith("gpt"):
        start = tensor_parallel(problem.graph, shapes[0], len(shapes[0]) - 1)
    chain = AnnealingChain(problem, problem.encode(start), TOTAL, seed)
    chain.advance(2 * WIDE_EVALUATIONS)
    return chain


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(
    name: str, make: Callable[[], tuple[OperatorGraph, Cluster, Skeleton]]
) -> dict[str, object]:
    """Time and check one case."""
    graph, cluster, skeleton = make()
    training = Training(precision="bfloat16")
    problem = make_problem(graph, skeleton, cluster, training, default_costs(), ZERO_STAGES)
    cores = usable_cores()
    chains = [settled(problem, seed) for seed in range(cores)]
    early = AnnealingChain(problem, chains[0].choice, TOTAL, 0)
    early.score()
    best = {"late": np.inf, "all": np.inf, "early": np.inf, "full": np.inf}
    with ThreadPoolExecutor(cores) as pool:

        def advance_all() -> None:
            list(pool.map(lambda chain: chain.advance(NUM_EVALUATIONS), chains))

        calls: dict[str, tuple[Callable[[], object], int]] = {
            "late": (lambda: chains[0].advance(NUM_EVALUATIONS), NUM_EVALUATIONS),
            "all": (advance_all, cores * NUM_EVALUATIONS),
            "early": (lambda: early.advance(NUM_EARLY), NUM_EARLY),
            "full": (lambda: [early.score() for _ in range(NUM_FULL)], NUM_FULL),
        }
        for _ in range(REPEATS):
            for key, (call, count) in calls.items():
                best[key] = min(best[key], seconds(call) / count)
    return {
        "case": name,
        "operators": len(problem.choices),
        "cores": cores,
        "evals_per_s": round(1 / best["all"]),
        "one_core": round(1 / best["late"]),
        "class_moves": round(1 / best["early"]),
        "ratio_full": round(best["full"] / best["late"], 1),
        "checked": all(chain.score() == chain.scores[0] for chain in (*chains, early)),
    }


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    for name, make in cases():
        if only in name:
            print(json.dumps(measure(name, make)), flush=True)


if __name__ == "__main__":
    main()
