"""Where an error comes from in the user's own code, which is what they can change."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from types import TracebackType

LOGS_OF = "logs of "
"""How the line of an error begins that says where logs are, in an error of many lines."""

OWN = str(Path(__file__).resolve().parents[1])
TOP = str(Path(__file__).resolve().parents[3])


def place_of(error: BaseException) -> str:
    """File and line of the user's code that an error comes from; empty where it is none of theirs.

    Example:
        >>> try:
        ...     compile("1 +", "mymodel.py", "exec")
        ... except SyntaxError as error:
        ...     place_of(error)
        'mymodel.py:1'
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{error.filename}:{error.lineno}"
    found = ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if _is_users(file):
            found = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def at_place(error: BaseException) -> str:
    """The place of an error in brackets, to go into a sentence; empty where there is none."""
    place = place_of(error)
    return f" ({place})" if place else ""


def place_in(traceback: str) -> str:
    """The same of an error whose traceback is text."""
    users = [
        f"{file}:{line}"
        for file, line in re.findall(r'File "([^"]+)", line (\d+)', traceback)
        if _is_users(file)
    ]
    return users[-1] if users else ""


def _is_users(file: str) -> bool:
    """Whether a file is neither of this package, of Python, nor of an installed package."""
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    folders = (OWN, *_LIBRARIES, *(f"{TOP}/{name}" for name in _LINKED))
    path = str(Path(file).resolve())
    return not any(path.startswith(f"{folder}/") for folder in folders)


_LIBRARIES = tuple(
    {str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib")}
)
_LINKED = ("simulator", "search", "profiler", "executor")
"""Folders of a source tree that the package links to."""
