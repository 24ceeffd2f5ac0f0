"""What ranges of operators cost as stages, in numba.

Times are integer nanoseconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stratagem.simulator.base.arrays import Ints, Records, record
from stratagem.simulator.base.compiling import kernel, uncounted

OPERATOR = record(
    *("forward", "launch", "gather", "backward", "again", "launch_back", "weight"),
    *("each_sync", "sync", "update"),
    *("state", "held", "working", "linked", "whole_gradient"),
)
"""An operator under a choice, in ns: passes, host launches, ZeRO-3's gather (each way), inputs
that are converted again for backward, the part of backward that makes gradients of weights, what
every microbatch and what the last one reduces (with ZeRO's publish), the update; bytes of state,
held per microbatch, and on top while it runs; whether a backward pass holds the link of gathers
and syncs itself (statistics of a batch); bytes of a gradient that waits whole to be summed."""

STAGE = record("forward", "backward", "weight", "last", "state", "held", "peak", "tied")
"""What a range of operators costs as a stage: passes, the part of backward for weights, what the
last microbatch adds; bytes of state, held per waiting microbatch, and of the running one at its
peak; what parameters take that a stage before owns."""


class PricedChain(NamedTuple):
    """A chain of operators under one variant.

    Attributes:
        columns: [N], `OPERATOR`.
        cuts: places of the cuts.
        out_edges: offsets by producer, and the consumer of each edge.
        in_edges: offsets by consumer, and the producer of each edge; edges as ``there[1]``.
        there: [2, E], forward conversions (ns) by producer, by consumer.
        back: [E], backward conversions by producer.
        ties: [T, 4], owner, user, bytes saved where both are in the range, ns where they are in
            different stages.
        shares_link: whether conversions use the link of gathers and syncs.
    """

    columns: Records
    cuts: Ints
    out_edges: tuple[Ints, Ints]
    in_edges: tuple[Ints, Ints]
    there: Ints
    back: Ints
    ties: Ints
    shares_link: bool


@uncounted(inner=True)
def _forward_costs(priced: PricedChain, limit: float, whole: bool, costs: Records) -> None:
    """Fill the forward pass of every range: the end moves up, as forward runs.

    A gather starts when the operator with parameters two before its own has run.
    """
    columns, cuts, shares_link = priced.columns, priced.cuts, priced.shares_link
    edge_offsets, edge_starts = priced.in_edges
    there = priced.there[1]
    for first in range(1 if whole else cuts.size - 1):
        start, last = cuts[first], cuts.size - 1 if whole else first + 1
        chain, link, launch, released, before = 0, 0, 0, 0, 0
        for c in range(start, cuts[cuts.size - 1]):
            if columns[c].gather:
                link = max(link, released) + columns[c].gather
            convert = 0
            for e in range(edge_offsets[c], edge_offsets[c + 1]):
                if edge_starts[e] >= start:
                    convert += there[e]
            if convert:
                chain = (max(chain, link) if shares_link else chain) + convert
                link = max(link, chain) if shares_link else link
            if columns[c].gather:
                chain = max(chain, link)
            launch += columns[c].launch
            chain += columns[c].forward
            if columns[c].state:
                released, before = before, chain
            if chain > limit:
                break
            if c + 1 == cuts[last]:
                costs[first, last].forward = max(chain, launch)
                last += 1


Clock = tuple[int, int, int, int, int, int, int, int, int]
"""Of a backward block: end of the chain of passes and conversions; end of the link of gathers and
syncs; of that of conversions, the same where they share it; when the last operator ended, and the
one before; when the last two operators with parameters ended, the earlier first, and how long the
syncs are that they still wait for."""


@uncounted(inner=True)
def _backward(
    columns: Records,
    synced: int,
    a: int,
    convert: int,
    shares_link: bool,
    gathers: bool,
    clock: Clock,
) -> Clock:
    """The clock of a backward block behind operator `a`, after `convert` ns of conversions.

    `synced` is the sync that the operator asks for. Inputs are converted again beside the operator
    before. A sync gives way to what is ready at the same time: a conversion, or the gather of
    the operator with parameters two further on.
    """
    chain, link, side, last, before, earlier, waiting, later, sync = clock
    if shares_link:
        side = link
    repeated = 0
    if columns[a].again:
        side = repeated = max(side, before) + columns[a].again
    if convert:
        side = chain = max(chain, side) + convert
    if shares_link:
        link = side
    chain = max(chain, repeated)
    if columns[a].gather:
        link = max(link, earlier) + columns[a].gather
        chain = max(chain, link)
    if not gathers and sync:
        link = max(link, later) + sync
        sync = 0
    if columns[a].linked:
        link = chain = max(chain, link) + columns[a].backward
    else:
        chain += columns[a].backward
    if columns[a].state:
        if waiting:
            link = max(link, earlier) + waiting
        earlier, waiting, later, sync = later, sync, chain, synced
    return chain, link, side, chain, last, earlier, waiting, later, sync


@uncounted(inner=True)
def _link_end(clock: Clock) -> int:
    """When the link is through with the syncs that wait."""
    _, link, _, _, _, earlier, waiting, later, sync = clock
    if waiting:
        link = max(link, earlier) + waiting
    if sync:
        link = max(link, later) + sync
    return link


Queue = tuple[int, int, int, int]
"""Of gradients that wait to be summed: the first one that does and the number of all there were;
their bytes; when the link is through with the last of them."""


@uncounted(inner=True)
def _summed_by(now: int, ends: Ints, whole: Ints, queue: Queue) -> Queue:
    """The queue at a time, without those whose sums are through."""
    first, count, nbytes, link = queue
    while first < count and ends[first] <= now:
        nbytes -= whole[first]
        first += 1
    return first, count, nbytes, link


@uncounted(inner=True)
def _queued(
    columns: Records, a: int, now: int, is_drained: bool, ends: Ints, whole: Ints, queue: Queue
) -> Queue:
    """The queue when operator `a` has made its gradients.

    Sums give way to gathers of parameters. `is_drained` says that a conversion went over their
    link behind them, which the operator waited for; where there are gathers, these come between.
    """
    first, count, nbytes, link = queue
    if is_drained:
        first, nbytes = count, 0
    for k in range(first + 1, count):
        ends[k] += columns[a].gather
    link += columns[a].gather
    if columns[a].whole_gradient:
        link = max(link, now) + columns[a].each_sync + columns[a].sync
        ends[count], whole[count] = link, columns[a].whole_gradient
        nbytes += whole[count]
        count += 1
    return first, count, nbytes, link


@uncounted(inner=True)
def _peak_with_leftovers(
    columns: Records,
    a: int,
    end: int,
    held: int,
    again: int,
    ends: Ints,
    whole: Ints,
    queue: Queue,
) -> int:
    """Bytes at the peak while gradients of the microbatch before still wait.

    `held` is what all operators from `a` to `end` hold, `again` when their next backward begins,
    less what their links gather before that: gradients give way to it.
    """
    peak, now = 0, again
    for i in range(end - 1, a - 1, -1):
        queue = _summed_by(now, ends, whole, queue)
        if queue[2] == 0:
            break
        peak = max(peak, held + columns[i].working + queue[2])
        held -= columns[i].held
        now += columns[i].backward
    return peak


@uncounted(inner=True)
def _converted(priced: PricedChain, a: int, end: int) -> int:
    """Backward conversions (ns) of the edges from operator `a` to operators before `end`."""
    offsets, ends = priced.out_edges
    total = 0
    for e in range(offsets[a], offsets[a + 1]):
        if ends[e] < end:
            total += priced.back[e]
    return total


@uncounted(inner=True)
def _tied(ties: Ints, a: int, end: int) -> tuple[int, int]:
    """Of the operators from `a` to `end` the bytes that ties save, and ns for owners before."""
    saved, sent = 0, 0
    for t in range(ties.shape[0]):
        if ties[t, 1] < a or ties[t, 1] >= end:
            continue
        if ties[t, 0] >= a:
            saved += ties[t, 2]
        else:
            sent += ties[t, 3]
    return saved, sent


@uncounted(inner=True)
def _gathers(columns: Records) -> bool:
    """Whether parameters of an operator are gathered."""
    found = False
    for i in range(columns.size):
        found |= columns[i].gather > 0
    return found


@uncounted(inner=True)
def _leave_out(costs: Records) -> None:
    """Say of all ranges that they are left out."""
    for first in range(costs.shape[0]):
        for last in range(costs.shape[1]):
            costs[first, last].forward = costs[first, last].peak = -1


@uncounted(inner=True)
def _note(
    costs: Records,
    first: int,
    last: int,
    seconds: tuple[int, int, int],
    nbytes: tuple[int, int, int],
    tied: int,
) -> None:
    """Fill in a range: its backward pass, in a microbatch before the last and in that; bytes."""
    costs[first, last].backward = seconds[0]
    costs[first, last].weight = seconds[1]
    costs[first, last].last = seconds[2]
    costs[first, last].state = nbytes[0]
    costs[first, last].held = nbytes[1]
    costs[first, last].peak = nbytes[2]
    costs[first, last].tied = tied


@kernel(cache=True)
def range_costs(priced: PricedChain, limit: float, whole: bool, costs: Records) -> None:
    """Fill ``costs[a, b]`` with what the operators from cut a to cut b cost as one stage.

    For a fixed end the start moves down, as backward runs. Passes and conversions are one chain;
    gathers and gradient syncs run beside it on a link of their own, unless `shares_link`:

        chain     B₃ ─▶ B₂ ─▶ B₁ ─▶ updates
        link         S₃ ─▶ ┄ S₂ ─▶ S₁      finish = max(passes + updates, link + last update)

    Backward blocks before the last go on without their syncs, but no microbatch takes less than
    the link is busy with it.

    The running microbatch needs max over i of (held by a … i) + working(i) bytes, and of the
    gradients that were made whole before i, or by the microbatch before, and are not summed yet:
    the link takes them one after the other.

    Args:
        priced: the operators under one variant.
        limit: ranges whose forward or backward pass is longer are of no interest (ns).
        whole: whether the range of all operators alone is of interest.
        costs: [cuts, cuts], `STAGE`: the result; a peak of −1 where a range is left out.
    """
    columns, cuts, shares_link = priced.columns, priced.cuts, priced.shares_link
    _leave_out(costs)
    _forward_costs(priced, limit, whole, costs)
    gathers = _gathers(columns)
    sum_ends = np.empty(columns.size, np.int64)
    whole_bytes = np.empty(columns.size, np.int64)
    for last in range(cuts.size - 1 if whole else 1, cuts.size):
        end, first = cuts[last], 0 if whole else last - 1
        launch, weight, update, busy, carried = 0, 0, 0, 0, 0
        state, held, peak, gathered = 0, 0, 0, 0
        inner = final = (0, 0, 0, 0, 0, 0, 0, 0, 0)
        queue = (0, 0, 0, 0)
        for a in range(end - 1, -1, -1):
            convert = _converted(priced, a, end)
            queue = _summed_by(inner[0], sum_ends, whole_bytes, queue)
            most = columns[a].working + queue[2]
            inner = _backward(columns, 0, a, convert, shares_link, gathers, inner)
            final = _backward(columns, columns[a].sync, a, convert, shares_link, gathers, final)
            launch += columns[a].launch_back
            carried += columns[a].each_sync + 2 * columns[a].gather
            weight += columns[a].weight
            busy += columns[a].backward
            update += columns[a].update
            state += columns[a].state
            held += columns[a].held
            gathered += columns[a].gather
            drained = shares_link and not gathers and (convert > 0 or columns[a].again > 0)
            queue = _queued(columns, a, inner[0], drained, sum_ends, whole_bytes, queue)
            peak = max(peak, most) + columns[a].held
            if inner[0] > limit:
                break
            if a != cuts[first]:
                continue
            if costs[first, last].forward < 0:
                break
            backward = max(inner[0], launch, carried - costs[first, last].forward)
            end_of_last = max(final[0], _link_end(final)) + columns[a].update
            finish = max(busy + update, end_of_last, backward)
            tied, sent = _tied(priced.ties, a, end)
            again = costs[first, last].forward + backward - gathered
            left = _peak_with_leftovers(columns, a, end, held, again, sum_ends, whole_bytes, queue)
            seconds = (backward, min(weight, backward), finish - backward)
            _note(costs, first, last, seconds, (state - tied, held, max(peak, left)), sent)
            first = 0 if whole else first - 1
