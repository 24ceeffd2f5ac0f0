"""Checkpoints: a run goes on bit for bit, under any plan, and from nothing that is damaged."""

from __future__ import annotations

import math
import os
import random
import stat
import threading
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
    LOCK_NAME,
    checkpoint_path,
    complete_checkpoints,
    find_checkpoint,
    only_writer,
)
from stratagem.executor.checkpoints.index import INDEX_NAME, PARAMETER, Course
from stratagem.executor.checkpoints.reader import Checkpoint, load_checkpoint, restore
from stratagem.executor.checkpoints.shard_writer import save_checkpoint
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.running.execute import prepare
from stratagem.executor.state.rewritten_parameters import to_model
from stratagem.executor.training.learning_rates import RateSchedule
from stratagem.searcher.space.graph_rewrites import steps as one_step
from stratagem.simulator.graph.models import llama, mlp
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import REPLICATE, Pin, Shard, check_config
from stratagem.simulator.graph.substitutions import rewrite
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh, MeshAxis
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Operator
from stratagem.simulator.plan.plan import Plan, Stage
from stratagem.simulator.sharding.choice import Choice
from stratagem.simulator.sharding.tensor_parts import box_elements
from stratagem.simulator.torch_ops.capture.capture import capture

torch.set_num_threads(1)
TOKENS = 11
Chooser = Callable[[Operator, int], Choice]


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return llama(
        num_layers=2, hidden=8, num_heads=2, ffn=12, vocabulary=TOKENS, sequence=6, batch=4
    )


@pytest.fixture(scope="module")
def state(graph: OperatorGraph) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {each.name: 0.3 * torch.randn(each.shape) for each in graph.parameters}


@pytest.fixture(scope="module")
def data(graph: OperatorGraph) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [
        {each.name: torch.randint(TOKENS, each.shape) for each in graph.inputs} for _ in range(3)
    ]


# -- plans --------------------------------------------------------------------------------------


def replicated(operator: Operator, ways: int) -> Choice:
    return Choice((REPLICATE,))


def sharded(*dims: str, zero: int = 0) -> Chooser:
    """Shard the first of `dims` that an operator can have sharded."""

    def choose(operator: Operator, ways: int) -> Choice:
        for name in dims:
            for dim in operator.dims:
                if name in (dim.name, dim.kind.value) and legal(operator, Shard(dim.name), ways):
                    return Choice((Shard(dim.name),), zero)
        return Choice((REPLICATE,))

    return choose


def drawn(seed: int) -> Chooser:
    rng = random.Random(seed)

    def choose(operator: Operator, ways: int) -> Choice:
        shards = [
            Shard(dim.name) for dim in operator.dims if legal(operator, Shard(dim.name), ways)
        ]
        tried = rng.choice([REPLICATE, Pin(rng.randrange(ways)), *shards, *shards])
        if not legal(operator, tried, ways):
            tried = REPLICATE
        return Choice((tried,), rng.randrange(4))

    return choose


def legal(operator: Operator, placement: object, ways: int) -> bool:
    try:
        check_config(operator, (placement,), (ways,))  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def make_plan(
    graph: OperatorGraph,
    choose: Chooser,
    *ways: int,
    rules: tuple[str, ...] = (),
    training: Training | None = None,
) -> Plan:
    """Stages of so many devices each, with the operators cut in equal parts."""
    found = [next(step for step in one_step(graph) if step.rule == rule) for rule in rules]
    graph = rewrite(graph, found).graph
    names = [operator.name for operator in graph.operators if not operator.is_source]
    cuts = [len(names) * s // len(ways) for s in range(len(ways) + 1)]
    stages, device = [], 0
    for s, count in enumerate(ways):
        mesh = DeviceMesh((MeshAxis("axis", count),), tuple(range(device, device + count)))
        device += count
        sources = tuple(o.name for o in graph.operators if o.is_source) if s == 0 else ()
        listed = (*sources, *names[cuts[s] : cuts[s + 1]])
        chosen = {
            name: replicated(graph.operator(name), count)
            if name in sources
            else choose(graph.operator(name), count)
            for name in listed
        }
        stages.append(Stage(listed, mesh, chosen))
    return Plan(
        name="test",
        model=graph.name,
        fingerprint=graph.fingerprint,
        cluster=Cluster.preset("dgx-a100", num_nodes=1),
        training=training or Training(learning_rate=0.01),
        stages=tuple(stages),
        num_microbatches=2,
        substitutions=tuple(found),
        seed=2,
    )


PLANS: dict[str, tuple[Chooser, tuple[int, ...], tuple[str, ...]]] = {
    "one device": (replicated, (1,), ()),
    "data parallel": (sharded("sample"), (2,), ()),
    "zero 1": (sharded("sample", zero=1), (2,), ()),
    "zero 3": (sharded("sample", zero=3), (2,), ()),
    "tensor parallel": (sharded("head", "ffn", "out", "parameter"), (2,), ()),
    "two stages": (sharded("sample", zero=2), (1, 2), ()),
    "rewritten": (sharded("sample", zero=1), (2,), ("merge",)),
    "drawn": (drawn(4), (3,), ()),
    "drawn and rewritten": (drawn(9), (2, 2), ("merge",)),
}


def plan_called(name: str, graph: OperatorGraph) -> Plan:
    choose, ways, rules = PLANS[name]
    return make_plan(graph, choose, *ways, rules=rules)


# -- what a checkpoint holds --------------------------------------------------------------------


def contents(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Every tensor of a checkpoint, whole and in the model's form, by kind and name."""
    found = {}
    with Checkpoint(find_checkpoint(folder)) as checkpoint:
        for kind in (PARAMETER, *checkpoint.index.states):
            whole = {
                each.name: checkpoint.whole(kind, each)
                for each in checkpoint.index.tensors
                if each.trained or kind == PARAMETER
            }
            for name, tensor in to_model(checkpoint.index.maps, whole).items():
                found[kind, name] = tensor
    return found


def same(one: dict[tuple[str, str], Tensor], two: dict[tuple[str, str], Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


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


@pytest.mark.parametrize("distance", [1, 3, 4])
@pytest.mark.parametrize("name", PLANS)
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


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["two stages", "drawn and rewritten"])
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
        kept.extend(interpreter.value(stored).numel() for stored in interpreter.mine.stored)
        for home in program.homes:
            kept.extend(
                t.numel() for t in interpreter.optimizer.state(home.stored.parameter).values()
            )

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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


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


# -- which checkpoints stay, and who writes them ------------------------------------------------


def steps_of(folder: Path) -> list[int]:
    return list(complete_checkpoints(folder))


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_checkpoints_stay(
    keep: int,
    graph: OperatorGraph,
    state: dict[str, Tensor],
    data: list[dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    plan = plan_called("data parallel", graph)
    execute(plan, graph, state, data, steps=5, checkpoint=tmp_path, every=1, keep=keep)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5][-keep:]
    if keep > 1:
        flip(checkpoint_path(tmp_path, 5) / "rank-00000.safetensors")
        again = execute(
            plan, graph, state, data, steps=6, resume=checkpoint_path(tmp_path, 4), warmup=0
        )
        assert again.first_step == 4


def test_what_stays_must_be_at_least_one_and_somewhere(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ValueError, match="keep=0; at least 1 checkpoint must stay"):
        execute(plan, graph, state, data, checkpoint=tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep=3, but there is no folder for checkpoints"):
        execute(plan, graph, state, data, keep=3)


def explode(step: int) -> float:
    """A learning rate that makes all parameters not a number in the third step."""
    return 1e60 if step == 2 else 1.0


def test_a_loss_that_is_not_finite_is_told_and_costs_no_checkpoint(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    """The step that breaks has a finite loss itself: its parameters are looked at, too."""
    plan = plan_called("data parallel", graph)
    given = {"checkpoint": tmp_path, "every": 1, "rate": explode}
    with pytest.warns(UserWarning, match=r"the loss of step 3 is nan, .* like 3 of 6 of this run"):
        broken = execute(plan, graph, state, data, steps=6, **given)
    assert [math.isfinite(loss) for loss in broken.losses] == [True] * 3 + [False] * 3
    assert steps_of(tmp_path) == [2, 5, 6]
    with pytest.warns(UserWarning, match=r"after steps 5, 6 are not finite; .* step 2 is taken"):
        assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 2)
    with pytest.warns(UserWarning, match="step 2 is taken"):
        again = execute(
            plan, graph, state, data, steps=6, checkpoint=tmp_path, every=1, resume=tmp_path
        )
    whole = execute(plan, graph, state, data, steps=6, checkpoint=tmp_path / "whole", every=1)
    assert again.losses == whole.losses[2:]
    assert steps_of(tmp_path) == [5, 6]
    assert same(contents(tmp_path / "whole"), contents(tmp_path))


@pytest.mark.parametrize("rate", [math.inf, math.nan, -0.5])
def test_a_rate_that_is_none_ends_the_run(
    rate: float, graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]]
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ValueError, match=rf"rate of step 1 is multiplied by {rate}; give"):
        execute(plan, graph, state, data, steps=3, rate=lambda step: rate if step else 1.0)


def test_a_loss_that_must_be_finite_ends_the_run(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = plan_called("data parallel", graph)
    with pytest.raises(ArithmeticError, match=r"the loss of step 3 is nan, and was to be finite"):
        execute(
            plan,
            graph,
            state,
            data,
            steps=6,
            checkpoint=tmp_path,
            every=1,
            keep=1,
            rate=explode,
            finite=True,
        )
    assert steps_of(tmp_path) == [2, 3]


def test_one_run_at_a_time_writes_to_a_folder(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    plan = plan_called("data parallel", graph)
    holder = rf"the run of plan 'first', process {os.getpid()} on .* writes checkpoints to"
    with only_writer(tmp_path, "first"), pytest.raises(ValueError, match=holder):
        execute(plan, graph, state, data, checkpoint=tmp_path)
    assert not (tmp_path / LOCK_NAME).exists()
    (tmp_path / LOCK_NAME).write_text("a run that was killed")
    execute(plan, graph, state, data, checkpoint=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [checkpoint_path("", 1).name]


def test_a_lock_that_its_holder_removes_meanwhile_does_not_count(tmp_path: Path) -> None:
    """Many take and leave a folder in turn: never are two in it."""
    inside, most, done = [], [], []

    def take() -> None:
        for _ in range(50):
            try:
                with only_writer(tmp_path, "plan"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
                    done.append(1)
            except ValueError:
                continue

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done
    assert max(most) == 1


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


def test_all_files_of_a_checkpoint_have_the_mode_of_new_files(
    graph: OperatorGraph, state: dict[str, Tensor], data: list[dict[str, Tensor]], tmp_path: Path
) -> None:
    before = os.umask(0o027)
    try:
        execute(plan_called("data parallel", graph), graph, state, data, checkpoint=tmp_path)
    finally:
        os.umask(before)
    (folder,) = complete_checkpoints(tmp_path).values()
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o640}
