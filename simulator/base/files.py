"""Reading and writing files so that a broken one is named and none is ever half-written."""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from stratagem.simulator.base.hostile_texts import check_texts

T = TypeVar("T")


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` when the block succeeds.

    Links are followed, so the file that one points to is written. A file that is there keeps its
    mode and owner; a new one gets what the umask leaves. What is no file (a device, a pipe) is
    written to and stays what it is. The new content is on the disk when this returns, and a
    machine that stops before has the old one. A file of several names (hard links) is changed
    under this one.

    Example:
        >>> with atomic_path("/nonexistent/x") as temporary:  # doctest: +SKIP
        ...     temporary.write_text("whole or not at all")

    Raises:
        OSError: when it cannot be written; what was there is there still.
    """
    if _is_written_to(path):
        with tempfile.TemporaryDirectory(prefix="stratagem-") as folder:
            temporary = Path(folder, "content")
            temporary.touch()
            yield temporary
            with temporary.open("rb") as content, Path(path).open("wb") as out:
                shutil.copyfileobj(content, out)
        return
    target = Path(os.path.realpath(path))
    try:
        before = _make_room(target)
        temporary = _create_beside(target, 0o666 if before is None else before.st_mode & 0o777)
    except OSError as error:  # It would name the temporary file, which nobody knows.
        raise type(error)(error.errno, error.strerror, str(path)) from error
    try:
        yield temporary
        if before is not None:
            _make_alike(temporary, before)
        sync(temporary)
        temporary.replace(target)
        sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _make_room(target: Path) -> os.stat_result | None:
    """Make the folders above a file; what is there of it already, None where nothing is."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder, not a file to write", str(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, "a folder above it is a file") from error
    return _status(target)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, where its file system can do so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def new_file_mode() -> int:
    """The mode of a new file: what the umask of this process leaves."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return 0o666 & ~int(line.split()[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


def _status(path: str | Path) -> os.stat_result | None:
    """What is at a path, links followed; None where nothing is."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_written_to(path: str | Path) -> bool:
    """Whether something that is no file must stay what it is, such as a device or open output."""
    status = _status(path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return False
    folder = os.path.realpath(Path(path).parent)
    open_output = folder.startswith(("/dev", "/proc")) and Path(path).is_symlink()
    return open_output or not stat.S_ISREG(status.st_mode)


def _create_beside(target: Path, mode: int) -> Path:
    """An empty file of a new name in the folder of `target`, which others may read as they may it.

    The system takes from `mode` what the umask has.
    """
    name = target.name.encode()[:NAME_BYTES].decode(errors="ignore")
    temporary = target.with_name(f".{name}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    return temporary


def _make_alike(temporary: Path, before: os.stat_result) -> None:
    """Give a file the owner and mode of the one that it replaces, as far as one may."""
    with suppress(PermissionError):
        os.chown(temporary, before.st_uid, before.st_gid)
    temporary.chmod(stat.S_IMODE(before.st_mode))


NAME_BYTES = 200
"""Of a file's name that come into that of the temporary one, which is longer."""


def check_place(path: str | Path) -> None:
    """Refuse, before a long wait, a file that could not be written after it.

    Example:
        >>> check_place("out/plan.json")

    Raises:
        ValueError: it is a folder, or the nearest folder above it is none or is read-only.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it to write")
    if _is_written_to(path):
        if not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written to by this user; name another file")
        return
    folder = next(each for each in target.parents if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{path} cannot be written: {folder} is no folder that can be written to")


def check_outputs(*written: Path | None, read: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before any work, files to write of which one could not be, or would replace another.

    Example:
        >>> check_outputs(Path("out/plan.json"), None, read=["model.json"])
        >>> check_outputs(Path("step.png"), Path("./step.png"))
        Traceback (most recent call last):
        ValueError: step.png is to be written twice; name a file for each output

    Args:
        written: files to write; None is none.
        read: files, or other names, that what is written is made from.

    Raises:
        ValueError: as `check_place`; two of them are one file, or one is read.
    """
    sources = {os.path.realpath(each) for each in read if each is not None}
    known: set[str] = set()
    for path in filter(None, written):
        check_place(path)
        place = os.path.realpath(path)
        if _is_written_to(path):
            continue
        if place in known:
            raise ValueError(f"{path} is to be written twice; name a file for each output")
        if place in sources:
            raise ValueError(
                f"{path} is read, and what is made from it would replace it; name another file to "
                "write"
            )
        known.add(place)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


MOST_BYTES = 2**30
"""Of a file that is read as a whole."""


def read_text(path: str | Path, what: str) -> str:
    """The text of a file.

    Raises:
        ValueError: when it cannot be read or has no end; names `what` and the path.
    """
    try:
        return read_bytes(path, what).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path} cannot be read: not UTF-8 text") from error


def read_bytes(path: str | Path, what: str) -> bytes:
    """The content of a file.

    Raises:
        ValueError: when it cannot be read or has no end; names `what` and the path.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ValueError(
            f"{what} {path} cannot be read: it has more than {MOST_BYTES / 2**30:g} GiB; see "
            f"whether it is the right file"
        )
    return content


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Errors of whoever makes sense of a file's content become one that names the file.

    A file of somebody else may hold anything where a list, a number or a name should be.

    Example:
        >>> with reading("result file r.json", "run again"):
        ...     {"losses": 3}["losses"][0]
        Traceback (most recent call last):
        ValueError: result file r.json is broken: 'int' object is not subscriptable; run again

    Args:
        what: names the file; an error that begins with it says enough.
        remedy: what to do.

    Raises:
        ValueError: instead of what went wrong.
    """
    try:
        yield
    except WRONG_CONTENT as error:
        if isinstance(error, ValueError) and str(error).startswith(what):
            raise
        said = f"{error}" if not isinstance(error, KeyError) else f"{error} is missing"
        after = f"; {remedy}" if remedy else ""
        raise ValueError(f"{what} is broken: {said}{after}") from error


WRONG_CONTENT = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError),
    *(msgspec.MsgspecError, AssertionError, MemoryError),
)
"""What content of the wrong kind leads to."""


def decode(text: str, kind: type[T], what: str) -> T:
    """Read JSON as the dataclass `kind`, unknown and missing fields refused.

    Raises:
        ValueError: names `what`, the field and what was expected there.
    """
    with reading(what):
        value = msgspec.json.decode(text, type=kind)
    return understood(value, msgspec.json.decode(text), what)


def understood(value: T, given: object, what: str) -> T:
    """What was decoded as `value`, if nothing that was `given` is unknown, or no name.

    Raises:
        ValueError: see `decode`.
    """
    check_texts(given, what)
    unknown = _unknown_field(given, msgspec.to_builtins(value), "$")
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
    """JSON text of dataclasses and containers, indented, the same for equal values.

    Example:
        >>> encode({"bandwidth": np.float64(2.5)}).split()
        ['{', '"bandwidth":', '2.5', '}']
    """
    text = msgspec.json.encode(value, enc_hook=plain_number)
    return msgspec.json.format(text, indent=2).decode() + "\n"


def plain_number(value: object) -> object:
    """The number that one of numpy's is: people measure, and put what comes out into a cluster.

    Raises:
        TypeError: `value` is none, and JSON has no word for it.
    """
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")
