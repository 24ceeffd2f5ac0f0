"""Drawing a program: what every rank does, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from stratagem.executor.program.programs import Program
from stratagem.executor.program.replay import replay


def grid(program: Program) -> str:
    """Draw one row a rank and one column a step; freeing is left out.

    All ranks of a collective stand in one column, and a receive comes after its send.
    """

    columns: list[dict[int, str]] = []
    for step, rank, instruction in replay(program):
        if not instruction.only_frees:
            columns += [{} for _ in range(step + 1 - len(columns))]
            columns[step][rank] = str(instruction)
    columns = [column for column in columns if column]
    widths = [max(map(len, column.values())) for column in columns]
    label = len(str(program.world_size - 1))
    return "\n".join(
        f"rank {rank:<{label}}  {'  '.join(_cells(columns, widths, rank)).rstrip()}"
        for rank in range(program.world_size)
    )


def _cells(columns: list[dict[int, str]], widths: list[int], rank: int) -> Iterator[str]:
    for column, width in zip(columns, widths, strict=True):
        yield column.get(rank, "").ljust(width)
