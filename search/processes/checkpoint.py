"""A search that was stopped goes on: what it has finished, in a file.

The file is written whole and then renamed, so that a killed process leaves the last one intact.
What is in it are skeletons that were searched, with the best plan of each; baselines and ranking,
which take seconds, are done anew. As every skeleton has random numbers of its own, a search that
goes on ends with the same plan as one that was never stopped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from stratagem.simulator.base.files import decode, encode, read_text, write_text
from stratagem.simulator.plan.plan import Plan

VERSION = 2


@dataclass(frozen=True)
class _Searched:
    plan: str
    evaluations: int
    bound: float | None  # None where no plan fits: JSON knows no infinity
    shared_bound: float


@dataclass(frozen=True)
class _CheckpointFile:
    version: int
    arguments: str
    searched: dict[str, _Searched]


@dataclass(frozen=True)
class Searched:
    """A skeleton that was searched: its best plan, what was spent, its lower bound (s).

    `shared_bound` is one of the same skeleton under policies that recompute more, 0 if unknown.
    """

    plan: Plan
    evaluations: int
    bound: float
    shared_bound: float


@dataclass(eq=False)
class SearchCheckpoint:
    """What a search has finished, kept in a file after each skeleton.

    Args:
        path: the file; None keeps nothing.
        arguments: everything that the search's course depends on.

    Raises:
        ValueError: the file is of a search with other arguments, or no checkpoint at all.
    """

    path: Path | None
    arguments: str
    _done: dict[str, _Searched] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.exists():
            return
        found = decode(
            read_text(self.path, "checkpoint"), _CheckpointFile, f"checkpoint {self.path}"
        )
        if found.version != VERSION:
            raise ValueError(
                f"checkpoint {self.path} has version {found.version}, this program reads "
                f"{VERSION}: remove the file to begin anew"
            )
        if found.arguments != self.arguments:
            raise ValueError(
                f"checkpoint {self.path} is of a search with other arguments (model, cluster, "
                "budget, seed, options or constraints): give another file, or remove it"
            )
        self._done = found.searched

    def get(self, key: str) -> Searched | None:
        """What was found on a skeleton, if it was searched."""
        found = self._done.get(key)
        if found is None:
            return None
        plan = Plan.from_json(found.plan)
        bound = float("inf") if found.bound is None else found.bound
        return Searched(plan, found.evaluations, bound, found.shared_bound)

    def put(self, key: str, searched: Searched) -> None:
        """Note a skeleton that was searched, and write the file."""
        if self.path is None:
            return
        text = json.dumps(json.loads(searched.plan.to_json()), ensure_ascii=False)  # One line.
        bound = searched.bound if isfinite(searched.bound) else None
        self._done[key] = _Searched(text, searched.evaluations, bound, searched.shared_bound)
        write_text(self.path, encode(_CheckpointFile(VERSION, self.arguments, self._done)))


def digest(*parts: Any) -> str:
    """A short name for what a search depends on."""
    text = "\n".join(repr(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
