"""Kernels count from the front of arrays only."""

from __future__ import annotations

import dis
import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType

import numpy as np
import pytest
from numba import njit
from numba.core.caching import NullCache
from numba.core.compiler import Flags
from numba.core.dispatcher import Dispatcher
from numba.core.errors import TypingError

from stratagem import searcher, simulator
from stratagem.searcher.annealing import _chain_kernels, _splitmix
from stratagem.searcher.annealing._chain_kernels import anneal
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.search import search
from stratagem.searcher.driver.skeleton_work import compile_chains
from stratagem.searcher.problem.scoring import peaks_of
from stratagem.simulator.base.compiling import (
    KernelCache,
    KernelFlags,
    is_compiled,
    kernel,
    uncounted,
)
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.hardware.cluster import Cluster

OUTSIDE = """
import numpy as np
from stratagem.simulator.base.compiling import kernel
look_up = kernel()(lambda array, index: array[index])
assert look_up(np.arange(3), 2) == 2
for index in (-1, 3):
    try:
        look_up(np.arange(3), index)
    except IndexError:
        print("IndexError")
"""


def read(array, index):
    return array[index]


def read_pair(array, row, column):
    return array[row, column]


def read_end(array):
    return array[-1]


def write(array, index, value):
    array[index] = value


@pytest.mark.parametrize("compiled", [kernel, uncounted])
def test_an_index_below_zero_is_before_the_array(compiled):
    """What lies there is the array of which this is a view; numba's own index is the last."""
    numbers = np.arange(10)
    assert njit()(read)(numbers[4:8], -1) == 7
    assert compiled()(read)(numbers[4:8], -1) == 3
    assert njit()(read_pair)(numbers.reshape(5, 2)[2:4], -1, 1) == 7
    assert compiled()(read_pair)(numbers.reshape(5, 2)[2:4], -1, 1) == 3
    compiled()(write)(numbers[4:8], -2, 20)
    assert numbers.tolist() == [0, 1, 20, *range(3, 10)]


def test_indices_from_the_front_are_what_they_were():
    """Of any width, constant ones from the end too, and slices."""
    table = np.arange(12).reshape(3, 4)
    for index in (0, 2, np.int32(1), np.uint8(2)):
        assert np.array_equal(kernel()(read)(table, index), table[index])
        assert kernel()(read_pair)(table, index, index) == table[index, index]
    assert kernel()(read_end)(table[0]) == 3
    kernel()(write)(table, 1, 5)
    assert (table[1] == 5).all()


def test_bounds_can_be_checked():
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["IndexError", "IndexError"]


CONSTANTS = "TIMES, UNUSED = {times}, {unused}\n"
CALLED = """
from stratagem.simulator.base.compiling import kernel
@kernel()
def added(x):
    return x + {added}
"""
CALLER = """
import called
from called import added
from constants import TIMES
from stratagem.simulator.base.compiling import kernel
@kernel(cache=True)
def computed(x):
    return TIMES * added(x)
print(computed(1), sum(computed.stats.cache_hits.values()))
"""


def caller(folder, times, added, unused=0):
    """A process that has begun to run a kernel of these constants."""
    files = {
        "constants.py": CONSTANTS.format(times=times, unused=unused),
        "called.py": CALLED.format(added=added),
        "caller.py": CALLER,
    }
    for name, text in files.items():
        path = folder / name
        # Another process may read it just now: one of an empty file found nothing to import.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    paths = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "caller.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def told_by(process):
    """What a process prints that ends well: words."""
    told, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    return told.split()


@pytest.mark.slow
def test_what_was_compiled_is_used_again_unless_something_of_it_changed(tmp_path):
    """A constant of another module was not in the key: kernels went on with its old value."""

    def run(times, added, unused=0):
        return told_by(caller(tmp_path, times, added, unused))

    assert run(times=2, added=10) == ["22", "0"]
    assert run(times=2, added=10) == ["22", "1"]
    assert run(times=2, added=10, unused=5) == ["22", "1"]
    assert run(times=3, added=10) == ["33", "0"]
    assert run(times=3, added=20) == ["63", "0"]
    assert run(times=3, added=20) == ["63", "1"]


STAYS = """
from stratagem.simulator.base.compiling import is_compiled, kernel
inside = kernel(inner=True)(lambda x: 2 * x)
outside = kernel(cache=True)(lambda x: inside(x))
print(outside(3), is_compiled(outside))
"""
RAISES = """
from stratagem.simulator.base.compiling import kernel
@kernel(inner=True)
def refused(x):
    if x < 0:
        raise ValueError("below 0", x)
    return 2 * x
@kernel(inner=True)
def doubled(x):
    return refused(x) + refused(x + 1)
@kernel(cache=True)
def computed(x):
    return doubled(x) + refused(x)
try:
    computed(-3)
except ValueError as error:
    print(error.args[1], computed(2), sum(computed.stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_what_kernels_raise_within_others_arrives(tmp_path):
    """Compiled here, by kernels that have no code of their own, and read from what was kept."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    command = [sys.executable, str(script)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout.split() for run in runs] == [["-3", "14", "0"], ["-3", "14", "1"]]


def test_processes_wait_for_the_one_that_compiles(tmp_path):
    """Each compiled what a search needs, and made the others slower."""
    begun = [caller(tmp_path, times=2, added=1) for _ in range(3)]
    assert sorted(map(told_by, begun)) == [["4", "0"], ["4", "1"], ["4", "1"]]


def test_who_fails_to_compile_lets_others_try():
    """So does who is interrupted: Ctrl-C ends a search, not its process."""

    @kernel(cache=True)
    def wrong(x):
        return x.nothing

    for _ in range(2):
        with pytest.raises(TypingError):
            wrong(1)
        assert not wrong._cache._turn.is_locked

    def interrupted(*_):
        raise KeyboardInterrupt

    wrong._cache._turn.acquire()
    with pytest.raises(KeyboardInterrupt):
        wrong._cache.watched(interrupted)()
    assert not wrong._cache._turn.is_locked


def test_kernels_can_stay_python():
    """To look into one with a debugger."""
    told = subprocess.run(
        [sys.executable, "-c", STAYS],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == ["6", "True"]


@pytest.mark.parametrize(
    "ours", [{}, {"nrt": True}, {"nrt": False}, {"nrt": True, "boundscheck": True}]
)
@pytest.mark.parametrize("theirs", [{}, {"nrt": True}, {"boundscheck": False}])
@pytest.mark.parametrize("kind", [Flags, KernelFlags])
def test_options_are_equal_as_to_numba(ours, theirs, kind):
    """Whether they are set, or are what they are unless set, makes no difference."""

    def options(kind, given):
        made = kind()
        for name, value in given.items():
            setattr(made, name, value)
        return made

    plain = options(Flags, ours) == options(Flags, theirs)
    assert (options(KernelFlags, ours) == options(kind, theirs)) == plain
    assert (options(kind, theirs) == options(KernelFlags, ours)) == plain
    assert hash(options(KernelFlags, ours)) == hash(options(Flags, theirs))
    assert options(KernelFlags, ours) != ours


@pytest.mark.slow
def test_a_chain_of_a_small_model_compiles_what_all_run():
    """Another process runs it ahead, so no chain of a search may have types of its own."""
    compile_chains()
    assert is_compiled(anneal)
    known = set(anneal.overloads)
    budget = Budget(300, skeletons=1, threads=1)
    search(gpt(num_layers=1, batch=4), Cluster.preset("dgx-a100", num_nodes=1), budget=budget)
    assert len(known) == 1
    assert set(anneal.overloads) == known


RENAMED = """
from typing import NamedTuple
from stratagem.simulator.base.compiling import kernel

class {name}(NamedTuple):
    x: int

@kernel(cache=True)
def doubled(pair):
    return 2 * pair.x

print(doubled({name}(4)), sum(doubled.stats.cache_hits.values()))
"""


def test_a_class_that_was_renamed_is_compiled_for_anew(tmp_path):
    """What was compiled for the old name could not be read, and that ended every process."""
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(name):
        (tmp_path / "renamed.py").write_text(RENAMED.format(name=name))
        told = subprocess.run(
            [sys.executable, "-c", "import renamed"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout.split()

    assert [run("Pair"), run("Pair")] == [["8", "0"], ["8", "1"]]
    assert [run("Couple"), run("Couple")] == [["8", "0"], ["8", "1"]]


def test_names_of_kernels_are_the_same_in_every_process():
    """An address in them would make every process compile anew."""
    code = "from stratagem.searcher.annealing._chain_kernels import anneal;"
    code += "print(anneal._cache.fingerprint)"
    paths = os.pathsep.join(filter(None, sys.path))
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert isinstance(anneal._cache, KernelCache)
    assert told.stdout.strip() == anneal._cache.fingerprint


def codes_of(value: object) -> Iterator[CodeType]:
    """The code of a function, or of all methods of a class, and of functions inside."""
    if isinstance(value, type):
        for each in vars(value).values():
            made = getattr(each, "fget", None) or getattr(each, "func", each)
            if isinstance(made, FunctionType):
                yield from codes_of(made)
    elif isinstance(value, CodeType):
        yield value
        for constant in value.co_consts:
            yield from codes_of(constant)
    elif isinstance(value, FunctionType):
        yield from codes_of(value.__code__)


def kernels_called(value: object, known: dict[str, object]) -> Iterator[Dispatcher]:
    """The kernels that Python code refers to among the globals of its module, or in a module.

    Where it runs one as Python, those that this one calls are compiled by themselves.
    """
    for code in codes_of(value):
        before: object = None
        for one, after in pairwise(dis.get_instructions(code)):
            inside = vars(before) if isinstance(before, ModuleType) else {}
            before = (known if one.opname == "LOAD_GLOBAL" else inside).get(str(one.argval))
            if not isinstance(before, Dispatcher):
                continue
            if after.argval == "py_func":
                yield from kernels_called(before.py_func, before.py_func.__globals__)
            else:
                yield before


def test_what_kernels_are_called_is_seen() -> None:
    known = {"anneal": anneal, "_splitmix": _splitmix}
    found = [_splitmix.random_float, anneal]
    assert list(kernels_called(lambda: (_splitmix.random_float(0), anneal(1)), known)) == found
    assert anneal not in list(kernels_called(lambda: anneal.py_func(1), known))
    assert _chain_kernels.evaluate in list(kernels_called(lambda: anneal.py_func(1), known))
    assert list(kernels_called(peaks_of, vars(sys.modules[peaks_of.__module__])))


@pytest.mark.slow
def test_kernels_that_python_calls_are_kept() -> None:
    """Peaks of ranks were compiled anew by every process that searched: a quarter of a second."""
    found: set[Dispatcher] = set()
    for package in (searcher, simulator):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            known = vars(importlib.import_module(each.name))
            for value in list(known.values()):
                if getattr(value, "__module__", "") == each.name:
                    found.update(kernels_called(value, known))
    assert len(found) > 20
    assert [k.py_func.__name__ for k in found if isinstance(k._cache, NullCache)] == []


def test_an_inner_kernel_is_called_by_kernels_only():
    @kernel(inner=True)
    def twice(value):
        return 2 * value

    @kernel()
    def four_times(value):
        return twice(twice(value))

    for _ in range(2):  # before it was compiled, and when it was: that ended the process
        with pytest.raises(TypeError, match="twice is an inner kernel"):
            twice(3)
        assert four_times(3) == 12
    assert twice.py_func(3) == 6
