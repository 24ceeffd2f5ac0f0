"""Collective times from the output of nccl-tests (github.com/NVIDIA/nccl-tests).

Its tables say per message size the time of one collective, in µs, as a mean over its iterations:

    # nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
    #  Rank  0 Group  0 Pid 33391 on  node01 device  0 [0x0f] NVIDIA A100-SXM4-40GB
    #                                                      out-of-place             in-place
    #     size     count    type  redop  root     time  algbw  busbw #wrong     time  algbw …
             8         2   float    sum    -1    29.35   0.00   0.00      0    29.61   0.00 …

Its size is the larger of what a rank holds before and after (for an all-gather and a
reduce-scatter the whole buffer), which is the convention of `hardware.collective_times`. Times
out of place are taken, since the executor's collectives are.

Which collective ran is read off the line ``# Collective test starting: all_reduce_perf`` or the
command in the log, or has to be told; the ratio of both bandwidths, which nccl-tests derives from
kind and ranks, must agree with it.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stratagem.profiler.cache.timing_keys import (
    BETWEEN_NODES,
    IN_A_NODE,
    CollectiveEntry,
    CollectiveKey,
    Measurement,
)
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.hardware.collective_kinds import Collective
from stratagem.simulator.plan.provenance import Environment
from stratagem.simulator.torch_ops.kernels.library_versions import dotted

ORIGIN = "nccl-tests"
PROGRAMS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "scatter": Collective.SCATTER,
    "gather": Collective.GATHER,
    "sendrecv": Collective.SEND,
}
"""What each program of nccl-tests measures, by its name without ``_perf``."""

_BEGIN = re.compile(r"# nThread|# Collective test starting")
_ROW = re.compile(r"\s*\d+\s+\d+\s")
_PROGRAM = re.compile(rf"\b({'|'.join(PROGRAMS)})_perf\b")
_ITERATIONS = re.compile(r"(?<!warmup )\biters: *(\d+)")
_LIBRARY = re.compile(r"nccl-library=(\d+)|NCCL version (\d+\.\d+\.\d+)")
_RANK = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+"
    r"\[[^\]]*\]\s+(.+?)\s*$"
)
_LEAST_BANDWIDTH = 1.0
"""GB/s from which two decimals tell the ratio of the bandwidths well enough."""


@dataclass
class _RunHeader:
    """What the header of one run says."""

    kind: Collective | None = None
    iterations: int = 1
    nccl: str = ""
    ranks: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    columns: list[str] = field(default_factory=list)
    has_rows: bool = False


@dataclass(frozen=True)
class _Sample:
    run: _RunHeader
    nbytes: int
    seconds: float


def read_nccl_tests(
    text: str,
    where: str,
    *,
    environment: Environment | None = None,
    kind: str = "",
    link: str = "",
    timestamp: float = 0.0,
) -> tuple[list[CollectiveEntry], Counter[str]]:
    """The collectives that nccl-tests printed, and what was left out and why.

    Example:
        >>> text = Path("all_reduce.log").read_text()  # doctest: +SKIP
        >>> entries, left_out = read_nccl_tests(text, "all_reduce.log")  # doctest: +SKIP

    Rows of one key (other types or operations, several runs) become one entry with their median.

    Args:
        text: what one or several runs printed; other lines of a log are passed over.
        where: what errors call the file.
        environment: versions that the output does not hold; its device and NCCL are filled in.
        kind: what was run, such as ``all_reduce``, where the output does not say.
        link: name of the slowest link that was crossed; ``intra-node`` or ``inter-node`` if empty.
        timestamp: when it was measured, in seconds since 1970.

    Raises:
        ValueError: no table, a broken row, an unknown kind, devices of several types, or ranks in
            several groups or unequally many on the nodes; names file and line.
    """
    told = None if not kind else _kind(kind, where)
    base = environment or Environment("", "")
    left_out: Counter[str] = Counter()
    samples: dict[CollectiveKey, list[_Sample]] = {}
    for sample in _samples(text, where, told, left_out):
        key = _key(sample, base, link, where)
        samples.setdefault(key, []).append(sample)
    if not samples and not left_out:
        raise ValueError(
            f"{where} has no table of nccl-tests; give what all_reduce_perf and its like print"
        )
    entries = [CollectiveEntry(k, _measurement(found), timestamp) for k, found in samples.items()]
    return entries, left_out


def looks_like_nccl_tests(text: str) -> bool:
    """Whether a text has the headings of a table of nccl-tests."""
    return any(_is_heading(line) for line in text.splitlines())


def _kind(name: str, where: str) -> Collective:
    plain = name.removesuffix("_perf")
    if plain not in PROGRAMS:
        raise unknown("kind", name, PROGRAMS, where=where)
    return PROGRAMS[plain]


def _samples(
    text: str, where: str, told: Collective | None, left_out: Counter[str]
) -> Iterator[_Sample]:
    for number, line, run in _rows(text):
        place = f"{where} line {number}"
        kind = told or run.kind
        if kind is None:
            raise ValueError(
                f"{place}: the output does not say which collective ran; give --kind, one of "
                f"{', '.join(PROGRAMS)}"
            )
        if run.kind not in (None, kind):
            raise ValueError(
                f"{place}: told to be {kind.value}, but the output is of {run.kind.value}; leave "
                "out --kind"
            )
        sample = _sample(line.split(), replace(run, kind=kind), place, left_out)
        if sample is not None:
            yield sample


def _rows(text: str) -> Iterator[tuple[int, str, _RunHeader]]:
    """Number and text of each row of a table, and the run that it belongs to."""
    run, named = _RunHeader(), None
    for number, line in enumerate(text.splitlines(), start=1):
        program = _PROGRAM.search(line)
        named = PROGRAMS[program[1]] if program else named
        if run.has_rows and _BEGIN.search(line):
            run = _RunHeader(nccl=run.nccl)
        if not run.has_rows:
            run.kind = named
        _read_header(line, run)
        if run.columns and _ROW.match(line):
            # A later run may be another program's.
            run.has_rows, named = True, None
            yield number, line, run


def _read_header(line: str, run: _RunHeader) -> None:
    library = _LIBRARY.search(line)
    if library is not None:
        run.nccl = dotted(int(library[1])) if library[1] else library[2]
    iterations = _ITERATIONS.search(line) if "# nThread" in line else None
    if iterations is not None:
        run.iterations = int(iterations[1])
    rank = _RANK.search(line)
    if rank is not None:
        run.ranks.append(rank[1])
        run.hosts.append(rank[3])
        run.devices.add(rank[4])
        run.groups.add(rank[2] or "0")
    if _is_heading(line):
        run.columns = line.lstrip("# ").split()


def _is_heading(line: str) -> bool:
    names = line.lstrip("# ").split()
    found = names[:3] == ["size", "count", "type"] and "time" in names
    return found and line.lstrip().startswith("#")


def _sample(
    cells: Sequence[str], run: _RunHeader, where: str, left_out: Counter[str]
) -> _Sample | None:
    """One row's time out of place, None if it means nothing."""
    if len(cells) != len(run.columns):
        raise ValueError(
            f"{where}: {len(cells)} fields, but its table has {len(run.columns)} columns "
            f"({', '.join(run.columns)}); the output was cut or mixed with other text"
        )
    time, algorithm, bus, wrong = cells[(first := run.columns.index("time")) : first + 4]
    if int(cells[0]) == 0:
        left_out["rows of 0 bytes"] += 1
        return None
    if run.columns[first + 3] == "#wrong" and wrong not in ("0", "N/A"):
        left_out["rows with wrong results"] += 1
        return None
    seconds = _number(time, "time", where) * 1e-6
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"{where}, field time: {time} µs; a collective takes some time")
    _check_bandwidths(run, algorithm, bus, where)
    return _Sample(run, int(cells[0]), seconds)


def _number(text: str, name: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"{where}, field {name}: {text!r} is no number") from error


def _check_bandwidths(run: _RunHeader, algorithm: str, bus: str, where: str) -> None:
    """The ratio of bus to algorithm bandwidth is set by kind and ranks; it shows a wrong kind."""
    given, derived = _number(algorithm, "algbw", where), _number(bus, "busbw", where)
    size = len(run.ranks)
    if size < 2 or given < _LEAST_BANDWIDTH:
        return
    expected = _bus_factor(run.kind, size)
    doubt = (_resolution(bus) + expected * _resolution(algorithm)) / given
    if abs(derived / given - expected) > doubt:
        kind = run.kind.value if run.kind else "it"
        raise ValueError(
            f"{where}: busbw {bus} is {derived / given:.3f} times algbw {algorithm}, but for "
            f"{kind} over {size} ranks it is {expected:.3f} times; give the right --kind"
        )


def _resolution(text: str) -> float:
    """The last digit of a printed number, more than rounding can change."""
    return float(10.0 ** -len(text.partition(".")[2]))


def _bus_factor(kind: Collective | None, size: int) -> float:
    """Bus over algorithm bandwidth, as PERFORMANCE.md of nccl-tests defines it."""
    if kind is Collective.ALL_REDUCE:
        return 2.0 * (size - 1) / size
    if kind in (Collective.BROADCAST, Collective.REDUCE, Collective.SEND):
        return 1.0
    return (size - 1) / size


def _key(sample: _Sample, base: Environment, link: str, where: str) -> CollectiveKey:
    run = sample.run
    if not run.ranks:
        raise ValueError(
            f"{where}: the output does not list its ranks (lines '#  Rank  0 …'), so the size of "
            "the group is not known; import it with its header"
        )
    if len(set(run.ranks)) < len(run.ranks):
        raise ValueError(
            f"{where}: its {len(run.ranks)} ranks have only {len(set(run.ranks))} numbers: each "
            "process ran alone; build nccl-tests with MPI=1"
        )
    if len(run.devices) > 1 or len(run.groups) > 1:
        found = f"devices {', '.join(sorted(run.devices))}; groups {', '.join(sorted(run.groups))}"
        raise ValueError(
            f"{where}: ranks of several kinds ({found}); import runs of one group of equal devices"
        )
    counts = Counter(run.hosts)
    if len(set(counts.values())) > 1:
        spread = ", ".join(f"{n} on {host}" for host, n in counts.items())
        raise ValueError(
            f"{where}: ranks unequally spread ({spread}); import runs with equal nodes"
        )
    (device,) = run.devices
    if base.device not in ("", device):
        raise ValueError(
            f"{where}: it ran on {device!r}, not on {base.device!r}; leave out --device, or "
            "import it as of the right machine"
        )
    assert run.kind is not None
    return CollectiveKey(
        environment=replace(base, device=device, nccl=base.nccl or run.nccl),
        kind=run.kind,
        nbytes=sample.nbytes,
        size=len(run.ranks),
        backend="nccl",
        link=link or (IN_A_NODE if len(counts) == 1 else BETWEEN_NODES),
        num_nodes=len(counts),
    )


def _measurement(samples: Sequence[_Sample]) -> Measurement:
    """The median of means, each over its iterations; their spread is not printed."""
    seconds = statistics.median(sample.seconds for sample in samples)
    return Measurement(
        seconds, 0.0, sum(sample.run.iterations for sample in samples), origin=ORIGIN
    )
