"""What torch.profiler recorded, as a forest of operator calls (its Kineto JSON traces).

A call of an operator on a thread contains those that it made:

    aten::linear ─┬─ aten::t ── aten::transpose
                  └─ aten::addmm            Sequence number 38
    …
    AddmmBackward0 ─┬─ aten::mm             Sequence number 38
                    └─ aten::mm

The sequence number of a forward call is that of the node which autograd puts into its graph, and
comes again with the call of that node on the way back. A call that makes no node shows the number
of the next one, so the last call that shows a number is its owner. On CUDA a kernel has the
correlation id of the runtime call that launched it, which lies in time within its operator's call.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

Thread = tuple[Any, Any]
"""Process and thread of an event."""

_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_ENGINE = "autograd::engine::evaluate_function"


@dataclass(eq=False)
class TraceCall:
    """One recorded call; times are in µs."""

    name: str
    thread: Thread
    start: float
    duration: float
    arguments: Mapping[str, Any]
    children: list[TraceCall] = field(default_factory=list)

    @property
    def sequence(self) -> int | None:
        """The sequence number that it shows, if any."""
        number = self.arguments.get("Sequence number")
        return number if isinstance(number, int) and number >= 0 else None

    @property
    def forward_thread(self) -> int:
        """The profiler's number of the thread of the forward call; 0 for a forward call itself."""
        return int(self.arguments.get("Fwd thread id", 0))

    def walk(self) -> Iterator[TraceCall]:
        """This call and all within it, in the order of their starts."""
        left = [self]
        while left:
            call = left.pop()
            yield call
            left.extend(reversed(call.children))


@dataclass(frozen=True, eq=False)
class KinetoTrace:
    """A trace that was read.

    Attributes:
        forward: outermost calls that are not part of a backward pass.
        backward: calls of autograd's nodes by (thread of the forward call, sequence number).
        kernels: start and duration of the device's work in µs, by thread and time of its launch.
        on_cuda: whether a device's kernels were recorded, launched by whomever.
        device: name of the device that ran them; empty without any, or if it is not said.
        began: seconds since 1970.
    """

    forward: tuple[TraceCall, ...]
    backward: Mapping[tuple[Thread, int], TraceCall]
    kernels: Mapping[Thread, tuple[list[float], list[tuple[float, float]]]]
    on_cuda: bool
    device: str
    began: float

    def seconds(self, calls: Iterable[TraceCall]) -> float:
        """Time of calls: on CUDA of the kernels that they launched, else of the calls themselves.

        Kernels that run at the same time count once.
        """
        if not self.on_cuda:
            return sum(call.duration for call in calls) * 1e-6
        work = sorted(piece for call in calls for piece in self._launched(call))
        total, reached = 0.0, float("-inf")
        for start, duration in work:
            end = max(reached, start + duration)
            total += end - max(reached, start)
            reached = end
        return total * 1e-6

    def _launched(self, call: TraceCall) -> list[tuple[float, float]]:
        times, work = self.kernels.get(call.thread, ([], []))
        first = bisect.bisect_left(times, call.start)
        return work[first : bisect.bisect_right(times, call.start + call.duration)]


def looks_like_trace(text: str) -> bool:
    """Whether a text begins as a trace of torch.profiler does."""
    return text.lstrip().startswith("{") and '"traceEvents"' in text


def read_trace(text: str, where: str) -> KinetoTrace:
    """A trace from its JSON text.

    Args:
        text: what `torch.profiler.profile.export_chrome_trace` wrote.
        where: what errors call the file.

    Raises:
        ValueError: broken JSON, no events, or an event without its time; names file and event.
    """
    try:
        content = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}; record the trace again") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{where} has no field traceEvents; is it a trace of torch.profiler?")
    spans = [_span(event, number, where) for number, event in enumerate(events) if _is_span(event)]
    roots = _nest(call for category, call in spans if category == "cpu_op")
    if not roots:
        raise ValueError(
            f"{where} has no operators (events of category cpu_op); record with "
            "ProfilerActivity.CPU"
        )
    forward = tuple(call for call in roots if not call.name.startswith(_ENGINE))
    nodes = [call for root in roots for call in _nodes(root)]
    return KinetoTrace(
        forward=forward,
        backward=_by_thread(nodes, _threads(events, nodes, forward)),
        kernels=_kernels(spans),
        on_cuda=any(category == "kernel" for category, _ in spans),
        device=_device(content, spans, where),
        began=float(content.get("baseTimeNanoseconds", 0)) * 1e-9
        + min(call.start for call in roots) * 1e-6,
    )


def owners(calls: Sequence[TraceCall]) -> dict[tuple[Thread, int], TraceCall]:
    """The call that made each node: the last one that shows its sequence number."""
    found: dict[tuple[Thread, int], TraceCall] = {}
    for root in sorted(calls, key=lambda call: call.start):
        for call in root.walk():
            if call.sequence is not None:
                found[call.thread, call.sequence] = call
    return found


def _is_span(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X"


def _span(event: dict[str, Any], number: int, where: str) -> tuple[str, TraceCall]:
    try:
        call = TraceCall(
            name=str(event["name"]),
            thread=(event["pid"], event["tid"]),
            start=float(event["ts"]),
            duration=float(event["dur"]),
            arguments=event.get("args") or {},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}, traceEvents[{number}] ({event.get('name', 'no name')}): a complete event "
            f"needs name, pid, tid, ts and dur ({error!r}); record the trace again"
        ) from error
    return str(event.get("cat", "")), call


def _nest(calls: Iterable[TraceCall]) -> list[TraceCall]:
    """Put calls into those that contain them on the same thread; the outermost ones."""
    roots: list[TraceCall] = []
    open_calls: dict[Thread, list[TraceCall]] = {}
    for call in sorted(calls, key=lambda call: (call.start, -call.duration)):
        stack = open_calls.setdefault(call.thread, [])
        while stack and call.start >= stack[-1].start + stack[-1].duration:
            stack.pop()
        (stack[-1].children if stack else roots).append(call)
        stack.append(call)
    return roots


def _nodes(root: TraceCall) -> Iterator[TraceCall]:
    """Calls of autograd's nodes, without the engine's work around them."""
    for call in root.walk():
        if call.forward_thread and call.sequence is not None and not call.name.startswith(_ENGINE):
            yield call


def _threads(
    events: Sequence[Any], nodes: Sequence[TraceCall], forward: Sequence[TraceCall]
) -> dict[int, Thread]:
    """Which thread the profiler's number of a forward thread means, from the trace's arrows.

    An arrow of category fwdbwd goes from a forward call to its node. Without arrows a single
    thread can be meant only.
    """
    starts: dict[Any, Thread] = {}
    ends: dict[tuple[Thread, float], Any] = {}
    for event in events:
        if isinstance(event, dict) and event.get("cat") == "fwdbwd":
            thread = (event.get("pid"), event.get("tid"))
            if event.get("ph") == "s":
                starts[event.get("id")] = thread
            else:
                ends[thread, float(event.get("ts", 0))] = event.get("id")
    known = {call.thread for root in forward for call in root.walk() if call.sequence is not None}
    found: dict[int, Thread] = {}
    for node in nodes:
        arrow = ends.get((node.thread, node.start))
        if arrow in starts:
            found.setdefault(node.forward_thread, starts[arrow])
    if len(known) == 1:
        (only,) = known
        found.update({node.forward_thread: only for node in nodes})
    return found


def _by_thread(
    nodes: Sequence[TraceCall], threads: Mapping[int, Thread]
) -> dict[tuple[Thread, int], TraceCall]:
    """Nodes by the forward call that they belong to; of a second backward pass none."""
    found: dict[tuple[Thread, int], TraceCall] = {}
    for node in sorted(nodes, key=lambda call: call.start):
        if node.forward_thread in threads and node.sequence is not None:
            found.setdefault((threads[node.forward_thread], node.sequence), node)
    return found


def _kernels(
    spans: Sequence[tuple[str, TraceCall]],
) -> dict[Thread, tuple[list[float], list[tuple[float, float]]]]:
    launches: dict[Any, TraceCall] = {}
    for category, call in spans:
        if category in _RUNTIME and "correlation" in call.arguments:
            launches[call.arguments["correlation"]] = call
    found: dict[Thread, list[tuple[float, float, float]]] = {}
    for category, call in spans:
        launch = launches.get(call.arguments.get("correlation"))
        if category in _DEVICE_WORK and launch is not None:
            pieces = found.setdefault(launch.thread, [])
            pieces.append((launch.start, call.start, call.duration))
    return {
        thread: ([piece[0] for piece in sorted(pieces)], [piece[1:] for piece in sorted(pieces)])
        for thread, pieces in found.items()
    }


def _device(content: Mapping[str, Any], spans: Sequence[tuple[str, TraceCall]], where: str) -> str:
    """The name of the device that ran the kernels."""
    used = {call.arguments.get("device") for category, call in spans if category == "kernel"}
    names = {
        str(device["name"])
        for device in content.get("deviceProperties", ())
        if device.get("id") in used and "name" in device
    }
    if len(names) > 1:
        raise ValueError(
            f"{where} has kernels of several kinds of devices ({', '.join(sorted(names))}); "
            "import a trace of one"
        )
    return names.pop() if names else ""
