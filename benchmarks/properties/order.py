"""Does a simulated rank do things in the order of its lowered program?

Both are read from outside: the instructions of a rank's first device, and the rows of its lanes in
the predicted timeline. The n-th row of a name is the n-th instruction of that task.

    blocks and updates    in one order
    gradient syncs        each behind the pass that makes it, and no later than its block ends and
                          the syncs and gathers before it, and what blocks gathered since; stage
                          by stage as in the program
    transfers             no later than the block ends in which the program has them, what the
                          link carried before, and sums of earlier gradients of the same stage,
                          without which the block begins none of its own
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from typing import NamedTuple

from stratagem.executor.lowering.lower import lower
from stratagem.executor.program.instructions import (
    Backward,
    BackwardPart,
    Bundle,
    Convert,
    Forward,
    Send,
    Update,
)
from stratagem.executor.program.programs import Program, RankProgram
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.simulation.simulation import simulate_plan
from stratagem.simulator.timeline.timeline import Timeline, lane_group

Moment = tuple[str, int]
"""A task by name, and how many of that name came before it on its rank."""

BOTH = " sync of both homes"
"""What also waits for another rank, so that it may begin later than this one lets it."""
GATHER = " gather"
PUBLISH = " publish"
SYNCS = "syncs"
PASSES = ("forward", "backward", "weight gradient")


class Span(NamedTuple):
    """When a task ran, ns."""

    start: int
    end: int


def disorder(plan: Plan, graph: OperatorGraph, costs: CostModel) -> list[str]:
    """What a plan's simulated ranks do in another order than their programs; nothing if equal."""
    program = lower(plan, graph)
    timeline = simulate_plan(plan, graph, costs).timeline
    found: list[str] = []
    for rank, member in enumerate(_first_of_each_crew(plan, program)):
        stage = member.stages[0]
        group = f"rank {rank}" if plan.is_mirrored else plan.group(stage)
        order = _Order(member, _spans(timeline, group), plan.stage_of, plan.rank_of, rank)
        found += [f"{group}: {each}" for each in order.faults()]
    return found


def _is_sync(each: Bundle | Convert) -> bool:
    """Whether it brings gradients together, and not values or what passes return."""
    first = _parts(each)[0]
    return first.adds or first.task.endswith(BOTH)


def _is_gathered(each: Bundle | Convert) -> bool:
    return _parts(each)[0].task.endswith(GATHER)


def _parts(each: Bundle | Convert) -> tuple[Convert, ...]:
    return each.parts if isinstance(each, Bundle) else (each,)


def _is_published(each: Bundle | Convert) -> bool:
    return each.task.endswith(PUBLISH)


def _is_gather(moment: Moment) -> bool:
    return moment[0].endswith(GATHER)


def _first_of_each_crew(plan: Plan, program: Program) -> list[RankProgram]:
    devices = dict.fromkeys(stage.mesh.devices[0] for stage in plan.stages)
    by_device = {each.device: each for each in program.ranks}
    return [by_device[device] for device in devices]


def _spans(timeline: Timeline, group: str) -> dict[Moment, Span]:
    """The rows of a group's lanes; what holds several lanes at once is there once."""
    rows = {
        (int(start), int(end), timeline.names[n])
        for n, (start, end) in enumerate(zip(timeline.start, timeline.end, strict=True))
        if lane_group(timeline.lanes[timeline.lane[n]]) == group
    }
    seen: Counter[str] = Counter()
    found: dict[Moment, Span] = {}
    for start, end, name in sorted(rows):
        found[name, seen[name]] = Span(start, end)
        seen[name] += 1
    return found


@dataclass(eq=False)
class _Order:
    """A rank's instructions, and the spans of what was simulated of it."""

    program: RankProgram
    spans: dict[Moment, Span]
    stage_of: dict[str, int]
    rank_of: Sequence[int]
    rank: int
    names: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        seen: Counter[str] = Counter()
        for name in self._tasks():
            self.names.append((name, seen[name]))
            seen[name] += 1

    def _tasks(self) -> Iterator[str]:
        """The tasks of a program, in order.

        Of several sends of a transfer the last, of the syncs and gathers of an operator's weights
        the first.
        """
        instructions, begun = self.program.instructions, set[tuple[str, int]]()
        gathered = set[str](), -1
        last = {each.task: n for n, each in enumerate(instructions) if isinstance(each, Send)}
        for number, each in enumerate(instructions):
            match each:
                case Forward(again=False):
                    yield f"{each.operator} forward"
                case Backward(part=BackwardPart.WEIGHTS):
                    yield f"{each.operator} weight gradient"
                case Backward():
                    yield f"{each.operator} backward"
                case Update():
                    yield f"{each.operator} update"
                case Send() if last[each.task] == number:
                    yield each.task
                case Bundle() | Convert(later=True) if _is_gathered(each):
                    before = gathered[0] if gathered[1] == number - 1 else set()
                    tasks = dict.fromkeys(part.task for part in _parts(each))
                    yield from (task for task in tasks if task not in before)
                    gathered = set(tasks), number
                case Bundle() | Convert(later=True) if _is_sync(each) or _is_published(each):
                    parts = ((part.task, part.microbatch) for part in _parts(each))
                    for sync in dict.fromkeys(parts):
                        if sync not in begun:
                            begun.add(sync)
                            yield sync[0]

    def faults(self) -> list[str]:
        """What is in another order."""
        simulated = sorted(
            (moment for moment in self.spans if self._block(moment)),
            key=lambda moment: self.spans[moment],
        )
        there = [moment for moment in self.names if moment in self.spans]
        ours = [block for block, _ in groupby(filter(None, map(self._block, there)))]
        theirs = [block for block, _ in groupby(map(self._block, simulated))]
        if ours != theirs:
            wrong = next(
                (pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), None
            )
            return [f"blocks and updates differ at {wrong} of {len(ours)} and {len(theirs)}"]
        return [*self._missing(), *self._communication(there)]

    def _block(self, moment: Moment) -> tuple[str, int, int] | None:
        """What a pass or an update belongs to: what is done, of which stage, which time."""
        operator, _, what = moment[0].partition(" ")
        if what in (*PASSES, "update"):
            return what, self.stage_of.get(operator, -1), moment[1]
        return None

    def _missing(self) -> list[str]:
        """Syncs and transfers that one has and the other has not."""
        sent = {name for name, _ in self.names}
        return [
            f"{moment[0]} is simulated, but no instruction"
            for moment in self.spans
            if (moment[0].endswith(" sync") or " ⇢ " in moment[0]) and moment[0] not in sent
        ]

    def _communication(self, there: Sequence[Moment]) -> Iterator[str]:
        over, made = self._ends(there), dict[str, int]()
        updated = last_gather = 0
        held = self._held(there)
        begun: dict[object, list[tuple[Span, int]]] = defaultdict(list)
        gathered = self._gathered(there)
        for moment in there:
            if not self._block(moment) and not _is_gather(moment):
                found = self.spans[moment], gathered[moment][1]
                begun[self._queue(moment)].append(found)
        for moment in there:
            span, (name, _) = self.spans[moment], moment
            operator = name.partition(" ")[0]
            if self._block(moment):
                made[operator] = span.end
                updated = max(updated, span.end) if name.endswith(" update") else 0
                continue
            if _is_gather(moment):
                last_gather = max(last_gather, span.end)
                continue
            if span.start < made.get(operator, 0):
                yield f"{name} begins {made[operator] - span.start} ns before it is made"
            begin, total = gathered[moment]
            queue, shares = begun[self._queue(moment)], self._queue(moment) == SYNCS
            asked = last_gather if shares else 0
            before = max(
                (
                    each.end + shares * max(0, total - min(behind, begin))
                    for each, behind in queue
                    if each.start < span.start
                ),
                default=0,
            )
            latest = max(over[moment], before, held.get(moment, 0), updated, asked)
            if span.start > latest and not name.endswith(BOTH):
                yield f"{name} begins {span.start - latest} ns after it may"
        yield from self._syncs(there)

    def _syncs(self, there: Sequence[Moment]) -> Iterator[str]:
        """Gradients are summed stage by stage as in the program."""
        syncs = [moment for moment in there if moment[0].endswith(" sync")]
        stages = [
            [
                stage
                for stage, _ in groupby(self.stage_of[name.partition(" ")[0]] for name, _ in each)
            ]
            for each in (syncs, sorted(syncs, key=lambda moment: self.spans[moment]))
        ]
        if stages[0] != stages[1]:
            yield f"gradients are summed in the order of stages {stages[1]}, not {stages[0]}"

    def _in_blocks(self, there: Sequence[Moment]) -> list[list[Moment]]:
        """The same, block by block: one is over when another pass begins, or its own again.

        What prefixes slices of tokens is of no stage, and not in all blocks. What is gathered
        ahead of the first pass of a block is of that block.
        """
        found: list[list[Moment]] = [[]]
        current, passed = ("", -1), set[str]()
        for moment in there:
            block = self._block(moment)
            if block and block[1] >= 0 and (block[:2] != current or moment[0] in passed):
                current, passed = block[:2], set()
                ahead = list(takewhile(_is_gather, reversed(found[-1])))[::-1]
                found[-1] = found[-1][: len(found[-1]) - len(ahead)]
                found.append(ahead)
            passed.add(moment[0])
            found[-1].append(moment)
        return found

    def _gathered(self, there: Sequence[Moment]) -> dict[Moment, tuple[int, int]]:
        """By moment, how long its rank has gathered parameters when its block begins and ends.

        Gathers use the links of syncs.
        """
        found: dict[Moment, tuple[int, int]] = {}
        total = 0
        for inside in self._in_blocks(there):
            gathers = (self.spans[moment] for moment in inside if _is_gather(moment))
            before, total = total, total + sum(each.end - each.start for each in gathers)
            found.update(dict.fromkeys(inside, (before, total)))
        return found

    def _held(self, there: Sequence[Moment]) -> dict[Moment, int]:
        """By transfer of a gradient, when the sums of earlier blocks of its stage are through."""
        found: dict[Moment, int] = {}
        summed: dict[int, int] = defaultdict(int)
        for inside in self._in_blocks(there):
            made = any(moment[0].endswith((" backward", " weight gradient")) for moment in inside)
            sent = [moment for moment in inside if " ⇢ " in moment[0]]
            for moment in sent if made else ():
                stage = int(moment[0].removeprefix("stage ").partition(" ")[0])
                found[moment] = summed[stage]
            for name, number in inside:
                if name.endswith(" sync"):
                    stage = self.stage_of[name.partition(" ")[0]]
                    summed[stage] = max(summed[stage], self.spans[name, number].end)
        return found

    def _queue(self, moment: Moment) -> object:
        """Communications of one queue may have to wait for one another: they share links.

        A transfer shares the link to the rank that it goes to. A stage that a rank has in the
        other direction is the one that its mirror image has in this.
        """
        name = moment[0]
        if " ⇢ " not in name:
            return SYNCS
        here, to = (
            self.rank_of[int(stage.removeprefix("stage ").partition(",")[0])]
            for stage in name.split(" ⇢ ")
        )
        return to if here == self.rank else max(self.rank_of) - to

    def _ends(self, there: Sequence[Moment]) -> dict[Moment, int]:
        """By sync and transfer, when the block ends in whose course the program has it."""
        found: dict[Moment, int] = {}
        end = 0
        for inside in self._in_blocks(there):
            blocks = {moment: self._block(moment) for moment in inside}
            ends = (self.spans[m].end for m, block in blocks.items() if block)
            if not any(block and block[0] == "update" for block in blocks.values()):
                end = max([end, *ends])
            found.update((moment, end) for moment, block in blocks.items() if not block)
        return found
