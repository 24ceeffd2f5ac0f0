"""CoCoNet: updates inside the sums of gradients, products that overlap with their sums."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import stratagem as sg
from benchmarks.papers.claims import Claim, Outcome
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
    exposed = sum(float(row[2]) for row in simulation.groups.rows[:1])
    count = sum(int(row[3]) for row in simulation.collectives.rows)
    fits = "" if simulation.fits else ", does not fit"
    return (
        f"{1e3 * simulation.step_time:.0f} ms ({1e3 * exposed:.0f} of them for {count} "
        f"collectives{fits})"
    )


INFERRED = {
    "BERT 3.9B": lambda: sg.models.bert(
        num_layers=48, hidden=2560, num_heads=32, sequence=512, batch=8
    ),
    "GPT-2 8.3B": lambda: sg.models.gpt(
        num_layers=72, hidden=3072, num_heads=32, sequence=1024, vocabulary=51200, batch=8
    ),
}
"""With heads that 16 devices can share out."""

PARTS = (2, 4, 8, 16)
"""As many as CoCoNet's ring has, one for each of 16 GPUs, or fewer."""


def streamed(plan: sg.Plan, chosen: Collection[str], chunks: int) -> sg.Plan:
    """The plan with some operators in parts, that the sum of their results waits for."""

    def change(name: str, choice: sg.Choice) -> sg.Choice:
        return replace(choice, chunks=chunks, streamed=True) if name in chosen else choice

    return chosen_anew(plan, change)


def is_summed(operator: Operator) -> bool:
    """Whether tensor parallelism sums what a product makes: the second of attention and of MLP."""
    return operator.name.endswith(("attn.out", "mlp.down"))


def _seconds_of(simulation: sg.Simulation, wanted: Callable[[str], bool]) -> float:
    """Of all tasks of some names together, which run one after the other."""
    timeline = simulation.timeline
    spans = (timeline.end - timeline.start).tolist()
    return 1e-9 * sum(span for n, span in zip(timeline.names, spans, strict=True) if wanted(n))


def _inference() -> Outcome:
    cluster = sg.Cluster.preset("dgx-2", num_nodes=1)
    gains, told = {}, []
    for name, build in INFERRED.items():
        graph = sg.forward_pass(build())
        setup = sg.TrainingSetup(
            microbatch=graph.batch, tensor=16, schedule="gpipe", training=sg.Training("float16")
        )
        plan = setup.plan(graph, cluster)
        whole = sg.simulate(plan, graph)
        chosen = [each.name for each in graph.operators if is_summed(each)]
        steps = {
            parts: sg.simulate(streamed(plan, chosen, parts), graph).step_time for parts in PARTS
        }
        best = min(steps.values())
        gains[name] = whole.step_time / best
        exposed = float(whole.groups.rows[0][2])
        products = {f"{each} forward" for each in chosen}
        hidden = _seconds_of(whole, products.__contains__)
        added = _seconds_of(whole, lambda n: n.endswith((".add forward", ".add_1 forward")))
        parts = ", ".join(f"{1e3 * step:.1f} in {count}" for count, step in steps.items())
        told.append(
            f"{name}: {1e3 * whole.step_time:.1f} ms whole, of which {1e3 * exposed:.1f} are sums "
            f"and {1e3 * hidden:.1f} the products before them; {parts} parts; if the residual "
            f"additions ({1e3 * added:.1f}) were inside the sums, as CoCoNet has them, "
            f"{whole.step_time / (best - added):.2f}"
        )
    return Outcome(
        gains,
        "overlap hides at most the products that are summed, which are shorter than their sums; "
        "CoCoNet's gain is also of biases, dropout and residual additions that its sums do on "
        "their way, each device for its share, which is left out here; " + "; ".join(told),
    )


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
        "inference on 16 V100s, tensor parallel: products that overlap with the sums of their "
        "results over those that do not",
        "",
        {"BERT 3.9B": 1.51, "GPT-2 8.3B": 1.48},
        (0.9, 1.1),
        _inference,
    ),
)
