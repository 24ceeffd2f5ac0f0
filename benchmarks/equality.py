"""Does every plan train what one process of torch trains on the whole batch?

    python -m benchmarks.equality [--plans 1000] [--seed 0]

Models and losses are drawn at random (`benchmarks.random_training`), and for each of them plans:
1, 2, 4 or all microbatches that the model allows, one to eight ranks, every schedule with a name
whose step is one update, sharding, ZeRO stage, recompute, pieces and buckets. Each makes two steps
with SGD in float64, perhaps with clipping and decay. Losses, gradients, parameters and buffers are
compared with those of torch on the whole batch, which knows no plan; where batch norms see
microbatches, torch's see the same.

Prints a JSON line for every kind of model, and one for all: `case`, `models`, `tried` (plans that
were run), `worst` (the largest relative error), `refused` (models or plans that were not taken),
`whole` (models that keep their batch whole), `failed`: plans that train something else or end
otherwise, models that are cut though torch says that their loss is no sum over samples, and models
that are not cut though it is one. Each failure is told on the standard error.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from benchmarks.properties.drawn import Shape
from benchmarks.random_training import Drawing, draw
from stratagem.executor import ExecutionResult, execute, model_state
from stratagem.executor.running.execute import prepare
from stratagem.executor.running.torch_reference import (
    gradient_errors,
    relative_error,
    statistics_apart,
)
from stratagem.executor.state.batch_norm_counters import COUNTER
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.schedules.named_schedules import SCHEDULES
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import SHAPES, Case, plan_on

TOLERANCE = 1e-8
"""Of two steps in float64 with sums in another order."""

STEPS = 2
PLANS_PER_MODEL = 4
"""Of schedules for any two stages; and one of any record."""

MOST_RANKS = 8
RATE = 0.05


@dataclass
class Tally:
    """What became of one kind of model."""

    models: int = 0
    tried: int = 0
    refused: int = 0
    whole: int = 0
    failed: int = 0
    worst: float = 0.0

    def add(self, other: Tally) -> None:
        """Count what another counted, too."""
        for name in ("models", "tried", "refused", "whole", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst = max(self.worst, other.worst)


@dataclass(frozen=True, eq=False)
class Truth:
    """Two steps of torch."""

    losses: tuple[float, ...]
    model: nn.Module


def compare(seed: int, number: int, plans: int = PLANS_PER_MODEL) -> tuple[str, Tally, list[str]]:
    """Draw a model, run some plans of it, and say what differs from torch.

    Returns:
        The kind of model, what was counted, and a line about each failure.
    """
    drawn = draw(seed, number)
    tally, failures = Tally(models=1), []
    where = f"model {number} ({drawn.model.name})"
    try:
        graph = capture(drawn.model, (), drawn.batch)
    except ValueError as error:
        return drawn.case, Tally(models=1, refused=1), [f"{where} is refused: {error}"]
    tally.whole = int(bool(graph.whole_batch))
    if drawn.adds_up == bool(graph.whole_batch):
        tally.failed += 1
        said = graph.whole_batch or "cut"
        failures.append(f"{where}: adds up {drawn.adds_up}, but the batch is: {said}")
    case = Case(drawn.model, drawn.batch, graph)
    rng = random.Random(f"{seed}/{number}/plans")
    for plan in random_plans(case, rng, plans):
        try:
            prepare(plan, graph)
        except ValueError:
            tally.refused += 1
            continue
        try:
            result = execute(
                plan, graph, model_state(drawn.model), drawn.batch, steps=STEPS, gradients=True
            )
        except Exception as error:  # Whatever it is, it is told and counted.
            tally.failed += 1
            failures.append(f"{where}: {_words(plan)} ends with {type(error).__name__}: {error}")
            continue
        tally.tried += 1
        off = _error(drawn, plan, graph, result)
        tally.worst = max(tally.worst, off)
        if not off <= TOLERANCE:
            tally.failed += 1
            failures.append(f"{where}: {_words(plan)} is {off:.1e} off")
    return drawn.case, tally, failures


def random_plans(case: Case, rng: random.Random, count: int) -> Iterator[Plan]:
    """Plans with any number of microbatches that the model allows, of one to eight ranks."""
    for number in range(count):
        parts = rng.choice([n for n in case.graph.microbatch_counts if n <= 4 or number == 0])
        yield _random_plan(case, rng, parts, _random_training(rng))
    shapes = list(_shapes(case.graph))
    if shapes:
        name = rng.choice(sorted({shape.schedule for shape in shapes}))
        yield _plan_under(case, rng, rng.choice([s for s in shapes if s.schedule == name]))


def _random_training(rng: random.Random) -> Training:
    return Training(
        optimizer="sgd",
        learning_rate=RATE,
        weight_decay=rng.choice([0.0, 0.1]),
        clip_norm=rng.choice([0.0, 0.0, 0.05]),
    )


def _shapes(graph: OperatorGraph) -> Iterator[Shape]:
    """Schedules with a name that make one update a step, of sizes that the model allows."""
    most = sum(not operator.is_source for operator in graph.operators)
    parts = [count for count in graph.microbatch_counts if 1 < count <= MOST_RANKS]
    for name, ranks, per_rank, count in product(SCHEDULES, [2, 4], [1, 2], parts):
        shape = Shape(name, ranks, per_rank, count, ways=1)
        made = shape.made() if shape.num_stages <= most else None
        if made is not None and made.update_every is None:
            yield shape


def _plan_under(case: Case, rng: random.Random, shape: Shape) -> Plan:
    """A plan under a schedule, whose stages are as wide as those of their mirror images."""
    small = [each for each in SHAPES if math.prod(each) * shape.ranks <= MOST_RANKS]
    half = [rng.choice(small) for _ in range(shape.ranks // 2)]
    made = shape.made()
    seed = rng.randrange(10**9)
    return plan_on(
        case, (half + half[::-1]) * shape.per_rank, rng, seed, num_microbatches=shape.parts,
        schedule=shape.schedule, training=_random_training(rng),
        crews=shape.ranks if shape.per_rank > 1 else None,
        pins=made is None or not made.is_mirrored,
    )  # fmt: skip


def _random_plan(case: Case, rng: random.Random, parts: int, training: Training) -> Plan:
    size = sum(not operator.is_source for operator in case.graph.operators)
    num_stages = rng.choice([1, 1, 2, 3]) if size > 3 else 1
    shapes = [rng.choice(SHAPES) for _ in range(num_stages)]
    while sum(map(math.prod, shapes)) > MOST_RANKS:
        shapes = [rng.choice(SHAPES) for _ in range(num_stages)]
    schedule, crews = rng.choice(["gpipe", "1f1b"]), None
    if num_stages == 2 and parts % 2 == 0 and size > 5 and rng.random() < 0.4:
        schedule, crews, shapes = "interleaved", 2, shapes * 2
    elif num_stages > 1 and parts >= num_stages and rng.random() < 0.4:
        schedule = "zb-h1"
    seed = rng.randrange(10**9)
    return plan_on(
        case, shapes, rng, seed, num_microbatches=parts, schedule=schedule, training=training,
        crews=crews,
    )  # fmt: skip


def _error(drawn: Drawing, plan: Plan, graph: OperatorGraph, result: ExecutionResult) -> float:
    """The largest relative error of losses, gradients, parameters and buffers."""
    truth = _truth(drawn, plan, len(graph.batch_norms))
    pairs = zip(result.losses, truth.losses, strict=True)
    errors = [abs(ours - theirs) / max(abs(theirs), 1.0) for ours, theirs in pairs]
    assert result.gradients is not None
    gradients = {k: p.grad for k, p in truth.model.named_parameters() if p.grad is not None}
    errors += gradient_errors(result.gradients, gradients).values()
    state = truth.model.state_dict()
    errors += [relative_error(result.parameters[name], state[name]) for name in result.parameters]
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def _truth(drawn: Drawing, plan: Plan, num_norms: int) -> Truth:
    model, training, losses = copy.deepcopy(drawn.model), plan.training, []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=training.weight_decay)
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = plan.num_microbatches
        apart = statistics_apart(parts) if num_norms and parts > 1 else nullcontext()
        with apart:
            loss = model(**drawn.batch)
        loss.backward()
        if training.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == COUNTER:
            begun = drawn.model.get_buffer(name)
            # Microbatches are normalised one by one, in one call here.
            buffer += (plan.num_microbatches - 1) * (buffer - begun)
    return Truth(tuple(losses), model)


def _words(plan: Plan) -> str:
    shapes = " + ".join("×".join(map(str, stage.mesh.shape)) for stage in plan.stages)
    return f"{plan.num_microbatches} microbatches on {shapes} under {plan.schedule}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality")
    parser.add_argument("--plans", type=int, default=1000, help="to run at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases: dict[str, Tally] = {}
    start, number, tried = time.monotonic(), 0, 0
    while tried < options.plans:
        case, tally, failures = compare(options.seed, number)
        cases.setdefault(case, Tally()).add(tally)
        for failure in failures:
            print(failure, file=sys.stderr)
        number, tried = number + 1, tried + tally.tried
    everything = Tally()
    for name, tally in sorted(cases.items()):
        everything.add(tally)
        print(json.dumps({"case": name, **vars(tally)}))
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"case": "all", **vars(everything), "seconds": seconds}))


if __name__ == "__main__":
    main()
