"""Reading checkpoints: parts of tensors, for the plan that wrote them or for another.

A part of a tensor whose parameter is the same in both graphs is put together from the saved boxes
that it meets, and nothing else is read. Where substitutions differ, the parameters that they touch
are made whole, brought to the model's own form, and rewritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stratagem.executor.checkpoints.folder import find_checkpoint
from stratagem.executor.checkpoints.index import (
    CheckpointIndex,
    Course,
    SavedTensor,
    key_of,
)
from stratagem.executor.checkpoints.shard_writer import file_hash
from stratagem.executor.program.programs import part_shape
from stratagem.executor.resharding.conversions import put_together
from stratagem.executor.resharding.seats import box_shape, cut, cut_part
from stratagem.executor.state.batch_norm_counters import as_tensors
from stratagem.executor.state.parameter_state import PARAMETER
from stratagem.executor.state.rewritten_parameters import to_model, to_rewritten
from stratagem.simulator.base.field_types import check_arguments
from stratagem.simulator.graph.substitutions.parameter_map import ParameterMap
from stratagem.simulator.kernel_times.training import AVERAGE, WHOLE_STATES
from stratagem.simulator.sharding.tensor_parts import (
    Box,
    TensorPart,
    box_elements,
    intersection,
)
from stratagem.simulator.torch_ops.kernels.step_programs import as_pairs

if TYPE_CHECKING:
    from stratagem.executor.communication.communicator import Communicator
    from stratagem.executor.interpreter.interpreter import Interpreter
    from stratagem.executor.program.programs import Program
    from stratagem.executor.state.parameter_state import ParameterState


def load_checkpoint(
    path: str | Path, model: nn.Module | None = None, *, averages: bool = False
) -> dict[str, Tensor]:
    """The parameters and buffers of a checkpoint as whole tensors of plain torch, by name.

    Example:
        >>> sg.load_checkpoint("checkpoints", model)["head.weight"].shape  # doctest: +SKIP
        torch.Size([1024, 256])

    Args:
        path: folder of a checkpoint, or of a run's checkpoints: the last one is taken.
        model: where to put them, too.
        averages: of trained parameters instead of these, where the run kept them.

    Returns:
        Every tensor under the name that it has in the model; what training neither reads nor
        changes is not there.

    Raises:
        ValueError: when there is no complete checkpoint, a file of it is missing or damaged, or
            `model` has other parameters, or there are no averages.
    """
    check_arguments(
        "load_checkpoint",
        path=(path, str | Path),
        model=(model, nn.Module | None),
        averages=(averages, bool),
    )
    with Checkpoint(find_checkpoint(path)) as checkpoint:
        checkpoint.check_files()
        checkpoint.check_hashes()
        if averages and AVERAGE not in checkpoint.index.states:
            raise ValueError(
                f"checkpoint {checkpoint.folder} has no averages of parameters; train with "
                'sg.Training(average="exponential"), or leave averages out'
            )
        whole = {
            tensor.name: checkpoint.whole(
                AVERAGE if averages and tensor.trained else PARAMETER, tensor
            )
            for tensor in checkpoint.index.tensors
        }
        state = to_model(checkpoint.index.maps, whole) | as_tensors(checkpoint.index.counters)
    if model is not None:
        _put(state, model, path)
    return state


def _put(state: Mapping[str, Tensor], model: nn.Module, path: str | Path) -> None:
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    theirs = {name: as_pairs(tensor.detach()) for name, tensor in named.items()}
    for name, tensor in state.items():
        given = theirs.get(name)
        if given is None or given.shape != tensor.shape:
            here = "missing" if given is None else tuple(given.shape)
            raise ValueError(
                f"checkpoint {path} has {name!r} of shape {tuple(tensor.shape)}, which is {here} "
                f"in the model; load it into the model that was trained"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            theirs[name].copy_(tensor)


def restore(interpreter: Interpreter, path: str | Path) -> Course:
    """Put a checkpoint into this rank: its parameters and optimizer states; every rank calls this.

    Returns:
        How far the run was.

    Raises:
        ValueError: on every rank alike, when a file is missing or damaged, or the checkpoint is of
            another model.
    """
    program, comm = interpreter.program, interpreter.comm
    with Checkpoint(find_checkpoint(path), program.maps) as checkpoint:
        index = checkpoint.index
        index.check_model(program, checkpoint.folder)
        checkpoint.check_files()
        checkpoint.check_hashes(comm)
        trained = [state for state in interpreter.states.values() if state.trained]
        for state in interpreter.states.values():
            state.put(checkpoint.kept(PARAMETER, state))
        found: list[dict[str, Tensor]] = [{} for _ in trained]
        for kind in index.states:  # What substitutions touch is made whole one kind at a time.
            for tensors, state in zip(found, trained, strict=True):
                if kind in _kinds(program, state.stored.parameter):
                    tensors[kind] = checkpoint.kept(kind, state).to(comm.device)
        for tensors, state in zip(found, trained, strict=True):
            state.optimizer.load(tensors, index.updates)
        if interpreter.scale is not None and index.scale is not None:
            interpreter.scale = index.scale
        interpreter.counters = interpreter.counters.going_on(index.course.step, index.counters)
        return index.course


def _kinds(program: Program, name: str) -> tuple[str, ...]:
    """What the optimizer of a parameter keeps of it."""
    shape = program.graph.parameter_index[name].shape
    return program.plan.training.for_parameter(name).states_of(shape)


class Checkpoint:
    """An open checkpoint, read for a graph that `maps` make of the model's parameters.

    Raises:
        ValueError: when its index is broken.
    """

    def __init__(self, folder: Path, maps: Sequence[ParameterMap] = ()) -> None:
        self.folder = folder
        self.index = CheckpointIndex.load(folder)
        self._maps = tuple(maps)
        self._touched: frozenset[str] = frozenset()
        if self._maps != self.index.maps:
            self._touched = frozenset(
                each.name
                for change in (*self._maps, *self.index.maps)
                for each in (*change.removed, *change.added)
            )
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self._rewritten: tuple[str, dict[str, Tensor]] = ("", {})

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._open.close()

    def check_files(self) -> None:
        """Refuse a checkpoint that lacks a file, or has one of another length.

        Raises:
            ValueError: names the file, and both lengths.
        """
        for file in self.index.files:
            path = self.folder / file.name
            if not path.is_file():
                raise ValueError(
                    f"checkpoint {self.folder} lacks its file {file.name}; copy it there, or "
                    f"resume from another checkpoint"
                )
            if path.stat().st_size != file.num_bytes:
                raise ValueError(
                    f"file {file.name} of checkpoint {self.folder} is damaged: it has "
                    f"{path.stat().st_size} bytes and was written with {file.num_bytes}; resume "
                    f"from another checkpoint"
                )

    def check_hashes(self, comm: Communicator | None = None) -> None:
        """Refuse a checkpoint with a file that changed; ranks share the work.

        Raises:
            ValueError: names the file.
        """
        first, stride = (comm.rank, comm.world_size) if comm else (0, 1)
        worst = 0
        for number in range(first, len(self.index.files), stride):
            file = self.index.files[number]
            if file_hash(self.folder / file.name).hex() != file.sha256:
                worst = number + 1
        if comm:
            mine = torch.tensor([worst], device=comm.device)
            worst = int(comm.all_reduce(mine, tuple(range(comm.world_size)), "max"))
        if worst:
            raise ValueError(
                f"file {self.index.files[worst - 1].name} of checkpoint {self.folder} is damaged: "
                f"its SHA-256 is not the one that it was written with; resume from another "
                f"checkpoint"
            )

    def kept(self, kind: str, state: ParameterState) -> Tensor:
        """What a rank keeps of a kind, in memory of its own, in the shape of its part.

        Raises:
            ValueError: when a file cannot be read.
        """
        stored, part = state.stored, state.part
        if kind in WHOLE_STATES:
            return self.whole_state(kind, stored.parameter)
        found = self.part(kind, stored.parameter, stored.sizes, part)
        return found.reshape(part_shape(stored.layout, part))

    def part(self, kind: str, name: str, sizes: tuple[int, ...], part: TensorPart) -> Tensor:
        """A part of a tensor of the graph, in memory of its own; `sizes` are those of its factors.

        Raises:
            ValueError: when a file cannot be read.
        """
        saved = self.index.by_name.get(name)
        if saved is not None and name not in self._touched:
            if saved.sizes == sizes:
                return self._assemble(kind, saved, part)
            whole = self.whole(kind, saved)
        else:
            whole = self._rewrite(kind)[name]
        everything = TensorPart(tuple((0, size) for size in sizes))
        return put_together(
            [(box, cut_part(whole.reshape(sizes), everything, box)) for box in part.pieces],
            part,
            whole.dtype,
            whole.device,
        ).clone()

    def whole_state(self, kind: str, name: str) -> Tensor:
        """What is kept of a whole parameter, in one file, in memory of its own.

        Raises:
            ValueError: when it cannot be read.
        """
        file = self.index.by_name[name].parts[0].file
        with self._damage(file):
            tensor: Tensor = self._opened(file).get_tensor(key_of(kind, name))
            return tensor.clone()

    def whole(self, kind: str, saved: SavedTensor) -> Tensor:
        """All of a tensor as it was saved, in the shape of the parameter."""
        everything = TensorPart(tuple((0, size) for size in saved.sizes))
        return self._assemble(kind, saved, everything).reshape(saved.shape)

    def _rewrite(self, kind: str) -> dict[str, Tensor]:
        """The parameters that either graph rewrites, as those of the graph that is to run."""
        if self._rewritten[0] != kind:
            whole = {
                name: self.whole(kind, saved)
                for name, saved in self.index.by_name.items()
                if name in self._touched and (saved.trained or kind == PARAMETER)
            }
            model = to_model(self.index.maps, whole)
            self._rewritten = kind, to_rewritten(self._maps, model)
        return self._rewritten[1]

    def _assemble(self, kind: str, saved: SavedTensor, part: TensorPart) -> Tensor:
        made: Tensor | None = None
        for each in saved.parts:
            held = each.part
            for tile, piece in itertools.product(held.pieces, part.pieces):
                shared = intersection(tile, piece)
                if box_elements(shared):
                    read = self._read(each.file, key_of(kind, saved.name), held, shared)
                    if made is None:
                        made = torch.empty(part.shape, dtype=read.dtype)
                    cut_part(made, part, shared).copy_(read)
        return torch.empty(part.shape) if made is None else made

    def _read(self, file: str, key: str, held: TensorPart, wanted: Box) -> Tensor:
        """The box `wanted` of what a file has of a tensor, which is the part `held`."""
        with self._damage(file):
            saved = self._opened(file)
            if held.span is not None:
                return _read_range(saved.get_slice(key), held, wanted)
            if held.box == wanted:
                tensor: Tensor = saved.get_tensor(key)
                return tensor
            slices = tuple(
                slice(start - first, stop - first)
                for (start, stop), (first, _) in zip(wanted, held.box, strict=True)
            )
            part: Tensor = saved.get_slice(key)[slices]
            return part

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            opened = safe_open(self.folder / file, framework="pt")
            self._files[file] = self._open.enter_context(opened)
        return self._files[file]

    @contextmanager
    def _damage(self, file: str) -> Iterator[None]:
        """Say which file it is that cannot be read."""
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"file {file} of checkpoint {self.folder} is damaged: {error}; resume from "
                f"another checkpoint"
            ) from error


def _read_range(saved: Any, held: TensorPart, wanted: Box) -> Tensor:
    """The box `wanted` of a part that a file has as a row of elements: whole lines of a piece."""
    before, piece = held.piece_around(wanted)
    if not wanted:  # A scalar has no lines.
        scalar: Tensor = saved[before : before + 1]
        return scalar.view(())
    (start, stop), (first, _) = wanted[0], piece[0]
    line = box_elements(piece[1:])
    row: Tensor = saved[before + (start - first) * line : before + (stop - first) * line]
    lines = ((start, stop), *piece[1:])
    return cut(row.view(box_shape(lines)), lines, wanted)
