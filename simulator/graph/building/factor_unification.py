"""Factors: the atoms that tensor dimensions are products of, split as late as they have to be.

A linear layer makes 2304 columns; only a later view tells that they are 3 × 12 × 64. So a factor
may be split after it was made, and factors that have met in an operator split together:

    linear out   [2304]          view(…, 3, 12, 64)          [3 · 12 · 64]
    weight       [2304]   ─────────────────────────────▶     [3 · 12 · 64]   (linked: splits too)

Linked factors keep their identity (a query and a key dim are different loops of an operator) but
have equal sizes, a common label, and are samples or not together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class Linked:
    """What linked factors share."""

    def __init__(self, member: Factor, sample: bool) -> None:
        self.members = [member]
        self.sample = sample
        self.label = ""
        self.priority = 0


class Factor:
    """One factor of a tensor dimension: a size that may later turn out to be a product.

    Example:
        >>> columns = Factor(2304)
        >>> split_front([columns], 3)
        ([Factor(3)], [Factor(768)])
        >>> columns.leaves
        [Factor(3), Factor(768)]
    """

    __slots__ = ("children", "group", "size")

    def __init__(self, size: int, *, sample: bool = False) -> None:
        self.size = size
        self.children: tuple[Factor, Factor] | None = None
        self.group = Linked(self, sample)

    def __repr__(self) -> str:
        return f"Factor({self.size})"

    @property
    def leaves(self) -> list[Factor]:
        """The factors that it has been split into, outermost first; itself if it is whole."""
        if self.children is None:
            return [self]
        return [*self.children[0].leaves, *self.children[1].leaves]

    @property
    def sample(self) -> bool:
        """Whether it counts samples of the batch."""
        return self.group.sample

    @property
    def label(self) -> str:
        """The name that operators gave it, or empty."""
        return self.group.label


def fresh(size: int, *, sample: bool = False) -> tuple[Factor, ...]:
    """Factors of a new tensor dimension: none for size 1."""
    return () if size == 1 else (Factor(size, sample=sample),)


def leaves_of(factors: Iterable[Factor]) -> list[Factor]:
    """The leaves of several factors, outermost first."""
    return [leaf for factor in factors for leaf in factor.leaves]


def size_of(factors: Iterable[Factor]) -> int:
    """The size of the dimension that `factors` make."""
    return math.prod(factor.size for factor in factors)


def split(factor: Factor, front: int) -> None:
    """Split a leaf, and all that are linked to it, into (`front`, size / `front`)."""
    group = factor.group
    firsts, seconds = [], []
    for member in group.members:
        first, second = Factor(front), Factor(member.size // front)
        member.children = (first, second)
        firsts.append(first)
        seconds.append(second)
    for parts in (firsts, seconds):
        parts[0].group.sample = group.sample
        for part in parts[1:]:
            _merge(parts[0].group, part.group)


def _merge(one: Linked, two: Linked) -> None:
    if one is two:
        return
    if len(one.members) < len(two.members):
        one, two = two, one
    if (two.priority, two.label) > (one.priority, one.label):
        one.priority, one.label = two.priority, two.label
    one.sample = one.sample or two.sample
    for member in two.members:
        member.group = one
    one.members.extend(two.members)


def link(one: Sequence[Factor], two: Sequence[Factor]) -> None:
    """Make two dimensions of equal size have equal factors from now on.

    Example:
        >>> a, b = [Factor(8), Factor(3)], [Factor(4), Factor(6)]
        >>> link(a, b)
        >>> leaves_of(a), leaves_of(b)
        ([Factor(4), Factor(2), Factor(3)], [Factor(4), Factor(2), Factor(3)])

    Raises:
        ValueError: the sizes differ, or have no common refinement, such as 4 × 3 and 6 × 2.
    """
    if size_of(one) != size_of(two):
        raise ValueError(f"sizes {size_of(one)} and {size_of(two)} differ")
    left, right = _stack(one), _stack(two)
    while left:
        a, b = left.pop(), right.pop()
        if a.size == b.size:
            _merge(a.group, b.group)
            continue
        large, small = (a, b) if a.size > b.size else (b, a)
        _check_split(large, small.size, one, two)
        split(large, small.size)
        left, right = _stack_from(left, a), _stack_from(right, b)


def _stack(factors: Sequence[Factor]) -> list[Factor]:
    return leaves_of(factors)[::-1]


def _stack_from(rest: list[Factor], factor: Factor) -> list[Factor]:
    """`factor` and the `rest` again on a stack, as leaves: a split may have split others too."""
    return [leaf for each in (*rest, factor) for leaf in reversed(each.leaves)]


def _check_split(
    factor: Factor, front: int, one: Sequence[Factor], two: Sequence[Factor] = ()
) -> None:
    if factor.size % front:
        sizes = [[leaf.size for leaf in leaves_of(side)] for side in (one, two) if side]
        raise ValueError(
            f"factor sizes {' and '.join(map(str, sizes))} have no common refinement: "
            f"{factor.size} is not a multiple of {front}"
        )


def split_front(factors: Sequence[Factor], front: int) -> tuple[list[Factor], list[Factor]]:
    """Cut a dimension into its outermost part of size `front` and the rest.

    Raises:
        ValueError: when no split of the factors gives `front`.
    """
    taken: list[Factor] = []
    rest = list(factors)[::-1]
    while front > 1:
        if not rest:
            raise ValueError(f"a part of size {front} is wanted of nothing")
        factor = rest.pop()
        if front % factor.size == 0:
            taken.append(factor)
            front //= factor.size
        elif factor.children is not None:
            rest.extend(reversed(factor.children))
        else:
            _check_split(factor, front, factors)
            split(factor, front)
            rest.extend(reversed(factor.leaves))
    return taken, rest[::-1]


def regroup(factors: Sequence[Factor], shape: Sequence[int]) -> list[tuple[Factor, ...]]:
    """The factors of each dimension after a reshape.

    Example:
        >>> regroup([Factor(32), Factor(1024)], (32, 4, 256))
        [(Factor(32),), (Factor(4),), (Factor(256),)]

    Raises:
        ValueError: the reshape would cut across factors, such as (4, 6) to (6, 4).
    """
    if size_of(factors) != math.prod(shape):
        raise ValueError(f"{size_of(factors)} elements do not have the shape {tuple(shape)}")
    rest = list(factors)
    groups: list[tuple[Factor, ...]] = []
    for size in shape:
        taken, rest = split_front(rest, size)
        groups.append(tuple(taken))
    return groups


def name_factors(factors: Iterable[Factor], label: str, priority: int) -> None:
    """Propose a name for factors; of several proposals the one of highest priority stays."""
    for leaf in leaves_of(factors):
        group = leaf.group
        if (priority, label) > (group.priority, group.label):
            group.priority, group.label = priority, label
