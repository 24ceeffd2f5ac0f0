"""Updates of many parameters in few launches: whatever their lengths, formats and numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stratagem.executor import lower, model_state
from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.cuda import cupy_kernels
from stratagem.executor.cuda.cuda_sources import CELLS, CHUNK, MOST_CELLS, MOST_TENSORS, TENSORS
from stratagem.executor.cuda.cupy_kernels import THREADS, StructArgument
from stratagem.executor.interpreter.interpreter import Interpreter
from stratagem.executor.optimizers import fused_optimizers
from stratagem.executor.optimizers.fused_optimizers import PAGE, FusedAdam, FusedSGD
from stratagem.executor.optimizers.make_optimizer import make_optimizer
from stratagem.executor.optimizers.parameter_tables import ParameterRow, table_of
from stratagem.executor.state.gradient_lists import GradientChange, clip_scale
from stratagem.simulator.kernel_times.training import Training
from tests.support.cuda.host_kernels import kernels_on_the_host, start_on_host
from tests.support.plans import Case, make_case, make_plan, sharding

ARGUMENTS = 4096
"""Bytes of a kernel's arguments that every driver takes."""


class Launches:
    """Names, threads and arguments of kernels that were started."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[int] = []
        self.arguments: list[tuple[Any, ...]] = []

    def start(self, name: str, num_threads: int, *arguments: Any, most_blocks: int = 1) -> None:
        self.names.append(name)
        self.threads.append(num_threads)
        self.arguments.append(arguments)
        start_on_host(name, num_threads, *arguments)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What is started, on the host."""
    made = Launches()
    monkeypatch.setattr(fused_optimizers, "start", made.start)
    return made


@contextmanager
def on_the_host() -> Iterator[None]:
    before = fused_optimizers.start
    fused_optimizers.start = start_on_host
    try:
        yield
    finally:
        fused_optimizers.start = before


def fused(training: Training) -> FusedSGD:
    return FusedAdam(training) if training.optimizer == "adam" else FusedSGD(training)


class Lying(NamedTuple):
    """How a parameter, its gradient and its copy lie: length, formats, and whether with gaps."""

    length: int
    gradient: torch.dtype
    copy: torch.dtype | None
    parameter_step: int
    gradient_step: int
    copy_step: int
    offset: int

    def change(self, name: str, generator: torch.Generator) -> GradientChange:
        def drawn(step: int, dtype: torch.dtype) -> Tensor:
            size = (self.length + 1) * step + self.offset
            whole = torch.randn(size, generator=generator).to(dtype)
            return whole[self.offset :: step][: self.length]

        copy = None if self.copy is None else drawn(self.copy_step, self.copy)
        return GradientChange(
            name,
            drawn(self.parameter_step, torch.float32),
            drawn(self.gradient_step, self.gradient),
            copy,
        )


LENGTHS = (0, 1, 3, 4, 5, 768, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 6)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LYING = st.builds(
    Lying,
    *(st.sampled_from(LENGTHS), st.sampled_from(DTYPES), st.sampled_from((None, *DTYPES[:3]))),
    *(st.sampled_from((1, 1, 2)), st.sampled_from((1, 1, 3)), st.sampled_from((1, 1, 2))),
    st.integers(0, 3),
)


@given(
    lying=st.lists(LYING, min_size=1, max_size=12),
    steps=st.lists(st.tuples(st.sets(st.integers(0, 11)), st.sampled_from((None, 0.25, 1.0)))),
    optimizer=st.sampled_from(("adam", "sgd")),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60)
def test_any_of_them_are_as_by_one_optimizer_each(
    lying: list[Lying], steps: list[tuple[set[int], float | None]], optimizer: str, seed: int
) -> None:
    """Some parameters a step, scaled or not, against torch's formulas on each alone."""
    training = Training(optimizer=optimizer, learning_rate=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(seed)
    changes = [each.change(str(n), generator) for n, each in enumerate(lying)]
    theirs = [change.parameter.clone() for change in changes]
    ours, others = fused(training), [make_optimizer(training) for _ in changes]
    with on_the_host():
        for chosen, scale in [*steps, (set(range(12)), 0.5)]:
            named = [n for n in sorted(chosen) if n < len(changes)]
            times = None if scale is None else torch.tensor(scale)
            ours.all_of([changes[n] for n in named], times)
            for n in named:
                gradient = changes[n].gradient.float() * (1.0 if scale is None else scale)
                others[n](str(n), theirs[n], gradient)
    for n, change in enumerate(changes):
        torch.testing.assert_close(change.parameter, theirs[n], rtol=1e-5, atol=1e-6)
        if change.copy is not None:
            assert torch.equal(change.copy, change.parameter.to(change.copy.dtype))
        assert ours.state(change.name).updates == others[n].state(change.name).updates
        for name, state in ours.state(change.name).tensors.items():
            other = others[n].state(change.name).tensors[name]
            torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("count", [1, MOST_TENSORS, MOST_TENSORS + 1, 2 * MOST_TENSORS + 28])
def test_launches_are_few_however_many_parameters_there_are(
    launches: Launches, count: int
) -> None:
    training = Training(optimizer="adam", learning_rate=0.01, weight_decay=0.1)
    update, by_torch = fused(training), make_optimizer(training)
    changes = [GradientChange(str(n), torch.ones(n + 1), torch.ones(n + 1)) for n in range(count)]
    theirs = [each._replace(parameter=each.parameter.clone()) for each in changes]
    update.all_of(changes)
    by_torch.all_of(theirs)
    assert launches.names == ["count_updates"] + ["adam"] * -(-count // MOST_TENSORS)
    assert sum(launches.threads[1:]) == count * THREADS
    for ours, other in zip(changes, theirs, strict=True):
        torch.testing.assert_close(ours.parameter, other.parameter)


def test_what_is_made_for_a_launch_is_a_handful(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients in formats that kernels do not know were cast all at once."""
    monkeypatch.setattr(fused_optimizers, "HANDFUL_BYTES", 40)
    update = FusedSGD(Training(optimizer="sgd", learning_rate=1.0))
    sizes, parts = [4, 6, 1, 30, 2, 2], [[4, 6], [1], [30], [2, 2]]
    for dtype, expected in ((torch.float64, parts), (torch.float32, [sizes])):
        changes = [
            GradientChange(str(n), torch.ones(size), torch.ones(size, dtype=dtype))
            for n, size in enumerate(sizes)
        ]
        launches.arguments.clear()
        update.all_of(changes)
        tables = [each[0].packed for each in launches.arguments[1:]]
        assert [each["length"][0, : each["count"][0]].tolist() for each in tables] == expected


def test_numbers_of_more_parameters_than_a_launch_raises(launches: Launches) -> None:
    count = max(MOST_CELLS, PAGE) + 10
    update = FusedSGD(Training(optimizer="sgd", learning_rate=1.0))
    changes = [GradientChange(str(n), torch.ones(1), torch.ones(1)) for n in range(count)]
    for _ in range(2):
        update.all_of(changes)
    assert launches.names.count("count_updates") == 4
    assert {update.state(str(n)).updates for n in range(count)} == {2}
    assert {float(change.parameter) for change in changes} == {-1.0}


def test_arguments_fit_what_old_drivers_take(launches: Launches) -> None:
    for optimizer in ("adam", "sgd"):
        training = Training(optimizer=optimizer, learning_rate=0.01)
        fused(training)("p", torch.ones(3), torch.ones(3))
    assert {*launches.names} == {"count_updates", "adam", "sgd"}
    for arguments in launches.arguments:
        sizes = [
            each.packed.nbytes if isinstance(each, StructArgument) else 8 for each in arguments
        ]
        assert min(TENSORS.itemsize, CELLS.itemsize) < sum(sizes) <= ARGUMENTS


def test_blocks_share_long_and_short_tensors_alike() -> None:
    """An embedding beside biases: as many blocks for each as it has chunks."""
    lengths = [5 * CHUNK + 1, 768, 0, CHUNK]
    rows = [
        ParameterRow(torch.zeros(n), torch.zeros(n), torch.zeros(4, dtype=torch.int32))
        for n in lengths
    ]
    table, chunks = table_of(rows)
    assert chunks == 8
    assert table.packed["end"][0, :4].tolist() == [6, 7, 7, 8]
    assert table.packed["length"][0, :4].tolist() == lengths


def test_nothing_to_change_starts_no_update(launches: Launches) -> None:
    update = FusedSGD(Training(optimizer="sgd", learning_rate=1.0))
    update.all_of([])
    assert launches.names == []
    update("empty", torch.empty(0), torch.empty(0))
    assert launches.names == ["count_updates"]
    assert update.state("empty").updates == 1


def test_a_parameter_named_twice_is_changed_twice(launches: Launches) -> None:
    training = Training(optimizer="adam", learning_rate=0.1)
    update, by_torch = fused(training), make_optimizer(training)
    ours, theirs = torch.ones(5), torch.ones(5)
    given = [torch.randn(5, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    update.all_of([GradientChange("p", ours, gradient) for gradient in given])
    for gradient in given:
        by_torch("p", theirs, gradient)
    torch.testing.assert_close(ours, theirs)
    assert update.state("p").updates == 2


def test_numbers_of_updates_stay_where_they_are(launches: Launches) -> None:
    """A recorded step raises them by their place, so that `load` must not move them."""
    update = FusedAdam(Training(optimizer="adam", learning_rate=0.1))
    changes = [GradientChange(name, torch.ones(3), torch.ones(3)) for name in ("a", "b")]
    update.all_of(changes)
    update.state("b").load(update.state("b").tensors, 7)
    update.all_of(changes)
    first, second = (launches.arguments[n][0].packed["cell"][0, :2].tolist() for n in (0, 2))
    assert first == second
    assert [update.state(name).updates for name in "ab"] == [2, 8]


# -- clipping ------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [0.1, 1e6])
def test_clipping_inside_is_that_of_torch(longest: float, launches: Launches) -> None:
    training = Training(optimizer="adam", learning_rate=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator) for n in (3, CHUNK + 5, 70)]
    theirs = [each.clone().requires_grad_() for each in start]
    by_torch = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1, eps=training.epsilon)
    update = fused(training)
    for step in range(4):
        for parameter in theirs:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**-step
        given = [each.grad.clone() for each in theirs if each.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(theirs, longest)
        by_torch.step()
        changes = [
            GradientChange(str(n), *both) for n, both in enumerate(zip(start, given, strict=True))
        ]
        update.all_of(changes, clip_scale(norm, longest).float())
        for gradient, change in zip(given, changes, strict=True):
            assert gradient is change.gradient
    for ours, other in zip(start, theirs, strict=True):
        torch.testing.assert_close(ours, other.detach(), rtol=2e-6, atol=1e-6)


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.layers(x), target)

    return make_case(Model(), x=torch.randn(4, 6), target=torch.randint(0, 3, (4,)))


@pytest.mark.parametrize("clip", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_step_is_the_same_whoever_clips(
    case: Case, precision: str, seen: bool, clip: str
) -> None:
    """Kept gradients are the clipped ones; parameters those of the optimizers of a CPU."""
    training = Training(optimizer="adam", learning_rate=0.01, precision=precision, **{clip: 0.01})
    program = lower(make_plan(case, sharding("sample"), (1,), training=training), case.graph)

    def rank(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
        interpreter = Interpreter(program, comm, model_state(case.model))
        scaled, make = [], interpreter.optimizer.all_of

        def watched(changes: list[GradientChange], scale: Tensor | None = None) -> None:
            scaled.append(scale is not None)
            make(changes, scale)

        interpreter.optimizer.all_of = watched  # type: ignore[method-assign,assignment]
        for _ in range(3):
            interpreter.step(case.batch, keep_gradients=seen)
        values = {each.stored.parameter: each.tensor for each in interpreter.states.values()}
        return values, interpreter.gradients, scaled

    def run() -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
        return run_local(1, rank)[0]

    theirs = run()
    with kernels_on_the_host():
        ours = run()
    alone = precision != "float16" and clip == "clip_norm"
    assert ({*ours[2]}, {*theirs[2]}) == ({alone}, {False})
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=tolerance, atol=tolerance)
    assert bool(ours[1]) == seen


# -- how CuPy is asked ---------------------------------------------------------------------------


class FakeCupy:
    """What `start` asks of CuPy: devices and streams as contexts, and kernels that are started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered: list[Any] = []
        self.made: list[int] = []
        self.started: list[tuple[Any, ...]] = []
        self.address = 0
        self.cuda = SimpleNamespace(
            Device=lambda number: self.context(("device", number)),
            Stream=SimpleNamespace(from_external=self.from_external),
        )
        torch_stream = lambda: SimpleNamespace(cuda_stream=self.address)  # noqa: E731
        monkeypatch.setitem(sys.modules, "cupy", self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_stream", torch_stream)
        for cached in (cupy_kernels._kernel, cupy_kernels._stream):
            cached.cache_clear()
        cupy_kernels._module.cache_clear()

    def RawModule(self, **options: Any) -> Any:  # noqa: N802
        return SimpleNamespace(get_function=self.function)

    def function(self, name: str) -> Callable[..., None]:
        def run(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
            self.started.append((name, grid, block, arguments, tuple(self.entered)))

        return run

    def from_external(self, stream: Any) -> Any:
        self.made.append(stream.cuda_stream)
        return self.context(("stream", stream.cuda_stream))

    def context(self, what: tuple[str, int]) -> Any:
        outer = self

        class Context:
            def __enter__(self) -> None:
                outer.entered.append(what)

            def __exit__(self, *_: object) -> None:
                assert outer.entered.pop() == what

        return Context()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    yield FakeCupy(monkeypatch)
    for cached in (cupy_kernels._kernel, cupy_kernels._stream):
        cached.cache_clear()
    cupy_kernels._module.cache_clear()


def test_kernels_go_to_the_stream_that_is_torchs_now(cupy: FakeCupy) -> None:
    """A stream is made CuPy's once, and still every launch is on the one that is current."""
    for cupy.address in (0, 16, 0, 32, 16):
        cupy_kernels.start("words", 1000, np.int64(3))
    streams = [entered for *_, entered in cupy.started]
    assert streams == [(("device", 1), ("stream", each)) for each in (0, 16, 0, 32, 16)]
    assert cupy.made == [0, 16, 32]
    assert cupy.entered == []


def test_tables_are_passed_by_value_and_tensors_by_address(cupy: FakeCupy) -> None:
    row = ParameterRow(torch.zeros(9), torch.zeros(9), torch.zeros(4, dtype=torch.int32))
    table, _ = table_of([row])
    cupy_kernels.start("adam", 5 * THREADS, table, row.gradient, None, most_blocks=3)
    cupy_kernels.start("adam", 5 * THREADS, table, most_blocks=10**6)
    (name, grid, block, arguments, _), (_, more, *_) = cupy.started
    assert (name, grid, block, more) == ("adam", (3,), (THREADS,), (5,))
    assert (arguments[0].shape, arguments[0].dtype) == ((1,), TENSORS)
    assert arguments[1:] == (row.gradient.data_ptr(), 0)
    assert [type(each) for each in arguments[1:]] == [np.uint64, np.uint64]


def test_fields_of_tables_lie_as_in_c() -> None:
    """The compiler aligns each by its own size, as NumPy does: wide ones come first."""
    offsets = [TENSORS.fields[name][1] for name in TENSORS.names or ()]  # type: ignore[index]
    assert offsets == sorted(offsets)
    assert all(first < second for first, second in pairwise(offsets))
    assert TENSORS.itemsize % 8 == 0
