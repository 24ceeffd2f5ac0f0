"""What is in a checkpoint: the index file beside its shards.

    DIR/step-00000040/index.json                 written last; a folder without it is no checkpoint
    DIR/step-00000040/rank-00000.safetensors     the parts that rank 0 holds first
    DIR/step-00000040/rank-00001.safetensors

A tensor is cut into boxes of its factors, or into ranges of what is in a box, as the plan of the
run that wrote it laid it out. Every part is in one file. Another plan reads the parts it meets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stratagem.executor.program.programs import Home, Program
from stratagem.executor.state.loss_scale import LossScale
from stratagem.simulator.base.files import decode, encode, read_text
from stratagem.simulator.graph.substitutions.parameter_map import ParameterMap
from stratagem.simulator.operators.operator import Parameter
from stratagem.simulator.sharding.tensor_parts import Box, TensorPart, part_of

INDEX_NAME = "index.json"
INDEX_VERSION = 2
UNSIGNED = 1
"""The version whose index had no hash of its own; it is read still."""


@dataclass(frozen=True)
class SavedPart:
    """The file that has a box of a tensor, whose factors are counted from 0.

    With a `span` it has a range of the elements of the box, in order.
    """

    file: str
    box: Box
    span: tuple[int, int] | None = None

    @property
    def part(self) -> TensorPart:
        """What the file has."""
        return TensorPart(self.box, self.span)


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer of the graph that ran; `trained` ones have optimizer states."""

    name: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    trained: bool
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True)
class ShardFile:
    """A file of the checkpoint, its length in bytes and its SHA-256."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Course:
    """How far a run is.

    Attributes:
        step: steps made.
        epoch: passes over the data that are complete.
        batch: batches taken in the pass under way.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class CheckpointIndex:
    """The index of a checkpoint.

    Attributes:
        model: name of the model, for messages.
        parameters: of the model, as the user knows them.
        plan: name of the plan that ran.
        optimizer: of the plan.
        states: names of its states of a parameter.
        updates: how often it has updated every parameter.
        rate: learning rate of the last step.
        course: where the run was.
        maps: what the plan's substitutions made of the model's parameters.
        tensors: of the graph that ran.
        files: the shards.
        scale: the loss scale of the next step, of a run in float16.
        finite: whether the last loss and all tensors are.
        counters: how often batch norms had normalised, by the names of their buffers.
        sha256: of the index itself, without it.
    """

    version: int
    model: str
    parameters: tuple[Parameter, ...]
    plan: str
    optimizer: str
    states: tuple[str, ...]
    updates: int
    rate: float
    course: Course
    maps: tuple[ParameterMap, ...]
    tensors: tuple[SavedTensor, ...]
    files: tuple[ShardFile, ...]
    scale: LossScale | None = None
    finite: bool = True
    counters: dict[str, int] = field(default_factory=dict)
    sha256: str = ""

    @cached_property
    def by_name(self) -> dict[str, SavedTensor]:
        """The tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @classmethod
    def load(cls, folder: Path) -> CheckpointIndex:
        """Read the index of a checkpoint.

        Raises:
            ValueError: names the file and what is wrong with it.
        """
        path = folder / INDEX_NAME
        text = read_text(path, "checkpoint")
        _check_version(text, path)
        index = decode(text, cls, f"checkpoint {path}")
        if (index.sha256 or index.version > UNSIGNED) and index.sha256 != _hash_of(text):
            raise ValueError(
                f"checkpoint {path} is damaged: its SHA-256 is not the one that it was written "
                f"with; resume from another checkpoint"
            )
        return index

    def to_json(self) -> str:
        """The text of the index file, with its own hash."""
        return encode(replace(self, sha256=_hash_of(encode(self))))

    def check_model(self, program: Program, where: Path) -> None:
        """Refuse to load the checkpoint into another model, or for another optimizer.

        Raises:
            ValueError: names the first parameter that differs and both shapes, or the optimizers.
        """
        saved = {each.name: each for each in self.parameters}
        wanted = {each.name: each for each in program.model_parameters}
        for name in (*wanted, *saved):
            ours, theirs = wanted.get(name), saved.get(name)
            if ours != theirs:
                raise ValueError(
                    f"checkpoint {where} is of model {self.model!r}, not of this one "
                    f"({program.graph.name!r}): parameter {name!r} is {_described(theirs)} there "
                    f"and {_described(ours)} here; resume from a checkpoint of this model"
                )
        optimizer = " and ".join(program.plan.training.optimizers)
        if self.optimizer != optimizer:
            raise ValueError(
                f"checkpoint {where} was written by optimizer {self.optimizer!r}, but plan "
                f"{program.plan.name!r} trains with {optimizer!r}; plan with "
                f"Training(optimizer={self.optimizer!r}), or begin anew from its parameters"
            )
        states = program.plan.training.states
        if self.updates and tuple(self.states) != states:
            had, goes_on = (" and ".join(each) or "nothing" for each in (self.states, states))
            raise ValueError(
                f"checkpoint {where} keeps {had} of each parameter, but the optimizer of plan "
                f"{program.plan.name!r} goes on from {goes_on}; give it the momentum and amsgrad "
                "of before, or begin anew from the parameters"
            )


def _hash_of(text: str) -> str:
    """The SHA-256 of all that the text of an index says but its hash.

    What an earlier program wrote has fewer fields, so what it says is taken as it stands.
    """
    said: dict[str, Any] = msgspec.json.decode(text) | {"sha256": ""}
    if not said.get("counters"):
        said.pop("counters", None)
    return hashlib.sha256(encode(said).encode()).hexdigest()


def _check_version(text: str, path: Path) -> None:
    """Refuse an index of another version before its fields are looked at, which may be others."""
    with suppress(msgspec.MsgspecError, UnicodeError):
        version = msgspec.json.decode(text, type=_Version).version
        if version not in (UNSIGNED, INDEX_VERSION):
            raise ValueError(
                f"checkpoint {path} has version {version}, this program reads {INDEX_VERSION}; "
                f"load it with the program that wrote it"
            )


@dataclass(frozen=True)
class _Version:
    version: int


def _described(parameter: Parameter | None) -> str:
    if parameter is None:
        return "missing"
    kind = "" if parameter.trainable else ", not trained"
    return f"{parameter.shape} {parameter.dtype}{kind}"


def shard_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def key_of(kind: str, name: str) -> str:
    """What a tensor is called in its file."""
    return f"{kind}/{name}"


def first_holders(program: Program, home: Home) -> Iterator[tuple[int, TensorPart]]:
    """The parts that a parameter is cut into at home, each with the first rank that holds it."""
    mesh = program.plan.stages[home.stage].mesh
    seen: set[TensorPart] = set()
    for device in mesh.devices:
        part = part_of(home.stored.sizes, home.stored.placements, mesh, device)
        if part is not None and part.elements and part not in seen:
            seen.add(part)
            yield program.rank_of[device], part


def saved_tensors(program: Program) -> tuple[SavedTensor, ...]:
    """Where a run of `program` leaves each part of each tensor."""
    index = program.graph.parameter_index
    return tuple(
        SavedTensor(
            name=home.stored.parameter,
            shape=index[home.stored.parameter].shape,
            sizes=home.stored.sizes,
            trained=home.trained,
            parts=tuple(
                SavedPart(shard_name(rank), part.box, part.span)
                for rank, part in first_holders(program, home)
            ),
        )
        for home in program.homes
    )
