"""PipeDream's profiles (`graph.txt`): reading, writing, and its objective.

A line a layer (``node1 -- Linear(…) -- forward_compute_time=…, …``: ms per minibatch, bytes), then
an indented line an edge. Stages are differences of down-sets; a stage on m devices takes
``(forward + backward + 4(m−1)·parameters/(bandwidth·m))/m`` seconds, and what crosses into it or
out of it ``2·activations/(bandwidth·m)``. The pipeline is as fast as the slowest of all of these
(Narayanan et al., *PipeDream*, SOSP 2019).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from stratagem.searcher.planners.inputs.down_sets import DownSets
from stratagem.searcher.planners.inputs.reading import check_numbers
from stratagem.searcher.planners.inputs.result import PlannedStage
from stratagem.simulator.base.arrays import Flags, Floats
from stratagem.simulator.base.files import read_text, write_text

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class ProfiledLayer:
    """One layer: times in ms a minibatch, sizes in bytes."""

    id: str
    description: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return (self.forward_ms + self.backward_ms) / 1000


@dataclass(frozen=True)
class PipeDreamGraph:
    """A profiled model.

    Attributes:
        name: the model: the file's name, or its folder's where the file is called graph.
        layers: layers in the order of the file.
        edges: indices of producer and consumer.
    """

    name: str
    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[int, int], ...]

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Direct predecessors of each layer."""
        before: list[list[int]] = [[] for _ in self.layers]
        for tail, head in self.edges:
            before[head].append(tail)
        return tuple(map(tuple, before))

    def column(self, field: str) -> Floats:
        """One attribute of all layers."""
        return np.array([getattr(layer, field) for layer in self.layers], dtype=np.float64)

    @cached_property
    def successors_of(self) -> Flags:
        """Row v: the direct successors of layer v."""
        matrix = np.zeros((len(self.layers),) * 2, dtype=np.bool_)
        for tail, head in self.edges:
            matrix[tail, head] = True
        return matrix

    @cached_property
    def ancestors_of(self) -> Flags:
        """Row v: all layers that layer v depends on."""
        matrix = self.successors_of.T.copy()
        while True:
            wider = matrix | ((matrix.astype(np.float32) @ matrix.astype(np.float32)) > 0)
            if (wider == matrix).all():
                return matrix
            matrix = wider

    def without_inputs(self) -> PipeDreamGraph:
        """The graph that the peer plans: without inputs, and without parts of tuples unread."""
        has_before = {head for _, head in self.edges}
        has_after = {tail for tail, _ in self.edges}
        dropped = {
            i
            for i, layer in enumerate(self.layers)
            if (i not in has_before and layer.description.startswith("Input"))
            or (i not in has_after and layer.description.startswith("__getitem__"))
        }
        kept = [i for i in range(len(self.layers)) if i not in dropped]
        new = {old: number for number, old in enumerate(kept)}
        return PipeDreamGraph(
            self.name,
            tuple(self.layers[i] for i in kept),
            tuple((new[a], new[b]) for a, b in self.edges if a in new and b in new),
        )

    def crossing_bytes(self, sets: DownSets) -> Floats:
        """Bytes of activations that leave each down-set, as the peer counts them.

        It counts the layers of the set that no other one in it follows, and ancestors of such a
        layer that a layer which is no ancestor of it reads, even where that reader is in the set.
        """
        inside = sets.membership
        followed = (inside.astype(np.float32) @ self.successors_of.T.astype(np.float32)) > 0
        last = inside & ~followed
        leaving = last | ((last.astype(np.float32) @ self._read_beside.astype(np.float32)) > 0)
        return leaving @ self.column("activation_bytes")

    @cached_property
    def _read_beside(self) -> Flags:
        """Row v: ancestors of v that are read by a layer which is neither v nor one of them."""
        outside = ~self.ancestors_of
        np.fill_diagonal(outside, val=False)
        read = (outside.astype(np.float32) @ self.successors_of.T.astype(np.float32)) > 0
        return self.ancestors_of & read


def read_pipedream_graph(path: str | Path) -> PipeDreamGraph:
    """Read a profile.

    Example:
        >>> read_pipedream_graph("vgg16.txt").name  # doctest: +SKIP
        'vgg16'

    Raises:
        ValueError: names the file, the line, what is wrong with it and what is expected.
    """
    layers: list[ProfiledLayer] = []
    number_of: dict[str, int] = {}
    edge_lines: list[tuple[int, str]] = []
    for number, line in enumerate(read_text(path, "profile").splitlines(), start=1):
        if line[:1].isspace() and line.strip():
            edge_lines.append((number, line))
        elif line.strip():
            layer = _layer(f"{path}:{number}", line)
            if layer.id in number_of:
                raise ValueError(f"{path}:{number}: a second layer {layer.id}; make ids unique")
            number_of[layer.id] = len(layers)
            layers.append(layer)
    if not layers:
        raise ValueError(f"{path}: no layers; a profile has a line for each")
    edges = [_edge(f"{path}:{number}", line, number_of) for number, line in edge_lines]
    name = Path(path).stem
    if name == "graph":
        name = Path(path).resolve().parent.name
    return PipeDreamGraph(name, tuple(layers), tuple(edges))


def write_pipedream_graph(
    graph: PipeDreamGraph, path: str | Path, stages: Sequence[PlannedStage] = ()
) -> None:
    """Write a profile in the same format, with the stage of each layer if there is a plan."""
    stage_of = {node: number for number, stage in enumerate(stages) for node in stage.nodes}
    lines = []
    for layer in graph.layers:
        values = (
            layer.forward_ms,
            layer.backward_ms,
            layer.activation_bytes,
            layer.parameter_bytes,
        )
        fields = ", ".join(f"{f}={v!r}" for f, v in zip(FIELDS, values, strict=True))
        stage = f" -- stage_id={stage_of[layer.id]}" if layer.id in stage_of else ""
        lines.append(f"{layer.id} -- {layer.description} -- {fields}{stage}")
    ids = [layer.id for layer in graph.layers]
    lines += [f"\t{ids[tail]} -- {ids[head]}" for tail, head in graph.edges]
    write_text(path, "\n".join(lines) + "\n")


def _layer(where: str, line: str) -> ProfiledLayer:
    match = re.fullmatch(r"(\S+) -- (.*?) -- (forward_compute_time=.*?)( -- .*)?", line.strip())
    given = dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,\s]+)", match[3])) if match else {}
    if match is None or set(given) != set(FIELDS):
        raise ValueError(
            f"{where}: {line.strip()[:60]!r} is no layer; expected "
            f"'ID -- DESCRIPTION -- {'=…, '.join(FIELDS)}=…'"
        )
    try:
        # A layer with several outputs lists their sizes.
        forward, backward, activation, parameter = (
            math.fsum(float(part) for part in given[field].strip("[]").split(";"))
            for field in FIELDS
        )
    except ValueError as error:
        raise ValueError(f"{where}: layer {match[1]}: {error}") from None
    check_numbers(where, f"layer {match[1]}", (forward, backward, activation, parameter))
    return ProfiledLayer(match[1], match[2], forward, backward, activation, parameter)


def _edge(where: str, line: str, number_of: dict[str, int]) -> tuple[int, int]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise ValueError(f"{where}: {line.strip()!r} is no edge; expected 'FROM -- TO'")
    for end in ends:
        if end not in number_of:
            raise ValueError(
                f"{where}: the edge {line.strip()!r} names {end}, which is none of the "
                f"{len(number_of)} layers; add the layer or drop the edge"
            )
    return number_of[ends[0]], number_of[ends[1]]
