"""Names in errors: what there is, what was perhaps meant, and the first few of many."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MOST_NAMES = 40
"""Names that an error lists; of more it lists the nearest."""

CUTOFF = 0.6
"""How alike two names are at least, from 0 to 1, for the one to be suggested for the other."""


def unknown(
    what: str, name: str, known: Iterable[str], *, where: str = "", hint: str = ""
) -> ValueError:
    """The error for a name that is none of `known`, to be raised by the caller.

    Example:
        >>> print(unknown("optimizer", "adams", ["sgd", "adam"]))
        no optimizer 'adams' (did you mean 'adam'?); there are sgd, adam

    Args:
        what: is missing, such as ``cluster preset``; after "no" in the message.
        name: as it was given.
        known: the names that there are, in the order in which they are listed.
        where: whose name it is, such as a file or a model; before the message.
        hint: what else to do, at the end.
    """
    names = list(known)
    near = nearest(name, names)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    if len(names) > MOST_NAMES:
        listed = f"; there are {len(names)}"
        listed += f", near are {', '.join(near)}" if near else f", such as {', '.join(names[:3])}"
    else:
        listed = f"; there are {', '.join(names)}" if names else "; there are none"
    message = f"{f'{where}: ' if where else ''}no {what} {name!r}{meant}{listed}"
    return ValueError(f"{message}. {hint}" if hint else message)


def few(names: Sequence[str], most: int = 3, *, quoted: bool = True) -> str:
    """The first of some names as a sentence has them, and how many more there are.

    Example:
        >>> print(few(["a", "b", "c"], 2))
        'a', 'b' and 1 more
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most]) if quoted else names[:most]) + more


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """The names most like `name`, whatever their case; the best first, none if none is like it.

    Example:
        >>> nearest("DGX-A10", ["dgx-a100", "local-cpu"])
        ['dgx-a100']
    """
    by_lower: dict[str, str] = {}
    for each in known:
        by_lower.setdefault(each.lower(), each)
    found = difflib.get_close_matches(name.lower(), by_lower, most, CUTOFF)
    return [by_lower[each] for each in found]
