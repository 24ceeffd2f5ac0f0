"""Kinds of operators of one's own: known by one call everywhere, or refused and known nowhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from stratagem.searcher.driver.skeleton_work import Registered, Sharpener
from stratagem.searcher.space.constraints import Constraints
from stratagem.searcher.space.situation import Situation
from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.kernel_times.fitted_kernels import default_costs
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.operators.operator_kinds import RULES, Rule, registered_rules
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS
from stratagem.simulator.torch_ops.aten.new_operators import NewOperator, register_operator
from stratagem.simulator.torch_ops.kernels.run_kernel import KERNELS
from stratagem.simulator.torch_ops.kernels.shards import Shards
from tests.support.fresh_process import in_fresh_process

RULE = Rule(lambda operator, sizes: 0.0, saved_inputs=())


def flipped(
    operator: Operator, shards: Shards, inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> Tensor:
    return torch.flip(inputs[0], (0,))


def flip(*aten: str, kind: str = "flip") -> NewOperator:
    return NewOperator(kind, RULE, flipped, dict.fromkeys(aten, lambda call: None))


@pytest.fixture
def as_they_were() -> Iterator[None]:
    before = [dict(table) for table in (RULES, KERNELS, HANDLERS)]
    yield
    for table, kept in zip((RULES, KERNELS, HANDLERS), before, strict=True):
        table.clear()
        table.update(kept)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (flip("flip", kind="linear"), "operators of kind 'linear' are there already, one of"),
        (
            flip("flip", "relu"),
            "aten operator 'relu', one of .* leave it out of those that",
        ),
    ],
)
def test_what_is_there_already_is_refused_and_nothing_is_changed(
    new: NewOperator, said: str
) -> None:
    before = [dict(table) for table in (RULES, KERNELS, HANDLERS)]
    with pytest.raises(ValueError, match=said):
        register_operator(new)
    assert before == [RULES, KERNELS, HANDLERS]


@pytest.mark.usefixtures("as_they_were")
def test_other_processes_of_a_search_know_it() -> None:
    """They priced graphs with such an operator by tables that lacked it."""
    register_operator(flip("flip"))
    assert registered_rules() == {"flip": RULE}
    graph, cluster = mlp([64, 64], batch=32), Cluster.preset("dgx-a100", num_nodes=1)
    situation = Situation(graph, cluster, Training(), default_costs())
    wishes = Constraints().bind(graph)
    arguments = Sharpener(situation, Options(), (0, 2), wishes, ("none",), 0).arguments

    def there(own: Registered) -> float:
        from stratagem.searcher.driver.skeleton_work import remade
        from stratagem.simulator.operators.operator_kinds import RULES

        remade(own, *arguments)
        return RULES["flip"].backward_flops

    assert in_fresh_process(there, Registered()) == RULE.backward_flops
