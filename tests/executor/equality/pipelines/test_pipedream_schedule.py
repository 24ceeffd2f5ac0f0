"""PipeDream's schedule: what a step takes, which versions of weights it keeps, and whose it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search_course import SearchCourse
from stratagem.searcher.driver.skeleton_entries import SkeletonList
from stratagem.searcher.methods.registry import METHODS
from stratagem.searcher.methods.simple_strategies import baseline_plans
from stratagem.searcher.problem.priced_skeleton import make_problem
from stratagem.searcher.processes.checkpoint import SearchCheckpoint
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, skeleton_of
from stratagem.simulator.graph import models
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.schedules.named_schedules import gpipe, pipedream, pipedream_vertical
from stratagem.simulator.schedules.schedule_player import StageTimes
from stratagem.simulator.schedules.steady_state import steady_state
from stratagem.simulator.schedules.weight_versions import (
    stashing_actions,
    versions_kept,
    versions_seen,
)
from stratagem.simulator.schedules.work_kinds import BACKWARD, FORWARD, LAST_BACKWARD
from stratagem.simulator.simulation.plan_in_words import describe
from stratagem.simulator.simulation.priced_plan import block_times, macro_durations, plan_model
from stratagem.simulator.simulation.simulation import simulate_model
from tests.executor.equality.pipelines.test_pipedream import COSTS, stashing
from tests.support.plans import (
    Case,
    sharding,
    whole,
)


def test_every_backward_ends_in_an_update_and_most_keep_the_weights() -> None:
    graph = models.mlp([256] * 5, batch=64)
    case = Case(torch.nn.Module(), {}, graph)
    plan = stashing(case, sharding("sample"), (2,), (2,), num_microbatches=4)
    model = plan_model(plan, graph, COSTS)
    for s, stage in enumerate(model.stages):
        synchronous = plan_model(replace(plan, schedule="1f1b"), graph, COSTS).stages[s]
        times = {k: t.makespan for k, t in block_times(stage).items()}
        plain = {k: t.makespan for k, t in block_times(synchronous).items()}
        assert times[FORWARD] == plain[FORWARD]
        assert times[BACKWARD] == plain[LAST_BACKWARD]
        copied = sum(int(stage.table.row(i).stash.ns[0]) for i in stage.table.operators)
        assert times[BACKWARD] < times[LAST_BACKWARD] <= times[BACKWARD] + copied
    kinds = {action: int(model.macro.kind[task]) for action, task in model.macro.number.items()}
    kept = {str(a) for a, kind in kinds.items() if kind == LAST_BACKWARD}
    assert kept == {"0B0", "0B1", "0B2"}


def test_a_long_step_takes_its_microbatches_at_the_pace_of_the_steady_state() -> None:
    graph = models.mlp([256] * 9, batch=256)
    case = Case(torch.nn.Module(), {}, graph)
    steps, times = {}, None
    for parts in (64, 128):
        plan = stashing(case, whole, (1,), (1,), (1,), num_microbatches=parts)
        small = replace(plan, fingerprint=models.mlp([256] * 9, batch=2 * parts).fingerprint)
        model = plan_model(small, models.mlp([256] * 9, batch=2 * parts), COSTS)
        steps[parts] = round(simulate_model(model).step_time * 1e9)
        durations = macro_durations(model)
        times = StageTimes(
            forward=[int(durations[FORWARD, s]) for s in range(3)],
            backward=[int(durations[LAST_BACKWARD if s < 2 else BACKWARD, s]) for s in range(3)],
            transfer=[int(durations[6, pair]) for pair in range(2)],
        )
    assert times is not None
    assert steps[128] - steps[64] == 64 * steady_state(pipedream(3, 32), times).period


# -- versions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("parts", [1, 2, 4, 9])
def test_versions_follow_the_published_rule(num_stages: int, parts: int) -> None:
    schedule = pipedream(num_stages, parts)
    for stage in range(num_stages):
        seen = versions_seen(schedule, stage)
        met = [max(0, t - num_stages + 1 + stage) for t in range(parts)]
        assert [seen[t] for t in range(parts)] == [(met[t], met[t], t) for t in range(parts)]
        ahead = num_stages - stage
        distinct = max(0, parts - ahead) + 1
        assert versions_kept(schedule, stage)[0] == min(ahead, distinct + 1, parts)
        kept = {a.microbatch for a in stashing_actions(schedule) if a.stage == stage}
        assert kept == {seen[t].version for t in range(parts) if seen[t].version < t}
        vertical = pipedream_vertical(num_stages, parts)
        first = versions_seen(schedule, 0)
        for t, each in versions_seen(vertical, stage).items():
            assert each == (first[t].version, seen[t].at_forward, t)
        most = min(num_stages, max(0, parts - num_stages) + 2, parts)
        assert versions_kept(vertical, stage) == (most, min(num_stages, parts) - 1)
    assert stashing_actions(gpipe(num_stages, parts)) == frozenset()


# -- the comparison -----------------------------------------------------------------------------


NAMES = ("PipeDream", "PipeDream asynchronous")


def test_pipedreams_own_schedule_is_shown_and_never_the_result() -> None:
    graph = models.mlp([512] * 9, batch=64)
    cluster = Cluster.preset("dgx-a100", devices_per_node=4)
    situation = Situation(graph, cluster, Training(), default_costs())
    plans = list(METHODS["PipeDream asynchronous"](situation))
    assert plans
    for plan, synchronous in zip(plans, METHODS["PipeDream"](situation), strict=False):
        assert plan.schedule == "pipedream"
        assert len(plan.stages) > 1
        assert synchronous.schedule == "1f1b"
    found = baseline_plans(situation, methods={name: METHODS[name] for name in NAMES})
    own = found["PipeDream asynchronous"]
    assert "in a PipeDream pipeline of" in describe(own, graph)
    space = SkeletonList(situation, Options(), (0,), Space().bind(graph))
    course = SearchCourse(
        space, Budget(1).settled(), lambda progress: None, SearchCheckpoint(None, "")
    )
    assert not course.incumbent.offer(own)
    assert course.incumbent.best is None
    assert course.incumbent.offer(found["PipeDream"])
    with pytest.raises(ValueError, match="a search does not choose for"):
        make_problem(graph, skeleton_of(own.plan), cluster, Training(), default_costs(), (0,))
