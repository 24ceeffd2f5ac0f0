"""The dynamic program over stages, in numba: what variants offer to stages, and the best chains.

Times are integer nanoseconds (see `_range_kernels`); values of the objective are floats, because
they weigh times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Floats, Ints, Records, record
from stratagem.simulator.base.compiling import kernel, uncounted

OPTION = record("total", "period", "flight", "variant")
"""An option of a stage: what it adds to the sum of a step, what to its slowest stage, how many
microbatches it can hold, and the number of the variant."""

NO_RANGE = np.iinfo(np.int64).max
"""Bytes over the memory of a range that no variant was offered for."""

UNLIMITED = 1 << 40
"""Microbatches that fit where none holds anything."""


class OfferedVariant(NamedTuple):
    """A variant that is offered for every range.

    Attributes:
        costs: [cuts, cuts], see `range_costs`.
        sends: [cuts], ns of what crosses each cut.
        capacity: bytes of a device.
        copies: of the state of a stage.
        late_weights: whether weights' gradients are made late.
        leaves_early: whether stages but the first do without what the last microbatch adds.
        variant: its number.
    """

    costs: Records
    sends: Ints
    capacity: int
    copies: int
    late_weights: bool
    leaves_early: bool
    variant: int


class KeptVariants(NamedTuple):
    """The variants that no other beats, range by range.

    Attributes:
        options: [cuts, cuts, rows], `OPTION`.
        costs: [cuts, cuts, rows], of each.
        counts: [cuts, cuts], rows in use.
        over: [cuts, cuts], by how many bytes the best variant exceeds the capacity with one
            microbatch.
    """

    options: Records
    costs: Records
    counts: Ints
    over: Ints


@uncounted(forceinline=True, inner=True)
def _option(new: OfferedVariant, a: int, b: int) -> tuple[int, int, int]:
    """What a range adds to the sum and to the slowest stage, and the bytes that it leaves free."""
    costs = new.costs[a, b]
    period = costs.forward + costs.backward + new.sends[b]
    total = period + new.copies * costs.tied
    if a == 0 or not new.leaves_early:
        total += costs.last
    if new.late_weights:
        total -= 2 * costs.weight
    room = new.capacity - new.copies * costs.state - costs.peak
    return total, period, room


@uncounted(forceinline=True, inner=True)
def _keep(kept: KeptVariants, a: int, b: int, total: int, period: int, flight: int) -> int:
    """Where a new option of a range belongs: −1 if it is beaten, else behind those it does not."""
    options, costs, count = kept.options[a, b], kept.costs[a, b], kept.counts[a, b]
    for r in range(count):
        ours = options[r]
        if ours.total <= total and ours.period <= period and ours.flight >= flight:
            return -1
    left = 0
    for r in range(count):
        ours = options[r]
        if not (total <= ours.total and period <= ours.period and flight >= ours.flight):
            if left < r:
                options[left] = ours
                costs[left] = costs[r]
            left += 1
    return left


@uncounted(cache=True)
def offer(new: OfferedVariant, kept: KeptVariants) -> bool:
    """Offer a variant for every range; keep those that no other beats. False if room is lacking.

    A variant is beaten by one that is no worse in its sum, its period and its microbatches.
    """
    options = kept.options
    for a in range(kept.counts.shape[0]):
        for b in range(a + 1, kept.counts.shape[0]):
            if new.costs[a, b].peak < 0:
                continue
            total, period, room = _option(new, a, b)
            kept.over[a, b] = min(kept.over[a, b], -room)
            if room < 0:
                continue
            held = new.costs[a, b].held
            flight = UNLIMITED if held == 0 else room // held + 1
            row = _keep(kept, a, b, total, period, flight)
            if row < 0:
                continue
            if row == options.shape[2]:
                return False
            option = options[a, b, row]
            option.total, option.period = total, period
            option.flight, option.variant = flight, new.variant
            kept.costs[a, b, row] = new.costs[a, b]
            kept.counts[a, b] = row + 1
    return True


@kernel(cache=True)
def least_rest(
    options: Records, counts: Ints, table_sizes: Ints, least_sum: Floats, least_work: Floats
) -> None:
    """For the operators before each cut the least sum of stages, and of period × device units.

    Both leave out how the devices lie and how much memory there is: bounds from below.
    """
    least_sum[:] = np.inf
    least_work[:] = np.inf
    least_sum[0] = least_work[0] = 0.0
    for b in range(1, least_sum.size):
        for a in range(b):
            for t in range(counts.shape[0]):
                for r in range(counts[t, a, b]):
                    option = options[t, a, b, r]
                    least_sum[b] = min(least_sum[b], least_sum[a] + option.total)
                    work = option.period * table_sizes[t]
                    least_work[b] = min(least_work[b], least_work[a] + work)


class StageChains(NamedTuple):
    """What chains of stages are made of, and which are of interest.

    Attributes:
        options: [tables, cuts, cuts, rows], see `KeptVariants`.
        counts: [tables, cuts, cuts].
        table_of: [sizes, units], the table of a stage of a size that begins at a unit; −1: none.
        sizes: device units of a stage.
        need: [stages + 1], microbatches in flight s stages before the end.
        weights: of the sum and of the slowest stage.
        least_sum, least_work: see `least_rest`.
        bound: values above it are of no interest.
        only_best: whether to keep one label a state, for a first bound.
    """

    options: Records
    counts: Ints
    table_of: Ints
    sizes: Ints
    need: Ints
    weights: Floats
    least_sum: Floats
    least_work: Floats
    bound: float
    only_best: bool


class Labels(NamedTuple):
    """Pareto labels of all states, and the front of the one that is being filled.

    Attributes:
        labels: [room, 2], sum and largest period.
        links: [room, 2], table · cuts² · rows + … of the first stage, and next label.
        starts: [stages + 1, cuts, units + 1, 2], first label of a state and one behind.
        front, front_links: [room, 2], work space.
    """

    labels: Floats
    links: Ints
    starts: Ints
    front: Floats
    front_links: Ints


@uncounted(forceinline=True, inner=True)
def _insert(
    found: Labels, count: int, total: float, largest: float, option: int, after: int
) -> int:
    """Add (sum, largest) to the front unless it is beaten; −1 if there is no room."""
    front, links = found.front, found.front_links
    for k in range(count):
        if front[k, 0] <= total and front[k, 1] <= largest:
            return count
    kept = 0
    for k in range(count):
        if not (total <= front[k, 0] and largest <= front[k, 1]):
            front[kept, 0], front[kept, 1] = front[k, 0], front[k, 1]
            links[kept, 0], links[kept, 1] = links[k, 0], links[k, 1]
            kept += 1
    if kept == front.shape[0]:
        return -1
    front[kept, 0], front[kept, 1] = total, largest
    links[kept, 0], links[kept, 1] = option, after
    return kept + 1


Suffix = tuple[int, int, int]
"""A state: stages so far, first cut, first device unit."""
Stage = tuple[int, int, int]
"""A first stage: what it adds to the sum, its period, its number among all options."""


@uncounted(forceinline=True, inner=True)
def _put_before(
    chains: StageChains, found: Labels, state: Suffix, stage: Stage, rest: tuple[int, int],
    count: int,
) -> int:  # fmt: skip
    """Put a stage before each label of the rest; the size of the front, −1 if there is no room."""
    _, a, d = state
    front, links, weights = found.front, found.front_links, chains.weights
    for k in range(rest[0], rest[1]):
        total = found.labels[k, 0] + stage[0]
        largest = max(found.labels[k, 1], stage[1])
        slowest = max(largest, chains.least_work[a] / d) if d else largest
        value = weights[0] * (total + chains.least_sum[a]) + weights[1] * slowest
        if value > chains.bound or (chains.only_best and count and value >= front[0, 1]):
            continue
        if chains.only_best:
            front[0, 0], front[0, 1] = total, value
            front[1, 1] = largest
            links[0, 0], links[0, 1] = stage[2], k
            count = 1
            continue
        count = _insert(found, count, total, largest, stage[2], k)
        if count < 0:
            return -1
    return count


@uncounted(forceinline=True, inner=True)
def _fill_front(chains: StageChains, found: Labels, state: Suffix) -> int:
    """Fill the front of a state with all first stages; its size, −1 if there is no room."""
    s, a, d = state
    options = chains.options
    num_cuts, rows = options.shape[1], options.shape[3]
    count = 0
    for z in range(chains.sizes.size):
        table, behind = chains.table_of[z, d], d + chains.sizes[z]
        if table < 0 or behind > chains.table_of.shape[1]:
            continue
        for b in range(a + 1, num_cuts):
            rest = found.starts[s - 1, b, behind, 0], found.starts[s - 1, b, behind, 1]
            if rest[0] == rest[1]:
                continue
            for r in range(chains.counts[table, a, b]):
                option = options[table, a, b, r]
                if option.flight < chains.need[s]:
                    continue
                stage = (
                    option.total,
                    option.period,
                    ((table * num_cuts + a) * num_cuts + b) * rows + r,
                )
                count = _put_before(chains, found, state, stage, rest, count)
                if count < 0:
                    return -1
    return count


@uncounted(cache=True)
def best_chains(chains: StageChains, found: Labels) -> int:
    """Fill the Pareto labels of every suffix of a chain of stages; −1 where memory is lacking.

    A state is (stages so far s, first cut a, first device unit d) of a suffix, counted from the
    end, so that the number of microbatches in flight, ``need[s]``, is known:

        cuts     0 ┄┄┄┄┄┄┄┄ a ════ new stage ════ b ──── labels of (s − 1, b, d + z) ──── end
        units    0 ┄┄┄┄┄┄┄┄ d ═══════════════ d + z ───────────────────────────────────── end

    A label is (sum, largest period); the value of a plan is ``weights[0]·sum +
    weights[1]·largest``. Labels that cannot lead below `bound` are dropped, all but the best of
    each state if `only_best`. Alpa enumerates slowest stages and solves one program for each
    (Zheng et al. 2022, arXiv 2201.12023, section 5.2); a front of labels is all of them at once.
    That is exact: a stage before it changes neither order of two labels, as it adds to both sums
    alike and takes the larger of its period and theirs.
    """
    labels, links, starts = found.labels, found.links, found.starts
    num_cuts, units = chains.counts.shape[1], chains.table_of.shape[1]
    starts[:] = 0
    labels[0, 0] = labels[0, 1] = 0.0
    links[0] = -1
    starts[0, num_cuts - 1, units, 1] = 1
    size = 1
    for s in range(1, chains.need.size):
        for a in range(num_cuts - 1):
            for d in range(units):
                starts[s, a, d] = size
                if (a == 0) != (d == 0):
                    continue
                count = _fill_front(chains, found, (s, a, d))
                if count < 0 or size + count > labels.shape[0]:
                    return -1
                if chains.only_best and count:
                    found.front[0, 1] = found.front[1, 1]
                for k in range(count):
                    for column in range(2):
                        labels[size + k, column] = found.front[k, column]
                        links[size + k, column] = found.front_links[k, column]
                size += count
                starts[s, a, d, 1] = size
    return size


@kernel(cache=True)
def least_over(over: Ints, table_of: Ints, sizes: Ints, count: int) -> tuple[int, Ints]:
    """The chain of `count` stages whose worst stage is over the memory by least.

    Args:
        over: [tables, cuts, cuts], bytes over the memory.
        table_of: [sizes, units], see `best_chains`.
        sizes: device units of a stage.
        count: number of stages.

    Returns:
        By how much, and per stage its two cuts and how much it is over.
    """
    num_cuts, units = over.shape[1], table_of.shape[1]
    worst = np.full((count + 1, num_cuts, units + 1), NO_RANGE, dtype=np.int64)
    chosen = np.zeros((count + 1, num_cuts, units + 1, 3), dtype=np.int64)
    worst[0, num_cuts - 1, units] = np.iinfo(np.int64).min
    for s in range(1, count + 1):
        for a in range(num_cuts - 1):
            for d in range(units):
                for z in range(sizes.size):
                    table, behind = table_of[z, d], d + sizes[z]
                    if table < 0 or behind > units:
                        continue
                    for b in range(a + 1, num_cuts):
                        value = max(over[table, a, b], worst[s - 1, b, behind])
                        if value < worst[s, a, d]:
                            worst[s, a, d] = value
                            chosen[s, a, d, 0] = b
                            chosen[s, a, d, 1] = behind
                            chosen[s, a, d, 2] = over[table, a, b]
    stages = np.zeros((count, 3), dtype=np.int64)
    a, d = 0, 0
    if worst[count, 0, 0] < NO_RANGE:
        for k in range(count):
            s = count - k
            stages[k, 0], stages[k, 1] = a, chosen[s, a, d, 0]
            stages[k, 2] = chosen[s, a, d, 2]
            a, d = chosen[s, a, d, 0], chosen[s, a, d, 1]
    return worst[count, 0, 0], stages
