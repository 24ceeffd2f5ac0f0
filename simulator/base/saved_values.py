"""Values with files of their own: JSON that says what it is and in which version.

And how values of many fields are shown in a line: by those that are not as usual.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from stratagem.simulator.base.files import read_text, reading, understood, write_text

T = TypeVar("T")


def differing(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not as they are when left out, by name."""
    found: dict[str, Any] = {}
    for each in fields(record):
        made = each.default_factory
        usual = each.default if made is MISSING else made()
        if (value := getattr(record, each.name)) != usual:
            found[each.name] = value
    return found


def in_words(given: Mapping[str, Any]) -> str:
    """Arguments as they are written: ``descents=0, again=2``."""
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def shown(record: Any) -> str:
    """The call that makes a dataclass, without what is as usual; for its `__repr__`."""
    return f"{type(record).__name__}({in_words(differing(record))})"


class SavedValue(ABC):
    """A value that is saved to a file and loaded from it.

    Example:
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> Cluster.preset("dgx-a100").save("cluster.json")  # doctest: +SKIP
        >>> Cluster.load("cluster.json").num_devices  # doctest: +SKIP
        16

    Attributes:
        FILE: what errors call its file.
    """

    FILE: ClassVar[str]

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            OSError: when it cannot be written; what was there is there still.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file.

        Raises:
            ValueError: names the file, the field and what was expected there.
        """
        return cls.from_json(read_text(path, cls.FILE), what=f"{cls.FILE} {path}")

    @abstractmethod
    def to_json(self) -> str:
        """The text of the file; equal values have equal text."""

    @classmethod
    @abstractmethod
    def from_json(cls, text: str, *, what: str | None = None) -> Self:
        """Read the text of a file, which errors call `what`."""


@dataclass(frozen=True)
class FileForm:
    """What a file says of itself, and what to do where it says something else.

    Example:
        >>> FileForm(2, "search again").check('{"version": 3}', "plan file p.json")
        Traceback (most recent call last):
        ValueError: plan file p.json has version 3, this program reads 2; search again

    Attributes:
        version: that is written and read.
        remedy: in words.
        format: the name in the file; empty for files that have none.
    """

    version: int
    remedy: str
    format: str = ""

    @property
    def head(self) -> dict[str, str | int]:
        """The first fields of a file."""
        named = {"format": self.format} if self.format else {}
        return {**named, "version": self.version}

    def check(self, text: str, what: str) -> object:
        """What the text holds; that of another kind of file or another version is refused.

        A field that is missing is for whoever reads the others.

        Raises:
            ValueError: names the file, both kinds or versions, and the remedy.
        """
        with reading(what):
            given = msgspec.json.decode(text)
        if isinstance(given, dict):
            self.check_head(given, what)
        return given

    def read(self, text: str, kind: type[T], what: str) -> T:
        """Read the text of a file as the dataclass `kind` (see `files.decode`), once `check`ed.

        Raises:
            ValueError: names the file, and what is wrong with it.
        """
        given = self.check(text, what)
        with reading(what):
            value = msgspec.json.decode(text, type=kind)
        return understood(value, given, what)

    def check_head(self, given: Mapping[str, Any], what: str) -> None:
        """The same of what was read from a file."""
        kind = given.get("format", self.format)
        if kind != self.format:
            wanted = f"a {self.format!r}" if self.format else "a file that names no format"
            raise ValueError(
                f"{what} is a {_shown(kind)}, this program reads {wanted} there; give a file of "
                "that kind"
            )
        version = given.get("version", self.version)
        if version != self.version or isinstance(version, bool):
            raise ValueError(
                f"{what} has version {_shown(version)}, this program reads {self.version}; "
                f"{self.remedy}"
            )


def _shown(value: object) -> str:
    """A value of somebody else's file in a sentence."""
    shown = repr(value)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}…"


LONGEST_SHOWN = 40
"""Characters of a value in an error."""
