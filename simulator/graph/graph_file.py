"""Operator graphs as JSON text, and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stratagem.simulator.base.files import decode, encode
from stratagem.simulator.graph.operator_graph import OperatorGraph

FORMAT = "stratagem graph"
VERSION = 1
_NUMBER = "number"


@dataclass(frozen=True)
class _GraphFile:
    """What a graph file holds."""

    format: str
    version: int
    graph: OperatorGraph


def graph_to_json(graph: OperatorGraph) -> str:
    """The graph as JSON text; equal graphs give equal text.

    Example:
        >>> graph_from_json(graph_to_json(graph)) == graph  # doctest: +SKIP
        True
    """
    return encode(_GraphFile(FORMAT, VERSION, _with_attributes(graph, _mark)))


def graph_from_json(text: str) -> OperatorGraph:
    """The graph that `graph_to_json` wrote.

    Raises:
        ValueError: the text is no graph file of this version, or a field of it is broken; names
            the field.
    """
    stored = decode(text, _GraphFile, "graph file")
    if (stored.format, stored.version) != (FORMAT, VERSION):
        raise ValueError(
            f"graph file is a {stored.format!r} of version {stored.version}, but this program "
            f"reads a {FORMAT!r} of version {VERSION}; capture the model again"
        )
    return _with_attributes(stored.graph, _unmark)


def _with_attributes(graph: OperatorGraph, change: Callable[[Any], Any]) -> OperatorGraph:
    operators = tuple(
        replace(o, attributes={name: change(value) for name, value in o.attributes.items()})
        for o in graph.operators
    )
    return replace(graph, operators=operators)


def _mark(value: Any) -> Any:
    """JSON has no infinity: ``-inf`` becomes ``{"number": "-inf"}``."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: str(value)}
    return [_mark(each) for each in value] if isinstance(value, list) else value


def _unmark(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {_NUMBER}:
        return float(value[_NUMBER])
    return [_unmark(each) for each in value] if isinstance(value, list) else value
