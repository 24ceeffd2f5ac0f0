"""Which version of a stage's weights a microbatch reads, and what the older ones are called."""

from __future__ import annotations

from collections.abc import Mapping

from stratagem.simulator.schedules.weight_versions import Seen


class Stashes:
    """The versions of a stage's weights while its instructions are written, one update at a time.

    The newest version has the name of the stored value; an older one is a copy of it.

    Args:
        seen: the versions that each microbatch meets; none where weights are not stashed.
    """

    def __init__(self, seen: Mapping[int, Seen]) -> None:
        self._seen = seen
        self._wanted = {each.version for each in seen.values() if each.is_stashed}
        self._newest = 0

    def is_stashed(self, microbatch: int) -> bool:
        """Whether the backward pass of a microbatch reads a copy."""
        return microbatch in self._seen and self._seen[microbatch].is_stashed

    def read(self, value: str, microbatch: int, *, again: bool) -> str:
        """What a microbatch reads in place of `value`, forward or `again`, backward."""
        seen = self._seen.get(microbatch)
        if seen is None or (seen.at_backward if again else seen.at_forward) == seen.version:
            return value
        return self._copy(value, seen.version)

    def kept(self, value: str) -> str | None:
        """The copy to make of `value` before its next update; None if nobody will read it."""
        return self._copy(value, self._newest) if self._newest in self._wanted else None

    def advance(self) -> None:
        """Note an update."""
        self._newest += 1

    def _copy(self, value: str, version: int) -> str:
        return f"{value} after {version} updates"
