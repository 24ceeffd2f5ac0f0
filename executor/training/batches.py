"""The batches of a run: drawn once a step, checked before the step, found again when it resumes.

Every rank sees the same whole batch and takes its own part of it. Ranks that are processes draw
from iterables of their own, so each gives the same batches everywhere: torch's random numbers are
seeded alike for every pass over the data.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stratagem.executor.state.parameter_parts import check_values
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.torch_ops.kernels.step_programs import torch_dtype

Batch = Mapping[str, Tensor]

Data = Batch | Iterable[Batch]
"""One batch for every step, or what gives a batch a step, such as a DataLoader."""

EPOCH_SEEDS = 1_000_003
"""Keeps the seeds of a run's passes over its data apart from those of another run."""

_numbers = threading.RLock()
"""Held while torch's random numbers, which this process has once, are those of some data."""


class Ordered:
    """Marks data whose order is settled elsewhere: no random number is taken going through it."""


class Batches:
    """The batch of each step, for all ranks of this process.

    Example:
        >>> batches = Batches(loader, graph, seed=0)  # doctest: +SKIP
        >>> batches.at(0)["input_ids"].shape  # doctest: +SKIP
        torch.Size([8, 128])

    An iterable that ends is gone through again, in an order of its own each time if it shuffles by
    torch's random numbers. They are left as they were.

    Args:
        data: one batch for every step, or an iterable of batches.
        graph: says which inputs there are, with their shapes and dtypes; a batch may have more.
        seed: of the order of the batches.
        buffers: inputs that the model itself holds, by name; a batch need not have them.
    """

    def __init__(
        self,
        data: Data,
        graph: OperatorGraph,
        *,
        seed: int = 0,
        buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._data = data
        self._graph = graph
        self._seed = seed
        held = buffers or {}
        self._buffers = {each.name: held[each.name] for each in graph.inputs if each.name in held}
        check_values(self._buffers)
        self._lock = threading.Lock()
        self._drawn: tuple[int, Batch] | None = None
        self._epoch, self._taken = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._random = torch.get_rng_state()

    def pin(self) -> None:
        """Let a batch that is that of every step lie in memory from which a GPU copies by itself.

        Of data that gives one after the other, a DataLoader does so (``pin_memory=True``).
        """
        if isinstance(self._data, Mapping):
            self._data = {
                name: each.pin_memory() if each.device.type == "cpu" else each
                for name, each in self._data.items()
            }

    def at(self, step: int) -> Batch:
        """The batch of a step; steps come in order, and every rank may ask for each.

        Raises:
            ValueError: when the batch does not fit the graph, or the data has ended for good.
        """
        with self._lock:
            if self._drawn is None or self._drawn[0] != step:
                self._drawn = step, self._checked(step)
            return self._drawn[1]

    @property
    def position(self) -> tuple[int, int]:
        """Passes over the data that are complete, and batches drawn in the one under way."""
        return self._epoch, self._taken

    def seek(self, position: tuple[int, int]) -> None:
        """Go on behind the batches that `position` counts, which are drawn and dropped."""
        with self._lock:
            if position != (self._epoch, self._taken) and not isinstance(self._data, Mapping):
                self._epoch, self._taken, self._iterator = position[0], 0, None
                for _ in range(position[1]):
                    self._draw()

    @property
    def draws(self) -> bool:
        """Whether the data gives batches one after the other, and not one for every step."""
        return not isinstance(self._data, Mapping)

    def _checked(self, step: int) -> Batch:
        batch = self._data if isinstance(self._data, Mapping) else self._draw()
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"the batch of step {step} is a {type(batch).__name__}; each must be a dict of "
                f"tensors by the names of the model's inputs (a DataLoader makes them with its "
                f"collate_fn)"
            )
        batch = {**self._buffers, **batch}
        check_batch(self._graph, batch, f"the batch of step {step}")
        return batch

    def _draw(self) -> Any:
        """The next batch, of the next pass over the data where this one is over."""
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None
            with self._own_random_numbers():
                try:
                    batch = next(self._iterator)
                except StopIteration:
                    self._iterator = None
            if self._iterator is not None:
                self._taken += 1
                return batch
            if self._taken:
                self._epoch, self._taken = self._epoch + 1, 0
        raise ValueError(
            f"the data gives no batch in pass {self._epoch + 1} over it; give an iterable that is "
            f"not empty and can be gone through again, such as a DataLoader or a list"
        )

    def _begin(self) -> None:
        assert not isinstance(self._data, Mapping)
        seeded = torch.Generator().manual_seed(self._seed * EPOCH_SEEDS + self._epoch)
        self._random = seeded.get_state()
        with self._own_random_numbers():
            self._iterator = iter(self._data)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        if isinstance(self._data, Ordered):
            yield
            return
        with _numbers:
            outside = torch.get_rng_state()
            torch.set_rng_state(self._random)
            try:
                yield
            finally:
                self._random = torch.get_rng_state()
                torch.set_rng_state(outside)


def first_batch(data: Data) -> dict[str, Tensor]:
    """The batch that a model is captured with; nothing is taken from the data, nor from chance.

    Raises:
        ValueError: when there is none, or taking it would lose it.
    """
    if isinstance(data, Mapping):
        return dict(data)
    if isinstance(data, Iterator):
        raise ValueError(
            "the data is an iterator, from which the first batch would be lost; give the graph "
            "too, or what the iterator is made from, such as a DataLoader"
        )
    with _numbers, torch.random.fork_rng(devices=[]):
        for batch in data:
            return dict(batch)
    raise ValueError("the data gives no batch; give an iterable that is not empty")


def check_batch(graph: OperatorGraph, batch: Batch, what: str = "the batch") -> None:
    """Refuse a batch that is not what the graph was captured with.

    Raises:
        ValueError: names the input, and both shapes or dtypes.
    """
    for given in graph.inputs:
        if given.name not in batch:
            known = ", ".join(batch) or "none"
            raise ValueError(f"{what} has no input {given.name!r}; it has {known}")
        tensor = batch[given.name]
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{what}: input {given.name!r} is a {type(tensor).__name__}; it must be a tensor"
            )
        if (tuple(tensor.shape), tensor.dtype) != (given.shape, torch_dtype(given.dtype)):
            raise ValueError(
                f"{what}: input {given.name!r} is {tuple(tensor.shape)} {tensor.dtype}, but graph "
                f"{graph.name!r} was captured with {given.shape} {given.dtype}; feed that "
                f"shape (a DataLoader with drop_last=True leaves out a smaller last batch), or "
                f"capture and search again"
            )


def units_of(graph: OperatorGraph) -> tuple[str, int]:
    """What the speed of a run is counted in, and how many of it a step has.

    Example:
        >>> from stratagem.simulator.graph.models import gpt
        >>> units_of(gpt(num_layers=1, hidden=8, num_heads=2, sequence=16, batch=4))
        ('tokens', 64)

    Tokens, where an input has an integer for every position of every sample; samples otherwise.
    """
    for given in graph.inputs:
        if given.sample_dim == 0 and given.dtype.startswith("int") and len(given.shape) == 2:
            return "tokens", given.shape[0] * given.shape[1]
    return "samples", graph.batch
