"""Timings out of any file that holds some, whatever its form."""

from __future__ import annotations

import dataclasses
import enum
import gzip
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stratagem.profiler.cache.csv_and_json import FORMAT, from_csv, from_json
from stratagem.profiler.cache.timing_keys import CacheEntry
from stratagem.profiler.imports.nccl_tests import looks_like_nccl_tests, read_nccl_tests
from stratagem.profiler.imports.torch_profiler import read_kineto
from stratagem.profiler.imports.trace_events import looks_like_trace
from stratagem.simulator.base.files import read_bytes
from stratagem.simulator.plan.provenance import Environment

MOST_UNPACKED = 2**29
"""Bytes of what a packed file holds: a small one may hold any number."""

_GZIP = b"\x1f\x8b"


class FileFormat(enum.Enum):
    """What a file of timings may be."""

    CSV = "csv"
    JSON = "json"
    KINETO = "kineto"
    NCCL_TESTS = "nccl-tests"


@dataclass(frozen=True)
class Imported:
    """What a file holds: entries for the cache, and how much was left out, by reason."""

    format: FileFormat
    entries: Sequence[CacheEntry]
    left_out: Counter[str]


def import_file(
    path: str | Path,
    *,
    format: FileFormat | None = None,
    environment: Environment | None = None,
    kind: str = "",
    link: str = "",
) -> Imported:
    """Read a file of timings: exported CSV or JSON, a trace, or the output of nccl-tests.

    Example:
        >>> found = import_file("trace.json.gz", environment=here)  # doctest: +SKIP
        >>> print(cache.merge(found.entries), found.left_out)  # doctest: +SKIP

    Args:
        path: of the file, gzipped or plain.
        format: how to read it; found out from the content when left out.
        environment: where a trace or nccl-tests ran, as far as the file does not say.
        kind: the collective that nccl-tests ran, where its output does not say.
        link: name of the link that the collectives crossed.

    Raises:
        ValueError: the file cannot be read, is of an unknown form or broken, or an argument does
            not apply to it; names the file, and line and field where there are any.
    """
    where = str(path)
    text = _text(Path(path))
    form = format or _recognise(text, where)
    _check_arguments(form, where, environment, kind, link)
    if form is FileFormat.CSV:
        return Imported(form, from_csv(text, where), Counter())
    if form is FileFormat.JSON:
        return Imported(form, from_json(text, where), Counter())
    if form is FileFormat.KINETO:
        return Imported(form, *read_kineto(text, where, environment or Environment("", "")))
    entries, left_out = read_nccl_tests(
        text,
        where,
        environment=environment,
        kind=kind,
        link=link,
        timestamp=Path(path).stat().st_mtime,
    )
    return Imported(form, entries, left_out)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP)) == _GZIP
        if not packed:
            return read_bytes(path, "file").decode("utf-8")
        with gzip.open(path) as unpacked:
            content = unpacked.read(MOST_UNPACKED + 1)
        if len(content) > MOST_UNPACKED:
            raise ValueError(
                f"{path} unpacks to more than {MOST_UNPACKED / 2**20:g} MiB; unpack it yourself "
                f"if you know what it is, and import the file inside"
            )
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read: it is no UTF-8 text") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}; copy the file again") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _recognise(text: str, where: str) -> FileFormat:
    start = text.lstrip()[:100]
    if start.startswith("{") and FORMAT in start:
        return FileFormat.JSON
    if looks_like_trace(text):
        return FileFormat.KINETO
    if start.replace('"', "").startswith("table,row,"):
        return FileFormat.CSV
    if looks_like_nccl_tests(text):
        return FileFormat.NCCL_TESTS
    forms = ", ".join(form.value for form in FileFormat)
    raise ValueError(
        f"{where} holds no timings of a known form ({forms}); give --format if it should"
    )


def _check_arguments(
    form: FileFormat, where: str, environment: Environment | None, kind: str, link: str
) -> None:
    """Refuse what would be passed over in silence."""
    told = environment or Environment("", "")
    named = {field.name for field in dataclasses.fields(told)}
    given = [n for n in sorted(named) if getattr(told, n) != getattr(Environment("", ""), n)]
    collective = [n for n, value in (("kind", kind), ("link", link)) if value]
    useless = []
    if form in (FileFormat.CSV, FileFormat.JSON):
        useless = [*given, *collective]
    elif form is FileFormat.KINETO:
        useless = collective
    if useless:
        options = ", ".join(f"--{name}" for name in useless)
        raise ValueError(f"{where} is {form.value} and says its own {options}; leave them out")
