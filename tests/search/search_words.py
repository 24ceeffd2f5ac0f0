"""What a search is told, in single words: tests change one of many from case to case."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.space.constraints import Space


def in_records(words: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `search` for single words of its space and its budget, and others.

    Example:
        >>> told = in_records({"pipeline": 2, "evaluations": 100, "threads": 1, "baselines": ()})
        >>> sorted(told), told["space"].pipeline, told["budget"].threads
        (['baselines', 'budget', 'space'], 2, 1)

    A word beside the record that has it changes the record.
    """
    told = dict(words)
    for name, record in (("space", Space()), ("budget", Budget())):
        own = {f.name: told.pop(f.name) for f in fields(record) if f.name in told}
        given = told.get(name) or record
        if own or name in told:
            told[name] = replace(given, **own)
    return told
