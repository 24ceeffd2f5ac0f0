"""Options of a choice are said once: prices, lists of choices, files and words follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from stratagem.cli.search import search
from stratagem.searcher.space.skeletons import Options, operator_choices
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.drawing.plan_picture import plan_picture
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Config, local_sizes
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan
from stratagem.simulator.pricing.cost_rows import OperatorRow, PricedTime
from stratagem.simulator.pricing.cost_table import TableBuilder
from stratagem.simulator.sharding.choice import OPTIONS, USUAL_TRIES, Choice, ChoiceOption
from stratagem.simulator.sharding.choice_options import as_tried
from stratagem.simulator.sharding.parameter_homes import trainable_weights, zero_stages_of
from stratagem.simulator.sharding.pieces_and_fusion import (
    fuses_forward,
    fuses_in_sum,
    piece_dim,
)
from stratagem.simulator.simulation.plan_in_words import choice_phrase

CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
MESH = DeviceMesh((MeshAxis("data", 2), MeshAxis("tensor", 2)), (0, 1, 2, 3))
EACH = {o.tried_by: (1, 2) if o.usual == 1 else True for o in OPTIONS}
ALL = Options(**{name: tried for name, tried in EACH.items() if name})
SOME = (
    Options(),
    Options(chunks=(1, 2), fuse=True, regather=True, stream=True, in_sums=True),
    Options(in_sums=True),
    Options(chunks=(4, 2), regather=True),
    Options(fuse=True),
    Options(chunks=(1, 3, 2), stream=True),
)


def graph() -> OperatorGraph:
    return gpt(num_layers=1, hidden=32, num_heads=2, sequence=8, vocabulary=16, batch=4)


def builder() -> TableBuilder:
    return TableBuilder(graph(), MESH, CLUSTER, Training(), default_costs())


def columns(row: OperatorRow) -> Iterator[tuple[str, Any]]:
    """All that a row has by choice, as lists."""
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, PricedTime):
            yield field.name, list(zip(value.ns.tolist(), value.mask.tolist(), strict=True))
        elif isinstance(value, np.ndarray):
            yield field.name, value.tolist()
        elif field.name in ("sync_latency", "publish_latency", "gather_latency", "sources"):
            yield field.name, list(value)


@pytest.mark.parametrize("name", [op.name for op in graph().operators if not op.is_source])
def test_a_choice_among_others_costs_what_it_does_alone(name: str) -> None:
    """Prices are remembered by the options that they depend on: none may be left out."""
    small = graph()
    i, operator = small.index[name], small.operator(name)
    plain = operator_choices(small, operator, MESH.shape, (0, 1, 2, 3), ALL)
    again = operator_choices(small, operator, MESH.shape, (0, 3), ALL, recompute=True)
    choices = (*plain, *again)
    together = dict(columns(builder().build((i,), {i: choices}).row(i)))
    assert len(together) > 20
    for number in range(0, len(choices), max(1, len(choices) // 60)):
        alone = builder().build((i,), {i: (choices[number],)})
        row = replace(alone.row(i), runs_again=False)
        for what, (value,) in columns(row):
            if what != "recompute" or choices[number].recompute:
                assert together[what][number] == value, (what, choices[number])


def written_out(
    small: OperatorGraph, operator: Operator, config: Config, options: Options, *, recompute: bool
) -> list[Choice]:
    """Every choice of a config, loop by loop."""
    sizes = local_sizes(operator, config, MESH.shape)
    fusible = options.fuse and (
        bool(trainable_weights(small, operator)) or fuses_forward(operator)
    )
    again = options.regather and bool(operator.weights) and not recompute
    joins = fuses_forward(operator)
    sums = options.in_sums and fuses_in_sum(operator)
    pieces = [n for n in options.chunks if n == 1 or piece_dim(operator, sizes, n)]
    return [
        Choice(config, zero, recompute, chunks, fused, regather, streamed, in_sum)
        for zero in zero_stages_of(small, operator, config, MESH.shape, (0, 1, 2, 3))
        for chunks in pieces or [1]
        for fused in ((False, True) if fusible else (False,))
        for regather in ((False, True) if again else (False,))
        for streamed in ((False, True) if options.stream and chunks > 1 else (False,))
        for in_sum in ((False, True) if sums and not (fused and joins) else (False,))
    ]


@pytest.mark.parametrize("options", SOME, ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_choices_are_all_that_options_allow(options: Options, recompute: bool) -> None:
    small = graph()
    for operator in small.operators:
        made = operator_choices(
            small, operator, MESH.shape, (0, 1, 2, 3), options, recompute=recompute
        )
        configs = dict.fromkeys(choice.config for choice in made)
        truth = [
            written_out(small, operator, config, options, recompute=recompute)
            for config in configs
        ]
        assert list(made) == list(itertools.chain(*truth))


def with_option(option: ChoiceOption) -> Choice:
    """A choice that has an option, and what it is a detail of."""
    rest = {option.part_of: 2} if option.part_of else {}
    value = 2 if isinstance(option.usual, int) and not isinstance(option.usual, bool) else True
    return replace(Choice(()), **rest, **{option.name: value})


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_each_option_is_in_files_words_and_pictures(option: ChoiceOption) -> None:
    small, setup = graph(), TrainingSetup(microbatch=1)
    plan = setup.plan(small, CLUSTER)
    (stage,) = plan.stages
    chosen = replace(with_option(option), config=stage.choices["h.0.mlp.up"].config)
    plain = replace(chosen, **{option.name: option.usual})

    def having(choice: Choice) -> Plan:
        choices = {**stage.choices, "h.0.mlp.up": choice}
        return replace(plan, stages=(replace(stage, choices=choices),))

    read = Plan.from_json(having(chosen).to_json())
    assert read == having(chosen) != having(plain)
    assert read.choice("h.0.mlp.up") == chosen
    assert plan_picture(having(chosen)) != plan_picture(having(plain))
    operator = small.operator("h.0.mlp.up")
    phrases = [choice_phrase(operator, each, stage.mesh.shape) for each in (chosen, plain)]
    assert phrases[0] != phrases[1]


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.tried_by], ids=lambda o: o.name)
def test_each_option_of_a_search_is_one_of_the_command_line(option: ChoiceOption) -> None:
    told = search.__annotations__[option.tried_by].__metadata__[0]
    assert told.help == option.help != ""


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.tried_by], ids=lambda o: o.name)
def test_what_is_not_tried_is_taken_away(option: ChoiceOption) -> None:
    chosen = with_option(option)
    assert as_tried(chosen, ALL) is chosen
    rest = {option.tried_by: USUAL_TRIES[option.tried_by]}
    if option.name == "chunks":
        rest["stream"] = False
    without = replace(ALL, **rest)
    assert as_tried(chosen, without) == replace(chosen, **{option.name: option.usual})


def test_details_go_with_what_they_are_details_of() -> None:
    chosen = Choice((), 3, chunks=4, streamed=True, fused=True)
    assert as_tried(chosen, ALL) == Choice((), 3, fused=True)
