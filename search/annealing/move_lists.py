"""What moves of a chain are drawn from: classes, best answers, choices that differ in one part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratagem.searcher.annealing._moves import Moves
from stratagem.searcher.problem.priced_skeleton import Problem
from stratagem.simulator.base.arrays import Ints
from stratagem.simulator.pricing.cost_rows import OperatorRow
from stratagem.simulator.pricing.cost_table import CostTable
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.choice_options import option_parts


def moves_of(problem: Problem) -> Moves:
    """What chains of a problem draw their proposals from; made once."""
    return problem.derive(_moves)


def _moves(problem: Problem) -> Moves:
    """The lists, from the tables of the stages and the choices of each operator."""
    tables, choices = problem.tables, problem.choices
    num_operators = len(choices)
    class_of = np.zeros(num_operators, dtype=np.int64)
    stage_of = np.zeros(num_operators, dtype=np.int64)
    members: list[list[int]] = []
    for stage, table in enumerate(tables):
        by_row: dict[tuple[int, ...], int] = {}
        feeds = {e.consumer: table.row_of[e.producer] for e in table.edges}
        for i in table.operators:
            key = (table.row_of[i], feeds.get(i, -1))
            if key not in by_row:
                by_row[key] = len(members)
                members.append([])
            class_of[i], stage_of[i] = by_row[key], stage
            members[by_row[key]].append(i)
    counts = np.array([len(options) for options in choices], dtype=np.int64)
    by_stage = [[i for i in table.operators if counts[i] > 1] for table in tables]
    base, starts, neighbours, variants = _by_choice(choices)
    return Moves(
        counts=counts,
        class_starts=np.cumsum([0, *(len(m) for m in members)]).astype(np.int64),
        class_members=np.array([i for m in members for i in m], dtype=np.int64),
        class_of=class_of,
        pairs=_pairs(tables, counts),
        neighbour_base=base,
        neighbour_starts=starts,
        neighbours=neighbours,
        variants=variants,
        movable=np.flatnonzero(counts > 1),
        stage_starts=np.cumsum([0, *(len(found) for found in by_stage)]).astype(np.int64),
        stage_members=np.array([i for found in by_stage for i in found], dtype=np.int64),
        stage_of=stage_of,
    )


def _by_choice(
    choices: Sequence[Sequence[Choice]],
) -> tuple[Ints, Ints, Ints, Ints]:
    """Rows of the operators' first choices; per row, choices one part apart; and variants."""
    base: dict[int, int] = {}
    distinct: list[Sequence[Choice]] = []
    size = 0
    for options in choices:
        if id(options) not in base:
            base[id(options)] = size
            size += len(options)
            distinct.append(options)
    near = [found for options in distinct for found in _one_apart(options)]
    return (
        np.array([base[id(options)] for options in choices], dtype=np.int64),
        np.cumsum([0, *(len(found) for found in near)]).astype(np.int64),
        np.array([number for found in near for number in found], dtype=np.int64),
        _variants(distinct, size),
    )


def _one_apart(options: Sequence[Choice]) -> list[list[int]]:
    """Per choice, those that differ in one axis or in one other part."""
    holes: dict[tuple[object, ...], list[int]] = {}
    keys: list[list[tuple[object, ...]]] = []
    for number, choice in enumerate(options):
        parts = (*choice.config, *option_parts(choice))
        mine: list[tuple[object, ...]] = [
            (k, *parts[:k], *parts[k + 1 :]) for k in range(len(parts))
        ]
        keys.append(mine)
        for key in mine:
            holes.setdefault(key, []).append(number)
    return [
        sorted({other for key in mine for other in holes[key]} - {number})
        for number, mine in enumerate(keys)
    ]


def _variants(distinct: Sequence[Sequence[Choice]], num_rows: int) -> Ints:
    """Per (part, value) beside placements, the choice of each row with that value in that part."""
    values: dict[tuple[int, object], None] = {}
    for options in distinct:
        for choice in options:
            values.update(dict.fromkeys(enumerate(option_parts(choice))))
    several = {part for part, _ in values if sum(p == part for p, _ in values) > 1}
    kept = [(part, value) for part, value in values if part in several]
    found = np.zeros((len(kept), num_rows), dtype=np.int64)
    row = 0
    for options in distinct:
        number_of = {
            (*choice.config, *option_parts(choice)): number
            for number, choice in enumerate(options)
        }
        for number, choice in enumerate(options):
            parts = option_parts(choice)
            for k, (part, value) in enumerate(kept):
                wanted = (*choice.config, *parts[:part], value, *parts[part + 1 :])
                found[k, row] = number_of.get(wanted, number)
            row += 1
    return found


def _pairs(tables: Sequence[CostTable], counts: Ints) -> Ints:
    """Who asks, who answers, and the best answers, of those who have several; in rows."""
    answers = [a for table in tables for a in _answers(table) if counts[a[1]] > 1]
    width = max((len(answer) for answer in answers), default=2)
    pairs = np.zeros((len(answers), width), dtype=np.int64)
    for k, answer in enumerate(answers):
        pairs[k, : len(answer)] = answer
    return pairs


def _answers(table: CostTable) -> list[list[int]]:
    """Per edge and direction: who asks, who answers, and the best answer to each of the choices.

    Best is the least of conversion both ways plus the answering operator's own passes.
    """
    found: list[list[int]] = []
    known: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    for edge, number in zip(table.edges, table.edge_row_of, strict=True):
        ends = edge.producer, edge.consumer
        key = number, table.row_of[edge.producer], table.row_of[edge.consumer]
        if key not in known:
            both = table.edge_rows[number].both_ns
            ours, theirs = (_own_ns(table.row(end)) for end in ends)
            known[key] = (
                np.argmin(both + theirs[None, :], axis=1).tolist(),
                np.argmin(both.T + ours[None, :], axis=1).tolist(),
            )
        ahead, back = known[key]
        found += [[*ends, *ahead], [*ends[::-1], *back]]
    return found


def _own_ns(row: OperatorRow) -> Ints:
    """An operator's own passes, repeated ones too."""
    own: Ints = row.passes_ns + row.recompute.ns
    return own
