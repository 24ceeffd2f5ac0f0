"""What a parameter tied across stages costs: its gradient goes to the owner, its value back."""

from __future__ import annotations

from dataclasses import dataclass, field

from stratagem.searcher.space.situation import Situation
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.pricing.stage_boundaries import price_tie
from stratagem.simulator.sharding.choice import Choice


@dataclass(eq=False)
class TiePricer:
    """Prices the tied parameters of a chain at one number of microbatches, each pair once."""

    chain: OperatorChain
    situation: Situation
    num_microbatches: int
    _builders: dict[DeviceMesh, TableBuilder] = field(init=False, default_factory=dict)
    _known: dict[object, int] = field(init=False, default_factory=dict)

    def ns(
        self,
        number: int,
        meshes: tuple[DeviceMesh, DeviceMesh],
        choices: tuple[dict[str, Choice], dict[str, Choice]],
    ) -> int:
        """Once a step, where owner and user lie in stages on these meshes and choose so.

        Args:
            number: of the tie in the chain.
            meshes: of the owner's stage and of the user's.
            choices: of both stages, by operator of the compact graph.
        """
        chain = self.chain
        owner, user = (int(place) for place in chain.ties[number])
        ours, theirs = chain.choice(choices[0], owner), chain.choice(choices[1], user)
        key = (number, meshes, ours.config, theirs.config)
        if key not in self._known:
            price = price_tie(
                (self._builder(meshes[0]), int(chain.operators[owner]), [ours]),
                (self._builder(meshes[1]), int(chain.operators[user]), [theirs]),
                chain.tied[number],
                self.situation.cluster,
            )
            self._known[key] = int(price.ns[0, 0])
        return self._known[key]

    def _builder(self, mesh: DeviceMesh) -> TableBuilder:
        if mesh not in self._builders:
            s, graph = self.situation, self.chain.graph.microbatch(self.num_microbatches)
            self._builders[mesh] = s.builder(graph, mesh)
        return self._builders[mesh]
