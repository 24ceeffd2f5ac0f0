"""Memory of stages under changes of few operators: peaks in O(tensors · log places).

A tensor adds its bytes at the place of its birth and takes them away behind that of its death
(see `stage.tensor_lifetimes`), so what is alive at a place is a sum over all places before. Each
of a stage's three passes has a binary tree over its places that keeps, for every node, the sum of
its changes and the largest sum of a beginning of them:

    sum(node) = sum(left) + sum(right)        top(node) = max(top(left), sum(left) + top(right))

The peak of a pass is then what is alive before it plus the top of its root.
"""

from __future__ import annotations

from typing import NamedTuple

from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.base.compiling import uncounted
from stratagem.simulator.stage._shut_gates import is_shut

FEW = 4
"""After changes of more operators trees are made anew instead of climbed."""
STATE, HELD, PEAK = 0, 1, 3
"""Columns of a profile: bytes of state; held between passes (2); peaks of the passes (3)."""


class Tensors(NamedTuple):
    """The tensors of all stages, in the order of stages.

    Attributes:
        starts: [S + 1], where those of each stage begin.
        sizes: [S], operators of each stage.
        stage: of each tensor.
        base, first, stride, second, second_stride, birth, death, gate, pool: see `Lifetimes`.
        gates: see `Sharing.arrays`.
        touch_starts: [N + 1], where the tensors begin whose bytes an operator decides.
        touches: those tensors.
        trees: [S + 1], where the nodes of each stage begin.
        nbytes: of each tensor.
        sums, tops: of each node; of a tree with leaves from L on, node n has the children 2n and
            2n + 1, and node 0 is not used.
        profiles: [S, 6], see `STATE`, ...
        undo: [2, K], of each tensor that was changed last its number and what takes it back.
    """

    starts: Ints
    sizes: Ints
    stage: Ints
    base: Ints
    first: Ints
    stride: Ints
    second: Ints
    second_stride: Ints
    birth: Ints
    death: Ints
    gate: Ints
    gates: tuple[Ints, Ints, Ints, Ints]
    pool: Ints
    touch_starts: Ints
    touches: Ints
    trees: Ints
    nbytes: Ints
    sums: Ints
    tops: Ints
    profiles: Ints
    undo: Ints


@uncounted(inline="always")
def bytes_of(tensors: Tensors, k: int, choice: Ints) -> int:
    """Bytes of tensor k under `choice`; none if another reader keeps the same copy."""
    gates = tensors.gates
    if is_shut(tensors.gate[k], choice, gates[0], gates[1], gates[2], gates[3]):
        return 0
    where = tensors.base[k] + choice[tensors.first[k]] * tensors.stride[k]
    return int(tensors.pool[where + choice[tensors.second[k]] * tensors.second_stride[k]])


@uncounted(inline="always")
def leaf_of(tensors: Tensors, stage: int, place: int) -> tuple[int, int]:
    """Where the tree of a place begins, and the number of its leaf."""
    size = (tensors.trees[stage + 1] - tensors.trees[stage]) // 6
    which, within = place // tensors.sizes[stage], place % tensors.sizes[stage]
    return tensors.trees[stage] + 2 * size * which, size + within


@uncounted(inline="always")
def add_at(tensors: Tensors, stage: int, place: int, nbytes: int, climb: bool) -> None:
    """Change what a place adds, and perhaps all nodes above it."""
    if place >= 3 * tensors.sizes[stage]:
        return
    tree, node = leaf_of(tensors, stage, place)
    tensors.sums[tree + node] += nbytes
    tensors.tops[tree + node] += nbytes
    while climb and node > 1:
        node >>= 1
        refresh_node(tensors.sums, tensors.tops, tree, node)


@uncounted(inner=True)
def refresh_node(sums: Ints, tops: Ints, tree: int, node: int) -> None:
    """Sum and top of a node from those of its children."""
    left = tree + 2 * node
    below = sums[left]
    sums[tree + node] = below + sums[left + 1]
    tops[tree + node] = max(tops[left], below + tops[left + 1])


@uncounted(inline="always")
def rebuild_trees(tensors: Tensors, stage: int) -> None:
    """All nodes of a stage's trees from their leaves."""
    size = (tensors.trees[stage + 1] - tensors.trees[stage]) // 6
    for which in range(3):
        tree = tensors.trees[stage] + 2 * size * which
        for node in range(size - 1, 0, -1):
            refresh_node(tensors.sums, tensors.tops, tree, node)


@uncounted(inner=True)
def resize(tensors: Tensors, k: int, nbytes: int, climb: bool) -> None:
    """Add `nbytes` to tensor k; without `climb` the trees must be rebuilt."""
    stage, birth, death = tensors.stage[k], tensors.birth[k], tensors.death[k]
    n = tensors.sizes[stage]
    profile = tensors.profiles[stage]
    tensors.nbytes[k] += nbytes
    if birth < 0:
        profile[STATE] += nbytes
        return
    add_at(tensors, stage, birth, nbytes, climb)
    add_at(tensors, stage, death + 1, -nbytes, climb)
    for which in range(1, 3):
        if birth < which * n and which * n <= death:
            profile[HELD + which - 1] += nbytes


@uncounted(inline="always")
def refresh_peaks(tensors: Tensors, stage: int) -> None:
    """Peaks of a stage's passes from the roots of its trees."""
    size = (tensors.trees[stage + 1] - tensors.trees[stage]) // 6
    before = 0
    for which in range(3):
        root = tensors.trees[stage] + 2 * size * which + 1
        tensors.profiles[stage, PEAK + which] = max(0, before + tensors.tops[root])
        before += tensors.sums[root]


@uncounted(inline="always")
def begin_memory(tensors: Tensors, choice: Ints) -> None:
    """Measure all stages under `choice` from nothing."""
    tensors.nbytes[:] = 0
    tensors.sums[:] = 0
    tensors.tops[:] = 0
    tensors.profiles[:] = 0
    for stage in range(tensors.sizes.size):
        for k in range(tensors.starts[stage], tensors.starts[stage + 1]):
            resize(tensors, k, bytes_of(tensors, k, choice), False)
        rebuild_trees(tensors, stage)
        refresh_peaks(tensors, stage)


@uncounted(inline="always")
def change_memory(tensors: Tensors, choice: Ints, changed: Ints, count: int) -> int:
    """Measure anew what changed operators alter; return how many tensors that are."""
    noted = 0
    for index in range(count):
        i = changed[index]
        for e in range(tensors.touch_starts[i], tensors.touch_starts[i + 1]):
            k = tensors.touches[e]
            nbytes = bytes_of(tensors, k, choice) - tensors.nbytes[k]
            # A tensor of two changed operators has its new bytes when it is met again.
            if nbytes != 0:
                tensors.undo[0, noted] = k
                tensors.undo[1, noted] = -nbytes
                resize(tensors, k, nbytes, count <= FEW)
                noted += 1
    refresh_profiles(tensors, noted, count <= FEW)
    return noted


@uncounted(inline="always")
def restore_memory(tensors: Tensors, noted: int, count: int) -> None:
    """Take back the last change, of so many tensors by so many operators."""
    for index in range(noted):
        resize(tensors, tensors.undo[0, index], tensors.undo[1, index], count <= FEW)
    refresh_profiles(tensors, noted, count <= FEW)


@uncounted(inline="always")
def refresh_profiles(tensors: Tensors, noted: int, climbed: bool) -> None:
    """Peaks of the stages of the changed tensors, and their trees if nobody climbed them."""
    last = -1
    for index in range(noted):
        stage = tensors.stage[tensors.undo[0, index]]
        if stage != last:
            last = stage
            if not climbed:
                rebuild_trees(tensors, stage)
            refresh_peaks(tensors, stage)
