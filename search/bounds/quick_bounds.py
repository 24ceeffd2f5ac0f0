"""What is known of skeletons before any choice is priced: what they compute and hold at least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stratagem.searcher.bounds.compute_bound import ComputingBounds
from stratagem.searcher.bounds.memory_bound import HoldingBounds
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.simulator.hardware.headroom import Headroom


@dataclass(frozen=True)
class Look:
    """A quick look at a skeleton.

    Attributes:
        bound: seconds that no plan of it is under; infinite where none fits.
        fullness: where none fits, what share of its memory some rank takes at least; 0 else.
        why: why none fits.
        is_brief: whether there was no time for a bound, which then is 0.
    """

    bound: float
    fullness: float = 0.0
    why: str = ""
    is_brief: bool = False


class QuickBounds:
    """Bounds skeletons of one situation; what they share is priced once.

    Example:
        >>> from stratagem.searcher.space.skeletons import skeletons
        >>> from stratagem.simulator.hardware.cluster import Cluster
        >>> from stratagem.simulator.kernel_times.fitted_kernels import default_costs
        >>> from stratagem.simulator.graph.models import mlp
        >>> from stratagem.simulator.kernel_times.training import Training
        >>> graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
        >>> situation = Situation(graph, cluster, Training(), default_costs())
        >>> bounds = QuickBounds(situation, Options(), Headroom())
        >>> [look.why for look in bounds.look([next(skeletons(graph, cluster))])]
        ['']

    Args:
        situation: model, cluster, training and prices.
        options: of choices.
        headroom: of each device.
    """

    def __init__(self, situation: Situation, options: Options, headroom: Headroom) -> None:
        self._computing = ComputingBounds(situation, options)
        self.models, self._clock = self._computing.models, situation.clock
        self._holding = HoldingBounds(self.models, headroom)

    def look(self, skeletons: Iterable[Skeleton]) -> list[Look]:
        """A look at each: first whether it may fit."""
        return [self._look(skeleton) for skeleton in skeletons]

    def _look(self, skeleton: Skeleton) -> Look:
        self._clock.check()
        excess = self._holding.excess(skeleton)
        if excess is not None:
            return Look(float("inf"), excess.share, str(excess))
        if self._clock.is_brief:
            return Look(0.0, is_brief=True)
        return Look(self.computing(skeleton))

    def computing(self, skeleton: Skeleton) -> float:
        """Seconds that no plan of a skeleton is under, by what it computes."""
        return self._computing.seconds(skeleton)
