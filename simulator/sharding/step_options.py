"""Options of a plan that are not an operator's: what all of its stages do alike.

One that is new is a field here, another of `Space` where a search may be told of it, and what
writes tasks and instructions by it: plans and their files, pipelines, searches' options and what
they lack go over the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What all stages of a plan do alike.

    Example:
        >>> StepOptions(bucket_bytes=2**20).beyond(StepOptions(inputs_first=True))
        ['bucket_bytes=1048576']

    Attributes:
        bucket_bytes: gradients are reduced in buckets of at least so many, counted as if no
            device sharded them; 0 reduces each operator's alone. What ZeRO 1 and 2 publish goes in
            the same buckets, what ZeRO 3 gathers in those of each layer.
        inputs_first: a backward pass makes the gradients of its inputs before those of its
            weights, which then run beside the conversion of the first (Megatron-LM's
            asynchronous all-reduce of tensor parallelism).

    Raises:
        ValueError: on a negative size.
    """

    bucket_bytes: int = 0
    inputs_first: bool = False

    def __post_init__(self) -> None:
        self.check_step_options()

    def check_step_options(self, where: str = "") -> None:
        """Refuse what no stage can do; `where` says whose options they are."""
        if self.bucket_bytes < 0:
            raise ValueError(f"{where}bucket_bytes is {self.bucket_bytes}; it must be 0 or more")

    @property
    def step_options(self) -> StepOptions:
        """These alone, of whatever else has them."""
        return StepOptions(**self.as_options)

    @property
    def as_options(self) -> dict[str, Any]:
        """These by name, as others are made with them."""
        return {each.name: getattr(self, each.name) for each in fields(StepOptions)}

    def beyond(self, tried: StepOptions) -> list[str]:
        """What is done here that is not among what is `tried`, as one gives it.

        What is on or off may be off where it is tried.
        """
        return [
            f"{name}={does}"
            for name, does in self.as_options.items()
            if does is not False and does != getattr(tried, name)
        ]
