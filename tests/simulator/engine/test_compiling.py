"""Kernels count from the front of arrays only."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import njit

from stratagem.searcher.annealing._chain_kernels import anneal
from stratagem.simulator.base.compiling import KernelCache, kernel, uncounted

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


def test_what_was_compiled_is_used_again_unless_something_of_it_changed(tmp_path):
    """A constant of another module was not in the key: kernels went on with its old value."""

    def run(times, added, unused=0):
        (tmp_path / "constants.py").write_text(CONSTANTS.format(times=times, unused=unused))
        (tmp_path / "called.py").write_text(CALLED.format(added=added))
        if not (tmp_path / "caller.py").exists():
            (tmp_path / "caller.py").write_text(CALLER)
        paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        told = subprocess.run(
            [sys.executable, "caller.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout.split()

    assert run(times=2, added=10) == ["22", "0"]
    assert run(times=2, added=10) == ["22", "1"]
    assert run(times=2, added=10, unused=5) == ["22", "1"]
    assert run(times=3, added=10) == ["33", "0"]
    assert run(times=3, added=20) == ["63", "0"]
    assert run(times=3, added=20) == ["63", "1"]


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
