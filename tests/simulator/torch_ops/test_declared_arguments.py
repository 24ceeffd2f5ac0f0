"""Handlers of aten operators declare what they read: others are refused, none is misspelt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stratagem.simulator.torch_ops.aten.arguments import (
    DTYPE_SAYS,
    HARMLESS,
    SHAPE_SAYS,
    Given,
    ReadingFunction,
    reads,
)
from stratagem.simulator.torch_ops.aten.handlers import HANDLERS
from stratagem.simulator.torch_ops.aten.sources import SOURCES
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.plans import assert_equal_to_torch, make_case, make_plan, whole

TABLES: dict[str, dict[str, ReadingFunction]] = {"operator": HANDLERS, "source": SOURCES}  # type: ignore[type-arg]


def arguments_of(name: str) -> set[str]:
    """The names in all schemas of an aten operator, or of one of ours."""
    space, _, short = name.rpartition("::")
    packet = getattr(getattr(torch.ops, space or "aten"), short)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return {argument.name for schema in schemas for argument in schema.arguments}


@pytest.mark.parametrize("table", TABLES)
def test_every_argument_that_is_declared_is_one_of_the_operator(table: str) -> None:
    import stratagem.simulator.torch_ops.blocks.experts  # noqa: F401

    for name, handler in TABLES[table].items():
        assert handler.names <= arguments_of(name), name


def test_what_may_be_left_alone_is_declared_by_no_handler_as_well() -> None:
    """One argument has one answer: it is read, or there is a reason why it need not be."""
    for name, handler in HANDLERS.items():
        said = {*SHAPE_SAYS.get(name, ()), *DTYPE_SAYS.get(name, ())} - {"split_size", "chunks"}
        assert not handler.names & {*HARMLESS, *said}, name


def test_a_handler_that_reads_more_than_it_declares_is_found_at_its_first_call() -> None:
    given = Given({"self": 1, "dim": 2}, {"dim": 0})
    handler = reads("self")(lambda arguments: arguments.get("dim"))
    given.declare(handler.names)
    assert given["self"] == 1
    assert given.get("other") is None, "what the schema lacks may be asked for"
    with pytest.raises(TypeError, match="reads the argument 'dim' and declares self"):
        handler.make(given)


class Tokens(nn.Module):
    """Sums the embeddings of two parts of its tokens."""

    def __init__(self, parts: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.table, self.head, self._parts = nn.Embedding(10, 8), nn.Linear(8, 10), parts

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        one, two = self._parts(ids)
        logits = self.head(self.table(one) + self.table(two))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


BATCH = {"ids": torch.arange(32).reshape(4, 8) % 10, "labels": torch.arange(16).reshape(4, 4) % 10}


@pytest.mark.parametrize(
    "parts",
    [
        lambda ids: ids.split(4, 1),
        lambda ids: ids.split([4, 4], 1),
        lambda ids: ids.chunk(2, 1),
        lambda ids: ids.view(4, 2, 4).unbind(1),
    ],
)
def test_inputs_may_be_cut_in_parts(parts: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    """How long the parts are was an argument that nobody had asked for, and the model refused."""
    torch.manual_seed(0)
    case = make_case(Tokens(parts), **BATCH)
    assert_equal_to_torch(case, make_plan(case, whole, (1,)))


class Masked(nn.Module):
    """Drops nothing of a mask, as models do that are not in training."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = nn.functional.dropout((ids > 2).float(), 0.5, training=False)
        logits = self.head(self.table(ids) * mask[..., None])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_dropout_of_a_mask_that_drops_nothing_is_the_mask() -> None:
    """It was looked up under a name that dropout's schema does not have."""
    torch.manual_seed(0)
    case = make_case(Masked(), ids=BATCH["ids"], labels=BATCH["ids"])
    assert_equal_to_torch(case, make_plan(case, whole, (1,)))


class Bagged(nn.Module):
    """Embeds with rows that torch shortens while it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows = nn.functional.embedding(ids, self.table.weight, scale_grad_by_freq=True)
        logits = self.head(rows)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_an_argument_that_is_not_declared_is_refused_by_its_name() -> None:
    batch = {"ids": BATCH["ids"], "labels": BATCH["ids"]}
    with pytest.raises(ValueError, match="embedding with scale_grad_by_freq=True is not sup"):
        capture(Bagged(), kwargs=batch, fallback=False)
