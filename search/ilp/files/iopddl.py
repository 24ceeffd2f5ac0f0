"""Instances of the IOPDDL contest (Moffitt and Fegade, ASPLOS 2025): JSON, gzipped or not.

A file holds ``problem``: ``nodes`` with ``costs`` and ``usages`` by strategy and the ``intervals``
[start, end) in which the usage counts (empty: never), ``edges`` as pairs of nodes with costs
row by row, and ``usage_limit``, the bytes that no step may exceed. 10¹⁸ stands for infinity.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stratagem.searcher.ilp.problem.instance import CostEdge, Device, Instance, MemoryUse
from stratagem.simulator.base.arrays import Floats, Ints

FORBIDDEN = 10**18
"""Costs from here on forbid a choice."""


class _Nodes(msgspec.Struct):
    intervals: list[list[int]]
    costs: list[list[int]]
    usages: list[list[int]]


class _Edges(msgspec.Struct):
    nodes: list[tuple[int, int]]
    costs: list[list[int]]


class _Problem(msgspec.Struct):
    nodes: _Nodes
    edges: _Edges
    usage_limit: int | None = None
    name: str = ""


class _IopddlFile(msgspec.Struct):
    problem: _Problem


def read_iopddl(path: str | Path) -> Instance:
    """Read an instance from a ``.json`` or ``.json.gz`` file.

    Example:
        ``solve(read_iopddl("G.json.gz"), seconds=30)``

    Raises:
        ValueError: the file is not of the format; the message says where.
    """
    path = Path(path)
    raw = path.read_bytes()
    try:
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        problem = msgspec.json.decode(raw, type=_IopddlFile).problem
    except (msgspec.DecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not an IOPDDL problem: {error}") from error
    nodes, edges = problem.nodes, problem.edges
    _same_length(path, "nodes", costs=nodes.costs, usages=nodes.usages, intervals=nodes.intervals)
    _same_length(path, "edges", nodes=edges.nodes, costs=edges.costs)
    return Instance(
        costs=tuple(_costs(costs) for costs in nodes.costs),
        edges=tuple(_edges(path, problem)),
        uses=tuple(_uses(path, nodes)) if problem.usage_limit is not None else (),
        devices=(
            (Device("device", problem.usage_limit),) if problem.usage_limit is not None else ()
        ),
    )


def _same_length(path: Path, what: str, **lists: list[Any]) -> None:
    lengths = {name: len(each) for name, each in lists.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{number} {name}" for name, number in lengths.items())
        raise ValueError(f"{path}: {what} hold {found}; give as many of each")


def _costs(figures: list[int]) -> Floats:
    costs = np.array(figures, dtype=np.float64)
    costs[costs >= FORBIDDEN] = np.inf
    return costs


def _edges(path: Path, problem: _Problem) -> list[CostEdge]:
    """Edges; those with equal costs share one array."""
    counts = [len(costs) for costs in problem.nodes.costs]
    shared: dict[tuple[int, int, bytes], Floats] = {}
    found = []
    for (first, second), figures in zip(problem.edges.nodes, problem.edges.costs, strict=True):
        if not (0 <= first < len(counts) and 0 <= second < len(counts)):
            raise ValueError(
                f"{path}: the edge of nodes {first} and {second} names a node that is not one of "
                f"{len(counts)}"
            )
        rows, columns = counts[first], counts[second]
        if len(figures) != rows * columns:
            raise ValueError(
                f"{path}: the edge of nodes {first} and {second} has {len(figures)} costs; "
                f"{rows} × {columns} strategies need {rows * columns}"
            )
        costs = _costs(figures)
        costs = shared.setdefault((rows, columns, costs.tobytes()), costs.reshape(rows, columns))
        found.append(CostEdge(first, second, costs))
    return found


def _uses(path: Path, nodes: _Nodes) -> list[MemoryUse]:
    found = []
    for node, (interval, usage) in enumerate(zip(nodes.intervals, nodes.usages, strict=True)):
        if len(interval) not in (0, 2):
            raise ValueError(
                f"{path}: the interval of node {node} holds {len(interval)} numbers; it is "
                "[start, end) or empty"
            )
        if interval:
            found.append(
                MemoryUse(node, interval[0], interval[1], np.array(usage, dtype=np.int64))
            )
    return found


def write_iopddl(instance: Instance, path: str | Path, *, name: str = "") -> None:
    """Write an instance; gzipped where the name ends in ``.gz``.

    Example:
        ``write_iopddl(instance, "small.json.gz")``

    Raises:
        ValueError: the format cannot say it: costs that are not whole, several devices, limits
            by step, or several intervals of one node.
    """
    path = Path(path)
    problem = _Problem(
        nodes=_written_nodes(instance),
        edges=_Edges(
            nodes=[(edge.first, edge.second) for edge in instance.edges],
            costs=[_written(edge.costs) for edge in instance.edges],
        ),
        usage_limit=_written_limit(instance),
        name=name,
    )
    raw = msgspec.json.encode(_IopddlFile(problem))
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)


def _written_nodes(instance: Instance) -> _Nodes:
    intervals: list[list[int]] = [[] for _ in instance.costs]
    usages = [[0] * len(costs) for costs in instance.costs]
    for use in instance.uses:
        if intervals[use.node]:
            raise ValueError(
                f"{instance.name(use.node)} uses memory in several intervals; IOPDDL has one"
            )
        intervals[use.node] = [use.start, use.end]
        usages[use.node] = use.nbytes.tolist()
    return _Nodes(intervals, [_written(costs) for costs in instance.costs], usages)


def _written_limit(instance: Instance) -> int | None:
    if not instance.devices:
        return None
    if len(instance.devices) > 1 or isinstance(instance.devices[0].limit, np.ndarray):
        raise ValueError(
            f"{len(instance.devices)} devices, or limits by step; IOPDDL has one limit"
        )
    return instance.devices[0].limit


def _written(costs: Floats) -> list[int]:
    finite = costs[np.isfinite(costs)]
    if np.any(finite != np.rint(finite)) or np.any(finite >= FORBIDDEN):
        raise ValueError(
            "a cost is not a whole number under 10^18, which IOPDDL needs; scale and round first"
        )
    whole: Ints = np.where(np.isfinite(costs), costs, FORBIDDEN).astype(np.int64)
    figures: list[int] = whole.ravel().tolist()
    return figures
