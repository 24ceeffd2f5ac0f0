"""Communicators: what the local one refuses, and that processes get what threads get."""

from __future__ import annotations

import functools
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stratagem.executor.backends.gloo import GlooCommunicator
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator, ring_bytes
from stratagem.simulator.hardware.collective_kinds import Collective
from tests.support.workers.communicator_calls import of_views, operations, ramp

torch.set_num_threads(1)


def every_operation(comm: Communicator, dtype: torch.dtype) -> dict[str, object]:
    """What a rank gets from each operation, in the whole world and in a group in odd order."""
    comm.prepare([tuple(range(comm.world_size)), (0,), (1, 0)])
    results: dict[str, object] = {}
    for group in (tuple(range(comm.world_size)), (1, 0)):
        if comm.rank in group:
            found = operations(comm, group, dtype) | of_views(comm, group, dtype)
            results |= {f"{name} in {group}": result for name, result in found.items()}
    alone = ramp(2, base=comm.rank)
    if comm.rank == 0:
        results["alone"] = [comm.all_reduce(alone, (0,)), *comm.all_gather(alone, [(2,)], (0,))]
    results |= messages(comm, dtype)
    comm.barrier()
    results["sent"] = dict(comm.sent)
    return results


def messages(comm: Communicator, dtype: torch.dtype) -> dict[str, object]:
    """Both neighbours send twice before they receive."""
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    mine = ramp(3, 2, dtype=dtype, base=comm.rank)
    comm.send(mine, after)
    comm.send(mine[:1], after)
    mine += 100
    return {
        "first": comm.recv((3, 2), dtype, before),
        "second": comm.recv((1, 2), dtype, before),
    }


class TestLocalValues:
    def test_reductions_and_gathers(self):
        def rank(comm: Communicator):
            x = torch.tensor([1.0 + comm.rank, -comm.rank])
            gathered = comm.all_gather(x[: 1 + comm.rank % 2], [(1,), (2,), (1,)], (0, 1, 2))
            return comm.all_reduce(x, (0, 1, 2)), comm.all_reduce(x, (2, 1, 0), "max"), gathered

        for total, largest, gathered in run_local(3, rank):
            assert total.tolist() == [6, -3]
            assert largest.tolist() == [3, 0]
            assert [piece.tolist() for piece in gathered] == [[1], [2, -1], [3]]

    def test_group_order_is_piece_order(self):
        def rank(comm: Communicator):
            group = (2, 0, 1)
            pieces = comm.all_gather(torch.tensor([comm.rank]), [(1,)] * 3, group)
            mine = comm.reduce_scatter([torch.tensor([float(i)]) for i in range(3)], group)
            return [int(p) for p in pieces], float(mine)

        assert run_local(3, rank) == [([2, 0, 1], 3.0), ([2, 0, 1], 6.0), ([2, 0, 1], 0.0)]

    def test_results_are_nobody_elses(self):
        def rank(comm: Communicator):
            x = torch.ones(2)
            first = comm.all_gather(x, [(2,), (2,)], (0, 1))
            x += comm.rank + 1
            first[0] += 10 * (comm.rank + 1)
            comm.barrier()
            return first[0].tolist(), first[1].tolist(), x.tolist()

        assert run_local(2, rank) == [([11, 11], [1, 1], [2, 2]), ([21, 21], [1, 1], [3, 3])]

    def test_sums_are_made_in_group_order(self):
        values = [1e8, 1.0, -1e8, 1.0]

        def rank(comm: Communicator):
            time.sleep(0.01 * ((comm.rank * 3) % 4))
            return comm.all_reduce(torch.tensor([values[comm.rank]]), (0, 1, 2, 3)).item()

        expected = functools.reduce(lambda a, b: a + b, torch.tensor(values)).item()
        assert run_local(4, rank) == [expected] * 4

    def test_inside_backward(self):
        def rank(comm: Communicator):
            class Sum(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return comm.all_reduce(x, (0, 1))

                @staticmethod
                def backward(ctx, gradient):
                    return comm.all_reduce(gradient, (0, 1))

            x = torch.tensor(float(comm.rank), requires_grad=True)
            (Sum.apply(x) * (comm.rank + 1)).backward()
            return x.grad.item()

        assert run_local(2, rank) == [3.0, 3.0]

    def test_bytes_sent(self):
        def rank(comm: Communicator):
            x = torch.zeros(100)
            comm.all_reduce(x, (0, 1, 2, 3))
            comm.all_gather(x, [(100,)] * 4, (0, 1, 2, 3))
            comm.all_to_all([x[: 10 * i] for i in range(4)], [(10 * comm.rank,)] * 4, (0, 1, 2, 3))
            return dict(comm.sent)

        sent = run_local(4, rank)
        assert sent[1] == {"all-reduce": 600, "all-gather": 1200, "all-to-all": 200}

    @pytest.mark.parametrize("kind", Collective)
    def test_a_group_of_one_sends_nothing(self, kind):
        assert ring_bytes(kind, 1000, 1) == 0


class TestLocalFailures:
    def test_another_operation(self):
        def rank(comm: Communicator):
            x = torch.zeros(2)
            if comm.rank:
                comm.all_gather(x, [(2,), (2,)], (0, 1))
            else:
                comm.all_reduce(x, (0, 1))

        with pytest.raises(RuntimeError, match=r"rank \d calls all_.* but rank \d calls all_"):
            run_local(2, rank)

    def test_another_dtype(self):
        def rank(comm: Communicator):
            comm.all_reduce(
                torch.zeros(2, dtype=(torch.float32, torch.float64)[comm.rank]), (0, 1)
            )

        with pytest.raises(
            RuntimeError, match=r"rank \d calls all_reduce.*float\d\d.*but rank \d"
        ):
            run_local(2, rank)

    def test_another_shape(self):
        def rank(comm: Communicator):
            comm.all_gather(torch.zeros(2 + comm.rank), [(2,), (2,)], (0, 1))

        with pytest.raises(
            RuntimeError, match=r"expects .* \(2,\) from rank 1, which sends \(3,\)"
        ):
            run_local(2, rank)

    def test_another_message(self):
        def rank(comm: Communicator):
            if comm.rank:
                comm.send(torch.zeros(2), 0)
            else:
                comm.recv((2,), torch.int64, 1)

        with pytest.raises(RuntimeError, match=r"rank 0 receives torch.int64 from rank 1"):
            run_local(2, rank)

    def test_an_exception_stops_everyone_and_is_raised(self):
        stopped = []

        def rank(comm: Communicator):
            if comm.rank == 2:
                raise KeyError("lost")
            try:
                comm.barrier()
            except BaseException:
                stopped.append(comm.rank)
                raise

        with pytest.raises(KeyError, match="lost") as caught:
            run_local(3, rank)
        assert caught.value.__notes__ == ["raised on rank 2 of 3"]
        assert sorted(stopped) == [0, 1]
        assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]

    def test_a_deadlock_is_seen_at_once(self):
        def rank(comm: Communicator):
            comm.recv((1,), torch.float32, 1 - comm.rank)

        with pytest.raises(RuntimeError, match="deadlock: rank 0 waits for a message from rank 1"):
            run_local(2, rank)

    def test_a_rank_that_left_too_early(self):
        def rank(comm: Communicator):
            if comm.rank:
                comm.all_reduce(torch.zeros(1), (0, 1))

        with pytest.raises(
            RuntimeError, match=r"rank 1 waits in all_reduce of the sum .*\(0, 1\)"
        ):
            run_local(2, rank)

    def test_groups_that_differ(self):
        def rank(comm: Communicator):
            comm.all_reduce(torch.zeros(1), ((0, 1), (1, 0))[comm.rank])

        with pytest.raises(RuntimeError, match="deadlock"):
            run_local(2, rank)

    def test_timeout(self):
        release = threading.Event()

        def rank(comm: Communicator):
            if comm.rank:
                release.wait(0.3)
            else:
                comm.barrier()

        with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.05 s in barrier"):
            run_local(2, rank, timeout=0.05)

    def test_a_rank_outside(self):
        with pytest.raises(ValueError, match=r"rank 0 calls a collective of group \(1,\)"):
            run_local(2, lambda comm: comm.all_reduce(torch.zeros(1), (1,)))
        with pytest.raises(ValueError, match="no rank 5 in a world of 2"):
            run_local(2, lambda comm: comm.send(torch.zeros(1), 5))


def run_gloo(world_size: int, folder: Path) -> list[dict[str, dict[str, object]]]:
    """All `JOBS` as every rank of a world of processes, which must not write to stderr."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    world = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-m", __name__, str(folder / f"{rank}.pt")],
            cwd=Path(__file__).parents[3],
            env={**os.environ, **world, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert errors == [""] * world_size
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]


def assert_same(one: object, two: object, where: str) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(two, torch.Tensor), where
        assert one.dtype == two.dtype, where
        assert torch.equal(one, two), where
    elif isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for name in one:
            assert_same(one[name], two[name], f"{where}: {name}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for a, b in zip(one, two, strict=True):
            assert_same(a, b, where)
    else:
        assert one == two, where


def refusals(comm: Communicator) -> dict[str, object]:
    """What a process is told when it asks for something wrong."""
    comm.prepare([(0, 1)])
    told = []
    for wrong in (
        lambda: comm.all_reduce(torch.zeros(1), (1, 2)),
        lambda: comm.all_gather(torch.zeros(2), [(1,), (1,)], (0, 1)),
        lambda: comm.prepare([(0, 5)]),
        lambda: GlooCommunicator(),
    ):
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
    return {"told": told}


def gradients_left(comm: Communicator) -> dict[str, object]:
    """Bytes of sums that are still there after they were finished and let go, collector off."""
    group = tuple(range(comm.world_size))
    gc.collect()
    gc.disable()
    begun: list[object] = []
    sums: list[weakref.ref[torch.Tensor]] = []
    for pending in (
        comm.start_all_reduce(torch.ones(1000), group),
        comm.start_reduce_scatter([torch.ones(10) for _ in group], group),
    ):
        begun.append(pending.ending)  # As the executor keeps it for the timeline.
        sums.append(weakref.ref(pending.finish()))
        del pending
    comm.barrier()
    # A thread of gloo may not have let go of work that is over; no collector comes meanwhile.
    until = time.monotonic() + 10
    while (left := sum(total() is not None for total in sums)) and time.monotonic() < until:
        time.sleep(0.01)
    gc.enable()
    return {"left": left}


def messages_left(comm: Communicator) -> dict[str, object]:
    """How many messages a rank keeps at the ends of steps, in each of which it sends four."""
    assert isinstance(comm, GlooCommunicator)
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    kept = []
    for _ in range(3):
        comm.let_go()
        comm.barrier()
        for number in range(4):
            comm.send(torch.ones(10**5), after, number)
        for number in range(4):
            comm.recv((10**5,), torch.float32, before, number)
        kept.append(len(comm._pending))
    comm.let_go()
    return {"kept": [*kept, len(comm._pending)]}


JOBS: dict[str, Callable[[Communicator], dict[str, object]]] = {
    "refusals": refusals,  # Before the others prepare the groups that it must not know.
    "operations": lambda comm: {
        str(dtype): every_operation(comm, dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.int64)
    },
    "gradients left": gradients_left,
    "messages left": messages_left,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, object]]]:
    """What three processes found, which start once for all jobs."""
    return run_gloo(3, tmp_path_factory.mktemp("world"))


class TestGloo:
    """Processes; they take seconds to start."""

    def test_processes_get_what_threads_get(self, world):
        job = "operations"
        for rank, (theirs, ours) in enumerate(zip(world, run_local(3, JOBS[job]), strict=True)):
            assert_same(theirs[job], ours, f"rank {rank}")

    @pytest.mark.slow
    def test_refusals(self, world):
        for got in world:
            unprepared, shape, unknown, twice = got["refusals"]["told"]
            assert "not in" in unprepared or "was not prepared" in unprepared
            assert "shape" in shape or "not in" in shape
            assert "group (0, 5) is not made of ranks below 3" in unknown
            assert "close the other communicator first" in twice

    @pytest.mark.slow
    def test_sums_are_freed_at_once(self, world):
        """What waited for a sum once held itself: gradients stayed until the collector came."""
        assert [got["gradients left"] for got in world] == [{"left": 0}] * 3

    @pytest.mark.slow
    def test_messages_are_kept_until_the_next_step(self, world):
        """All were until the end of a run, each send looked through them, and steps of pipelines
        took three times as long after two hundred."""
        assert [got["messages left"] for got in world] == [{"kept": [4, 4, 4, 0]}] * 3


def main(path: str) -> None:
    """One process of `run_gloo`."""
    with GlooCommunicator(timeout=30) as comm:
        torch.save({name: job(comm) for name, job in JOBS.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
