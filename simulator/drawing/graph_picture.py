"""A graph as a chain of blocks: what is repeated is drawn once, with how often it comes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.simulator.drawing.svg import COLOURS, Drawing, shortened, text_width
from stratagem.simulator.graph.operator_graph import OperatorGraph, repeated_blocks
from stratagem.simulator.operators.operator import Operator, shape_of

MAX_BLOCKS = 7
MAX_OPERATORS = 16
"""Blocks, and operators of a block, that are drawn; the others are counted."""

LINE, ARROW = 17.0, 26.0
MAX_NAME, MAX_SHAPE = 26, 24


@dataclass(frozen=True)
class _Block:
    """Consecutive operators, `count` times."""

    operators: tuple[Operator, ...]
    count: int


def graph_picture(graph: OperatorGraph) -> str:
    """The HTML of the picture: blocks from the inputs on the left to the loss on the right.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> graph = gpt(num_layers=12, hidden=64, num_heads=2, sequence=16, batch=2)
        >>> "12 ×" in graph_picture(graph)
        True
    """
    drawing = Drawing()
    drawing.text(0, 14, graph.name, size=15, bold=True)
    summary = (
        f"{len(graph.operators)} operators, {graph.num_parameters:,} parameters, "
        f"batch {graph.batch}"
    )
    drawing.text(0, 33, summary, faint=True)
    blocks = _blocks(graph)
    x, top = 0.0, 46.0
    for number, block in enumerate(blocks[:MAX_BLOCKS]):
        if number:
            drawing.line([(x + 3, top + 30), (x + ARROW - 3, top + 30)])
            drawing.line(
                [
                    (x + ARROW - 8, top + 26),
                    (x + ARROW - 3, top + 30),
                    (x + ARROW - 8, top + 34),
                ]
            )
            x += ARROW
        x += _draw_block(drawing, graph, block, x, top)
    if len(blocks) > MAX_BLOCKS:
        rest = sum(len(block.operators) * block.count for block in blocks[MAX_BLOCKS:])
        drawing.text(x + 10, top + 34, f"… and {rest} more operators", faint=True)
    return drawing.svg(f"graph {graph.name}: {summary}")


def _blocks(graph: OperatorGraph) -> list[_Block]:
    """The operators without sources, repeats folded."""
    found: list[_Block] = []
    place = 0
    for repeat in repeated_blocks(graph):
        found.append(_Block(graph.operators[place : repeat.start], 1))
        end = repeat.start + repeat.length
        found.append(_Block(graph.operators[repeat.start : end], repeat.count))
        place = repeat.start + repeat.length * repeat.count
    found.append(_Block(graph.operators[place:], 1))
    kept = [
        _Block(tuple(op for op in block.operators if not op.is_source), block.count)
        for block in found
    ]
    return [block for block in kept if block.operators]


def _draw_block(
    drawing: Drawing, graph: OperatorGraph, block: _Block, x: float, top: float
) -> float:
    """Draw a block; how wide it is."""
    shown = block.operators[:MAX_OPERATORS]
    prefix = _prefix([op.name for op in block.operators])
    names = [shortened(op.name.removeprefix(prefix), MAX_NAME) for op in shown]
    notes = [shortened(_note(op), MAX_SHAPE + 12) for op in shown]
    title, parameters = _title(graph, block, prefix)
    shapes = x + 8 + max(text_width(name, 11) for name in names) + 12
    right = max(shapes + max(text_width(note, 10.5) for note in notes), x + 130)
    right = max(right, x + 12 + text_width(title, 13), x + 12 + text_width(parameters, 11))
    rows = len(shown) + (len(block.operators) > MAX_OPERATORS)
    width, height = right - x + 8, 46 + rows * LINE
    if block.count > 1:
        for shift in (6.0, 3.0):
            drawing.box(x + shift, top + shift, width, height, colour=COLOURS[0])
    drawing.box(x, top, width, height, colour=COLOURS[0], fill=0.1)
    drawing.text(x + 8, top + 18, title, size=13, bold=True)
    drawing.text(x + 8, top + 34, parameters, size=11, faint=True)
    for row, (operator, name, note) in enumerate(zip(shown, names, notes, strict=True)):
        y = top + 53 + row * LINE
        drawing.text(x + 8, y, name, size=11, tip=operator.name)
        drawing.text(shapes, y, note, size=10.5, faint=True)
    if len(block.operators) > MAX_OPERATORS:
        more = f"and {len(block.operators) - MAX_OPERATORS} more"
        drawing.text(x + 8, top + 53 + len(shown) * LINE, more, size=11, faint=True)
    return width + (6 if block.count > 1 else 0)


def _prefix(names: Sequence[str]) -> str:
    """The modules that all the names begin with, such as ``h.0.``."""
    if len(names) < 2:
        return ""
    shared = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "".join(f"{part}." for part in shared)


def _title(graph: OperatorGraph, block: _Block, prefix: str) -> tuple[str, str]:
    number = len(block.operators)
    module = prefix.rstrip(".")
    if block.count > 1:
        title = f"{block.count} × {number} operator{'s' * (number > 1)}"
        title += f", first {module}" if module else ""
    else:
        title = module or f"{number} operator{'s' * (number > 1)}"
    names = {w.parameter for op in block.operators for w in op.weights}
    shapes = [graph.parameter_index[name].shape for name in names]
    parameters = sum(math.prod(shape) for shape in shapes)
    each = " each" if block.count > 1 else ""
    return title, f"{parameters:,} parameters{each}" if parameters else "no parameters"


def _note(operator: Operator) -> str:
    """What it is, and the shape of what it makes."""
    shape = " × ".join(map(str, shape_of(operator.outputs[0].layout, operator.sizes)))
    return f"{operator.kind} {shape}".rstrip()
