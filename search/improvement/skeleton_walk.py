"""Markov chains over skeletons: a proposal is a neighbour, on which a chain over choices settles.

The chains of `annealing.chains` know the prices of one skeleton and decide on choices in
microseconds. What they cannot change is changed here: a stage boundary, the number of
microbatches, the schedule, how many stages a rank has, what a stage recomputes (see `neighbours`).
A proposal is priced, a short chain goes on from the choices carried over, and its best is accepted
or not as by Metropolis et al. (1953). Chains whose steps end in an optimization are the large-step
Markov chains of Martin, Otto and Felten (1991).

The random number is drawn first: what is accepted is then known as seconds of a step, and a
neighbour whose bound is above them is rejected without pricing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stratagem.searcher.annealing._splitmix import random_below, random_float, seeded
from stratagem.searcher.improvement.neighbours import MOVES, Neighbour, Neighbourhood
from stratagem.searcher.improvement.outcomes import Settled
from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import Skeleton

HOT, COLD = 0.02, 1e-3
"""Temperatures of the first and of the last round, as shares of the step."""
TRIES = 64
"""Proposals of a walk in a round at most; the round ends with the first that must be priced."""


@dataclass(frozen=True)
class Proposal:
    """A plan on which a chain shall settle.

    Attributes:
        skeleton: with the policy of each stage.
        choices: where the chain begins.
        limit: seconds of a step up to which it is accepted; infinite for where a walk begins.
        change: what leads to it; empty for where a walk begins.
    """

    skeleton: Skeleton
    choices: Choices
    limit: float = math.inf
    change: str = ""


Settle = Callable[[Sequence[Proposal]], Sequence[Settled | None]]
"""Runs a chain on each; None where constraints leave no choice. Those that there was time for, in
order."""
Known = dict[Skeleton, Settled | None]


class Walk:
    """One Markov chain over skeletons.

    Args:
        neighbourhood: what neighbours are.
        start: where it begins.
        seed: of its random numbers.

    Attributes:
        now: where it is.
        best: the best that it has been to; one that fits comes before others.
    """

    def __init__(self, neighbourhood: Neighbourhood, start: Settled, seed: int) -> None:
        self.now = self.best = start
        self._neighbourhood, self._rng = neighbourhood, seeded(seed)
        self._paths: dict[Skeleton, tuple[str, ...]] = {start.skeleton: ()}
        self._around: dict[Skeleton, list[list[Neighbour]]] = {}

    @property
    def changes(self) -> tuple[str, ...]:
        """What led from the start to the best."""
        return self._paths[self.best.skeleton]

    def propose(self, temperature: float, known: Known) -> Proposal | None:
        """The next neighbour that must be priced; None where no bound or plan known leaves one.

        Neighbours that are known are decided at once.

        Args:
            temperature: as a share of the step.
            known: what was settled before, by the skeleton that was proposed.
        """
        for _ in range(TRIES):
            kinds = self._by_kind()
            if not kinds:
                return None
            alike = kinds[random_below(self._rng, len(kinds))]
            near = alike[random_below(self._rng, len(alike))]
            limit = self.now.score * (1.0 - temperature * math.log(1.0 - random_float(self._rng)))
            proposal = Proposal(near.skeleton, near.choices, limit, near.change)
            if near.skeleton in known:
                self.decide(proposal, known[near.skeleton])
            elif self._neighbourhood.bound(near.skeleton) < limit:
                if self._neighbourhood.plan(near) is not None:
                    return proposal
                known[near.skeleton] = None
        return None

    def decide(self, proposal: Proposal, settled: Settled | None) -> None:
        """Go to what was settled on the skeleton proposed, if it is accepted."""
        if settled is None or settled.score > proposal.limit:
            return
        path = (*self._paths[self.now.skeleton], proposal.change)
        self._paths.setdefault(settled.skeleton, path)
        self.now = settled
        if settled.rank < self.best.rank:
            self.best = settled

    def _by_kind(self) -> list[list[Neighbour]]:
        """Neighbours of where it is; kinds are equally likely, however many neighbours they have.

        A chain whose steps go back as likely as forth needs no correction; these nearly do.
        """
        skeleton = self.now.skeleton
        if skeleton not in self._around:
            simulation = self._neighbourhood.situation.simulate(self.now.plan)
            around = self._neighbourhood.around(skeleton, simulation)
            groups = [[near for near in around if near.kind == kind] for kind in MOVES]
            self._around[skeleton] = [group for group in groups if group]
        return self._around[skeleton]


def walk(
    neighbourhood: Neighbourhood,
    starts: Sequence[Settled],
    settle: Settle,
    rounds: int,
    seed: int,
) -> list[Walk]:
    """Walk from each start at a falling temperature; what one of them has settled all know.

    Each walk has one neighbour priced a round, all at the same time: what they find depends on
    their number and seed, not on who prices them.

    Args:
        neighbourhood: what neighbours are.
        starts: settled themselves.
        settle: runs chains; where it gives fewer than it was asked for, walks end.
        rounds: neighbours priced from each start at most.
        seed: of all random numbers.
    """
    known: Known = {start.skeleton: start for start in starts}
    walks = [Walk(neighbourhood, start, seed + k) for k, start in enumerate(starts)]
    for number in range(rounds):
        temperature = HOT * (COLD / HOT) ** (number / max(1, rounds - 1))
        proposals = [each.propose(temperature, known) for each in walks]
        asked: dict[Skeleton, Proposal] = {}
        for proposal in proposals:
            if proposal is not None:
                other = asked.setdefault(proposal.skeleton, proposal)
                if proposal.limit > other.limit:
                    asked[proposal.skeleton] = proposal
        found = settle(list(asked.values()))
        for skeleton, settled in zip(asked, found, strict=False):
            known[skeleton] = settled
            if settled is not None:
                known.setdefault(settled.skeleton, settled)
        for each, proposal in zip(walks, proposals, strict=True):
            if proposal is not None and proposal.skeleton in known:
                each.decide(proposal, known[proposal.skeleton])
        if not asked or len(found) < len(asked):
            break
    return walks
