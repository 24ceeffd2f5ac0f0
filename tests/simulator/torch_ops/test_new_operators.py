"""Kinds of operators of one's own: known by one call everywhere, or refused and known nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stratagem.searcher.driver.skeleton_work import Registered, Sharpener
from stratagem.searcher.space.constraints import Space
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.kinds.kind_record import (
    OperatorKind,
    OperatorRole,
    no_operations,
)
from stratagem.simulator.operators.kinds.operator_kinds import KINDS, registered_kinds
from stratagem.simulator.operators.kinds.traffic import EachTensorOnce
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.saved_tensors import SavedTensors
from stratagem.simulator.torch_ops.aten.arguments import reads
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS, Handler
from stratagem.simulator.torch_ops.aten.new_operators import register_operator
from stratagem.simulator.torch_ops.kernels.run_kernel import KERNELS
from stratagem.simulator.torch_ops.kernels.shards import Shards
from tests.support.processes import in_fresh_process

FLIP = OperatorKind(
    name="flip",
    role=OperatorRole.OTHER,
    flops=no_operations,
    backward_flops=1.0,
    product=None,
    traffic=EachTensorOnce(),
    saved=SavedTensors(inputs=()),
    weight_share=0.0,
)


def flipped(
    operator: Operator, shards: Shards, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    return torch.flip(inputs[0], (0,))


HANDLER: Handler = reads("self")(lambda call: None)


def register(*aten: str, **changes: Any) -> None:
    register_operator(replace(FLIP, **changes), flipped, dict.fromkeys(aten, HANDLER))


@pytest.fixture
def as_they_were() -> Iterator[None]:
    before = [dict(table) for table in (KINDS, KERNELS, HANDLERS)]
    yield
    for table, kept in zip((KINDS, KERNELS, HANDLERS), before, strict=True):
        table.clear()
        table.update(kept)


@pytest.mark.parametrize(
    ("aten", "changes", "said"),
    [
        (["flip"], {"name": "linear"}, "operators of kind 'linear' are there already, one of"),
        (["flip", "relu"], {}, "aten operator 'relu', one of .* leave it out of those that"),
        (["flip"], {"name": ""}, "a kind of operator has no name: give it one"),
        (["flip"], {"weight_share": 1.5}, "'flip' has weight_share 1.5: .* from 0 to 1"),
        (["flip"], {"backward_flops": -1.0}, "'flip' has backward_flops -1.0: .* 0 or more"),
    ],
)
def test_what_is_there_already_or_wrong_is_refused_and_nothing_is_changed(
    aten: list[str], changes: dict[str, Any], said: str
) -> None:
    before = [dict(table) for table in (KINDS, KERNELS, HANDLERS)]
    with pytest.raises(ValueError, match=said):
        register(*aten, **changes)
    assert before == [KINDS, KERNELS, HANDLERS]


def test_nothing_that_prices_depend_on_can_be_left_out() -> None:
    """A kind with products that its table of traffic lacked was priced as if it moved bytes."""
    given = {each.name: getattr(FLIP, each.name) for each in fields(FLIP)}
    needed = {
        each.name
        for each in fields(FLIP)
        if each.default is MISSING and each.default_factory is MISSING
    }
    assert {"flops", "backward_flops", "product", "traffic", "saved", "weight_share"} < needed
    for name in needed:
        with pytest.raises(TypeError, match=f"'{name}'"):
            OperatorKind(**{key: value for key, value in given.items() if key != name})


@pytest.mark.usefixtures("as_they_were")
def test_other_processes_of_a_search_know_it() -> None:
    """They priced graphs with such an operator by tables that lacked it."""
    register("flip")
    assert registered_kinds() == {"flip": FLIP}
    graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
    situation = Situation(graph, cluster, Training(), default_costs())
    wishes = Space().bind(graph)
    arguments = Sharpener(situation, Options(), (0, 2), wishes, ("none",), 0).arguments

    def there(own: Registered) -> float:
        from stratagem.searcher.driver.skeleton_work import remade
        from stratagem.simulator.operators.kinds.operator_kinds import KINDS

        remade(own, *arguments)
        return KINDS["flip"].backward_flops

    assert in_fresh_process(there, Registered()) == FLIP.backward_flops
