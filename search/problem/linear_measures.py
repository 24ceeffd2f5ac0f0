"""What a plan of a problem costs, as sums of look-ups: the linear side of the simulator.

The duration of every task and the size of every tensor is one look-up by the choices of at most
two operators (see `stage.stage_blocks` and `stage.tensor_lifetimes`). So whatever adds some of
them up with fixed weights, such as the tasks along a path, the load of a link or the bytes alive
at one place, is a *measure* of the form

    Σᵢ nodeᵢ[cᵢ] + Σᵢⱼ pairᵢⱼ[cᵢ, cⱼ]

over the choices c, which dynamic programs and integer programs can minimise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.searcher.problem.sure_waits import SureWaits, sure_waits
from stratagem.simulator.base.arrays import Flags, Floats, Ints
from stratagem.simulator.base.compiling import kernel
from stratagem.simulator.hardware.resources import NUM_RESOURCES
from stratagem.simulator.stage.stage_blocks import TaskRole

PLAIN = NUM_RESOURCES
"""Stands for a resource where values count whatever they occupy."""
TURNED = 16_384
"""Entries, of all that is added to a table, above which it is worth being turned."""
TILE_ROWS, TILE_COLUMNS = 8, 256
"""Of a table, to which all that is added to it is added at a time: 16 KiB."""


@dataclass(frozen=True, eq=False)
class Lookups:
    """Values ``pool[base + c[first]·stride + c[second]·second_stride]``, a row each.

    `second_stride` is 0 where one operator alone decides.
    """

    pool: Ints
    base: Ints
    first: Ints
    stride: Ints
    second: Ints
    second_stride: Ints
    mask: Ints | None = None
    resource: int = PLAIN

    def at(self, where: Ints) -> Floats:
        """The values at places of the pool, 0 where they do not occupy the `resource`.

        Pools are large and shared, so nothing is copied that is not asked for.
        """
        found = self.pool[where].astype(np.float64)
        if self.mask is not None and self.resource != PLAIN:
            found *= self.mask[where] >> self.resource & 1
        return found

    def values(self, choice: Ints) -> Floats:
        """The values of all rows under `choice`, one number per operator of the graph."""
        where = self.base + choice[self.first] * self.stride
        return self.at(where + choice[self.second] * self.second_stride)

    def some(self, rows: Ints | Flags) -> Lookups:
        """The look-ups of some rows."""
        return Lookups(
            self.pool,
            self.base[rows],
            self.first[rows],
            self.stride[rows],
            self.second[rows],
            self.second_stride[rows],
            self.mask,
            self.resource,
        )


@dataclass(eq=False)
class LinearMeasure:
    """Look-ups with a weight each: a linear function of the choices."""

    lookups: Lookups
    weights: Floats
    _known: list[float] = field(init=False, default_factory=list)

    def value(self, choice: Ints) -> float:
        """What the choices measure."""
        return float(self.weights @ self.lookups.values(choice))

    def under(self, met: Sequence[Ints]) -> Floats:
        """What each of some choices measures; the next call may only have more at the end."""
        self._known += [self.value(choice) for choice in met[len(self._known) :]]
        return np.array(self._known)


@dataclass(eq=False)
class BlockLookups:
    """The look-ups of one kind of block of one stage, and its topology."""

    problem: Problem
    stage: int
    kind: int

    def __post_init__(self) -> None:
        blocks = self.problem.stage_blocks[self.stage]
        self.block, self.last = blocks.of_kind(self.kind)

    @cached_property
    def tasks(self) -> Ints:
        """The tasks that have anything to do under some choice."""
        return np.flatnonzero(self.base_of_tasks > 0)

    @cached_property
    def base_of_tasks(self) -> Ints:
        """Where the look-up of every task of the block begins, 0 of those that are always idle."""
        return self.block.bases(self.last)

    def lookups(self, resource: int = PLAIN) -> Lookups:
        """Durations in ns of `tasks`; with a resource, 0 for those that do not occupy it."""
        return self._plain if resource == PLAIN else replace(self._plain, resource=resource)

    @cached_property
    def _plain(self) -> Lookups:
        blocks = self.problem.stage_blocks[self.stage]
        return Lookups(
            blocks.pool_ns,
            self.base_of_tasks[self.tasks],
            self.block.first[self.tasks],
            self.block.stride[self.tasks],
            self.block.second[self.tasks],
            self.block.second_stride[self.tasks],
            blocks.pool_mask,
        )

    def is_used(self, resource: int) -> bool:
        """Whether some choice occupies a resource."""
        masks = self.problem.stage_blocks[self.stage].pool_mask
        return bool((np.bitwise_or.reduce(masks) >> resource) & 1)

    @cached_property
    def share(self) -> Floats:
        """What share of each of `tasks` surely counts: of edges that may share one has it all.

        Weighed so, what they take together is at most what the one takes that makes it. What might
        be idle in the plan, whatever its own operator chooses, does not count.
        """
        sharing = self.problem.stage_blocks[self.stage].sharing
        shares = 1.0 / sharing.share_of(self.block.gate[self.tasks])
        return np.where(self.waits.is_doubtful[self.tasks], 0.0, shares)

    @cached_property
    def is_shared(self) -> Flags:
        """Of every task of the block, whether another reader of its tensor may make it."""
        sharing = self.problem.stage_blocks[self.stage].sharing
        return sharing.share_of(self.block.gate) > 1

    @cached_property
    def waits(self) -> SureWaits:
        """The waits that are in every plan."""
        return sure_waits(self.problem.tables[self.stage], self.block)

    def longest_path(self, choice: Ints) -> Ints:
        """The tasks of the path that takes longest under `choice`, resources apart, in order."""
        stage = self.problem.stage_blocks[self.stage]
        durations, again = np.zeros(len(self.base_of_tasks)), self.waits
        shut = stage.sharing.shut(self.block.gate[self.tasks], choice)
        durations[self.tasks] = np.where(shut, 0, self.lookups().values(choice))
        durations[again.is_doubtful] = 0.0
        return longest_path(again.successor_offsets, again.successors, durations)

    def rows_of(self, path: Ints) -> Ints:
        """The positions in `tasks` of those of a path."""
        return np.flatnonzero(np.isin(self.tasks, path))

    def counted(self, path: Ints) -> Floats:
        """What share of each of `rows_of` a path counts under all choices.

        A conversion that another reader makes still keeps its own waiting as long, from the same
        tensor on; but it counts once where the path goes through that of another reader, too.
        """
        counts = dict(zip(path.tolist(), self._counting(path.tolist()), strict=True))
        return np.array([counts[task] for task in self.tasks[self.rows_of(path)].tolist()])

    def _counting(self, path: Sequence[int]) -> list[float]:
        """Whether each task of a path counts whoever makes what its edge may share."""
        sharing = self.problem.stage_blocks[self.stage].sharing
        roles = [None, *(self.block.roles[task] for task in path), None]
        found: list[float] = []
        doubtful = self.waits.is_doubtful
        for place, task in enumerate(path, start=1):
            gate, role = int(self.block.gate[task]), roles[place]
            before = roles[place - 1]
            counts = before is not TaskRole.LAUNCH_CONVERSION
            if role is TaskRole.CONVERT:
                counts = counts and before is not role
            elif role is TaskRole.CONVERT_BACK:
                counts = counts and roles[place + 1] is not role
            else:
                counts = False
            is_own = gate < 0 or not len(sharing.rivals(gate))
            found.append(1.0 if (is_own or counts) and not doubtful[task] else 0.0)
        return found


def crossing_lookups(problem: Problem) -> Lookups:
    """What travels between stages in ns, tensor by tensor: a row each of `Problem.crossings`."""
    rows = problem.crossings
    ones = np.ones(len(rows), dtype=np.int64)
    return Lookups(problem.blocks.pool_ns, rows[:, 5], rows[:, 2], rows[:, 3], rows[:, 4], ones)


@kernel(inner=True)
def topological_order(offsets: Ints, successors: Ints) -> Ints:
    """Tasks of a graph without cycles, each behind all that it waits for (Kahn 1962)."""
    count = offsets.size - 1
    waiting = np.zeros(count, dtype=np.int64)
    for follower in successors:
        waiting[follower] += 1
    order, taken, known = np.empty(count, dtype=np.int64), 0, 0
    for task in range(count):
        if waiting[task] == 0:
            order[known] = task
            known += 1
    while taken < known:
        task = order[taken]
        taken += 1
        for k in range(offsets[task], offsets[task + 1]):
            follower = successors[k]
            waiting[follower] -= 1
            if waiting[follower] == 0:
                order[known] = follower
                known += 1
    return order[:known]


@kernel(cache=True)
def longest_path(offsets: Ints, successors: Ints, durations: Floats) -> Ints:
    """Tasks of a path of greatest length in a graph without cycles.

    Example:
        >>> offsets, successors = np.array([0, 2, 3, 4, 4]), np.array([1, 2, 3, 3])
        >>> longest_path(offsets, successors, np.array([1.0, 5.0, 2.0, 1.0])).tolist()
        [0, 1, 3]
    """
    count = durations.size
    start, came_from = np.zeros(count), np.full(count, -1, dtype=np.int64)
    for task in topological_order(offsets, successors):
        end = start[task] + durations[task]
        for k in range(offsets[task], offsets[task + 1]):
            follower = successors[k]
            if end > start[follower]:
                start[follower] = end
                came_from[follower] = task
    path, length = np.empty(count, dtype=np.int64), 0
    last = int(np.argmax(start + durations))
    while last >= 0:
        path[length] = last
        length += 1
        last = came_from[last]
    return path[:length][::-1].copy()


@dataclass(frozen=True, eq=False)
class _Alike:
    """Pairs of operators with the same look-ups.

    `rows` has a line a pair, of its rows among the rows of all parts; `terms` says of each column
    (pool, resource, base, whether the lower operator comes first, stride, second stride).
    """

    pairs: list[tuple[int, int]]
    rows: Ints
    terms: Ints


class MeasureTables:
    """Node vectors and pair matrices of weighted sums of look-ups.

    What repeated layers have in common is added up once: pairs with the same terms share a matrix.
    A pair is named with the lower operator first.

    Args:
        sizes: number of choices of every operator.
        parts: look-ups; `combine` weighs their rows.
    """

    def __init__(self, sizes: Sequence[int], parts: Sequence[Lookups]) -> None:
        self.sizes = list(sizes)
        pools = {(id(part.pool), id(part.mask)): part for part in parts}
        self._pools = list(pools.values())
        numbers = {key: number for number, key in enumerate(pools)}
        lows, highs, columns = [], [], []
        for part in parts:
            ends = np.where(part.second_stride == 0, part.first, part.second)
            low = np.minimum(part.first, ends)
            lows.append(low)
            highs.append(np.maximum(part.first, ends))
            number = numbers[id(part.pool), id(part.mask)]
            same = np.full(len(low), number), np.full(len(low), part.resource)
            columns.append(
                np.column_stack(
                    (*same, part.base, part.first == low, part.stride, part.second_stride)
                )
            )
        low, high, terms = np.concatenate(lows), np.concatenate(highs), np.concatenate(columns)
        self._alike = _alike(self.sizes, low, high, terms)
        self.pairs = [pair for alike in self._alike for pair in alike.pairs if pair[0] != pair[1]]

    def combine(
        self, weights: Sequence[Floats]
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Node vectors by operator, and pair matrices, of Σ weight · look-up.

        Args:
            weights: per part, one number a row.
        """
        every = np.concatenate(weights)
        nodes = [np.zeros(size) for size in self.sizes]
        pairs: dict[tuple[int, int], Floats] = {}
        made: dict[tuple[int, int, bool, bytes, bytes], Floats] = {}
        for alike in self._alike:
            i, j = alike.pairs[0]
            weighed = every[alike.rows]
            found: dict[bytes, Floats | None] = {}
            for line, (low, high) in zip(weighed, alike.pairs, strict=True):
                seen = line.tobytes()
                if seen not in found:
                    used = np.flatnonzero(line)
                    terms, factors = alike.terms[used], line[used]
                    ends = (self.sizes[i], self.sizes[j], i == j)
                    key = (*ends, terms.tobytes(), factors.tobytes())
                    if len(used) and key not in made:
                        made[key] = self._sum(*ends, terms, factors)
                    found[seen] = made.get(key)
                total = found[seen]
                if total is None:
                    continue
                if low == high:
                    nodes[low] = total
                else:
                    pairs[low, high] = total
        return nodes, pairs

    def _sum(self, ours: int, theirs: int, one: bool, terms: Ints, factors: Floats) -> Floats:
        # Of most large tables the choices of the lower operator lie side by side, not the other's:
        # then the sum is made as they lie, term by term in the same order, and turned at last.
        is_turned = not one and ours * theirs * len(terms) > TURNED and _lie_across(terms)
        if is_turned:
            ours, theirs, terms = theirs, ours, terms.copy()
            terms[:, 3] = 1 - terms[:, 3]
        total = np.zeros((1, ours) if one else (ours, theirs))
        # Terms of one pool stand together, as those of one part do.
        begin = 0
        for number, run in groupby(terms[:, 0].tolist()):
            part, end = self._pools[number], begin + len(list(run))
            mask = part.pool if part.mask is None else part.mask
            mine = terms[begin:end], factors[begin:end]
            _add(total, part.pool, mask, part.mask is not None, *mine, one)
            begin = end
        if is_turned:
            return np.ascontiguousarray(total.T)
        return total[0] if one else total


def _lie_across(terms: Ints) -> bool:
    """Whether the choices of the lower operator lie side by side in most tables (see `_Alike`)."""
    lower, other = terms[:, 4], terms[:, 5]
    return int(np.count_nonzero((lower < other) == (terms[:, 3] == 1))) * 2 > len(terms)


def _alike(sizes: Sequence[int], low: Ints, high: Ints, terms: Ints) -> tuple[_Alike, ...]:
    """The pairs with something to look up, those with equal terms together."""
    order = np.lexsort((high, low))
    low, high, terms = low[order], high[order], np.ascontiguousarray(terms[order])
    changes = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
    begins, ends = [0, *changes.tolist()], [*changes.tolist(), len(low)]
    pairs: dict[tuple[int, int, bool, bytes], list[tuple[tuple[int, int], Ints]]] = {}
    kept: dict[tuple[int, int, bool, bytes], Ints] = {}
    for begin, end in zip(begins, ends, strict=True):
        i, j = int(low[begin]), int(high[begin])
        mine = terms[begin:end]
        key = (sizes[i], sizes[j], i == j, mine.tobytes())
        kept.setdefault(key, mine)
        pairs.setdefault(key, []).append(((i, j), order[begin:end]))
    return tuple(
        _Alike([pair for pair, _ in found], np.stack([rows for _, rows in found]), kept[key])
        for key, found in pairs.items()
    )


@kernel(cache=True)
def _add(
    total: Floats,
    pool: Ints,
    mask: Ints,
    is_masked: bool,
    terms: Ints,
    factors: Floats,
    one: bool,
) -> None:
    """Add tables of look-ups to `total`, one a line of `terms` (see `_Alike`), times its factor.

    What does not occupy a line's resource is 0. Where both ends are `one` operator, its choice is
    that of both. All lines are added to a tile before the next, while it is in the cache, and
    without a branch: 1.2 to 4 times as fast as table by table.
    """
    rows, columns = total.shape
    for top in range(0, rows, TILE_ROWS):
        bottom = min(top + TILE_ROWS, rows)
        for left in range(0, columns, TILE_COLUMNS):
            right = min(left + TILE_COLUMNS, columns)
            for k in range(factors.size):
                resource, base, stride, second = terms[k, 1], terms[k, 2], terms[k, 4], terms[k, 5]
                if one:
                    stride, second = 0, stride + second
                elif terms[k, 3] == 0:
                    stride, second = second, stride
                every, factor = not is_masked or resource == PLAIN, factors[k]
                for i in range(top, bottom):
                    where = base + i * stride + left * second
                    if every:
                        for j in range(left, right):
                            total[i, j] += factor * pool[where]
                            where += second
                    else:
                        for j in range(left, right):
                            total[i, j] += factor * (pool[where] * ((mask[where] >> resource) & 1))
                            where += second
