"""Checkpoints: a run goes on bit for bit, under any plan, and from nothing that is damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.models import SmallGPT
from stratagem.executor import ExecutionResult, execute, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.checkpoints import shard_writer as writing
from stratagem.executor.checkpoints.folder import (
    checkpoint_path,
    complete_checkpoints,
    find_checkpoint,
)
from stratagem.executor.checkpoints.index import INDEX_NAME, Course
from stratagem.executor.checkpoints.reader import Checkpoint, load_checkpoint, restore
from stratagem.executor.checkpoints.shard_writer import save_checkpoint
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.executor.state.parameter_state import PARAMETER
from stratagem.executor.training.learning_rates import RateSchedule
from stratagem.simulator.graph.models import mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.sharding.tensor_parts import box_elements
from stratagem.simulator.torch_ops.capture.capture import capture
from tests.support.checkpoint_runs import (
    PLANS,
    TOKENS,
    contents,
    flip,
    make_plan,
    plan_called,
    replicated,
    same,
    sharded,
)
from tests.support.plans import crossed

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def written(
    graph: OperatorGraph,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """The folder of a run of two steps under a plan."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("run")
            plan = plan_called(name, graph)
            execute(plan, graph, state, data, steps=2, checkpoint=folders[name], timeout=60)
        return folders[name]

    return run


@pytest.mark.parametrize(("distance", "name"), crossed([1, 3, 4], PLANS, every=3))
def test_a_checkpoint_is_the_same_after_any_plan_has_loaded_it(
    name: str,
    distance: int,
    graph: OperatorGraph,
    state: dict[str, Tensor],
    written: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Parameters and optimizer states survive every change of layout bit for bit."""
    names = list(PLANS)
    other = names[(names.index(name) + distance) % len(names)]
    program = prepare(plan_called(other, graph), graph)
    folder = written(name)

    def run(comm: Communicator) -> Course:
        interpreter = Interpreter(program, comm, state)
        course = restore(interpreter, folder)
        save_checkpoint(interpreter, tmp_path, course)
        return course

    courses = run_local(program.world_size, run)
    assert set(courses) == {Course(step=2, epoch=0, batch=2)}
    first, second = contents(folder), contents(tmp_path)
    assert {kind for kind, _ in first} == {PARAMETER, "mean", "square"}
    assert {n for kind, n in first if kind == PARAMETER} == set(state)
    assert same(first, second)
    updates = [Checkpoint(find_checkpoint(f)).index.updates for f in (folder, tmp_path)]
    assert updates == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "name"),
    crossed(["float32", "bfloat16"], ["two stages", "drawn and rewritten"], every=2),
)
def test_a_run_that_goes_on_equals_one_that_was_not_interrupted(
    name: str,
    precision: str,
    graph: OperatorGraph,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    """Bit for bit: losses, parameters and optimizer states, also into another pass over data."""
    training = Training(precision, learning_rate=0.01)
    plan = replace(plan_called(name, graph), training=training)
    rate = RateSchedule("cosine", 2, 7)

    def run(steps: int, folder: str, resume: str | None = None) -> ExecutionResult:
        return execute(
            plan,
            graph,
            state,
            data,
            steps=steps,
            warmup=1,
            rate=rate,
            checkpoint=tmp_path / folder,
            every=2,
            resume=None if resume is None else tmp_path / resume,
            timeout=60,
        )

    whole = run(7, "whole")
    first = run(4, "parts")
    second = run(7, "parts", resume="parts")
    assert (first.first_step, second.first_step) == (0, 4)
    assert (*first.losses, *second.losses) == whole.losses
    for parameter, tensor in whole.parameters.items():
        assert torch.equal(tensor, second.parameters[parameter]), parameter
    for folder in (tmp_path / "whole", tmp_path / "parts"):
        assert list(complete_checkpoints(folder)) == [6, 7]
    assert same(contents(tmp_path / "whole"), contents(tmp_path / "parts"))


def test_updates_are_counted_on_where_an_optimizer_keeps_nothing_else(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = replace(plan_called("zero 1", graph), training=Training(optimizer="sgd"))
    execute(plan, graph, state, data, steps=2, checkpoint=tmp_path)
    execute(plan, graph, state, data, steps=5, checkpoint=tmp_path, resume=tmp_path)
    with Checkpoint(find_checkpoint(tmp_path)) as checkpoint:
        assert (checkpoint.index.states, checkpoint.index.updates) == ((), 5)


def test_training_goes_on_under_another_plan(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    whole = execute(plan_called("one device", graph), graph, state, data, steps=5, timeout=60)
    execute(plan_called("zero 1", graph), graph, state, data, steps=2, checkpoint=tmp_path)
    plan = plan_called("drawn and rewritten", graph)
    rest = execute(plan, graph, state, data, steps=5, resume=tmp_path, timeout=60)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-4)


def test_a_rank_reads_what_it_keeps_and_no_more(
    graph: OperatorGraph,
    state: dict[str, Tensor],
    written: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    original = Checkpoint._read

    def count(self, file, key, held, wanted):  # type: ignore[no-untyped-def]
        read.append(box_elements(wanted))
        return original(self, file, key, held, wanted)

    monkeypatch.setattr(Checkpoint, "_read", count)
    program = prepare(plan_called("tensor parallel", graph), graph)
    folder = written("zero 1")
    kept: list[int] = []  # List.extend is one step for the threads that play ranks.

    def run(comm: Communicator) -> None:
        interpreter = Interpreter(program, comm, state)
        restore(interpreter, folder)
        for each in interpreter.states.values():
            kept.extend(tensor.numel() for tensor in each.kept().values())

    run_local(program.world_size, run)
    assert sum(read) == sum(kept)


def test_a_checkpoint_is_plain_torchs_too(tmp_path: Path) -> None:
    """Whole tensors by the names of the model, which then has the loss of the next step."""
    torch.manual_seed(0)
    model = SmallGPT(num_layers=1, hidden=8, num_heads=2, vocabulary=TOKENS, sequence=6)
    tokens = torch.randint(TOKENS, (4, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    graph = capture(model, kwargs=batch)
    plan = make_plan(graph, sharded("head", "parameter", zero=1), 2)
    result = execute(plan, graph, model_state(model), batch, steps=3, checkpoint=tmp_path)
    state = load_checkpoint(tmp_path, model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, result.parameters.get(name, tensor))
    assert state.keys() == result.parameters.keys()
    more = execute(plan, graph, model_state(model), batch)
    assert float(model(**batch).detach()) == pytest.approx(more.losses[0], rel=1e-5)
    other = SmallGPT(num_layers=1, hidden=12, num_heads=2, vocabulary=TOKENS, sequence=6)
    with pytest.raises(
        ValueError, match=r"'tokens.weight' of shape \(11, 8\), which is \(11, 12\)"
    ):
        load_checkpoint(tmp_path, other)


# -- what is refused ----------------------------------------------------------------------------


@pytest.fixture
def run_on(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]]
) -> Callable[..., list[str]]:
    """Try to go on from a folder; the steps that were run although it must not."""

    def run(folder: Path, **changed: object) -> list[str]:
        shown: list[str] = []
        plan = replace(plan_called("data parallel", graph), **changed)  # type: ignore[arg-type]
        execute(
            plan,
            graph,
            state,
            data,
            steps=9,
            resume=folder,
            show=lambda what, fraction, remark: shown.append(remark),
        )
        return shown

    return run


@pytest.fixture
def copy(written: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint of two shards that a test may spoil."""
    source = find_checkpoint(written("zero 1"))
    target = tmp_path / source.name
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "rank-00001.safetensors").unlink(), "lacks its file rank-00001"),
        (
            lambda f: (f / "rank-00001.safetensors").write_bytes(b"short"),
            r"rank-00001.safetensors of checkpoint .* is damaged: it has 5 bytes and was written",
        ),
        (lambda f: flip(f / "rank-00001.safetensors"), "rank-00001.* damaged: its SHA-256"),
        (lambda f: (f / INDEX_NAME).unlink(), "no complete checkpoint"),
        (lambda f: (f / INDEX_NAME).write_text('{"version": 1'), "index.json is broken"),
        (
            lambda f: (f / INDEX_NAME).write_text(
                (f / INDEX_NAME).read_text().replace('"version": 2', '"version": 99')
            ),
            "has version 99, this program reads 2",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    copy: Path, spoil: Callable[[Path], object], words: str, run_on: Callable[..., list[str]]
) -> None:
    spoil(copy)
    with pytest.raises(ValueError, match=words):
        run_on(copy.parent)
    with pytest.raises(ValueError, match=words):
        load_checkpoint(copy.parent)


def test_a_checkpoint_of_another_model_is_refused(
    written: Callable[[str], Path], run_on: Callable[..., list[str]], tmp_path: Path
) -> None:
    other = mlp([6, 5, 4], batch=4)
    state = {each.name: torch.zeros(each.shape) for each in other.parameters}
    batch = {
        each.name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype))
        for each in other.inputs
    }
    plan = make_plan(other, replicated, 1)
    with pytest.raises(ValueError, match=r"is of model 'llama', not of this one .*missing there"):
        execute(plan, other, state, batch, steps=9, resume=written("zero 1"))
    with pytest.raises(ValueError, match="written by optimizer 'adam', but plan 'test' trains"):
        run_on(written("zero 1"), training=Training(optimizer="sgd"))


def test_there_must_be_something_to_go_on_from_and_to_do(
    graph: OperatorGraph,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    written: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ValueError, match="nowhere has no complete checkpoint"):
        execute(plan, graph, state, data, steps=3, resume=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is of step 2 already; steps=2 counts from the start"):
        execute(plan, graph, state, data, steps=2, resume=written("zero 1"))
    with pytest.raises(
        ValueError, match="has a checkpoint of step 2 already, and this run begins"
    ):
        execute(plan, graph, state, data, steps=2, checkpoint=written("zero 1"))


# -- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["_write_shard", "publish", "sync"])
def test_a_checkpoint_that_fails_leaves_the_last_one(
    broken: str,
    graph: OperatorGraph,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_called("data parallel", graph)
    execute(plan, graph, state, data, steps=2, checkpoint=tmp_path)
    before = contents(tmp_path)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, broken, fail)
        with pytest.raises(OSError, match="no space left"):
            execute(plan, graph, state, data, steps=4, checkpoint=tmp_path, resume=tmp_path)
    assert list(complete_checkpoints(tmp_path)) == [2]
    assert same(before, contents(tmp_path))
    execute(plan, graph, state, data, steps=4, checkpoint=tmp_path, resume=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [checkpoint_path("", step).name for step in (2, 4)]


def test_a_folder_that_a_rank_does_not_see_is_refused(
    graph: OperatorGraph, state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = prepare(plan_called("data parallel", graph), graph)

    def run(comm: Communicator) -> None:
        interpreter = Interpreter(program, comm, state)
        save_checkpoint(interpreter, tmp_path / str(comm.rank), Course(1))

    with pytest.raises(OSError, match=r"rank 1 does not see .* a folder that every node sees"):
        run_local(2, run)


def test_every_change_of_an_index_is_found(copy: Path) -> None:
    """Digits and letters of values: what is no JSON any more is found anyway."""
    path = copy / INDEX_NAME
    text = path.read_text()
    rng = random.Random(0)
    places = [n for n, character in enumerate(text) if character.isalnum()]
    for place in rng.sample(places, 300):
        changed = rng.choice([c for c in "019azAZ" if c != text[place]])
        path.write_text(text[:place] + changed + text[place + 1 :])
        with pytest.raises(ValueError, match="checkpoint"):
            load_checkpoint(copy)
