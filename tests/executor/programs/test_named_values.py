"""Values by name of a rank: what is promised, what adds up, and what takes another one's place."""

from __future__ import annotations

import torch

from stratagem.executor.interpreter.named_values import NamedValues


def test_what_is_promised_is_added_when_it_is_read() -> None:
    memory = NamedValues()
    memory.promise("gradient", lambda: torch.tensor(1.0))
    memory.promise("gradient", lambda: torch.tensor(2.0))
    assert memory.values["gradient"] == 3.0


def test_a_value_takes_the_place_of_one_that_is_still_on_its_way() -> None:
    """Weights that two updates published, and nobody had read between, were the sum of both."""
    memory, waited = NamedValues(), list[str]()

    def first() -> torch.Tensor:
        waited.append("first")
        return torch.tensor(1.0)

    memory.promise("weight", first)
    memory.forget("weight")
    assert waited == ["first"], "what is under way ends before its memory is let go of"
    memory.promise("weight", lambda: torch.tensor(2.0))
    assert memory.values["weight"] == 2.0


def test_what_takes_the_place_of_a_sum_is_no_sum_of_ones_own() -> None:
    """Adding to it in place would have changed it where it came from."""
    memory, given = NamedValues(), torch.tensor(5.0)
    memory.add("x", torch.tensor(1.0))
    memory.add("x", torch.tensor(1.0))
    memory.forget("x")
    memory.add("x", given)
    memory.add("x", torch.tensor(1.0))
    assert memory.values["x"] == 6.0
    assert given == 5.0
