"""Annealing by delta: exact after any walk, whatever the plan is made of; chains in threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from stratagem.searcher.annealing import _block_replays, _pipeline_play
from stratagem.searcher.annealing.chain_state import own_arrays, shared_arrays
from stratagem.searcher.annealing.chains import (
    HARD,
    SOFT,
    AnnealingChain,
    course_of,
    run_chains,
)
from stratagem.searcher.problem._score_kernels import OVER_MEMORY
from stratagem.searcher.problem.exhaustive import exhaustive
from stratagem.searcher.problem.priced_skeleton import Problem, make_problem
from stratagem.searcher.problem.tensors_touched import stages_touched
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton, skeletons
from stratagem.searcher.space.strategies import data_parallel
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.engine.event_engine import simulate
from stratagem.simulator.graph.models import gpt, llama, mlp, resnet
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Calibration, Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.cost_model import RooflineCosts
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.simulation.simulation import Simulation
from tests.support.plans import crossed

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
COSTS = RooflineCosts()
RICH = Options(chunks=(1, 2), fuse=True, bucket_bytes=4096, stream=True)


def tiny_gpt() -> OperatorGraph:
    return gpt(num_layers=2, hidden=64, num_heads=4, vocabulary=96, sequence=32, batch=16)


def small_llama() -> OperatorGraph:
    """Whose plans lie far apart where memory is tight: between two that fit are others."""
    return llama(
        num_layers=2, hidden=128, num_heads=4, num_kv_heads=2, ffn=256, vocabulary=512,
        sequence=32, batch=21,
    )  # fmt: skip


def tight(cluster: Cluster, gib: float) -> Cluster:
    """A cluster whose devices have so little memory that some plans do not fit."""
    device = replace(cluster.device_types[0], memory_gib=gib, reserved_gib=0)
    return replace(cluster, device_types=(device,))


def staged(graph: OperatorGraph, stages: int, schedule: str, policy: str = "none") -> Skeleton:
    found = [s for s in skeletons(graph, CLUSTER, schedule=schedule) if len(s.stages) == stages]
    return replace(found[-1], recompute=policy)


def on_ranks(graph: OperatorGraph, ranks: int) -> Skeleton:
    """Four stages that share devices."""
    apart = next(s for s in skeletons(graph, CLUSTER, max_stages=4) if len(s.stages) == 4)
    groups = [tuple(range(r * 4 // ranks, (r + 1) * 4 // ranks)) for r in range(ranks)]
    meshes = [DeviceMesh((MeshAxis("device", len(group)),), group) for group in groups]
    return Skeleton(apart.stages, tuple(meshes[s % ranks] for s in range(4)), 4, "interleaved")


@dataclass(frozen=True)
class Case:
    """What a problem is made of."""

    graph: OperatorGraph
    skeleton: Skeleton
    cluster: Cluster = CLUSTER
    options: Options = Options()  # noqa: RUF009 (frozen)
    zero_stages: tuple[int, ...] = (0, 2, 3)

    def problem(self) -> Problem:
        parts = self.graph, self.skeleton, self.cluster, Training(), COSTS, self.zero_stages
        return make_problem(*parts, options=self.options)

    def simulate(self, p: Problem, choice: Ints) -> Simulation:
        plan = p.plan(choice, name="x", seed=0, fingerprint=self.graph.fingerprint)
        return Situation(self.graph, self.cluster, Training(), COSTS).simulate(plan)


GPT = tiny_gpt()
RESNET = resnet(18, batch=16, image=32)
LOCAL = Cluster.preset("local-cpu")
SLOW = replace(CLUSTER, compute_slowdown=0.13, calibration=Calibration(launch_us=2.0))
STALLED = replace(
    Cluster.preset("dgx-a100", num_nodes=2, devices_per_node=2),
    calibration=Calibration(launch_us=2.0, stall_us=5.0),
)
CASES = {
    "one stage": Case(GPT, staged(GPT, 1, "1f1b")),
    "gradients summed once": Case(GPT, staged(GPT, 1, "1f1b"), zero_stages=(0, 1)),
    "1f1b, a parameter tied across": Case(GPT, staged(GPT, 2, "1f1b")),
    "gpipe, little memory": Case(GPT, staged(GPT, 2, "gpipe"), tight(CLUSTER, 0.0026)),
    "zb-h1, recompute": Case(GPT, staged(GPT, 2, "zb-h1", "full")),
    "options, contention, launches": Case(GPT, staged(GPT, 2, "1f1b", "selective"), SLOW, RICH),
    "stalls between nodes": Case(GPT, staged(GPT, 2, "1f1b", "selective"), STALLED, RICH),
    "interleaved": Case(GPT, on_ranks(GPT, 2)),
    "four stages on one rank": Case(GPT, on_ranks(GPT, 1)),
    "convolutions": Case(RESNET, staged(RESNET, 2, "1f1b")),
    "CPU processes": Case(
        GPT, next(s for s in skeletons(GPT, LOCAL, max_microbatches=4) if len(s.stages) > 1), LOCAL
    ),
}


def random_choice(p: Problem, seed: int) -> Ints:
    counts = [len(options) for options in p.choices]
    return np.random.default_rng(seed).integers(0, counts)


@pytest.mark.parametrize(("wide", "name"), crossed([0.0, 0.5], CASES, every=2))
def test_after_any_walk_score_and_memory_are_the_simulators(name: str, wide: float) -> None:
    case = CASES[name]
    p = case.problem()
    chain = AnnealingChain(p, random_choice(p, 1), 4000, 1)
    # Hot enough to go up and down all the time.
    chain._course = np.array([[4000, wide, 0.1, 0.01, OVER_MEMORY, OVER_MEMORY, 0.3]])
    for _ in range(8):
        chain.advance(500)
        assert chain.score() == chain.scores[0]
        simulated = case.simulate(p, chain.choice)
        assert chain.peaks() == [rank.without_waiting for rank in simulated.memory]
        if simulated.fits:
            assert chain.scores[0] == pytest.approx(simulated.step_time, rel=1e-12)
        else:
            assert chain.scores[0] > simulated.step_time
    movable = any(len(options) > 1 for options in p.choices)
    assert (chain.accepted > 50) == movable
    assert AnnealingChain(p, chain.best, 1, 0).scores[0] == chain.scores[1] <= chain.scores[0]


@pytest.mark.slow
def test_a_chain_weighs_what_is_over_the_memory_as_its_course_has_it() -> None:
    """Its best is by the usual weight all the same, and one that fits if it met any."""
    case = CASES["gpipe, little memory"]
    p = case.problem()
    met = set()
    for seed in range(4):
        chain = AnnealingChain(p, random_choice(p, seed), 4000, seed, SOFT)
        assert chain._course[0, 4:6].tolist() == [SOFT, OVER_MEMORY]
        lowest = np.inf
        for _ in range(40):
            done = chain.done
            chain.advance(100)
            simulated = case.simulate(p, chain.choice)
            over = max(0.0, *(m.without_waiting / m.capacity - 1 for m in simulated.memory))
            soft, hard = (SOFT, OVER_MEMORY) if done < 2000 else (OVER_MEMORY, HARD)
            level = int((done % 2000 + 99) / 2000 * 16) / 15
            weight = soft * (hard / soft) ** level
            expected = simulated.step_time * (1 + weight * over)
            assert chain.scores[0] == pytest.approx(expected, rel=1e-9)
            met.add(over > 0)
            if not over:
                lowest = min(lowest, simulated.step_time)
        assert chain.rank[1] <= lowest
        best = case.simulate(p, chain.best)
        assert chain.rank == (False, pytest.approx(best.step_time))
    assert met == {True, False}


def test_chains_stop_within_a_round() -> None:
    """A round of the chains of a long pipeline went on for 20 seconds after its time was up."""
    graph = mlp([256, 1024, 64], batch=64)
    skeleton = next(s for s in skeletons(graph, CLUSTER) if len(s.stages) == 1)
    p = Case(graph, skeleton).problem()
    start = np.zeros(len(p.choices), dtype=np.int64)

    def chains() -> list[AnnealingChain]:
        return [AnnealingChain(p, start, 3000, seed) for seed in range(2)]

    asked = itertools.count()
    stopped, asking, plain = chains(), chains(), chains()
    run_chains(stopped, num_threads=1, stop=lambda: next(asked) >= 10)
    assert 0 < stopped[0].done < 3000
    run_chains(asking, stop=lambda: False)
    run_chains(plain)
    for one, other in zip(asking, plain, strict=True):
        assert one.done == other.done == 3000
        assert one.rank == other.rank
        np.testing.assert_array_equal(one.best, other.best)


def test_chains_that_cross_plans_that_do_not_fit_come_further() -> None:
    """Those with the whole weight from the first stayed near their starts, however long."""
    graph = small_llama()
    base = Cluster.preset("p3.16xlarge", num_nodes=1, devices_per_node=4)
    base = replace(base, calibration=replace(base.calibration, reserved_gib=0.0))
    mesh = DeviceMesh((MeshAxis("outer", 2), MeshAxis("inner", 2)), (0, 1, 2, 3))
    skeleton = Skeleton((tuple(op.name for op in graph.operators),), (mesh,), 1, "1f1b")
    cluster, costs = tight(base, 6.38 / 1024), default_costs()
    training, options = Training(eager_loss=True), Options(regather=False)
    p = make_problem(graph, skeleton, cluster, training, costs, (0, 2, 3), options=options)
    start = p.encode(data_parallel(graph, mesh.shape, zero=3))
    ends = {}
    for weight in (OVER_MEMORY, SOFT):
        chains = [AnnealingChain(p, start, 16_000, seed, weight) for seed in range(6)]
        run_chains(chains)
        ends[weight] = sorted(chain.rank for chain in chains)
    assert not any(does_not_fit for found in ends.values() for does_not_fit, _ in found)
    assert ends[SOFT][3][1] < 0.95 * ends[OVER_MEMORY][3][1]


def test_one_that_fits_is_better_than_any_that_does_not() -> None:
    """A byte over the memory costs next to nothing in the score, and hid the best that fits."""
    graph = mlp([256, 1024, 64], batch=64)
    skeleton = next(s for s in skeletons(graph, CLUSTER) if len(s.stages) == 1)
    roomy = Case(graph, skeleton).problem()
    fastest = exhaustive(roomy, limit=10**6)
    peak = max(AnnealingChain(roomy, fastest.choice, 1, 0).peaks())
    p = replace(roomy, capacities=np.full_like(roomy.capacities, peak - 1))
    best = exhaustive(p, limit=10**6)
    assert best.fits
    assert best.score > 1.001 * AnnealingChain(p, fastest.choice, 1, 0).scores[0]
    chains = [AnnealingChain(p, fastest.choice, 5000, seed) for seed in range(3)]
    for chain in chains:
        assert chain.rank[0]
        chain.advance(5000)
        assert chain.rank == (False, best.score)
        assert max(AnnealingChain(p, chain.best, 1, 0).peaks()) < peak
    # It stays so where a chain goes on from elsewhere, and between chains.
    chain = chains[0]
    chain.restart(fastest.choice)
    assert chain.scores[0] < chain.scores[1]
    assert chain.rank == (False, best.score)
    other = AnnealingChain(p, fastest.choice, 1, 9)
    assert min([other, chain], key=lambda each: each.rank) is chain


@pytest.mark.slow
def test_a_choice_may_decide_the_memory_of_the_stage_that_receives() -> None:
    """Stages of one rank reshard: what a stage receives depends on how the one before made it."""
    p = CASES["four stages on one rank"].problem()
    choice = random_choice(p, 0)
    chain = AnnealingChain(p, choice, 1, 0)
    before = chain._arrays.tensors.profiles.copy()
    found = 0
    for i, options in enumerate(p.choices):
        for number in range(len(options)):
            other = choice.copy()
            other[i] = number
            chain.restart(other)
            profiles = chain._arrays.tensors.profiles
            stages = set(np.flatnonzero((profiles != before).any(axis=1)).tolist())
            assert stages <= set(stages_touched(p, i))
            found += bool(stages - {int(p.stage_of[i])})
    assert found > 0


def test_the_little_memory_is_between_that_of_plans() -> None:
    """Or the test above would not cross from plans that fit to plans that do not."""
    case = CASES["gpipe, little memory"]
    p = case.problem()
    chains = [AnnealingChain(p, random_choice(p, seed), 3000, seed) for seed in range(3)]
    fits = set()
    for chain in chains:
        for _ in range(10):
            fits.add(case.simulate(p, chain.choice).fits)
            chain.advance(300)
    assert fits == {True, False}


def test_a_pipeline_is_played_in_order_where_its_order_is_known() -> None:
    hows = {
        name: int(shared_arrays(case.problem()).pipeline.how[0]) for name, case in CASES.items()
    }
    assert hows["gradients summed once"] == _pipeline_play.CLOSED
    assert hows["one stage"] == _pipeline_play.ORDERED, "links go on beside its blocks"
    assert hows["four stages on one rank"] == _pipeline_play.QUEUED, (
        "it syncs beside its next blocks"
    )
    assert (
        hows["1f1b, a parameter tied across"] == hows["zb-h1, recompute"] == _pipeline_play.ORDERED
    )


@pytest.mark.parametrize("name", CASES)
def test_orders_and_bounds_hold_for_any_durations(name: str) -> None:
    """The pipeline alone, under random tables: in order as by the engine, bounds below both."""
    p = CASES[name].problem()
    pipeline = own_arrays(shared_arrays(p)).pipeline
    rng = np.random.default_rng(0)
    for _ in range(60):
        table = rng.integers(0, 10 ** rng.integers(1, 7), p.table.shape)
        table[rng.random(table.shape) < 0.2] = 0
        makespan = simulate(p.macro_graph.with_durations(table)).makespan
        pipeline.proposed[:] = table.ravel()
        assert _pipeline_play.bound_of(pipeline) <= makespan
        if pipeline.how[0] == _pipeline_play.CLOSED:
            assert _pipeline_play.bound_of(pipeline) == makespan
        elif pipeline.how[0] == _pipeline_play.ORDERED:
            assert _pipeline_play.play_in_order(pipeline) == makespan
            _pipeline_play.note_longest_path(pipeline)
            assert _pipeline_play.bound_of(pipeline) == makespan


def path_of(plays: _block_replays.Plays, k: int) -> tuple[int, int]:
    """ns of the path that is noted of a block, which must be one; and of the longest there is."""
    state = _block_replays.state_of.py_func(plays, k)
    links = state.predecessors.tolist()
    ns = state.tasks["played_duration"][:-1].tolist()
    starts = state.tasks["predecessors"].tolist()
    first, last = plays.starts["tasks"][[k, k + 1]]
    noted = set(np.flatnonzero(plays.on_path[first:last]).tolist())
    ends: dict[int, int] = {}
    path: list[int] = []
    for each in state.places["task"].tolist():
        before = links[starts[each] : starts[each + 1]]
        ends[each] = ns[each] + max((ends[task] for task in before), default=0)
        if each in noted:
            assert not path or path[-1] in before
            path.append(each)
    return sum(ns[each] for each in noted), max(ends.values())


# One kernel, compiled for this test alone and kept: as three they compile thrice what they share.
@uncounted(cache=True)
def least_and_played(
    plays: _block_replays.Plays, k: int, choice: Ints, changed: Ints, proposal: int
) -> tuple[int, int]:
    """The bound of a block under a change that is taken back, and its ns; −1 if none of it is."""
    least = _block_replays.gather_changes(plays, k, choice, changed, changed.size, proposal)
    ns = -1
    if plays.books[k].found:
        ns = _block_replays.play_changes_of(plays, k, changed.size)
        _block_replays.settle_play(plays, k, False)
    return least, ns


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bounds_of_blocks_hold_for_any_change(name: str) -> None:
    p = CASES[name].problem()
    chain = AnnealingChain(p, random_choice(p, 3), 2000, 0)
    plays, stage_of = chain._arrays.plays, chain._arrays.moves.stage_of
    for k in range(plays.which.size):
        noted, longest = path_of(plays, k)
        assert plays.books["path"][k] == noted == longest
    chain._course[:, 2:4] = 0.1
    chain.advance(2000)
    for k in range(plays.which.size):
        assert plays.books["path"][k] == path_of(plays, k)[0]
    rng = np.random.default_rng(0)
    tight = 0
    for proposal in range(10_000, 10_200):
        stage = rng.integers(0, p.num_stages)
        changed = rng.permutation(np.flatnonzero(stage_of == stage))[: rng.integers(1, 4)]
        choice = chain.choice.copy()
        choice[changed] = random_choice(p, proposal)[changed]
        for k in range(plays.stages[stage], plays.stages[stage + 1]):
            least, ns = least_and_played(plays, k, choice, changed, proposal)
            if ns >= 0:
                assert least <= ns
                tight += least > 0.5 * ns
    movable = any(len(options) > 1 for options in p.choices)
    assert (tight > 50) == movable
    assert chain.score() == chain.scores[0]


def test_chains_do_not_depend_on_how_their_proposals_are_dealt_out() -> None:
    p = CASES["1f1b, a parameter tied across"].problem()
    whole, parts = (AnnealingChain(p, random_choice(p, 0), 2000, 5) for _ in range(2))
    whole.advance(2000)
    for size in (1, 499, 1000, 600):
        parts.advance(size)
    assert parts.done == 2000
    assert np.array_equal(whole.choice, parts.choice)
    assert np.array_equal(whole.scores, parts.scores)
    assert whole.accepted == parts.accepted


@pytest.mark.parametrize("exchange_every", [0, 700])
def test_threads_change_nothing(exchange_every: int) -> None:
    p = CASES["options, contention, launches"].problem()
    runs = []
    for num_threads in (1, 2, 4):
        chains = [AnnealingChain(p, random_choice(p, seed), 5000, seed) for seed in range(4)]
        run_chains(chains, num_threads=num_threads, exchange_every=exchange_every)
        runs.append([(*chain.scores, chain.accepted, *chain.best) for chain in chains])
        assert all(chain.score() == chain.scores[0] for chain in chains)
    assert runs[0] == runs[1] == runs[2]


def test_an_exchange_moves_the_worst_chain_to_the_best_choices() -> None:
    p = CASES["one stage"].problem()
    chains = [AnnealingChain(p, random_choice(p, seed), 2000, seed) for seed in range(3)]
    run_chains(chains, exchange_every=1000, after_round=lambda: True)
    best = min(chain.scores[1] for chain in chains)
    assert sum(chain.scores[0] == best for chain in chains) >= 1
    assert all(chain.done == 1000 for chain in chains)


def test_an_interrupt_between_rounds_leaves_chains_whole() -> None:
    p = CASES["one stage"].problem()
    chains = [AnnealingChain(p, random_choice(p, seed), 10**9, seed) for seed in range(2)]

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_chains(chains, after_round=interrupt)
    assert all(0 < chain.done < 10**6 for chain in chains)
    assert all(chain.score() == chain.scores[0] for chain in chains)


def test_broken_runs_are_refused() -> None:
    first, second = CASES["one stage"].problem(), CASES["1f1b, a parameter tied across"].problem()
    chains = [AnnealingChain(p, random_choice(p, 0), 10, 0) for p in (first, second)]
    with pytest.raises(ValueError, match="2 chains of several problems cannot exchange"):
        run_chains(chains, exchange_every=5)
    with pytest.raises(ValueError, match="num_threads is 0"):
        run_chains(chains, num_threads=0)


def test_a_space_of_one_plan_is_left_alone() -> None:
    graph = mlp([8, 8], batch=1)
    mesh = DeviceMesh((MeshAxis("device", 1),), (0,))
    names = tuple(op.name for op in graph.operators)
    p = make_problem(
        graph, Skeleton((names,), (mesh,), 1, "1f1b"), CLUSTER, Training(), COSTS, (0,)
    )
    assert p.num_plans == 1
    chain = AnnealingChain(p, np.zeros(len(p.choices), dtype=np.int64), 100, 0)
    chain.advance(100)
    assert chain.done == 100
    assert chain.accepted == 0


def test_phases_end_in_order() -> None:
    for total in (1, 10, 5000, 10**6):
        ends = course_of(total)[:, 0]
        assert ends[-1] == total
        assert (np.diff(ends) >= 0).all()


def in_bounds(walks: str, **settings: str) -> bool:
    """Whether lines about a chain of some problem `p` run in another process to their end."""
    script = f"import sys; sys.path.insert(0, sys.argv[1])\n{walks}\nprint('in bounds')"
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[3])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.stdout.strip() == "in bounds", done.stderr[-2000:]
    return True


PLAIN_WALKS = """
from tests.support.workers.plain_kernels import checked
from tests.search.moves.test_anneal import CASES, AnnealingChain, random_choice
for name, case in CASES.items():
    p = case.problem()
    chain = AnnealingChain(p, random_choice(p, 0), 100, 0)
    for each in ("_arrays", "_course", "_rng", "scores", "best"):
        setattr(chain, each, checked(getattr(chain, each)))
    chain.restart(checked(chain.choice))
    for wide in (0.0, 0.5):
        chain._course[:, 1] = wide
        chain.advance(50)
        assert chain.score() == chain.scores[0], name
for index in (-1, chain.best.size):
    try:
        chain.best[index]
    except IndexError:
        continue
    raise AssertionError(f"{index} is taken for an index")
"""

COMPILED_WALKS = """
from tests.search.moves.test_anneal import CASES, AnnealingChain, random_choice
for name in ("1f1b, a parameter tied across", "four stages on one rank"):
    p = CASES[name].problem()
    for wide in (0.0, 0.5):
        chain = AnnealingChain(p, random_choice(p, 0), 1500, 0)
        chain._course[:, 1] = wide
        chain.advance(1500)
        assert chain.score() == chain.scores[0], name
"""


@pytest.mark.slow
def test_no_kernel_reads_beyond_its_arrays() -> None:
    """As Python, whose arrays check every index, and here also that none is below zero."""
    assert in_bounds(PLAIN_WALKS)


@pytest.mark.long
def test_no_compiled_kernel_reads_beyond_its_arrays(request: pytest.FixtureRequest) -> None:
    """numba checks every index in another process, which keeps what it compiled for the next."""
    kept = request.config.cache.mkdir("kernels_that_check_indices")
    assert in_bounds(COMPILED_WALKS, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(kept))
