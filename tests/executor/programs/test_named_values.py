"""Values by name of a rank: what is promised, what adds up, and what takes another one's place."""

from __future__ import annotations

import torch

from stratagem.executor.actions.named_values import NamedValues


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


class Sum:
    """A sum on its way: over when it is told so, or when somebody waits for it."""

    def __init__(self, worth: float, waited: list[float]) -> None:
        self.worth, self.over, self._waited = worth, False, waited

    def finish(self) -> torch.Tensor:
        if not self.over:
            self._waited.append(self.worth)
        return torch.tensor(self.worth)

    def is_over(self) -> bool:
        return self.over


def begin(memory: NamedValues, name: str, each: Sum) -> None:
    memory.before_sum([name])
    memory.promise_sum(name, each.finish, each.is_over)


def test_sums_that_are_over_are_not_held_until_the_end() -> None:
    """Each held its gradient until the update: ZeRO 2 had as many in memory as microbatches."""
    memory, waited = NamedValues(), list[float]()
    held = [Sum(float(n), waited) for n in range(1, 7)]
    for n, each in enumerate(held):
        begin(memory, f"gradient {n}", each)
        each.over = n != 3
    assert list(memory.values) == ["gradient 0", "gradient 1", "gradient 2"]
    held[3].over = True
    begin(memory, "gradient 6", Sum(7.0, waited))
    assert len(memory.values) == 6
    assert waited == []


def test_no_two_sums_for_one_value_are_on_their_way() -> None:
    memory, waited = NamedValues(), list[float]()
    for n in range(1, 4):
        begin(memory, "a", Sum(float(n), waited))
        begin(memory, "b", Sum(10.0 * n, waited))
    assert waited == [1.0, 10.0, 2.0, 20.0]
    assert (float(memory.values["a"]), float(memory.values["b"])) == (6.0, 60.0)


def test_a_sum_that_was_read_says_nothing_of_the_next_for_its_value() -> None:
    memory, waited = NamedValues(), list[float]()
    first, late, second = (Sum(float(n), waited) for n in (1, 2, 3))
    begin(memory, "late", late)
    begin(memory, "value", first)
    assert memory.values["value"] == 1.0
    begin(memory, "value", second)
    first.over = late.over = True
    waited.clear()
    begin(memory, "other", Sum(4.0, waited))
    assert waited == [], "the second sum for the value is not over, and nobody asked for it"
