"""Times of operators from traces of torch.profiler, under the keys of the graph's operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from stratagem.profiler.cache.timing_keys import Measurement, TimingEntry, TimingKey, summarise
from stratagem.profiler.imports.trace_events import (
    KinetoTrace,
    Thread,
    TraceCall,
    owners,
    read_trace,
)
from stratagem.profiler.imports.traced_operators import (
    READERS,
    TracedCall,
    UnreadableError,
    is_whole,
    read_call,
)
from stratagem.simulator.base.files import reading
from stratagem.simulator.kernel_times.cost_model import Direction
from stratagem.simulator.plan.provenance import Environment

ORIGIN = "torch.profiler"


@dataclass
class _Times:
    """Seconds of one key, call by call."""

    key: TimingKey
    seconds: list[float] = field(default_factory=list)


def read_kineto(
    text: str, where: str, environment: Environment
) -> tuple[list[TimingEntry], Counter[str]]:
    """The operators in a trace, and the calls that are none of ours or not whole, by reason.

    Example:
        >>> with torch.profiler.profile(record_shapes=True) as profiler:  # doctest: +SKIP
        ...     loss(model(x)).backward()
        >>> profiler.export_chrome_trace("trace.json")  # doctest: +SKIP
        >>> read_kineto(Path("trace.json").read_text(), "trace.json", here)  # doctest: +SKIP

    A call counts if its backward pass is there too and makes every gradient; equal calls are one
    entry with their median and spread. On CUDA, times are those of the kernels alone.

    Args:
        text: the trace's JSON.
        where: what errors call the file.
        environment: where it was recorded; an empty device is filled in from a CUDA trace.

    Raises:
        ValueError: a broken trace, one that does not say on which device it was recorded, or one
            that says another.
    """
    with reading(where, "record the trace again"):
        return _read(read_trace(text, where), where, environment)


def _read(
    trace: KinetoTrace, where: str, environment: Environment
) -> tuple[list[TimingEntry], Counter[str]]:
    if trace.device and environment.device not in ("", trace.device):
        raise ValueError(
            f"{where} was recorded on {trace.device!r}, not on {environment.device!r}; leave out "
            "--device, or import it as of the right machine"
        )
    here = replace(environment, device=environment.device or trace.device)
    if not here.device or not here.torch:
        missing = "torch" if here.device else "device"
        raise ValueError(
            f"{where} does not say its {missing}; give --{missing}, or --here cpu (or cuda) if "
            "this machine recorded it"
        )
    left_out: Counter[str] = Counter()
    found: dict[str, _Times] = {}
    made_by = owners(trace.forward)
    for call in _calls(trace, left_out):
        try:
            reading = read_call(call)
        except UnreadableError as error:
            left_out[f"{call.name}: {error}"] += 1
            continue
        passes = _passes(trace, call, reading, made_by)
        if isinstance(passes, str):
            left_out[f"{call.name}: {passes}"] += 1
            continue
        for operator in reading.operators:
            for direction, seconds in passes.items():
                key = TimingKey(here, operator, reading.precision, direction)
                found.setdefault(key.digest, _Times(key)).seconds.append(seconds)
    return [TimingEntry(t.key, _measurement(t), trace.began) for t in found.values()], left_out


def _calls(trace: KinetoTrace, left_out: Counter[str]) -> Iterator[TraceCall]:
    """The calls to read; outermost ones without any are counted."""
    for root in trace.forward:
        inside = list(_readable(root))
        if not inside:
            left_out[f"{root.name}: no operator that is read"] += 1
        yield from inside


def _readable(root: TraceCall) -> Iterator[TraceCall]:
    """The call, or what it contains; under autocast the inner one, which sees the cast tensors."""
    left = [root]
    while left:
        call = left.pop()
        if call.name in READERS:
            inner = [each for each in call.walk() if each.name == call.name][1:]
            yield inner[0] if len(inner) == 1 else call
        else:
            left.extend(reversed(call.children))


def _passes(
    trace: KinetoTrace,
    call: TraceCall,
    reading: TracedCall,
    made_by: Mapping[tuple[Thread, int], TraceCall],
) -> dict[Direction, float] | str:
    """Seconds of both passes, or why they do not count."""
    nodes = [
        trace.backward[key]
        for inner in call.walk()
        if inner.sequence is not None
        and made_by.get(key := (call.thread, inner.sequence)) is inner
        and key in trace.backward
    ]
    if not nodes:
        return "no backward pass recorded"
    if not is_whole(reading, nodes):
        return "a backward pass without some gradients"
    forward, backward = trace.seconds([call]), trace.seconds(nodes)
    if not (forward > 0.0 and backward > 0.0):
        return "no kernels recorded"
    return {Direction.FORWARD: forward, Direction.BACKWARD: backward}


def _measurement(times: _Times) -> Measurement:
    if len(times.seconds) == 1:
        return Measurement(times.seconds[0], 0.0, 1, origin=ORIGIN)
    return replace(summarise(times.seconds), origin=ORIGIN)
