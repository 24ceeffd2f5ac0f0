"""FlexFlow, OptCNN and Tofu: operators split one by one, and how fast a proposal is decided."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache

import stratagem as sg
from benchmarks.anneal import whole
from benchmarks.papers.claims import Claim, Outcome
from benchmarks.papers.networks import alexnet, vgg16
from stratagem.searcher.annealing.chains import WIDE_EVALUATIONS, AnnealingChain
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.space.situation import Situation, rank
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.kernel_times.fitted_kernels import default_costs

SGD = sg.Training(optimizer="sgd", momentum=0.9, eager_loss=True)

Build = Callable[[int], sg.OperatorGraph]
NETWORKS: dict[str, Build] = {
    "AlexNet": alexnet,
    "VGG-16": vgg16,
    "Inception v3": lambda batch: sg.models.inception_v3(batch=batch),
    "ResNet-101": lambda batch: sg.models.resnet(101, batch=batch),
    "NMT": lambda batch: sg.models.nmt(batch=batch),
}
"""By the names that the papers use, for a batch."""


def p100s(num_devices: int) -> sg.Cluster:
    """P100s as FlexFlow and OptCNN had them."""
    return sg.Cluster.preset("p100-100g").with_devices(num_devices)


def copied(graph: sg.OperatorGraph, cluster: sg.Cluster) -> float:
    """Seconds of a data parallel step."""
    setup = sg.TrainingSetup(microbatch=graph.batch // cluster.num_devices, training=SGD)
    return sg.simulate(setup.plan(graph, cluster), graph).step_time


def proposed(method: str, graph: sg.OperatorGraph, cluster: sg.Cluster) -> float:
    """Seconds of the best plan that a method of the literature proposes."""
    situation = Situation(graph, cluster, SGD, default_costs())
    plans = [situation.simulate(plan) for plan in METHODS[method](situation)]
    return min(plans, key=rank).step_time


BATCH = 64
"""Of FlexFlow's networks on all devices."""
DELTA_DEVICES = (4, 16, 64)
DELTA_NETWORKS = ("Inception v3", "ResNet-101", "NMT")
PROPOSALS, FULL, ROUNDS = 4000, 10, 10
"""Decided by delta and scored in full in a round; the fastest round counts."""


@cache
def decided(network: str, num_devices: int) -> tuple[float, float]:
    """Seconds of a proposal by delta and in full, late in a chain as FlexFlow's table has it."""
    problem = flat_problem(NETWORKS[network](BATCH), p100s(num_devices))
    start = problem.encode(data_parallel(problem.graph, problem.skeleton.meshes[0].shape))
    chain = AnnealingChain(problem, start, 10**9, 0)
    chain.advance(2 * WIDE_EVALUATIONS)
    delta = full = math.inf
    for _ in range(ROUNDS):
        began = time.process_time()
        chain.advance(PROPOSALS)
        between = time.process_time()
        for _ in range(FULL):
            chain.score()
        delta = min(delta, (between - began) / PROPOSALS)
        full = min(full, (time.process_time() - between) / FULL)
    return delta, full


def flat_problem(graph: sg.OperatorGraph, cluster: sg.Cluster) -> Problem:
    """All operators on one mesh: nodes times the devices of one."""
    shape = cluster.num_nodes, cluster.devices_per_node
    return make_problem(graph, whole(graph, shape, 1), cluster, SGD, default_costs(), (0,))


def _delta() -> Outcome:
    gains = {}
    for network in DELTA_NETWORKS:
        for devices in DELTA_DEVICES:
            by_delta, in_full = decided(network, devices)
            gains[network, devices] = in_full / by_delta
    told = "; ".join(
        f"{network} on {devices}: {gain:.1f}" for (network, devices), gain in gains.items()
    )
    return Outcome({"least": min(gains.values()), "most": max(gains.values())}, told)


def _speed() -> Outcome:
    found = {}
    for network in ("Inception v3", "NMT"):
        step = copied(NETWORKS[network](BATCH), p100s(16))
        found[network] = step / decided(network, 16)[0]
    return Outcome(
        found,
        "a step of the network over a proposal's time: of several steps, which a trial needs, "
        "the ratio is as many times larger",
    )


def _translation() -> Outcome:
    graph = NETWORKS["NMT"](BATCH)
    cluster = sg.Cluster.preset("k80-56g")
    return Outcome({"gain": copied(graph, cluster) / proposed("FlexFlow", graph, cluster)})


def _convolutions() -> Outcome:
    gains, told = {}, []
    for network in ("Inception v3", "ResNet-101"):
        graph = NETWORKS[network](BATCH)
        gains[network] = copied(graph, p100s(16)) / proposed("FlexFlow", graph, p100s(16))
        large = NETWORKS[network](16 * BATCH)
        gain = copied(large, p100s(16)) / proposed("OptCNN", large, p100s(16))
        told.append(f"{network}: {gains[network]:.2f} with 4 images a GPU, {gain:.2f} with 64")
    return Outcome(gains, "what is gained is due to small batches: " + "; ".join(told))


WEAK_IMAGES = 32
"""Of a GPU, in OptCNN's measurements."""
CONVOLUTIONAL = ("AlexNet", "VGG-16", "Inception v3")


def _optcnn() -> Outcome:
    speedups, alike, updating = {}, [], []
    for network in CONVOLUTIONAL:
        build = NETWORKS[network]
        small, alone = build(WEAK_IMAGES), p100s(1)
        plan = sg.TrainingSetup(microbatch=WEAK_IMAGES, training=SGD).plan(small, alone)
        one = sg.simulate(plan, small)
        updates = sum(one.operators.numbers("update"))
        graph, cluster = build(16 * WEAK_IMAGES), p100s(16)
        speedups[network] = 16 * one.step_time / proposed("OptCNN", graph, cluster)
        alike.append(f"{network} {16 * one.step_time / copied(graph, cluster):.1f}")
        updating.append(f"{updates / one.step_time:.0%}")
    return Outcome(
        speedups,
        f"by data parallelism alone {', '.join(alike)}; updates, which split layers share out, "
        f"are {', '.join(updating)} of their steps on one GPU",
    )


def _tofu() -> Outcome:
    gains, told = {}, []
    for network in CONVOLUTIONAL:
        graph, cluster = NETWORKS[network](16 * WEAK_IMAGES), p100s(16)
        tofu = proposed("Tofu", graph, cluster)
        gains[network] = copied(graph, cluster) / tofu
        told.append(f"{network} {tofu / proposed('OptCNN', graph, cluster):.2f}")
    return Outcome(
        gains,
        "Tofu's models fit no device whole, so that data parallelism could not run, and these do. "
        "Over OptCNN's best, times as long: " + ", ".join(told),
    )


CLAIMS = (
    Claim(
        "flexflow-delta",
        "FlexFlow",
        "arXiv 1807.05358, section 8 and table 4",
        "proposals decided by delta simulation (here by bounds first) over full simulation, "
        "networks on 4 to 64 GPUs: at least so much",
        "",
        {"least": 2.2, "most": 6.9},
        (0.8, 100.0),
        _delta,
        is_timed=True,
    ),
    Claim(
        "flexflow-speed",
        "FlexFlow",
        "arXiv 1807.05358, abstract",
        "deciding a proposal over executing a step of it: at least three orders of magnitude",
        "",
        {"Inception v3": 1000.0, "NMT": 1000.0},
        (0.8, 100.0),
        _speed,
        is_timed=True,
    ),
    Claim(
        "flexflow-nmt",
        "FlexFlow",
        "arXiv 1807.05358, figure 8",
        "NMT on 64 K80s over data parallelism: 1.7 to 2.4",
        "",
        {"gain": 1.7},
        (0.9, 1.42),
        _translation,
    ),
    Claim(
        "flexflow-convolutions",
        "FlexFlow",
        "arXiv 1807.05358, figure 7 and section 8.2",
        "Inception v3 and ResNet-101 on 16 P100s, batch 64, over data parallelism",
        "",
        {"Inception v3": 1.3, "ResNet-101": 1.0},
        (0.8, 1.25),
        _convolutions,
    ),
    Claim(
        "optcnn-speedups",
        "OptCNN",
        "arXiv 1802.04924, section 6",
        "16 P100s over one, 32 images a GPU",
        "",
        {"AlexNet": 12.2, "VGG-16": 14.8, "Inception v3": 15.5},
        (0.85, 1.15),
        _optcnn,
    ),
    Claim(
        "tofu-gain",
        "Tofu",
        "arXiv 1807.08887, abstract",
        "over other ways to train, 1.25 to 4 (the least counts here)",
        "",
        dict.fromkeys(CONVOLUTIONAL, 1.25),
        (1.0, 3.2),
        _tofu,
    ),
)
