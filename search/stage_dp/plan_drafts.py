"""From a solution of the dynamic program to a plan: names, meshes, choices, an estimate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options, Skeleton
from stratagem.searcher.space.stage_cuts import cut_stages
from stratagem.searcher.stage_dp.closed_form_times import (
    ClosedFormTimes,
    microbatches_held,
    mode_of,
    placed_stages,
    step_ns,
)
from stratagem.searcher.stage_dp.pipeline_dp import PipelineSolution, StageDraft
from stratagem.searcher.stage_dp.tables.operator_chain import OperatorChain
from stratagem.searcher.stage_dp.tables.operator_profiles import (
    BoundaryPricer,
    MeshPricer,
    stage_mesh,
)
from stratagem.searcher.stage_dp.tables.tied_parameters import TiePricer
from stratagem.simulator.hardware.device_mesh import DeviceMesh
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_table import TableBuilder


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that the dynamic program proposes.

    Attributes:
        skeleton: stages, meshes, microbatches, schedule, recompute of each stage.
        choices: by operator.
        seconds: estimated time of a step.
        peaks: estimated bytes per device of each stage's rank, in the order of stages.
        reason: what the plan is, in a line.
    """

    skeleton: Skeleton
    choices: Choices
    seconds: float
    peaks: tuple[int, ...]
    reason: str
    shape: tuple[object, ...]

    @property
    def peak_bytes(self) -> int:
        """Estimated bytes per device of the fullest rank."""
        return max(self.peaks)

    def plan(
        self,
        situation: Situation,
        *,
        name: str = "inter-operator DP",
        options: Options = Options(),  # noqa: B008 (frozen)
    ) -> Plan:
        """The plan, to be simulated or run."""
        return situation.plan(self.skeleton, self.choices, name=name, options=options)


@dataclass(eq=False)
class Drafter:
    """Turns solutions at one number of microbatches into candidates."""

    chain: OperatorChain
    situation: Situation
    num_microbatches: int

    def __post_init__(self) -> None:
        self._boundaries = BoundaryPricer(self.chain, self.situation)
        self._ties = TiePricer(self.chain, self.situation, self.num_microbatches)
        self._builders: dict[DeviceMesh, TableBuilder] = {}

    def candidate(self, solution: PipelineSolution, schedule: str) -> Candidate:
        """The candidate, its boundaries priced between the meshes that it really has."""
        stages = solution.stages
        meshes = self._meshes(stages, schedule)
        step = step_ns(schedule, self._times(stages, meshes), self.num_microbatches)
        skeleton = Skeleton(
            stages=self._names(stages),
            meshes=tuple(meshes),
            num_microbatches=self.num_microbatches,
            schedule=schedule,
            recompute=tuple(stage.ways.variant.recompute for stage in stages),
        )
        return Candidate(
            skeleton=skeleton,
            choices=self._choices(stages, skeleton.stages),
            seconds=(step + self._tied_ns(stages, meshes)) * 1e-9,
            peaks=self._peaks(stages, schedule),
            reason=f"{skeleton}: {_described(stages)}",
            shape=(schedule, len(stages), tuple(mesh.shape for mesh in meshes)),
        )

    def _meshes(self, stages: Sequence[StageDraft], schedule: str) -> list[DeviceMesh]:
        """A rank's stages share its devices; in a solution they follow one another."""
        placed = placed_stages(schedule, len(stages), self.num_microbatches)
        return [
            stage_mesh(stages[rank].devices, stage.ways.tensor)
            for rank, stage in zip(placed, stages, strict=True)
        ]

    def _builder(self, mesh: DeviceMesh) -> TableBuilder:
        if mesh not in self._builders:
            pricer = MeshPricer(self.chain, self.situation, mesh, self.num_microbatches)
            self._builders[mesh] = pricer.builder
        return self._builders[mesh]

    def _times(
        self, stages: Sequence[StageDraft], meshes: Sequence[DeviceMesh]
    ) -> list[ClosedFormTimes]:
        found: list[ClosedFormTimes] = []
        for s, stage in enumerate(stages):
            ahead = back = 0
            if s + 1 < len(stages):
                ends = self._builder(meshes[s]), self._builder(meshes[s + 1])
                choices = stage.ways.variant.choices, stages[s + 1].ways.variant.choices
                ahead, back = self._boundaries.cut(stage.last, ends, choices)
            costs = stage.costs
            passes = float(costs.forward), float(costs.backward), float(costs.weight)
            found.append(ClosedFormTimes(*passes, float(costs.last), ahead, back))
        return found

    def _tied_ns(self, stages: Sequence[StageDraft], meshes: Sequence[DeviceMesh]) -> int:
        """Ns of all parameters that are tied across stages: their links are shared."""
        ends = [int(self.chain.cuts[stage.last]) for stage in stages]
        total = 0
        for number, places in enumerate(self.chain.ties.tolist()):
            owner, user = (bisect_right(ends, place) for place in places)
            if owner != user:
                choices = [stages[s].ways.variant.choices for s in (owner, user)]
                there = meshes[owner], meshes[user]
                total += self._ties.ns(number, there, (choices[0], choices[1]))
        return total

    def _peaks(self, stages: Sequence[StageDraft], schedule: str) -> tuple[int, ...]:
        copies = mode_of(schedule, len(stages)).copies
        flights = microbatches_held(schedule, len(stages), self.num_microbatches)[::-1]
        return tuple(
            int(copies * stage.costs.state + stage.costs.peak + (flight - 1) * stage.costs.held)
            for stage, flight in zip(stages, flights, strict=True)
        )

    def _names(self, stages: Sequence[StageDraft]) -> tuple[tuple[str, ...], ...]:
        ends = [int(self.chain.cuts[stage.last]) for stage in stages]
        return cut_stages(self.chain.graph, self.chain.operators.tolist(), ends[:-1])

    def _choices(self, stages: Sequence[StageDraft], names: Sequence[Sequence[str]]) -> Choices:
        graph, compact = self.chain.graph, self.chain.compact
        twin = compact.graph.names
        return {
            name: stage.ways.variant.choices[twin[compact.stands_for[graph.index[name]]]]
            for stage, group in zip(stages, names, strict=True)
            for name in group
        }


def _described(stages: Sequence[StageDraft]) -> str:
    """Runs of stages that are alike: ``8 × (8 × 8, sequence, ZeRO-2)``."""
    words = [
        f"{len(s.devices) // s.ways.tensor} data × {s.ways.tensor} tensor, {s.ways.variant}"
        for s in stages
    ]
    runs: list[tuple[str, int]] = []
    for word in words:
        if runs and runs[-1][0] == word:
            runs[-1] = (word, runs[-1][1] + 1)
        else:
            runs.append((word, 1))
    return "; ".join(f"{count} × ({word})" for word, count in runs)
