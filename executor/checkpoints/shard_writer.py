"""Writing checkpoints: every rank its own shard, and the index when all of them are there.

    rank 0   ── folder .step-40 ──┬── shard ── sync ──┬── index ── rename to step-40 ── old ones go
    rank 1   ─────────────────────┴── shard ── sync ──┴──────────────────────────────

A rank that is killed at any moment leaves the last complete checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from stratagem.executor.checkpoints.folder import KEEP, checkpoint_path, publish
from stratagem.executor.checkpoints.index import (
    INDEX_NAME,
    INDEX_VERSION,
    CheckpointIndex,
    Course,
    ShardFile,
    first_holders,
    key_of,
    saved_tensors,
    shard_name,
)
from stratagem.simulator.base.files import new_file_mode, sync
from stratagem.simulator.kernel_times.training import WHOLE_STATES

if TYPE_CHECKING:
    from stratagem.executor.interpreter.interpreter import Interpreter

HASH_BYTES = 32
CHUNK_BYTES = 1 << 22


def save_checkpoint(
    interpreter: Interpreter,
    folder: str | Path,
    course: Course,
    *,
    loss: float | None = None,
    keep: int = KEEP,
) -> Path:
    """Write what a run needs to go on, and remove older checkpoints; every rank calls this.

    Example:
        >>> save_checkpoint(interpreter, "checkpoints", Course(step=40))  # doctest: +SKIP
        PosixPath('checkpoints/step-00000040')

    Args:
        interpreter: this rank's.
        folder: of the run's checkpoints, which every rank sees.
        course: how far the run is.
        loss: of the last step, where this rank knows it.
        keep: how many checkpoints stay, and beside them the last finite one.

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
    written = _write_shard(interpreter, temporary, loss)
    rows = comm.gather(
        written.to(comm.device),
        [tuple(written.shape)] * comm.world_size,
        0,
        tuple(range(comm.world_size)),
    )
    if rows is not None:
        files, updates, finite = _files(rows)
        training = program.plan.training
        index = CheckpointIndex(
            version=INDEX_VERSION,
            model=program.plan.model,
            parameters=program.model_parameters,
            plan=program.plan.name,
            optimizer=" and ".join(training.optimizers),
            states=training.states if updates else (),
            updates=updates,
            rate=interpreter.optimizer.now[0].rate,
            course=course,
            maps=program.maps,
            tensors=saved_tensors(program),
            files=files,
            scale=interpreter.scale,
            finite=finite,
            counters=interpreter.counters.at(course.step),
        )
        path = temporary / INDEX_NAME
        path.write_text(index.to_json(), encoding="utf-8")
        sync(path)
        sync(temporary)
        publish(temporary, final, keep=keep)
    comm.barrier()
    return final


def file_hash(path: Path) -> bytes:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _write_shard(interpreter: Interpreter, folder: Path, loss: float | None) -> Tensor:
    """Write this rank's parts; a row of their bytes, updates, finiteness and hash."""
    comm = interpreter.comm
    tensors, updates = _own_parts(interpreter)
    row = torch.zeros(3 + HASH_BYTES, dtype=torch.int64)
    row[2] = (loss is None or math.isfinite(loss)) and all(map(_is_finite, tensors.values()))
    if not folder.is_dir():
        raise OSError(
            f"rank {comm.rank} does not see {folder}, which rank 0 made; write checkpoints to a "
            f"folder that every node sees"
        )
    if tensors:
        path = folder / shard_name(comm.rank)
        save_file(tensors, path)
        path.chmod(new_file_mode())
        sync(path)
        row[0], row[1] = path.stat().st_size, updates
        row[3:] = torch.tensor(list(file_hash(path)))
    return row


def _own_parts(interpreter: Interpreter) -> tuple[dict[str, Tensor], int]:
    """The parts of which this rank is the first holder, and how often they were updated."""
    program, rank = interpreter.program, interpreter.comm.rank
    tensors: dict[str, Tensor] = {}
    updates = 0
    for state in interpreter.states.values():
        holders = () if state.home is None else first_holders(program, state.home)
        for number, (holder, part) in enumerate(holders):
            if holder != rank:
                continue
            updates = max(updates, state.optimizer.updates)
            for kind, tensor in state.kept().items():
                key = key_of(kind, state.stored.parameter)
                if kind not in WHOLE_STATES:
                    tensors[key] = tensor.reshape(part.shape).contiguous()
                elif number == 0:  # Every rank has all of it.
                    tensors[key] = tensor.contiguous()
    return tensors, updates


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _files(rows: list[Tensor]) -> tuple[tuple[ShardFile, ...], int, bool]:
    table = [row.tolist() for row in rows]
    files = tuple(
        ShardFile(shard_name(rank), row[0], bytes(row[3:]).hex())
        for rank, row in enumerate(table)
        if row[0]
    )
    return files, max(row[1] for row in table), all(row[2] for row in table)
