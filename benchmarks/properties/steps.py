"""Properties of predicted steps: of hardware, of interleaving, of layers and of bubbles."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction

from benchmarks.properties.drawn import draw_plan, draw_shape, kinds
from benchmarks.properties.order import disorder
from benchmarks.properties.setups import (
    draw_setup,
    prompter,
    simulated,
    small_gpt,
    wider,
    with_free_links,
    with_links,
)
from benchmarks.properties.tries import Try
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.schedules.actions import Schedule
from stratagem.simulator.schedules.named_schedules import (
    gpipe,
    interleaved,
    one_f_one_b,
    terapipe,
    zb_h1,
)
from stratagem.simulator.schedules.schedule_player import StageTimes, play_schedule

ANOMALY = 0.002
"""What faster hardware may cost: queues that serve in another order (Graham's anomalies)."""
FREE = 0.001
"""What is left of communication where links are as good as free, as a share of a step."""


def orders(rng: random.Random) -> Iterator[Try]:
    """Every schedule is in the order of its lowered programs; the excess is what is not."""
    while True:
        for kind in kinds():
            plan, graph = draw_plan(rng, draw_shape(rng, kind))
            found = disorder(plan, graph, RooflineCosts())
            yield Try(f"{plan.name} of {graph.name}: {found[:3]}", float(len(found)))


def faster_hardware(rng: random.Random) -> Iterator[Try]:
    """No step is longer on faster hardware, be it links, memory, products or launches."""
    while True:
        setup, graph, cluster = draw_setup(rng)
        before = simulated(setup, graph, cluster).step_time
        for name, change in _FASTER.items():
            times = rng.choice([1.1, 1.5, 3.0, 10.0])
            after = simulated(setup, graph, change(cluster, times)).step_time
            what = f"{name} {times} times as fast: {setup} on {cluster.name}"
            yield Try(what, after / before - 1.0 - ANOMALY)


def _calibrated(cluster: Cluster, change: Callable[[Calibration], Calibration]) -> Cluster:
    return replace(cluster, calibration=change(cluster.calibration))


_FASTER: dict[str, Callable[[Cluster, float], Cluster]] = {
    "links": lambda cluster, times: with_links(cluster, lambda link: wider(link, times)),
    "messages": lambda cluster, times: with_links(cluster, lambda link: prompter(link, times)),
    "links in a node": lambda cluster, times: replace(
        cluster, intra_node=wider(cluster.intra_node, times)
    ),
    "links between nodes": lambda cluster, times: replace(
        cluster, inter_node=wider(cluster.inter_node, times)
    ),
    "memory": lambda cluster, times: _calibrated(
        cluster, lambda found: replace(found, memory_scale=found.memory_scale / times)
    ),
    "products": lambda cluster, times: _calibrated(
        cluster, lambda found: replace(found, product_scale=found.product_scale / times)
    ),
    "launches": lambda cluster, times: _calibrated(
        cluster, lambda found: replace(found, launch_us=found.launch_us / times)
    ),
}
"""Clusters with something so many times as fast."""


def interleaving(rng: random.Random) -> Iterator[Try]:
    """More stages a rank make no step longer where links are free, whatever updates take."""
    while True:
        ranks, tensor = rng.choice([2, 4]), rng.choice([1, 2])
        layers = ranks * rng.choice([4, 8])
        cluster = with_free_links(
            Cluster.preset(rng.choice(["dgx-a100", "dgx-h100"]), num_nodes=2)
        )
        data = cluster.num_devices // (ranks * tensor)
        rounds, sequence = rng.choice([1, 2, 4]), rng.choice([32, 128, 1024])
        hidden, batch = rng.choice([512, 1024]), data * ranks * rounds
        graph = small_gpt(layers, hidden, batch, sequence)
        zero, recompute = rng.choice([0, 1]), rng.choice(["none", "full"])
        steps = {
            virtual: simulated(
                TrainingSetup(
                    tensor=tensor,
                    pipeline=ranks,
                    virtual_stages=virtual,
                    zero=zero,
                    recompute=recompute,
                ),
                graph,
                cluster,
            ).step_time
            for virtual in (1, 2, 4)
        }
        for virtual in (2, 4):
            what = (
                f"{virtual} stages a rank of {ranks}, tensor {tensor}, {layers} layers of {hidden}"
            )
            what += f", {rounds} rounds of {sequence} tokens, ZeRO {zero}, {recompute}: {steps}"
            yield Try(what, steps[virtual] / steps[1] - 1.0 - FREE)


def affine_layers(rng: random.Random) -> Iterator[Try]:
    """A step of one device grows by as much with every layer."""
    while True:
        hidden, batch = rng.choice([256, 512, 1024, 2048]), rng.choice([1, 2, 4])
        setup = TrainingSetup(microbatch=batch, recompute=rng.choice(["none", "full"]))
        preset = rng.choice(["dgx-a100", "dgx-h100"])
        cluster = Cluster.preset(preset, num_nodes=1, devices_per_node=1)
        counts = sorted(rng.sample(range(2, 24), 3))
        low, middle, high = (
            simulated(setup, small_gpt(count, hidden, batch), cluster).step_time
            for count in counts
        )
        share = (counts[1] - counts[0]) / (counts[2] - counts[0])
        expected = low + share * (high - low)
        what = f"{counts} layers of {hidden} on {preset}, batch {batch}: {low}, {middle}, {high}"
        yield Try(what, abs(middle / expected - 1.0) - 1e-6)


def bubbles(rng: random.Random) -> Iterator[Try]:
    """The bubble of balanced stages is that of each schedule's paper, as a fraction."""
    while True:
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "terapipe"):
            schedule, times, formula = _bubble_case(rng, name)
            found = play_schedule(schedule, times).bubble
            yield Try(f"{schedule.name} {times}: {found}", float(abs(found - formula)))


def _bubble_case(rng: random.Random, name: str) -> tuple[Schedule, StageTimes, Fraction]:
    s, m = rng.randrange(1, 9), rng.randrange(1, 17)
    f, b = rng.randrange(1, 10**6), rng.randrange(1, 10**6)
    match name:
        case "interleaved":
            v, m = rng.randrange(1, 5), s * rng.randrange(1, 5)
            return interleaved(v * s, m, s), StageTimes(f, b), Fraction(s - 1, v * m + s - 1)
        case "zb-h1":
            w, m = rng.randrange(1, min(f, b) + 1), s + m
            times, idle = StageTimes(f, input_gradient=b, weight_gradient=w), (s - 1) * (f + b - w)
            return zb_h1(s, m), times, Fraction(idle, idle + m * (f + b + w))
        case "terapipe":
            k = rng.randrange(1, 6)
            return terapipe(s, m, k), StageTimes(f, b), Fraction(s - 1, k * m + s - 1)
    made = gpipe if name == "gpipe" else one_f_one_b
    return made(s, m), StageTimes(f, b), Fraction(s - 1, m + s - 1)
