"""What do algebraic substitutions save, under the known strategies alone?

    python -m benchmarks.substitutions

Prints one JSON object a line for a model on a node of A100s: the graphs that were scored, the
seconds that took, and under ZeRO-3 and tensor parallelism over the node (with the sequence or
without) the predicted step of the model as it is and of the best graph, in milliseconds, with the
rules that made it. A graph's score is its best step; `ratio` is that of the best graph to that of
the model as it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.graph_rewrites import Rewriting, rewritings
from stratagem.searcher.space.strategies import data_parallel, tensor_dims, tensor_parallel
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor, reshape, transpose
from stratagem.simulator.graph.models import gpt, layers, llama
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.pricing.row_memory import RowMemory
from stratagem.simulator.simulation.simulation import simulate_plan

LIMIT = 12
"""Graphs that are scored."""


@dataclass(frozen=True, eq=False)
class Case:
    """A model, and the node that it is trained on."""

    name: str
    make: Callable[[], OperatorGraph]
    cluster: Cluster
    training: Training


def gpt_j(
    num_layers: int, hidden: int, num_heads: int, sequence: int, batch: int
) -> OperatorGraph:
    """Layers whose attention and feed-forward branch run side by side (Wang and Komatsuzaki)."""
    b = GraphBuilder("gpt-j")
    ids, labels = layers.tokens(b, batch, sequence)
    x = b.embedding(ids, b.parameter("wte.weight", (50400, hidden)), name="wte")
    split = (batch, sequence, num_heads, hidden // num_heads)
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            y = layers.layer_norm(b, "ln", x)
            q, k, v = (
                transpose(reshape(layers.linear(b, n, y, hidden, bias=False), split), 1, 2)
                for n in ("q", "k", "v")
            )
            mixed = transpose(b.attention(q, k, v, causal=True), 1, 2)
            out = layers.linear(b, "out", reshape(mixed, y.shape), hidden, bias=False)
            wide = b.pointwise("gelu", layers.linear(b, "up", y, 4 * hidden), "tanh")
            x = _added(b, x, out, layers.linear(b, "down", wide, hidden))
    logits = layers.linear(b, "head", layers.layer_norm(b, "ln_f", x), 50400)
    return b.build(b.cross_entropy(logits, labels))


def _added(b: GraphBuilder, x: DraftTensor, *others: DraftTensor) -> DraftTensor:
    for other in others:
        x = b.pointwise("add", x, other)
    return x


def cases() -> Iterator[Case]:
    """Models as their users write them: projections apart, or made at once."""
    half = Training("bfloat16", eager_loss=True)
    node = Cluster.preset("dgx-a100", num_nodes=1)
    yield Case("llama 7B", lambda: llama(sequence=2048, batch=8), node, half)
    yield Case(
        "llama 8B, shared keys",
        lambda: llama(num_kv_heads=8, ffn=14336, sequence=2048, batch=8),
        node,
        half,
    )
    yield Case("gpt-j 6B", lambda: gpt_j(28, 4096, 16, 2048, 8), node, half)
    yield Case(
        "gpt 2.6B",
        lambda: gpt(num_layers=32, hidden=2560, num_heads=32, sequence=1024, batch=16),
        node,
        half,
    )


class Scorer:
    """Predicts the step of a graph under each strategy."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._memory = RowMemory()

    def steps(self, graph: OperatorGraph) -> dict[str, float]:
        """Seconds by strategy; plans that do not fit count too, since substitutions are asked."""
        ways = self._case.cluster.devices_per_node
        found: dict[str, Choices] = {"ZeRO-3": data_parallel(graph, (ways,), zero=3)}
        if tensor_dims(graph, ways):
            found["tensor"] = tensor_parallel(graph, (ways,), 0)
            found["tensor and sequence"] = tensor_parallel(
                graph, (ways,), 0, sequence_parallel=True
            )
        return {name: self._seconds(graph, choices) for name, choices in found.items()}

    def best(self, graph: OperatorGraph) -> float:
        """The shortest step under the strategies."""
        return min(self.steps(graph).values())

    def _seconds(self, graph: OperatorGraph, choices: Choices) -> float:
        ways = self._case.cluster.devices_per_node
        mesh = DeviceMesh((MeshAxis("gpu", ways),), tuple(range(ways)))
        plan = Plan(
            name="strategy",
            model=graph.name,
            fingerprint=graph.fingerprint,
            cluster=self._case.cluster,
            training=self._case.training,
            stages=(Stage(graph.names, mesh, choices),),
        )
        return simulate_plan(plan, graph, default_costs(), memory=self._memory).step_time


def line(case: Case) -> dict[str, object]:
    """What is printed of a case."""
    graph, scorer = case.make(), Scorer(case)
    begin = time.perf_counter()
    found: list[Rewriting] = rewritings(graph, scorer.best, limit=LIMIT)
    seconds = time.perf_counter() - begin
    before = scorer.steps(graph)
    best = {name: min(found, key=lambda each: scorer.steps(each.graph)[name]) for name in before}
    return {
        "case": case.name,
        "operators": len(graph.operators),
        "graphs": len(found),
        "seconds": round(seconds, 2),
        "ratio": round(found[0].score / min(before.values()), 4),
        "strategies": {
            name: {
                "step_ms": round(before[name] * 1e3, 2),
                "rewritten_ms": round(scorer.steps(each.graph)[name] * 1e3, 2),
                "rules": [step.rule for step in each.rewritten.steps],
            }
            for name, each in best.items()
        },
    }


def main() -> None:
    """Print a line a case."""
    for case in cases():
        print(json.dumps(line(case)), flush=True)


if __name__ == "__main__":
    main()
