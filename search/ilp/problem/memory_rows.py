"""Limits on memory as rows: bytes by node and strategy that one moment of one device adds up.

Steps between which nothing starts or ends are one row. Rows that can never be full are dropped,
and so are those that another row implies. What a node holds whatever it chooses is taken off the
limits. A node's rows lie next to each other, since its intervals do: it has a *window* of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stratagem.searcher.ilp.problem._reduction_kernels import WindowArrays, implied_rows
from stratagem.searcher.ilp.problem.instance import Instance, MemoryUse, limits
from stratagem.simulator.base.arrays import Floats, Ints


class OverLimitError(Exception):
    """A row is over its limit even where every node holds its least."""

    def __init__(self, device: int, step: int, nbytes: int) -> None:
        super().__init__(f"device {device} is {nbytes} bytes over at step {step}")
        self.device, self.step, self.nbytes = device, step, nbytes


@dataclass(frozen=True, eq=False)
class MemoryWindow:
    """Bytes of a node: `nbytes[k, r]` in row `first + r` under strategy k."""

    first: int
    nbytes: Ints

    @property
    def end(self) -> int:
        """One more than the last row."""
        return self.first + int(self.nbytes.shape[1])


EMPTY = MemoryWindow(0, np.zeros((1, 0), np.int64))


class MemoryRows:
    """The rows of a problem, their limits in bytes, and the window of every node.

    `devices` and `steps` say where a row comes from: the first step that it stands for.
    """

    def __init__(
        self, limits: Ints, devices: Ints, steps: Ints, windows: list[MemoryWindow]
    ) -> None:
        self.limits = limits
        self.devices = devices
        self.steps = steps
        self.windows = windows

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.limits)

    def keep(self, node: int, strategies: Ints) -> None:
        """See `reductions.keep`."""
        window = self.windows[node]
        if window.nbytes.shape[1]:
            self.windows[node] = MemoryWindow(window.first, window.nbytes[strategies])

    def fix(self, node: int) -> None:
        """See `reductions.fix`."""
        window = self.windows[node]
        if window.nbytes.shape[1]:
            self.limits[window.first : window.end] -= window.nbytes[0]
        self.windows[node] = EMPTY

    def merge(self, leader: int, node: int, follows: Ints) -> None:
        """See `reductions.merge`."""
        one, other = self.windows[leader], self.windows[node]
        self.windows[node] = EMPTY
        if not other.nbytes.shape[1]:
            return
        if not one.nbytes.shape[1]:
            self.windows[leader] = MemoryWindow(other.first, other.nbytes[follows])
            return
        first, end = min(one.first, other.first), max(one.end, other.end)
        nbytes = np.zeros((len(follows), end - first), np.int64)
        nbytes[:, one.first - first : one.end - first] += one.nbytes
        nbytes[:, other.first - first : other.end - first] += other.nbytes[follows]
        self.windows[leader] = MemoryWindow(first, nbytes)

    def copy(self) -> MemoryRows:
        """Rows of its own; windows are never changed in place and are shared."""
        return MemoryRows(self.limits.copy(), self.devices, self.steps, list(self.windows))

    def held(self, choice: Ints) -> Ints:
        """Bytes of each row under a choice of the nodes."""
        used = np.zeros(self.num_rows, np.int64)
        for node, window in enumerate(self.windows):
            if window.nbytes.shape[1]:
                used[window.first : window.end] += window.nbytes[choice[node]]
        return used

    def fits(self, choice: Ints) -> bool:
        """Whether no row is over its limit."""
        return bool((self.held(choice) <= self.limits).all())

    def uses(self, node: int) -> bool:
        """Whether the node's choice matters to any row."""
        return bool(self.windows[node].nbytes.size)

    @property
    def size(self) -> int:
        """Entries of all windows."""
        return sum(window.nbytes.size for window in self.windows)

    def tighten(self, *, implied: bool = False) -> None:
        """Take off what is held in any case; drop rows that can never be full.

        With `implied`, those that another row implies too, which takes longer.

        Raises:
            OverLimitError: a row is over its limit whatever is chosen.
        """
        most = np.zeros(self.num_rows, np.int64)
        for node, window in enumerate(self.windows):
            if window.nbytes.shape[1]:
                least = window.nbytes.min(axis=0)
                rows = slice(window.first, window.end)
                self.limits[rows] -= least
                nbytes = window.nbytes - least
                most[rows] += nbytes.max(axis=0)
                self.windows[node] = MemoryWindow(window.first, nbytes)
        over = np.flatnonzero(self.limits < 0)
        if len(over):
            row = over[self.limits[over].argmin()]
            raise OverLimitError(
                int(self.devices[row]), int(self.steps[row]), -int(self.limits[row])
            )
        taken = most > self.limits
        self.take_rows(taken)
        if implied:
            self._drop_implied(most[taken])

    def take_rows(self, taken: npt.NDArray[np.bool_]) -> None:
        """Drop the other rows."""
        if taken.all():
            return
        place = np.concatenate(([0], np.cumsum(taken)))
        for node, window in enumerate(self.windows):
            if window.nbytes.shape[1]:
                self.windows[node] = _trimmed(
                    MemoryWindow(
                        int(place[window.first]),
                        window.nbytes[:, taken[window.first : window.end]],
                    )
                )
        self.limits = self.limits[taken]
        self.devices, self.steps = self.devices[taken], self.steps[taken]

    def _drop_implied(self, most: Ints) -> None:
        if self.num_rows < 2:
            return
        windows = flat_windows(self.windows)
        self.take_rows(~implied_rows(self.limits, most - self.limits, windows))


def _trimmed(window: MemoryWindow) -> MemoryWindow:
    """The same without rows at either end in which nothing is held."""
    rows = np.flatnonzero(window.nbytes.any(axis=0))
    if not len(rows):
        return EMPTY
    lo, hi = int(rows[0]), int(rows[-1]) + 1
    return MemoryWindow(window.first + lo, np.ascontiguousarray(window.nbytes[:, lo:hi]))


def some_rows(num_rows: int, prices: Floats, count: int) -> Ints:
    """Rows to begin with where there are many: the dearest, and as many spread over time."""
    if num_rows <= 2 * count:
        return np.arange(num_rows)
    dearest = np.argsort(-prices, kind="stable")[:count]
    return np.union1d(dearest[prices[dearest] > 0], np.arange(0, num_rows, num_rows // count))


def only(window: MemoryWindow, rows: Ints) -> MemoryWindow:
    """The window of a node in a memory that has some of the rows, by number, ascending."""
    lo, hi = np.searchsorted(rows, (window.first, window.end))
    return MemoryWindow(
        int(lo), np.ascontiguousarray(window.nbytes[:, rows[lo:hi] - window.first])
    )


def flat_windows(windows: list[MemoryWindow]) -> WindowArrays:
    """The windows of all nodes for kernels, strategy by strategy."""
    starts = np.concatenate(([0], np.cumsum([window.nbytes.size for window in windows])))
    pool = np.empty(int(starts[-1]), np.int64)
    for start, window in zip(starts.tolist(), windows, strict=False):
        pool[start : start + window.nbytes.size] = window.nbytes.ravel()
    return WindowArrays(
        first=np.array([window.first for window in windows], np.int64),
        width=np.array([window.nbytes.shape[1] for window in windows], np.int64),
        start=starts.astype(np.int64),
        num_strategies=np.array([len(window.nbytes) for window in windows], np.int64),
        pool=pool,
    )


@dataclass(frozen=True, eq=False)
class Spans:
    """Windows as spans of rows in which what a node holds is the same, for kernels.

    Node n has the spans `first[n]` to `first[n + 1]`; span s is the rows from `begin[s]` to
    `end[s]`, and its bytes, one number per strategy, start at `place[s]` in `pool`. Most nodes
    have one or two, over thousands of rows.
    """

    first: Ints
    begin: Ints
    end: Ints
    place: Ints
    pool: Ints

    @classmethod
    def of(cls, windows: list[MemoryWindow]) -> Spans:
        """Lay out the windows of all nodes."""
        first, begin, end, place = [0], [np.empty(0, np.int64)], [np.empty(0, np.int64)], [0]
        pool = [np.empty(0, np.int64)]
        for window in windows:
            starts, columns = _runs(window.nbytes)
            begin.append(window.first + starts[:-1])
            end.append(window.first + starts[1:])
            pool.append(columns.ravel())
            first.append(first[-1] + len(columns))
            place.extend(place[-1] + columns.shape[1] * np.arange(1, len(columns) + 1))
        return cls(
            first=np.array(first, np.int64),
            begin=np.concatenate(begin),
            end=np.concatenate(end),
            place=np.array(place, np.int64),
            pool=np.concatenate(pool),
        )

    @property
    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """All of them, in the order in which kernels take them."""
        return self.first, self.begin, self.end, self.place, self.pool


def _runs(nbytes: Ints) -> tuple[Ints, Ints]:
    """Where runs of equal columns start, the end last, and the columns, one run a line."""
    if not nbytes.shape[1]:
        return np.zeros(1, np.int64), np.empty((0, len(nbytes)), np.int64)
    changes = np.flatnonzero((nbytes[:, 1:] != nbytes[:, :-1]).any(axis=0)) + 1
    starts = np.concatenate(([0], changes, [nbytes.shape[1]]))
    return starts, nbytes[:, starts[:-1]].T


def make_memory(instance: Instance, roots: Ints, maps: list[Ints]) -> MemoryRows:
    """Rows of an instance whose nodes follow `roots` by `maps` (see `reductions.Problem.maps`).

    Raises:
        OverLimitError: a row is over its limit whatever is chosen.
    """
    memory = gather(instance, roots, maps)
    memory.tighten(implied=True)
    return memory


def gather(instance: Instance, roots: Ints, maps: list[Ints]) -> MemoryRows:
    """The same before it is tightened: limits may be below what is held at the least."""
    rows = _WindowRows(instance)
    left, changes = _changes(rows, roots, maps)
    devices, steps = rows.devices, rows.steps
    while True:
        taken = _worth_keeping(left, devices, changes)
        place = np.concatenate(([0], np.cumsum(taken)))
        changes = {node: _joined(place[at], by) for node, (at, by) in changes.items()}
        left, devices, steps = left[taken], devices[taken], steps[taken]
        if taken.sum() >= ENOUGH * len(taken):
            break
    windows = [EMPTY] * len(roots)
    for node, (at, by) in changes.items():
        windows[node] = _trimmed(_spread(at, by))
    return MemoryRows(left, devices, steps, windows)


ENOUGH = 0.9
"""Neighbouring rows are compared until no more than the rest of them goes away."""

Changes = dict[int, tuple[Ints, Ints]]
"""By node: rows at which what it holds changes, ascending, and by how many bytes [k, row]."""


def _changes(rows: _WindowRows, roots: Ints, maps: list[Ints]) -> tuple[Ints, Changes]:
    """Limits less what is held in any case, and what nodes that choose hold beside."""
    at: dict[int, list[int]] = {}
    by: dict[int, list[Ints]] = {}
    fixed = np.zeros(rows.num_rows + 1, np.int64)
    for use, lo, hi in rows.ranges():
        nbytes = use.nbytes[maps[use.node]]
        least = nbytes.min()
        fixed[lo] += least
        fixed[hi] -= least
        root = int(roots[use.node])
        if root >= 0 and least < nbytes.max():
            at.setdefault(root, []).extend((lo, hi))
            by.setdefault(root, []).extend((nbytes - least, least - nbytes))
    changes = {node: _joined(np.array(at[node]), np.stack(by[node], axis=1)) for node in at}
    return rows.limits - np.cumsum(fixed)[:-1], changes


def _joined(at: Ints, by: Ints) -> tuple[Ints, Ints]:
    """Changes with those at one row added up and those of nothing left out."""
    order = np.argsort(at, kind="stable")
    places, first = np.unique(at[order], return_index=True)
    total = np.add.reduceat(by[:, order], first, axis=1)
    some = total.any(axis=0)
    return places[some], total[:, some]


def _worth_keeping(left: Ints, devices: Ints, changes: Changes) -> npt.NDArray[np.bool_]:
    """Rows that may be full (or are over at their least) and are not implied by the next to them.

    Row r is implied by its neighbour s if Σ over nodes of max over k of (u_r[k] − u_s[k]) is no
    more than limit_r − limit_s.
    """
    num_rows = len(left)
    least, most, up, down = np.zeros((4, num_rows + 1), np.int64)
    for at, by in changes.values():
        held = np.cumsum(by, axis=1)
        for total, extreme in ((least, held.min(axis=0)), (most, held.max(axis=0))):
            total[at] += np.diff(extreme, prepend=0)
        up[at] += by.max(axis=0)
        down[at] += (-by).max(axis=0)
    least, most = np.cumsum(least)[:-1], np.cumsum(most)[:-1]
    rise = np.diff(left)
    same = devices[1:] == devices[:-1]
    by_next = same & (down[1:-1] <= -rise)
    by_last = same & (up[1:-1] <= rise) & ~by_next
    taken = most > left
    taken[:-1] &= ~by_next
    taken[1:] &= ~by_last
    return taken | (least > left)


def _spread(at: Ints, by: Ints) -> MemoryWindow:
    """The window of a node, row by row."""
    if not len(at):
        return EMPTY
    held = np.cumsum(by, axis=1)[:, :-1]
    return MemoryWindow(int(at[0]), np.repeat(held, np.diff(at), axis=1))


class _WindowRows:
    """The moments of an instance at which its devices may be full."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.bounds: list[Ints] = []
        self.offsets: list[int] = []
        found_limits, devices, steps = [], [], []
        offset = 0
        for number, device in enumerate(instance.devices):
            used = [use for use in instance.uses if use.device == number and use.start < use.end]
            bounds = np.unique(np.array([[use.start, use.end] for use in used], np.int64))
            end = int(bounds[-1]) if len(bounds) else 0
            per_step = limits(device, end)
            starts = bounds[:-1]
            self.bounds.append(bounds)
            self.offsets.append(offset)
            offset += len(starts)
            found_limits.append(
                np.minimum.reduceat(per_step, starts) if len(starts) else np.empty(0, np.int64)
            )
            devices.append(np.full(len(starts), number))
            steps.append(starts)
        self.num_rows = offset
        self.limits = np.concatenate([*found_limits, np.empty(0, np.int64)]).astype(np.int64)
        self.devices = np.concatenate([*devices, np.empty(0, np.int64)]).astype(np.int64)
        self.steps = np.concatenate([*steps, np.empty(0, np.int64)]).astype(np.int64)

    def ranges(self) -> Iterator[tuple[MemoryUse, int, int]]:
        """Every use with the rows [lo, hi) that it is in."""
        for use in self.instance.uses:
            if use.start < use.end:
                bounds, offset = self.bounds[use.device], self.offsets[use.device]
                lo, hi = np.searchsorted(bounds, (use.start, use.end))
                yield use, offset + int(lo), offset + int(hi)
