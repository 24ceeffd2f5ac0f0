"""The picture of a value, whichever it is of those that have one."""

from __future__ import annotations

from functools import singledispatch

from stratagem.simulator.drawing.cluster_picture import cluster_picture
from stratagem.simulator.drawing.graph_picture import graph_picture
from stratagem.simulator.drawing.plan_picture import plan_picture
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.plan.plan import Plan


@singledispatch
def picture_of(value: object) -> str:
    """SVG, as HTML, of a plan, a cluster or a graph; notebooks show it where one is a result.

    Example:
        >>> picture_of(Cluster.preset("dgx-a100"))[:4]
        '<div'

    Raises:
        TypeError: when `value` is none of these.
    """
    raise TypeError(
        f"a {type(value).__name__} has no picture; plans, clusters and operator graphs have one"
    )


picture_of.register(Plan, plan_picture)
picture_of.register(Cluster, cluster_picture)
picture_of.register(OperatorGraph, graph_picture)
