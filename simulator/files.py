"""Reading and writing files so that a broken one is named and none is ever half-written."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block succeeds.

    Example:
        >>> with atomic_path("/nonexistent/x") as temporary:  # doctest: +SKIP
        ...     temporary.write_text("whole or not at all")
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_place(path: str | Path) -> None:
    """Refuse, before a long wait, a file that could not be written after it.

    Example:
        >>> check_place("out/plan.json")

    Raises:
        ValueError: it is a folder, or the nearest folder above it is none or is read-only.
    """
    target = Path(path).absolute()
    if target.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it to write")
    folder = next(each for each in target.parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: {folder} is no folder that can be written to")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_text(path: str | Path, what: str) -> str:
    """The text of a file.

    Raises:
        ValueError: when it cannot be read; names `what` and the path.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"{what} {path} cannot be read: {reason}") from error


def decode(text: str, kind: type[T], what: str) -> T:
    """Read JSON as the dataclass `kind`, unknown and missing fields refused.

    Raises:
        ValueError: names `what`, the field and what was expected there.
    """
    try:
        value = msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{what} is broken: {error}") from error
    unknown = _unknown_field(msgspec.json.decode(text), msgspec.to_builtins(value), "$")
    if unknown is not None:
        raise ValueError(f"{what} is broken: unknown field {unknown}")
    _fill(value)
    return value


def _fill(value: object) -> None:
    """Give every dataclass the defaults of fields that its file did not have.

    The decoder leaves them to the class, where the encoder would not look for them: a file of an
    earlier version would be written back without them, and equal values would not be equal text.
    """
    if dataclasses.is_dataclass(value):
        held: dict[str, object] = vars(value)
        for each in dataclasses.fields(value):
            _fill(held.setdefault(each.name, getattr(value, each.name)))
    elif isinstance(value, dict):
        for part in value.values():
            _fill(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            _fill(part)


def _unknown_field(given: object, understood: object, path: str) -> str | None:
    """Path of the first field in `given` that `understood` lacks (a misspelt name, say)."""
    pairs: list[tuple[str, object, object]] = []
    if isinstance(given, dict) and isinstance(understood, dict):
        for key in given:
            if key not in understood:
                return f"`{path}.{key}`"
        pairs = [(f"{path}.{key}", given[key], understood[key]) for key in given]
    elif isinstance(given, list) and isinstance(understood, (list, tuple)):
        both = zip(given, understood, strict=True)
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(both)]
    return next((u for p, a, b in pairs if (u := _unknown_field(a, b, p)) is not None), None)


def encode(value: object) -> str:
    """JSON text of dataclasses and containers, indented, the same for equal values."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
