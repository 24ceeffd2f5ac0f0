"""How much does replaying a change save over playing the whole task graph again?

    python -m benchmarks.delta

Prints one JSON object a line: the case, its tasks, the mean number of tasks replayed a proposal,
nanoseconds a proposal and its rejection take inside numba, the ratio of a full simulation of the
same changes to that, nanoseconds that an acceptance takes on top, and how many proposals were
checked against full simulation and how many were equal to it, every time of every task included.

The last two cases are moves of one operator of a pipelined GPT-3 (`benchmarks.delta_pipeline`),
with the macro graph played in full and by delta. There a full simulation plays the blocks of all
stages; `speedup_stage` compares with playing those of the changed stage only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable

import numpy as np
from numba import njit

from benchmarks.delta_cases import CASES, Case, Proposals
from benchmarks.delta_pipeline import (
    DELTA,
    DELTA_MACRO,
    NUM_MOVES,
    PLAN,
    STAGE,
    Player,
    change_and_play,
    pipelined_gpt3,
)
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.engine._delta_replay import (
    accept_changes,
    propose_changes,
    reject_changes,
)
from stratagem.simulator.engine._delta_state import DeltaState
from stratagem.simulator.engine.delta_engine import DeltaEngine
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.engine.task_graph import TaskGraph

NUM_CHECKED = 40
REPEATS = 9


@njit()
def reject_all(
    state: DeltaState, rounds: int, starts: Ints, tasks: Ints, durations: Ints, sets: Ints
) -> int:
    """Propose and reject everything some times over; return how many tasks were replayed."""
    replayed = 0
    for _ in range(rounds):
        for k in range(starts.size - 1):
            lo, hi = starts[k], starts[k + 1]
            propose_changes(state, tasks[lo:hi], durations[lo:hi], sets[lo:hi])
            replayed += state.book[0].replayed
            reject_changes(state)
    return replayed


@njit()
def accept_all(
    state: DeltaState, starts: Ints, tasks: Ints, durations: Ints, sets: Ints, accept: bool
) -> None:
    """Propose everything once and accept it, or leave that out."""
    for k in range(starts.size - 1):
        lo, hi = starts[k], starts[k + 1]
        propose_changes(state, tasks[lo:hi], durations[lo:hi], sets[lo:hi])
        if accept:
            accept_changes(state)


@njit()
def full_all(
    state: DeltaState, rounds: int, starts: Ints, tasks: Ints, durations: Ints, sets: Ints
) -> int:
    """Play the graph in full with every proposal, some times over."""
    total = 0
    for _ in range(rounds):
        for k in range(starts.size - 1):
            lo, hi = starts[k], starts[k + 1]
            total += change_and_play(state, tasks[lo:hi], durations[lo:hi], sets[lo:hi])
    return total


def best_ns(*calls: tuple[Callable[[], object], int]) -> list[float]:
    """Time the fastest of several calls, each of which does that many things; ns a thing.

    The calls take turns, so that all see the same moods of the machine.
    """
    best = [float("inf")] * len(calls)
    for _ in range(REPEATS):
        for k, (call, count) in enumerate(calls):
            begin = time.perf_counter_ns()
            call()
            best[k] = min(best[k], (time.perf_counter_ns() - begin) / count)
    return best


def count_equal(graph: TaskGraph, proposals: Proposals) -> tuple[int, int]:
    """Compare proposals, every other one accepted, with full simulation."""
    engine = DeltaEngine(graph)
    durations, sets = graph.durations.copy(), graph.resource_sets.copy()
    num_equal = 0
    count = min(NUM_CHECKED, proposals.count)
    for k in range(count):
        tasks, *new = proposals.proposal(k)
        before = durations[tasks], sets[tasks]
        makespan = engine.propose(tasks, *new)
        durations[tasks], sets[tasks] = new
        expected = simulate(
            dataclasses.replace(graph, durations=durations.copy(), resource_sets=sets.copy())
        )
        times = engine.times()
        num_equal += makespan == expected.makespan and all(
            np.array_equal(getattr(times, name), getattr(expected, name))
            for name in ("ready", "start", "end")
        )
        if k % 2:
            engine.accept()
        else:
            engine.reject()
            durations[tasks], sets[tasks] = before
    return count, num_equal


def measure(case: Case) -> dict[str, object]:
    """Time and check one case."""
    graph, proposals = case.build()
    engine = DeltaEngine(graph)
    flat = (proposals.starts, proposals.tasks, proposals.durations, proposals.sets)
    reject_all(engine.state, 1, *flat)
    replayed = reject_all(engine.state, 1, *flat) / proposals.count
    (once,) = best_ns((lambda: reject_all(engine.state, 1, *flat), 1))
    rounds = max(1, round(20e6 / once))  # 20 ms, longer than it takes to warm the caches up
    first = (proposals.starts[: 1 + max(20, 1_000_000 // graph.num_tasks)], *flat[1:])
    full_all(engine.state, 1, *first)
    delta, full = best_ns(
        (lambda: reject_all(engine.state, rounds, *flat), rounds * proposals.count),
        (lambda: full_all(engine.state, 1, *first), first[0].size - 1),
    )
    accept_all(DeltaEngine(graph).state, *flat, True)
    accepted, proposed = best_ns(
        (lambda: accept_all(engine.state, *flat, True), proposals.count),
        (lambda: accept_all(engine.state, *flat, False), proposals.count),
    )
    checked, equal = count_equal(graph, proposals)
    return {
        "case": case.name,
        "tasks": graph.num_tasks,
        "replayed": round(replayed, 1),
        "ns_per_proposal": round(delta),
        "speedup_full": round(full / delta, 2),
        "ns_per_acceptance": round(max(accepted - proposed, 0)),
        "checked": checked,
        "equal": equal,
    }


def measure_pipeline() -> list[dict[str, object]]:
    """Time and check moves of one operator of a pipeline."""
    pipeline = pipelined_gpt3()
    player = Player.of(pipeline)
    num_moves = {DELTA: NUM_MOVES, DELTA_MACRO: NUM_MOVES, STAGE: 100, PLAN: 40}
    replayed = {how: player.play(how, moves) for how, moves in num_moves.items()}
    calls = [(functools.partial(player.play, how, n), n) for how, n in num_moves.items()]
    ns = dict(zip(num_moves, best_ns(*calls), strict=True))
    lines: list[dict[str, object]] = []
    for how, name in ((DELTA, "in full"), (DELTA_MACRO, "by delta")):
        player.play(how, NUM_CHECKED)
        equal = sum(int(player.makespans[k]) == pipeline.makespan(k) for k in range(NUM_CHECKED))
        lines.append(
            {
                "case": f"pipelined GPT-3, 8 stages × 64 microbatches, macro graph {name}",
                "tasks": pipeline.num_tasks,
                "replayed": round(replayed[how], 1),
                "ns_per_proposal": round(ns[how]),
                "speedup_full": round(ns[PLAN] / ns[how], 2),
                "speedup_stage": round(ns[STAGE] / ns[how], 2),
                "checked": NUM_CHECKED,
                "equal": equal,
            }
        )
    return lines


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    for case in CASES:
        if only in case.name:
            print(json.dumps(measure(case)), flush=True)
    if only in "pipelined GPT-3":
        for line in measure_pipeline():
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
