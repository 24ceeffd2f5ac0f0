"""A plan as a picture: which devices run which stage, and how each stage's operators are split.

Devices stand as the cluster has them, a row a node, coloured by stage. Below, for every stage, the
operators that are treated alike are a row, and the axes of its mesh are columns: a chip names the
dim that the axis splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.simulator.base.units import format_numbers
from stratagem.simulator.drawing.svg import COLOURS, GREY, Drawing, shortened, text_width
from stratagem.simulator.graph.placement import Pin, Placement, Shard
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import OPTIONS, Choice
from stratagem.simulator.simulation.plan_in_words import collapse

MAX_NODES = 8
MAX_PANELS = 6
MAX_ROWS = 9
"""Nodes, different stages and rows of a stage that are drawn; the others are counted."""

MAX_LETTERS = 56
CELL_WIDTH, CELL_HEIGHT, GAP = 34.0, 24.0, 3.0
CHIP_WIDTH, ROW = 92.0, 23.0


@dataclass(frozen=True)
class _Row:
    """Operators of a stage that are treated alike."""

    names: str
    count: int
    placements: tuple[Placement, ...]
    remarks: str


@dataclass(frozen=True)
class _Panel:
    """Consecutive stages that treat their operators alike."""

    first: int
    last: int
    axes: tuple[tuple[str, int], ...]
    rows: tuple[_Row, ...]


def plan_picture(plan: Plan) -> str:
    """The HTML of the picture.

    Example:
        >>> picture = plan_picture(Plan.load("plan.json"))  # doctest: +SKIP
    """
    drawing = Drawing()
    drawing.text(0, 14, f"{plan.model} on {plan.cluster.name}", size=15, bold=True)
    drawing.text(0, 33, _headline(plan), faint=True)
    bottom = _draw_devices(drawing, plan, 46)
    panels = _panels(plan)
    dims = _dim_colours(panels)
    for panel in panels[:MAX_PANELS]:
        bottom = _draw_panel(drawing, panel, bottom + 14, dims)
    if len(panels) > MAX_PANELS:
        rest = sum(panel.last - panel.first + 1 for panel in panels[MAX_PANELS:])
        drawing.text(0, bottom + 20, f"and {rest} more stages", faint=True)
    return drawing.svg(f"plan of {plan.model} on {plan.cluster.name}: {_headline(plan)}")


def _headline(plan: Plan) -> str:
    parts = plan.num_microbatches
    pieces = f"{parts} microbatches" if parts > 1 else "the batch in one piece"
    pieces += f", {plan.training.precision_name}"
    if len(plan.stages) == 1:
        return f"no pipeline, {pieces}"
    return f"{len(plan.stages)} stages, schedule {plan.schedule}, {pieces}"


def _draw_devices(drawing: Drawing, plan: Plan, top: float) -> float:
    """Draw the cluster's devices, coloured by rank; where they end."""
    cluster = plan.cluster
    holders: dict[int, list[int]] = {}
    for number in range(len(plan.stages)):
        for device in (d for mesh in plan.homes(number) for d in mesh.devices):
            holders.setdefault(device, []).append(number)
    for node in range(min(cluster.num_nodes, MAX_NODES)):
        y = top + node * (CELL_HEIGHT + GAP)
        drawing.text(0, y + 16, f"node {node}", size=11, faint=True)
        for place in range(cluster.devices_per_node):
            device = node * cluster.devices_per_node + place
            stages = holders.get(device, [])
            _draw_device(drawing, plan, device, stages, 54 + place * (CELL_WIDTH + GAP), y)
    bottom = top + min(cluster.num_nodes, MAX_NODES) * (CELL_HEIGHT + GAP)
    if cluster.num_nodes > MAX_NODES:
        drawing.text(0, bottom + 14, f"and {cluster.num_nodes - MAX_NODES} more nodes", faint=True)
        bottom += 20
    return bottom


def _draw_device(
    drawing: Drawing, plan: Plan, device: int, stages: Sequence[int], x: float, y: float
) -> None:
    if not stages:
        drawing.box(x, y, CELL_WIDTH, CELL_HEIGHT, dashed=True, tip=f"device {device}: not used")
        return
    own = next(s for s in stages if device in plan.stages[s].mesh.devices)
    rank, mesh = plan.rank_of[own], plan.stages[own].mesh
    place = ", ".join(
        f"{axis.name} {index}"
        for axis, index in zip(mesh.axes, mesh.coordinates(device), strict=True)
        if axis.size > 1
    )
    named = format_numbers(stages)
    colour = COLOURS[rank % len(COLOURS)]
    tip = f"device {device}: stage {named}" + (f"; {place}" if place else "")
    drawing.box(x, y, CELL_WIDTH, CELL_HEIGHT, colour=colour, fill=0.35, tip=tip)
    label = f"s{named}" if len(plan.stages) > 1 else str(device)
    drawing.text(
        x + CELL_WIDTH / 2, y + 16, shortened(label, 6), size=10, anchor="middle", tip=tip
    )


def _panels(plan: Plan) -> list[_Panel]:
    """The stages, neighbours that look the same joined."""
    panels: list[_Panel] = []
    for number, stage in enumerate(plan.stages):
        axes = tuple((axis.name, axis.size) for axis in stage.mesh.axes if axis.size > 1)
        panel = _Panel(number, number, axes, _rows(stage))
        before = panels[-1] if panels else None
        if before and (before.axes, before.rows) == (panel.axes, panel.rows):
            panels[-1] = _Panel(before.first, number, axes, panel.rows)
        else:
            panels.append(panel)
    return panels


def _rows(stage: Stage) -> tuple[_Row, ...]:
    wide = [i for i, axis in enumerate(stage.mesh.axes) if axis.size > 1]
    groups: dict[tuple[tuple[Placement, ...], str], list[str]] = {}
    for name in stage.operators:
        choice = stage.choices[name]
        key = tuple(choice.config[i] for i in wide), _remarks(choice)
        groups.setdefault(key, []).append(name)
    rows = [_Row(collapse(names), len(names), *key) for key, names in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.count))


def _remarks(choice: Choice) -> str:
    return ", ".join(filter(None, (option.remark(choice) for option in OPTIONS)))


def _dim_colours(panels: Sequence[_Panel]) -> dict[str, str]:
    """A colour a dim, in the order in which they are met."""
    dims: dict[str, str] = {}
    for panel in panels:
        for row in panel.rows:
            for placement in row.placements:
                if isinstance(placement, Shard):
                    dims.setdefault(str(placement.dim), COLOURS[len(dims) % len(COLOURS)])
    return dims


def _draw_panel(drawing: Drawing, panel: _Panel, top: float, dims: dict[str, str]) -> float:
    """Draw the operators of some stages in rows; where they end."""
    title = f"Stage {panel.first}"
    if panel.last > panel.first:
        title = f"Stages {panel.first} to {panel.last}, each"
    count = sum(row.count for row in panel.rows)
    drawing.text(0, top + 12, title, bold=True)
    start = text_width(title) + 16
    drawing.text(start, top + 12, f"{count} operators, treated alike by row", faint=True)
    left = max(min(len(row.names), MAX_LETTERS) for row in panel.rows[:MAX_ROWS])
    chips = max(230.0, left * 12 * 0.54 + 12)
    y = top + 20
    for number, (name, size) in enumerate(panel.axes):
        middle = chips + number * (CHIP_WIDTH + GAP) + CHIP_WIDTH / 2
        drawing.text(middle, y + 13, f"{name} × {size}", size=11, anchor="middle", faint=True)
    y += ROW - 3
    for row in panel.rows[:MAX_ROWS]:
        _draw_row(drawing, row, y, chips, dims)
        y += ROW
    if len(panel.rows) > MAX_ROWS:
        rest = sum(row.count for row in panel.rows[MAX_ROWS:])
        others = len(panel.rows) - MAX_ROWS
        drawing.text(0, y + 14, f"and {rest} operators in {others} other ways", faint=True)
        y += ROW
    return y


def _draw_row(drawing: Drawing, row: _Row, y: float, chips: float, dims: dict[str, str]) -> None:
    drawing.text(0, y + 14, shortened(row.names, MAX_LETTERS), tip=row.names)
    x = chips
    for placement in row.placements:
        if isinstance(placement, Shard):
            words, colour, fill = str(placement.dim), dims[str(placement.dim)], 0.35
        elif isinstance(placement, Pin):
            words, colour, fill = f"only on {placement.index}", GREY, 0.35
        else:
            words, colour, fill = "copies", GREY, 0.0
        drawing.box(x, y, CHIP_WIDTH, ROW - 4, colour=colour, fill=fill, dashed=fill == 0)
        middle = x + CHIP_WIDTH / 2
        drawing.text(middle, y + 14, shortened(words, 14), size=11, anchor="middle", tip=words)
        x += CHIP_WIDTH + GAP
    if row.remarks:
        drawing.text(x + 6, y + 14, row.remarks, size=11, faint=True)
