"""How fast does the search plan large models, how good are its plans, and how far from the best?

    python -m benchmarks.search [--case NAME] [--evaluations N] [--every-baseline]

Cases, at the sizes and batches of the papers that trained them:

gpt2-1.5b     GPT-2 of 48 layers (Radford et al. 2019), batch 512, bfloat16, on 16 A100s
gpt-39b       as Alpa trained it (Zheng et al. 2022): batch 1,024, float16, on 64 V100s
gpt3-175b     as Megatron-LM did (Narayanan et al. 2021): batch 1,536, bfloat16, on 1,024 A100s
moe-70b       GShard's experts as Alpa trained them: batch 1,024, float16, on 64 V100s
wresnet-13b   as Alpa trained it: batch 1,520, float32, on 64 V100s
inception     Inception v3, batch 64, float32, on 4 nodes of 4 V100s whose links are slow
nmt           LSTMs of 40 steps, batch 64, float32, on the same

Pipelines run under 1F1B or interleaved, gradients of inputs first and inputs
gathered again, as Megatron-LM has it.

The last two are FlexFlow's (Jia et al. 2019), whose clusters had 4 GPUs a node as well; its P100s
and K80s, slower than V100s, hung on links of 100 and 56 Gb/s. Nodes are joined by the 25 Gb/s of
p3.16xlarge here. A100s are those of DGX A100, other V100s those of p3.16xlarge.

Prints one JSON object a case: `seconds` of the whole search, baselines and bounds included, with
kernels compiled before; `evals_per_s`, evaluations of the chains by the time that they ran;
`plan_ms`, `baselines_ms` by name and `unfit`, which of them do not fit; `bound_ms`, of the
skeletons listed `listed_ms`, and `gap` to the first, a share of the step; `fits`; `data_parallel`,
by how much its fastest kind takes longer (with or without ZeRO, fitting or not); `best_baseline`,
by how much the best that fits does; `plan` in words; `stop`; `peak_mb` of the process and those
that it starts, 10⁶ bytes. Each case is searched in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from stratagem.searcher.annealing.chains import AnnealingChain, run_chains
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.driver.search import search
from stratagem.searcher.improvement import skeleton_choices
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.processes.worker_processes import worker_count
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.graph.models import gpt, inception_v3, mlp, moe, nmt, wide_resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType
from stratagem.simulator.kernel_times.training import Training

DATA_PARALLEL = ("data parallel", "ZeRO-2", "ZeRO-3")


@dataclass(frozen=True)
class Case:
    """A model, where and how it is trained, and evaluations to spend unless told."""

    build: Callable[[], OperatorGraph]
    cluster: Callable[[], Cluster]
    training: Training
    evaluations: int = 400_000


def _a100s(num_nodes: int) -> Callable[[], Cluster]:
    return lambda: Cluster.preset("dgx-a100", num_nodes=num_nodes)


def _v100s(num_nodes: int, devices_per_node: int = 8) -> Callable[[], Cluster]:
    return lambda: Cluster.preset(
        "p3.16xlarge", num_nodes=num_nodes, devices_per_node=devices_per_node
    )


def _large_v100s(num_nodes: int) -> Callable[[], Cluster]:
    """The same with V100s of 32 GB.

    A mixture of 70 billion parameters takes 16 bytes each with Adam and float32 copies: 16.4 GiB
    of each of 64 devices, where 16 GB leave 15.0 GiB.
    """

    def make() -> Cluster:
        cluster = _v100s(num_nodes)()
        large = DeviceType.preset("V100-32GB")
        names = (large.name,) * num_nodes
        return replace(cluster, name="p3dn", node_devices=names, device_types=(large,))

    return make


ALPA = Training("float16", fused_elementwise=True, eager_loss=True)
"""As those train with whose plans ours are compared; their losses copy the logits to float32."""

CASES: dict[str, Case] = {
    "gpt2-1.5b": Case(
        lambda: gpt(num_layers=48, hidden=1600, num_heads=25, vocabulary=50304, batch=512),
        _a100s(2),
        Training("bfloat16", eager_loss=True),
    ),
    "gpt-39b": Case(
        lambda: gpt(
            num_layers=48,
            hidden=8192,
            num_heads=64,
            vocabulary=51200,
            batch=1024,
            attention="unfused",
        ),
        _v100s(8),
        ALPA,
    ),
    "gpt3-175b": Case(
        lambda: gpt(
            num_layers=96,
            hidden=12288,
            num_heads=96,
            vocabulary=51200,
            sequence=2048,
            batch=1536,
        ),
        _a100s(128),
        Training("bfloat16", eager_loss=True),
        evaluations=100_000,
    ),
    "moe-70b": Case(
        lambda: moe(
            num_layers=32,
            hidden=2048,
            experts=64,
            batch=1024,
            attention="unfused",
            dispatch="einsum",
        ),
        _large_v100s(8),
        ALPA,
    ),
    "wresnet-13b": Case(
        lambda: wide_resnet(50, base_channels=320, width_factor=32, batch=1520),
        _v100s(8),
        Training(fused_elementwise=True, eager_loss=True),
    ),
    "inception": Case(lambda: inception_v3(batch=64), _v100s(4, 4), Training(eager_loss=True)),
    "nmt": Case(lambda: nmt(batch=64), _v100s(4, 4), Training(eager_loss=True)),
}


class ChainClock:
    """Proposals that chains decided, and the seconds that they took."""

    def __init__(self) -> None:
        self.evaluations, self.seconds = 0, 0.0

    def run(self, chains: Sequence[AnnealingChain], **settings: Any) -> None:
        """`run_chains`, timed."""
        began = time.perf_counter()
        run_chains(chains, **settings)
        self.seconds += time.perf_counter() - began
        self.evaluations += sum(chain.done for chain in chains)

    @property
    def rate(self) -> float:
        """Evaluations a second."""
        return self.evaluations / self.seconds if self.seconds else 0.0


def measure(name: str, case: Case, evaluations: int, *, every_baseline: bool) -> dict[str, object]:
    """Search one case in this process."""
    compile_kernels()
    graph, cluster = case.build(), case.cluster()
    clock = ChainClock()
    with patch.object(skeleton_choices, "run_chains", clock.run):
        result = search(
            graph,
            cluster,
            training=case.training,
            budget=Budget(evaluations),
            baselines=tuple(METHODS) if every_baseline else None,
            space=Space(
                inputs_first=True, regather=True, headroom=0.0, schedules=("1f1b", "interleaved")
            ),
        )
    return {
        "case": name,
        **told(result),
        "evals_per_s": round(clock.rate),
        "peak_mb": peak_bytes() // 10**6,
    }


def peak_bytes() -> int:
    """At most so much memory this process and the workers that it had took at once."""
    here, largest = (
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return 1024 * (here + worker_count() * largest)


def told(result: SearchResult) -> dict[str, object]:
    """What a result says of a case."""
    step, baselines = result.simulation.step_time, result.baselines
    fitting = [each.step_time for each in result.alike.values()]
    copies = [baselines[name].step_time for name in DATA_PARALLEL if name in baselines]
    return {
        "seconds": round(result.seconds, 1),
        "plan_ms": _ms(step),
        "fits": result.simulation.fits,
        "bound_ms": None if result.bound is None else _ms(result.bound),
        "listed_ms": None if result.listed_bound is None else _ms(result.listed_bound),
        "gap": None if result.gap is None else round(result.gap, 4),
        "data_parallel": round(min(copies) / step, 3) if copies else None,
        "best_baseline": round(min(fitting) / step, 3) if fitting else None,
        "baselines_ms": {name: _ms(each.compared_time) for name, each in baselines.items()},
        "unfit": [name for name, each in baselines.items() if not each.fits],
        "plan": in_words(result),
        "stop": result.stop_reason.value,
        "evaluations": result.evaluations,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)


def in_words(result: SearchResult) -> str:
    """Stages, the mesh of the first, microbatches and schedule."""
    plan = result.plan
    shape = "×".join(map(str, plan.stages[0].mesh.shape))
    count = len(plan.stages)
    parts = plan.num_microbatches
    cut = f"{parts} microbatches" if parts > 1 else "whole batch"
    return f"{count} stages on {shape}, {cut}, {plan.schedule}" if count > 1 else f"{shape}, {cut}"


def compile_kernels() -> None:
    """Run a tiny search, so that numba compiles or loads what the case needs."""
    cluster = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
    search(mlp([64, 64, 64], batch=32), cluster, budget=Budget(200))


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), help="this one only")
    parser.add_argument("--evaluations", type=int, help="instead of the case's own")
    parser.add_argument(
        "--every-baseline",
        action="store_true",
        help="all methods of the literature, slow ones too",
    )
    parser.add_argument("--inside", action="store_true", help="search in this very process")
    given = parser.parse_args()
    for name in [given.case] if given.case else CASES:
        case = CASES[name]
        evaluations = case.evaluations if given.evaluations is None else given.evaluations
        if given.inside:
            line = measure(name, case, evaluations, every_baseline=given.every_baseline)
            print(json.dumps(line, ensure_ascii=False), flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks.search", "--inside", "--case", name]
        command += ["--evaluations", str(evaluations)]
        subprocess.run(command + ["--every-baseline"] * given.every_baseline, check=True)


if __name__ == "__main__":
    main()
