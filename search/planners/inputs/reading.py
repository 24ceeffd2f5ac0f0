"""Reading the files of other planners, so that a broken one is named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from stratagem.simulator.base.files import read_text

T = TypeVar("T")


def decode_file(path: str | Path, kind: type[T]) -> T:
    """Read a JSON file; fields that it has beside those of `kind` are let be.

    Raises:
        ValueError: names the file and the field, and what was expected there.
    """
    try:
        return msgspec.json.decode(read_text(path, "input"), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is broken or of another format: {error}") from error


def check_numbers(where: str, what: str, numbers: Iterable[float]) -> None:
    """Refuse what is no time and no size.

    Raises:
        ValueError: names the file, the place in it and the number.
    """
    for number in numbers:
        if not 0 <= number < float("inf"):
            raise ValueError(
                f"{where}: {what} has {number}; times and sizes are finite and 0 or more"
            )
