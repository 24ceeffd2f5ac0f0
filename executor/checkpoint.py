"""Writing checkpoints: every rank its own shard, and the index when all of them are there.

    rank 0   ── folder .step-40 ──┬── shard ── sync ──┬── index ── rename to step-40 ── old ones go
    rank 1   ─────────────────────┴── shard ── sync ──┴──────────────────────────────

A rank that is killed at any moment leaves the last complete checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from stratagem.executor.checkpoint_index import (
    INDEX_NAME,
    INDEX_VERSION,
    PARAMETER,
    CheckpointIndex,
    Course,
    ShardFile,
    first_holders,
    key_of,
    saved_tensors,
    shard_name,
)
from stratagem.executor.optimizers import state_names
from stratagem.executor.seats import box_shape
from stratagem.simulator.files import encode

if TYPE_CHECKING:
    from stratagem.executor.interpreter import Interpreter

HASH_BYTES = 32
CHUNK_BYTES = 1 << 22


def save_checkpoint(interpreter: Interpreter, folder: str | Path, course: Course) -> Path:
    """Write what a run needs to go on, and remove older checkpoints; every rank calls this.

    Example:
        >>> save_checkpoint(interpreter, "checkpoints", Course(step=40))  # doctest: +SKIP
        PosixPath('checkpoints/step-00000040')

    Args:
        interpreter: this rank's.
        folder: of the run's checkpoints, which every rank sees.
        course: how far the run is.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: when it cannot be written; older checkpoints are there still.
    """
    comm, program = interpreter.comm, interpreter.program
    final = checkpoint_path(folder, course.step)
    temporary = final.with_name(f".{final.name}.tmp")
    if comm.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    comm.barrier()
    written = _write_shard(interpreter, temporary)
    rows = comm.gather(
        written.to(comm.device),
        [tuple(written.shape)] * comm.world_size,
        0,
        tuple(range(comm.world_size)),
    )
    if rows is not None:
        files, updates = _files(rows)
        training = program.plan.training
        index = CheckpointIndex(
            version=INDEX_VERSION,
            model=program.plan.model,
            parameters=program.model_parameters,
            plan=program.plan.name,
            optimizer=training.optimizer,
            states=state_names(training) if updates else (),
            updates=updates,
            rate=interpreter.optimizer.rate,
            course=course,
            maps=program.maps,
            tensors=saved_tensors(program),
            files=files,
            scale=interpreter.scale,
        )
        _publish(index, temporary, final)
    comm.barrier()
    return final


def checkpoint_path(folder: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return Path(folder) / f"step-{step:08d}"


def complete_checkpoints(folder: str | Path) -> dict[int, Path]:
    """The complete checkpoints of a folder by step, ascending; none where it does not exist."""
    found: dict[int, Path] = {}
    for path in Path(folder).glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match and (path / INDEX_NAME).is_file():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def file_hash(path: Path) -> bytes:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _write_shard(interpreter: Interpreter, folder: Path) -> Tensor:
    """Write this rank's parts; bytes, updates and hash of the file as a row of integers."""
    comm = interpreter.comm
    tensors, updates = _own_parts(interpreter)
    row = torch.zeros(2 + HASH_BYTES, dtype=torch.int64)
    if not folder.is_dir():
        raise OSError(
            f"rank {comm.rank} does not see {folder}, which rank 0 made; write checkpoints to a "
            f"folder that every node sees"
        )
    if tensors:
        path = folder / shard_name(comm.rank)
        save_file(tensors, path)
        _sync(path)
        row[0], row[1] = path.stat().st_size, updates
        row[2:] = torch.tensor(list(file_hash(path)))
    return row


def _own_parts(interpreter: Interpreter) -> tuple[dict[str, Tensor], int]:
    """The parts of which this rank is the first holder, and how often they were updated."""
    program, rank = interpreter.program, interpreter.comm.rank
    tensors: dict[str, Tensor] = {}
    updates = 0
    for home in program.homes:
        name = home.stored.parameter
        for holder, box in first_holders(program, home):
            if holder != rank:
                continue
            kept = {PARAMETER: interpreter.value(home.stored)}
            if home.trained:
                kept |= interpreter.optimizer.state(name)
                updates = max(updates, interpreter.optimizer.updates(name))
            for kind, tensor in kept.items():
                tensors[key_of(kind, name)] = tensor.reshape(box_shape(box)).contiguous()
    return tensors, updates


def _files(rows: list[Tensor]) -> tuple[tuple[ShardFile, ...], int]:
    table = [row.tolist() for row in rows]
    files = tuple(
        ShardFile(shard_name(rank), row[0], bytes(row[2:]).hex())
        for rank, row in enumerate(table)
        if row[0]
    )
    return files, max(row[1] for row in table)


def _publish(index: CheckpointIndex, temporary: Path, final: Path) -> None:
    """Make the checkpoint visible, and then remove what it replaces."""
    path = temporary / INDEX_NAME
    path.write_text(encode(index), encoding="utf-8")
    _sync(path)
    _sync(temporary)
    temporary.rename(final)
    _sync(final.parent)
    for step, old in complete_checkpoints(final.parent).items():
        if step < index.course.step:
            (old / INDEX_NAME).unlink()
            shutil.rmtree(old)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
