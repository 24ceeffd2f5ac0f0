"""Why an instance has no solution, and the cheapest way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from stratagem.searcher.ilp.bounds.linear_relaxation import LinearProgram
from stratagem.searcher.ilp.problem.instance import Device, Instance, limits
from stratagem.searcher.ilp.problem.memory_rows import gather
from stratagem.searcher.ilp.problem.reductions import (
    ContradictionError,
    Propagation,
    ReducedInstance,
    make_problem,
)
from stratagem.searcher.ilp.solve import IlpSolution, Status, solve
from stratagem.simulator.base.arrays import Ints

NUM_HOLDERS = 5
"""Nodes that a shortage names."""


@dataclass(frozen=True)
class InstanceShortage:
    """A device at its worst step, in the choice that is over the limits by least.

    `held` and `limit` in bytes; `holders` are the nodes that hold most, with their bytes.
    `unavoidable` says that the nodes hold more than the limit even if each holds its least.
    """

    label: str
    step: int
    held: int
    limit: int
    holders: tuple[tuple[str, int], ...]
    unavoidable: bool

    def __str__(self) -> str:
        """Both numbers, and who holds most."""
        holders = ", ".join(f"{name} ({nbytes:,})" for name, nbytes in self.holders)
        least = "even if each node holds its least" if self.unavoidable else "at best"
        return (
            f"{self.label} holds {self.held:,} bytes at step {self.step} {least}; its limit is "
            f"{self.limit:,}, {self.held - self.limit:,} less.\nMost is held by {holders}."
        )


@dataclass(frozen=True)
class Explanation:
    """Why there is no solution.

    `stuck`: what is forbidden, where memory has no part in it. `increase`:
    by how many bytes each limit must be raised, their sum being the least (`proved`) or the least
    found in time; `cost`: that of the best solution then.
    """

    stuck: str | None
    shortages: tuple[InstanceShortage, ...] = ()
    increase: tuple[int, ...] = ()
    proved: bool = False
    cost: float = np.inf
    labels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What a person reads."""
        if self.stuck is not None:
            return self.stuck
        raised = ", ".join(
            f"{label} by {nbytes:,} bytes"
            for label, nbytes in zip(self.labels, self.increase, strict=True)
            if nbytes
        )
        way_out = (
            f"Raising the limit of {raised} is enough; the best choice then costs {self.cost:g}."
        )
        return "\n".join([*map(str, self.shortages), way_out])


def explain_infeasible(
    instance: Instance, *, seconds: float = 60.0, tied: Sequence[Sequence[int]] = ()
) -> Explanation:
    """Say why an instance has no solution, and what increase of its limits gives it one.

    Example:
        >>> import numpy as np
        >>> from stratagem.searcher.ilp.problem.instance import Device, Instance, MemoryUse
        >>> uses = tuple(MemoryUse(node, 0, 1, np.array([6, 9])) for node in range(2))
        >>> costs = (np.array([2.0, 0.0]),) * 2
        >>> print(explain_infeasible(Instance(costs, (), uses, (Device("gpu 0", 10),))))
        gpu 0 holds 12 bytes at step 0 even if each node holds its least; its limit is 10, 2 less.
        Most is held by node 0 (6), node 1 (6).
        Raising the limit of gpu 0 by 2 bytes is enough; the best choice then costs 4.

    Raises:
        ValueError: the instance has a solution, or none was found in time to say how it is over.
    """
    try:
        problem = make_problem(instance, tied)
        Propagation(problem).run()
    except ContradictionError as error:
        name = instance.name(error.node)
        return Explanation(
            stuck=f"No strategy of {name} goes with those of its neighbours, whatever the memory. "
            "Allow one of the choices that are forbidden there."
        )
    roots, maps = problem.maps()
    problem.memory = gather(instance, roots, maps)
    choice, proved = _least_excess(problem, len(instance.devices), seconds)
    if choice is None:
        return Explanation(
            stuck=f"No choice of {len(problem.alive)} nodes together avoids what is forbidden, "
            "whatever the memory. Allow some of it."
        )
    increase = _excess_by_device(instance, choice)
    if not any(increase):
        raise ValueError(
            f"there is a solution, of cost {instance.objective(choice)}; nothing to explain"
        )
    relaxed = _solve_raised(instance, increase, seconds, tied)
    return Explanation(
        stuck=None,
        shortages=tuple(_shortages(instance, choice, roots, maps)),
        increase=increase,
        proved=proved,
        cost=relaxed.objective if relaxed.choice is not None else instance.objective(choice),
        labels=tuple(device.label for device in instance.devices),
    )


def _least_excess(
    problem: ReducedInstance, num_devices: int, seconds: float
) -> tuple[Ints | None, bool]:
    """The choice that is over by least, summed over devices, and whether that is proved."""
    memory = problem.memory
    assert memory is not None
    if not problem.alive:
        return problem.expand(np.zeros(len(problem.costs), np.int64)), True
    program = LinearProgram(problem, 1.0)
    program.rows = list(range(memory.num_rows))
    matrix, right, scale = program.memory_rows()
    unit = float(max((window.nbytes.max(initial=1) for window in memory.windows), default=1))
    place = (np.arange(memory.num_rows), memory.devices)
    slack = scipy.sparse.csr_matrix((-unit / scale, place), shape=(memory.num_rows, num_devices))
    num_columns = program.equalities.shape[1]
    none = scipy.sparse.csr_matrix((program.equalities.shape[0], num_devices))
    whole = np.zeros(num_columns + num_devices)
    whole[: program.num_strategies] = 1
    upper = np.concatenate((np.ones(num_columns), np.full(num_devices, np.inf)))
    found = scipy.optimize.milp(
        np.concatenate((np.zeros(num_columns), np.ones(num_devices))),
        constraints=[
            scipy.optimize.LinearConstraint(
                scipy.sparse.hstack([program.equalities, none]), program.right, program.right
            ),
            scipy.optimize.LinearConstraint(scipy.sparse.hstack([matrix, slack]), -np.inf, right),
        ],
        bounds=scipy.optimize.Bounds(0, upper),
        integrality=whole,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.status == 2:
        return None, True
    if found.x is None:
        raise ValueError(f"no choice was found in {seconds:g} seconds; give more with seconds=")
    choice = np.zeros(len(problem.costs), np.int64)
    for node in program.nodes:
        start = program.start[node]
        choice[node] = found.x[start : start + len(problem.costs[node])].argmax()
    return problem.expand(choice), found.status == 0


def _excess_by_device(instance: Instance, choice: Ints) -> tuple[int, ...]:
    return tuple(
        int(max(0, (profile - limits(device, len(profile))).max(initial=0)))
        for device, profile in zip(instance.devices, instance.memory(choice), strict=True)
    )


def _solve_raised(
    instance: Instance, increase: tuple[int, ...], seconds: float, tied: Sequence[Sequence[int]]
) -> IlpSolution:
    raised = tuple(
        Device(device.label, device.limit + more)
        for device, more in zip(instance.devices, increase, strict=True)
    )
    solution = solve(replace(instance, devices=raised), seconds=seconds, tied=tied)
    assert solution.status is not Status.INFEASIBLE
    return solution


def _shortages(
    instance: Instance, choice: Ints, roots: Ints, maps: list[Ints]
) -> list[InstanceShortage]:
    found = []
    for number, profile in enumerate(instance.memory(choice)):
        device = instance.devices[number]
        allowed = limits(device, len(profile))
        over = profile - allowed
        if not over.max(initial=0) > 0:
            continue
        step = int(over.argmax())
        here = [
            use for use in instance.uses if use.device == number and use.start <= step < use.end
        ]
        held: dict[int, int] = {}
        for use in here:
            held[use.node] = held.get(use.node, 0) + int(use.nbytes[choice[use.node]])
        most = sorted(held, key=lambda node: (-held[node], node))[:NUM_HOLDERS]
        least = sum(int(use.nbytes[maps[use.node]].min()) for use in here)
        found.append(
            InstanceShortage(
                device.label,
                step,
                int(profile[step]),
                int(allowed[step]),
                tuple((instance.name(node), held[node]) for node in most),
                unavoidable=least > allowed[step],
            )
        )
    return found
