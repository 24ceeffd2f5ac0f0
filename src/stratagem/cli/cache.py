"""The command line's verbs on the timing cache.

stratagem cache ls
stratagem cache merge node1.sqlite node2.sqlite
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from stratagem.cli.shared.options import AsJson, print_json, speaker
from stratagem.cli.shared.rich_tables import simple_table
from stratagem.simulator.base.files import write_text
from stratagem.simulator.base.hostile_texts import printable
from stratagem.simulator.base.misspelt_names import nearest, unknown
from stratagem.simulator.base.units import format_bytes

if TYPE_CHECKING:
    from stratagem.profiler.cache.timing_cache import TimingCache
    from stratagem.profiler.cache.timing_keys import CacheEntry
    from stratagem.simulator.plan.provenance import Environment

cache_app = typer.Typer(
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Say what the timing cache holds; merge, export, import and prune it.",
)

CacheFile = Annotated[
    Path | None,
    typer.Option("--cache", help="cache file; that of STRATAGEM_CACHE or the user if left out"),
]
Where = Annotated[
    str, typer.Option("--environment", "-e", help="only those whose name contains this")
]
Kind = Annotated[
    str, typer.Option("--kind", "-k", help="only operators or collectives of this kind")
]
OlderThan = Annotated[
    str, typer.Option("--older-than", help="only those measured so long ago: 12h, 30d, 8w")
]
Failures = Annotated[bool, typer.Option("--failures", help="only what could not be measured")]

_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_MOST_REASONS = 12


@cache_app.callback()
def _cache(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print_cache()


@cache_app.command("ls")
def list_entries(
    cache: CacheFile = None,
    environment: Where = "",
    kind: Kind = "",
    older_than: OlderThan = "",
    failures: Failures = False,
    as_json: AsJson = False,
) -> None:
    """List what the cache holds, by where it was measured and by whom.

    Own times are the profiler's, learned ones come from runs (compare --learn), imported ones from
    other programs. The first are trusted most, the last least: an operator counts as measured when
    the profiler timed each of its passes.

    Example: stratagem cache ls --environment h200 --kind linear --json
    """
    choice = _Choice(environment, kind, older_than, failures)
    with _open(cache) as timings:
        chosen = choice.of(_all(timings))
        path = timings.path
    if as_json:
        groups = [_summary(where, found) for where, found in _by_environment(chosen)]
        print_json({"cache": path, "environments": groups})
        return
    size = format_bytes(path.stat().st_size)
    console = speaker(as_json)
    console.print(f"{path}: {len(chosen)} times, {size} on disk", soft_wrap=True)
    _print_groups(console, chosen)


@cache_app.command("merge")
def merge_caches(
    others: Annotated[list[Path], typer.Argument(help="cache files, as of other machines")],
    cache: CacheFile = None,
    as_json: AsJson = False,
) -> None:
    """Take over the times of other caches, as from other machines.

    Of two measurements of one key the profiler's own stays before one learned from a run, and that
    before an imported one, then that of more repeats, then the newer one, whatever the order of
    the files.

    Example: stratagem cache merge node1.sqlite node2.sqlite
    """
    for other in others:
        _check_exists(other)
    merged: list[dict[str, Any]] = []
    with _open(cache) as timings:
        for other in others:
            with _open(other) as source:
                found = _all(source)
            report = timings.merge(found)
            speaker(as_json).print(f"{other}: {report}", soft_wrap=True)
            merged.append({"file": other, **dataclasses.asdict(report)})
    if as_json:
        print_json({"merged": merged})


@cache_app.command("export")
def export_entries(
    file: Annotated[Path, typer.Argument(help="file to write, .csv or .json")],
    cache: CacheFile = None,
    environment: Where = "",
    kind: Kind = "",
    older_than: OlderThan = "",
    failures: Failures = False,
    as_json: AsJson = False,
) -> None:
    """Write times to a CSV or JSON file, exact to the last bit.

    Example: stratagem cache export timings.csv --environment h200
    """
    from stratagem.profiler.cache.csv_and_json import to_csv, to_json

    writers: dict[str, Callable[[Iterable[CacheEntry]], str]] = {".csv": to_csv, ".json": to_json}
    if file.suffix not in writers:
        raise ValueError(
            f"{file} ends in {file.suffix or 'nothing'!r}; call it .csv or .json, which says how "
            "to write it"
        )
    with _open(cache) as timings:
        chosen = _Choice(environment, kind, older_than, failures).of(_all(timings))
    write_text(file, writers[file.suffix](chosen))
    speaker(as_json).print(f"{len(chosen)} times written to {file}", soft_wrap=True)
    if as_json:
        print_json({"file": file, "times": len(chosen)})


@cache_app.command("import")
def import_entries(
    files: Annotated[list[Path], typer.Argument(help="files to read, gzipped or plain")],
    cache: CacheFile = None,
    format: Annotated[
        str, typer.Option(help="csv, json, kineto or nccl-tests; else found from the content")
    ] = "",
    here: Annotated[
        str, typer.Option(help="cpu or cuda: this machine's, with its versions, measured it")
    ] = "",
    device: Annotated[str, typer.Option(help="name of the device that was measured")] = "",
    torch: Annotated[str, typer.Option(help="version of torch")] = "",
    threads: Annotated[int, typer.Option(help="threads of one kernel on a CPU")] = 1,
    load: Annotated[int, typer.Option(help="processes that did the same meanwhile")] = 0,
    driver: Annotated[str, typer.Option(help="version of the GPU's driver")] = "",
    cuda: Annotated[str, typer.Option(help="version of CUDA")] = "",
    cudnn: Annotated[str, typer.Option(help="version of cuDNN")] = "",
    nccl: Annotated[str, typer.Option(help="version of NCCL")] = "",
    kind: Annotated[str, typer.Option(help="what nccl-tests ran, such as all_reduce")] = "",
    link: Annotated[str, typer.Option(help="name of the link that nccl-tests crossed")] = "",
    as_json: AsJson = False,
) -> None:
    """Take over times from exported files, torch.profiler traces and output of nccl-tests.

    Files are read whole before any of their times counts. Calls that are no operators of ours are
    counted, not guessed.

    Example: stratagem cache import trace.json.gz --here cuda
    """
    from stratagem.profiler.imports.importing import FileFormat, import_file
    from stratagem.simulator.plan.provenance import Environment

    form = None
    if format:
        form = FileFormat(_checked(format, [each.value for each in FileFormat], "format"))
    told = Environment(device, torch, threads, load, driver, cuda, cudnn, nccl)
    where = _environment_here(here, told) if here else told
    found = [
        import_file(file, format=form, environment=where, kind=kind, link=link) for file in files
    ]
    with _open(cache) as timings:
        report = timings.merge(entry for each in found for entry in each.entries)
    console = speaker(as_json)
    console.print(str(report), soft_wrap=True)
    if any(_is_collective(entry) for each in found for entry in each.entries):
        console.print(
            "stratagem clusters NAME --fit --out FILE makes links of the collectives; a search "
            "over that file is priced by them",
            soft_wrap=True,
        )
    for file, each in zip(files, found, strict=True):
        _print_left_out(console, file, each.left_out)
    if as_json:
        left_out = {str(f): dict(each.left_out) for f, each in zip(files, found, strict=True)}
        print_json({**dataclasses.asdict(report), "left_out": left_out})


@cache_app.command("prune")
def prune_entries(
    cache: CacheFile = None,
    environment: Where = "",
    kind: Kind = "",
    older_than: OlderThan = "",
    failures: Failures = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be removed, and remove nothing")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove times that meet all the conditions given.

    Example: stratagem cache prune --older-than 90d --dry-run
    """
    choice = _Choice(environment, kind, older_than, failures)
    if choice == _Choice("", "", "", False):
        raise ValueError(
            "prune without a condition would remove everything; give --older-than, --environment, "
            "--kind or --failures, or delete the file"
        )
    with _open(cache) as timings:
        chosen = choice.of(_all(timings))
        removed = len(chosen) if dry_run else timings.remove(chosen)
        left = len(timings)
    would = "would be removed" if dry_run else "removed"
    stay = left - removed * dry_run
    console = speaker(as_json)
    console.print(f"{removed} times {would}, {stay} stay", soft_wrap=True)
    _print_groups(console, chosen)
    if as_json:
        print_json({"removed": removed, "stay": stay, "dry_run": dry_run})


def print_cache() -> None:
    """Say what the user's cache holds, by environment."""
    list_entries()


@dataclasses.dataclass(frozen=True)
class _Choice:
    """The conditions of a verb, as they were given."""

    environment: str
    kind: str
    older_than: str
    failures: bool

    def of(self, entries: Sequence[CacheEntry]) -> list[CacheEntry]:
        """The entries that meet them all."""
        names = sorted({entry.key.environment.name for entry in entries})
        if self.environment and not any(self._is_there(name) for name in names):
            short = {name.partition(",")[0] for name in names}
            raise unknown("environment", self.environment, sorted(short))
        if self.kind:
            _checked(self.kind, sorted({_kind_of(entry) for entry in entries}), "kind")
        before = time.time() - _duration(self.older_than) if self.older_than else float("inf")
        return [
            entry
            for entry in entries
            if self._is_there(entry.key.environment.name)
            and self.kind in ("", _kind_of(entry))
            and entry.timestamp <= before
            and (entry.measurement.error or not self.failures)
        ]

    def _is_there(self, name: str) -> bool:
        return self.environment.lower() in name.lower()


def _open(path: Path | None) -> TimingCache:
    from stratagem.profiler.cache.timing_cache import TimingCache

    return TimingCache(path)


def _all(timings: TimingCache) -> list[CacheEntry]:
    return [*timings.entries(), *timings.collective_entries()]


def _check_exists(path: Path) -> None:
    """A cache to read must be there; opening would make an empty one."""
    if not path.is_file():
        beside = path.parent.iterdir() if path.parent.is_dir() else ()
        near = nearest(path.name, [each.name for each in beside], most=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"there is no cache {path}{hint}")


def _checked(name: str, known: Sequence[str], what: str) -> str:
    """`name` if it is known, else an error that suggests the nearest."""
    if name not in known:
        raise unknown(what, name, known)
    return name


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if found is None:
        raise ValueError(
            f"--older-than is {text!r}; give a number and m, h, d or w, such as 30d for days"
        )
    return float(found[1]) * _SECONDS[found[2]]


def _kind_of(entry: CacheEntry) -> str:
    from stratagem.profiler.cache.timing_keys import TimingEntry

    return entry.key.operator.kind if isinstance(entry, TimingEntry) else entry.key.kind.value


def _is_collective(entry: CacheEntry) -> bool:
    from stratagem.profiler.cache.timing_keys import CollectiveEntry

    return isinstance(entry, CollectiveEntry)


def _environment_here(here: str, told: Environment) -> Environment:
    """This machine's environment, with what was told in its place."""
    from stratagem.profiler.machine.device_clocks import describe_environment
    from stratagem.simulator.plan.provenance import Environment

    device = _checked(here, ["cpu", "cuda"], "device for --here")
    found = describe_environment(device, threads=told.threads, load=told.load)
    usual = Environment("", "")
    given = {n: v for n, v in dataclasses.asdict(told).items() if v != getattr(usual, n)}
    return dataclasses.replace(found, **given)


def _by_environment(entries: Iterable[CacheEntry]) -> list[tuple[Environment, list[CacheEntry]]]:
    groups: dict[Environment, list[CacheEntry]] = {}
    for entry in entries:
        groups.setdefault(entry.key.environment, []).append(entry)
    return sorted(groups.items(), key=lambda pair: dataclasses.astuple(pair[0]))


def _summary(where: Environment, found: Sequence[CacheEntry]) -> dict[str, Any]:
    from stratagem.profiler.cache.rows import row_of

    times = [entry.timestamp for entry in found]
    return {
        **dataclasses.asdict(where),
        "name": where.name,
        "times": len(found),
        "collectives": sum(map(_is_collective, found)),
        "failures": sum(bool(entry.measurement.error) for entry in found),
        **_by_trust(found),
        "kinds": dict(sorted(Counter(map(_kind_of, found)).items())),
        "bytes": sum(len(json.dumps(dataclasses.asdict(row_of(entry)))) for entry in found),
        "oldest": min(times),
        "newest": max(times),
    }


def _by_trust(found: Sequence[CacheEntry]) -> dict[str, int]:
    """How many times were measured by the profiler, learned from runs, imported."""
    from stratagem.profiler.cache.timing_keys import Trust

    counts = Counter(entry.measurement.trust for entry in found)
    return {trust.name.lower(): counts[trust] for trust in sorted(Trust, reverse=True)}


def _print_groups(console: Console, entries: Sequence[CacheEntry]) -> None:
    if not entries:
        return
    rows = []
    names = ("times", "collectives", "own", "learned", "imported", "failures")
    for where, found in _by_environment(entries):
        told = _summary(where, found)
        counts = [str(told[name]) for name in names]
        ages = " – ".join(dict.fromkeys((_age(told["newest"]), _age(told["oldest"]))))
        rows.append([where.name, *counts, format_bytes(told["bytes"]), ages])
    console.print(simple_table(("environment", *names, "size", "age"), rows))


def _age(timestamp: float) -> str:
    seconds = max(0.0, time.time() - timestamp)
    unit = next((u for u in ("d", "h") if seconds >= _SECONDS[u]), "m")
    return f"{seconds / _SECONDS[unit]:.0f}{unit}"


def _print_left_out(console: Console, file: Path, left_out: Counter[str]) -> None:
    if not left_out:
        return
    console.print(f"{file}: {left_out.total()} left out:", soft_wrap=True)
    for reason, count in left_out.most_common(_MOST_REASONS):
        console.print(f"  {count} × {printable(reason)}", soft_wrap=True)
    rest = len(left_out) - _MOST_REASONS
    if rest > 0:
        console.print(f"  and {rest} other reasons")
