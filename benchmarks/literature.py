"""What does each method of the literature propose, how good is it, and how long does it take?

    python -m benchmarks.literature [CASE …]

Prints one JSON object a line: a model and cluster, a method, CPU seconds that it took to propose
its plans, how many they are, and the best of them on the simulator: step in ms, whether it fits,
its name. Then how pricing was made fast, as ratios taken in one run: strategies of one mesh by
look-ups against simulating each as a plan, device placements likewise (with pricing all pairs of
devices first), and how many of Megatron-LM's setups are simulated, with the step of the best
beside that of the best of all that no bound excludes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from stratagem.searcher.methods.literature import (
    LITERATURE,
    StagePrices,
    grid_meshes,
    megatron_setups,
    one_stage_plan,
    operator_groups,
    random_choices,
    screen,
)
from stratagem.searcher.methods.literature.device_placement_rl import Placements
from stratagem.searcher.space.situation import Situation, rank
from stratagem.simulator.graph.models import gpt, mlp, moe, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import Simulation, simulate_plan

REPEATS = 5
STRATEGIES = 20

CASES: dict[str, tuple[Callable[[], OperatorGraph], int]] = {
    "mlp, 8 A100s": (lambda: mlp([1024, 4096, 4096, 1000], batch=64), 1),
    "GPT-2, 8 A100s": (lambda: gpt(batch=64, vocabulary=51200), 1),
    "ResNet-50, 8 A100s": (lambda: resnet(50, batch=256), 1),
    "GShard-MoE, 16 A100s": (lambda: moe(num_layers=8, batch=256, experts=16), 2),
    "GPT-2 1.5B, 16 A100s": (
        lambda: gpt(num_layers=48, hidden=1600, num_heads=25, batch=512),
        2,
    ),
    "GPT-3 175B, 1,024 A100s": (
        lambda: gpt(
            num_layers=96,
            hidden=12288,
            num_heads=96,
            vocabulary=51200,
            sequence=2048,
            batch=1536,
        ),
        128,
    ),
}


def situation_of(name: str) -> Situation:
    """A case with nothing priced yet."""
    build, nodes = CASES[name]
    cluster = Cluster.preset("dgx-a100", num_nodes=nodes)
    return Situation(build(), cluster, Training("bfloat16", eager_loss=True), default_costs())


def methods(name: str) -> None:
    """A line for each method that applies."""
    situation = situation_of(name)
    for method, propose in LITERATURE.items():
        began = time.process_time()
        plans = list(propose(situation))
        seconds = time.process_time() - began
        if not plans:
            continue
        best = min((situation.simulate(plan) for plan in plans), key=rank)
        say(
            case=name,
            method=method,
            seconds=round(seconds, 2),
            plans=len(plans),
            step_ms=round(best.step_time * 1e3, 3),
            fits=best.fits,
            plan=best.plan.name,
        )


def pricing(name: str) -> None:
    """Strategies and placements by look-ups, against a simulation of each."""
    situation = situation_of(name)
    mesh = grid_meshes(situation)[-1]
    drawn = [random_choices(situation.graph, mesh.shape, seed=k) for k in range(STRATEGIES)]
    listed = {n: [choices[n] for choices in drawn] for n in situation.graph.names}
    prices = StagePrices(situation, mesh, listed)
    plans = [one_stage_plan("x", situation, mesh, choices) for choices in drawn]
    groups = operator_groups(situation.graph, 64)
    rng = np.random.default_rng(0)
    shape = STRATEGIES, int(groups.max()) + 1
    placed = list(rng.integers(0, situation.cluster.num_devices, shape))
    pinned = [Placements(situation, groups).plan(each) for each in placed]

    def price_placements() -> None:
        placements = Placements(situation, groups)
        for each in placed:
            placements.price(each)

    for what, fast, plain in (
        ("strategies of one mesh", lambda: [prices.of(c) for c in drawn], plans),
        ("device placements", price_placements, pinned),
    ):
        ours = best_ms(fast)
        theirs = best_ms(lambda: [simulated(situation, plan) for plan in plain])  # noqa: B023
        say(case=name, pricing=what, ms=ours, simulate_plan_ms=theirs, ratio=theirs / ours)


def simulated(situation: Situation, plan: Plan) -> Simulation:
    """A plan's simulation, made anew from prices that are known: `simulate` remembers the last."""
    return simulate_plan(plan, situation.graph, situation.costs, memory=situation.memory)


def screening(name: str) -> None:
    """How many setups are simulated, and what leaving the others out costs."""
    situation = situation_of(name)
    setups = list(megatron_setups(situation))
    began = time.process_time()
    found = screen(situation, setups)
    seconds = time.process_time() - began
    whole = screen(situation, setups, max_simulated=len(setups))
    best, all_of_them = found.simulated[0], whole.simulated[0]
    say(
        case=name,
        setups=len(setups),
        simulated=len(found.simulated),
        seconds=round(seconds, 2),
        best_ms=best.step_time * 1e3,
        best_of_all_ms=all_of_them.step_time * 1e3,
        simulated_of_all=len(whole.simulated),
    )


def best_ms(run: Callable[[], object]) -> float:
    """Milliseconds for each of the strategies, best of several repeats."""
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return round(min(times) / STRATEGIES * 1e3, 3)


def say(**fields: object) -> None:
    """Print a line."""
    print(json.dumps(fields), flush=True)


def main() -> None:
    """Run the cases named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    for name in parser.parse_args().cases or CASES:
        methods(name)
    pricing("GPT-2, 8 A100s")
    for name in ("GPT-2 1.5B, 16 A100s", "GPT-3 175B, 1,024 A100s"):
        screening(name)


if __name__ == "__main__":
    main()
