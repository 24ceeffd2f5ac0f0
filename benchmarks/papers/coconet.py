"""CoCoNet: updates, dropout and residuals inside sums, products that overlap with sums."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import stratagem as sg
from benchmarks.papers.claims import Claim, Outcome
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import DraftTensor
from stratagem.simulator.graph.models.gpt_bert import TransformerBlock, positions_added
from stratagem.simulator.graph.models.layers import layer_norm, tokens
from stratagem.simulator.operators.operator import Operator

BERTS = {
    # layers, hidden, heads, samples a GPU at once under PyTorch and under ZeRO and CoCoNet
    "336M": (24, 1024, 16, 32, 32),
    "1.2B": (24, 2048, 32, 8, 32),
    "3.9B": (48, 2560, 40, 8, 8),
}
"""Section 6.1 of arXiv 2105.05720: the most that fits for a global batch of 8,192 on 256 V100s."""

BATCH, TOKENS = 8192, 128
BUCKET = 25 * 2**20


def bert(size: str) -> sg.OperatorGraph:
    """A BERT on sequences of 128 tokens, with which its training begins."""
    layers, hidden, heads, *_ = BERTS[size]
    return sg.models.bert(
        num_layers=layers, hidden=hidden, num_heads=heads, sequence=TOKENS, batch=BATCH
    )


def chosen_anew(plan: sg.Plan, change: Callable[[str, sg.Choice], sg.Choice]) -> sg.Plan:
    """The plan with every choice changed, by the name of its operator."""
    stages = [
        replace(stage, choices={name: change(name, each) for name, each in stage.choices.items()})
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


def with_fused(plan: sg.Plan, graph: sg.OperatorGraph) -> sg.Plan:
    """The plan with every update inside the collective that sums its gradients."""
    return chosen_anew(
        plan, lambda name, choice: replace(choice, fused=bool(graph.operator(name).weights))
    )


def _updates() -> Outcome:
    cluster = sg.Cluster.preset("dgx-2", num_nodes=16)
    training = sg.Training("float16")
    gains, told = {}, []
    for size, (*_, copied_samples, shared_samples) in BERTS.items():
        graph = bert(size)
        copied = sg.TrainingSetup(
            microbatch=copied_samples, bucket_bytes=BUCKET, training=training
        ).plan(graph, cluster)
        shared = sg.TrainingSetup(
            microbatch=shared_samples, zero=2, bucket_bytes=BUCKET, training=training
        ).plan(graph, cluster)
        ddp, zero = (sg.simulate(plan, graph) for plan in (copied, shared))
        fused = [sg.simulate(with_fused(plan, graph), graph) for plan in (copied, shared)]
        fitting = [each for each in fused if each.fits]
        best = min(fitting or fused, key=lambda each: each.step_time)
        if ddp.fits:
            gains[f"{size}, DDP"] = ddp.step_time / best.step_time
        gains[f"{size}, ZeRO"] = zero.step_time / best.step_time
        told.append(
            f"{size}: DDP {waits(ddp)}, fused {1e3 * fused[0].step_time:.0f} ms; ZeRO-2 "
            f"{waits(zero)}, fused {1e3 * fused[1].step_time:.0f} ms"
        )
    return Outcome(
        gains,
        "under ZeRO a bucket is gathered behind its updates, of which each device has few, so "
        "that a fused update spares nothing; " + "; ".join(told),
    )


def waits(simulation: sg.Simulation) -> str:
    """How long a step is, how much of it waits for collectives, and of how many."""
    exposed = simulation.groups.numbers("exposed communication")[0]
    count = sum(map(int, simulation.collectives.numbers("count")))
    fits = "" if simulation.fits else ", does not fit"
    return (
        f"{1e3 * simulation.step_time:.0f} ms ({1e3 * exposed:.0f} of them for {count} "
        f"collectives{fits})"
    )


class BiasesApart(TransformerBlock):
    """A layer of Megatron-LM as CoCoNet took it: a bias behind each sum, dropout, the residual.

    Those of the other products are added as they are computed, and left out.
    """

    def residual(self, b: GraphBuilder, x: DraftTensor, y: DraftTensor) -> DraftTensor:
        """x plus what dropout leaves of y and its bias."""
        bias = b.parameter(f"{y.node.name}.bias", y.shape[-1:])
        return super().residual(b, x, b.pointwise("add", y, bias))


def megatron(
    *, num_layers: int, hidden: int, sequence: int, vocabulary: int, causal: bool
) -> sg.OperatorGraph:
    """A model of Megatron-LM for 8 samples, which attends without FlashAttention.

    It has 32 heads, which 16 devices can share out.
    """
    block = BiasesApart(
        "megatron", 32, 4 * hidden, bias=False, attention="unfused", dropout=0.1, causal=causal
    )
    b = GraphBuilder("megatron")
    ids, labels = tokens(b, 8, sequence)
    table = b.parameter("wte.weight", (vocabulary, hidden))
    x = positions_added(b, b.embedding(ids, table, name="wte"))
    x = block.dropped(b, x, "embedding")
    for i in range(num_layers):
        with b.scope(f"h.{i}"):
            x = block.forward(b, x)
    x = layer_norm(b, "ln_f", x)
    return b.build(b.cross_entropy(b.linear(x, table, name="lm_head"), labels))


FORWARD = {
    "BERT 3.9B": lambda: megatron(
        num_layers=48, hidden=2560, sequence=512, vocabulary=30592, causal=False
    ),
    "GPT-2 8.3B": lambda: megatron(
        num_layers=72, hidden=3072, sequence=1024, vocabulary=51200, causal=True
    ),
}
"""Timed were forward passes of training steps, whose sums have a bias, dropout and an addition as
kernels of their own behind them: so do the programs that go with the paper, `megatron/training.py`
and `megatron/mpu/layers.py` in github.com/parasailteam/coconet-experiments. Of passes without
dropout, with biases added in the products and FlashAttention (`sg.models`), ours are 1.20 and
1.27.
"""

PARTS = (2, 4, 8, 16)
"""As many as CoCoNet's ring has, one for each of 16 GPUs, or fewer."""


def streamed(plan: sg.Plan, chosen: Collection[str], chunks: int) -> sg.Plan:
    """The plan with some operators in parts, that the sum of their results waits for."""

    def change(name: str, choice: sg.Choice) -> sg.Choice:
        return replace(choice, chunks=chunks, streamed=True) if name in chosen else choice

    return chosen_anew(plan, change)


def in_sums(plan: sg.Plan, chosen: Collection[str]) -> sg.Plan:
    """The plan with some operators inside the sums that they read."""
    return chosen_anew(plan, lambda name, choice: replace(choice, in_sum=name in chosen))


def is_summed(operator: Operator) -> bool:
    """Whether tensor parallelism sums what a product makes: the second of attention and of MLP."""
    return operator.name.endswith(("attn.out", "mlp.down"))


def is_behind(operator: Operator) -> bool:
    """Whether an operator adds biases and residuals to such sums, and drops some of them out."""
    return operator.name.endswith((".add", ".add_1"))


class Passes:
    """Seconds of the forward pass of a model under a plan, and of tasks in it."""

    def __init__(self, plan: sg.Plan, graph: sg.OperatorGraph) -> None:
        timeline = sg.simulate(plan, graph).timeline
        rows = zip(timeline.names, timeline.start.tolist(), timeline.end.tolist(), strict=True)
        self._spans = {name: (start, end) for name, start, end in rows}

    @property
    def seconds(self) -> float:
        """Until the loss is there."""
        return 1e-9 * self._spans["cross_entropy forward"][1]

    def of(self, wanted: Callable[[str], bool]) -> float:
        """Of all tasks of some names together, which run one after the other."""
        return 1e-9 * sum(end - start for n, (start, end) in self._spans.items() if wanted(n))


def _overlap() -> Outcome:
    cluster = sg.Cluster.preset("dgx-2", num_nodes=1)
    gains, told = {}, []
    for name, build in FORWARD.items():
        graph = build()
        setup = sg.TrainingSetup(
            microbatch=graph.batch, tensor=16, training=sg.Training("float16")
        )
        plan = setup.plan(graph, cluster)
        whole = Passes(plan, graph)
        products = [each.name for each in graph.operators if is_summed(each)]
        behind = [each.name for each in graph.operators if is_behind(each)]
        fused = in_sums(plan, behind)
        steps = {parts: Passes(streamed(fused, products, parts), graph).seconds for parts in PARTS}
        gains[name] = whole.seconds / min(steps.values())
        sums = whole.of(lambda n: any(f"{each} → " in n for each in products))  # noqa: B023
        runs = whole.of({f"{each} forward" for each in products}.__contains__)
        added = whole.of({f"{each} forward" for each in behind}.__contains__)
        parts = ", ".join(f"{1e3 * step:.1f} in {count}" for count, step in steps.items())
        told.append(
            f"{name}: {1e3 * whole.seconds:.1f} ms, of which {1e3 * sums:.1f} are sums, "
            f"{1e3 * runs:.1f} the products before them and {1e3 * added:.1f} biases, dropout and "
            f"residuals behind them; {1e3 * Passes(fused, graph).seconds:.1f} with these inside "
            f"the sums, and {parts} parts of the products"
        )
    return Outcome(gains, "; ".join(told))


CLAIMS = (
    Claim(
        "coconet-updates",
        "CoCoNet",
        "arXiv 2105.05720, section 6.1",
        "BERTs on 256 V100s: fused sums and updates of Adam over PyTorch's DDP and over ZeRO",
        "",
        {
            "336M, DDP": 1.22,
            "336M, ZeRO": 1.10,
            "1.2B, DDP": 1.52,
            "1.2B, ZeRO": 1.10,
            "3.9B, ZeRO": 1.22,
        },
        (0.9, 1.1),
        _updates,
    ),
    Claim(
        "coconet-overlap",
        "CoCoNet",
        "arXiv 2105.05720, section 6.2",
        "forward passes on 16 V100s, tensor parallel: products that overlap with the sums of "
        "their results, and biases, dropout and residual additions inside these, over neither",
        "",
        {"BERT 3.9B": 1.51, "GPT-2 8.3B": 1.48},
        (0.9, 1.1),
        _overlap,
    ),
)
