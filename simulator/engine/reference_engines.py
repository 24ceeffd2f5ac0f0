"""Two slow simulators that share no code with the engine, to hold it against.

`simulate_plain` is the definition in twenty lines of Python. `simulate_simpy` says the same in
other words, with SimPy's own processes, queues and clock: nothing in it computes a start time.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator

import numpy as np
import simpy
from simpy.events import EventPriority
from simpy.resources.resource import Request

from stratagem.simulator.engine.event_engine import Times
from stratagem.simulator.engine.task_graph import TaskGraph

AFTER_ARRIVALS = EventPriority(2)
"""SimPy priority of the wake-up call: its own events have 0 and 1, and lower ones go first."""


def simulate_plain(graph: TaskGraph) -> Times:
    """Play a task graph in plain Python; the same times as `event_engine.simulate`."""
    held, successors, durations = _sets(graph), _successors(graph), graph.durations.tolist()
    ready, start, end = ([0] * graph.num_tasks for _ in range(3))
    remaining = graph.num_predecessors.tolist()
    free = [0] * graph.num_resources
    rivals, slowdown = _rivals(graph), graph.slowdown
    # Idle tasks go before all others of their instant: they end in it, and release more of them.
    queue = [(0, duration > 0, task) for task, duration in enumerate(durations)]
    queue = [entry for entry in queue if remaining[entry[2]] == 0]
    heapq.heapify(queue)
    while queue:
        _, _, task = heapq.heappop(queue)
        start[task] = max([ready[task], *(free[resource] for resource in held[task])])
        busy = max([0, *(free[r] - start[task] for each in held[task] for r in rivals[each])])
        lost = min(durations[task] * slowdown // 1000, busy * slowdown // (1000 + slowdown))
        end[task] = start[task] + durations[task] + lost
        for resource in held[task]:
            free[resource] = end[task]
        for after in successors[task]:
            ready[after] = max(ready[after], end[task])
            remaining[after] -= 1
            if remaining[after] == 0:
                heapq.heappush(queue, (ready[after], durations[after] > 0, after))
    return _times(ready, start, end)


def simulate_simpy(graph: TaskGraph) -> Times:
    """Play a task graph with SimPy; the same times as `event_engine.simulate`."""
    return _SimpyRun(graph).run()


class _SimpyRun:
    """One process a task, one first-come-first-served `simpy.Resource` a resource.

    What takes care is who comes first among the tasks that get ready in one instant: SimPy serves
    them in the order of its events. Here they wait for a wake-up call, which goes out when all of
    that instant have arrived, and then join the lines of all their resources at once, in the order
    of their ids. A task at the head of one line keeps it while it waits in another: that is the
    engine's reservation of a resource into the future. Whom a task has for rivals is known when it
    joins the lines: those who are last in the lines of rival resources. How long they slow it down
    is not; it finds out when they end.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.clock = simpy.Environment()
        self.durations = graph.durations.tolist()
        self.sets = _sets(graph)
        self.resources = [simpy.Resource(self.clock) for _ in range(graph.num_resources)]
        self.rivals, self.slowdown = _rivals(graph), graph.slowdown
        self.last_in_line = [-1] * graph.num_resources
        self.beside: list[list[int]] = [[] for _ in self.durations]
        self.ended = [self.clock.event() for _ in self.durations]
        self.ready, self.start, self.end = ([0] * graph.num_tasks for _ in range(3))
        self.arrived: dict[int, simpy.Event] = {}
        predecessors: list[list[simpy.Event]] = [[] for _ in self.durations]
        for task, successors in enumerate(_successors(graph)):
            for after in successors:
                predecessors[after].append(self.ended[task])
        for task, before in enumerate(predecessors):
            self.clock.process(self.live(task, before))

    def run(self) -> Times:
        self.clock.run()
        return _times(self.ready, self.start, self.end)

    def live(
        self, task: int, before: list[simpy.Event]
    ) -> Generator[simpy.Event, list[Request], None]:
        """The life of a task."""
        yield self.clock.all_of(before)
        self.ready[task] = int(self.clock.now)
        requests: list[Request] = []
        if self.durations[task] > 0:
            requests = yield self.arrive(task)
            yield self.clock.all_of(requests)
        self.start[task] = int(self.clock.now)
        if self.durations[task] > 0:
            yield from self.work(task)
        self.end[task] = int(self.clock.now)
        for resource, request in zip(self.sets[task], requests, strict=True):
            self.resources[resource].release(request)
        self.ended[task].succeed()

    def work(self, task: int) -> Generator[simpy.Event, object, None]:
        """Run slowly while rivals have not ended, then at full speed."""
        start, duration = int(self.clock.now), self.durations[task]
        slowly = self.clock.timeout(duration + duration * self.slowdown // 1000)
        alone = self.clock.all_of([self.ended[rival] for rival in self.beside[task]])
        yield slowly | alone
        if not slowly.processed:
            slowed = int(self.clock.now) - start
            lost = slowed * self.slowdown // (1000 + self.slowdown)
            yield self.clock.timeout(duration + lost - slowed)

    def arrive(self, task: int) -> simpy.Event:
        """Wait to be put in line; the event's value is the task's requests."""
        if not self.arrived:
            call = simpy.Event(self.clock)
            call.callbacks.append(self.line_up)
            call._ok, call._value = True, None
            self.clock.schedule(call, priority=AFTER_ARRIVALS)
        self.arrived[task] = self.clock.event()
        return self.arrived[task]

    def line_up(self, call: simpy.Event) -> None:
        """Put all tasks that arrived in this instant in line, by id."""
        for task in sorted(self.arrived):
            rivals = {r for each in self.sets[task] for r in self.rivals[each]}
            last = {self.last_in_line[rival] for rival in rivals - {*self.sets[task]}}
            self.beside[task] = sorted(last - {-1})
            for resource in self.sets[task]:
                self.last_in_line[resource] = task
            requests = [self.resources[resource].request() for resource in self.sets[task]]
            self.arrived[task].succeed(requests)
        self.arrived.clear()


def _sets(graph: TaskGraph) -> list[list[int]]:
    sets = np.split(graph.set_resources, graph.set_offsets[1:-1])
    return [sets[number].tolist() for number in graph.resource_sets]


def _rivals(graph: TaskGraph) -> list[list[int]]:
    """Of each resource, those that slow its tasks down."""
    found: list[list[int]] = [[] for _ in range(graph.num_resources)]
    for first, second in graph.rivals:
        found[first].append(second)
        found[second].append(first)
    return found


def _successors(graph: TaskGraph) -> list[list[int]]:
    lists = np.split(graph.successors, graph.successor_offsets[1:-1])
    return [successors.tolist() for successors in lists]


def _times(ready: list[int], start: list[int], end: list[int]) -> Times:
    return Times(
        np.array(ready, np.int64), np.array(start, np.int64), np.array(end, np.int64), max(end)
    )
