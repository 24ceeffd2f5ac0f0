"""On which cluster an example is to run, and how its plan is searched for."""

from __future__ import annotations

from dataclasses import dataclass

import stratagem as sg


@dataclass(frozen=True)
class Job:
    """On which cluster an example is to run, and how long to search for its plan.

    Example:
        >>> Job("dgx-a100", num_nodes=2).devices.num_devices
        16

    Attributes:
        cluster: a preset.
        num_nodes: how many it has.
        precision: of the training; the optimizer is Adam.
        evaluations: of plans in the search.
    """

    cluster: str
    num_nodes: int = 1
    precision: str = "bfloat16"
    evaluations: int = 1000

    @property
    def devices(self) -> sg.Cluster:
        """The cluster."""
        return sg.Cluster.preset(self.cluster, num_nodes=self.num_nodes)

    def search(self, graph: sg.OperatorGraph, *, progress: bool = False) -> sg.SearchResult:
        """Search for a plan; the same arguments give the same plan."""
        return sg.search(
            graph,
            self.devices,
            training=sg.Training(self.precision),
            budget=sg.Budget(evaluations=self.evaluations, skeletons=2, bounded=0),
            draws=0,
            progress=progress,
        )
