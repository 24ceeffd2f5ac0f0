"""CUDA kernels of blocks on the host: threads stand for threads, and wait for one another.

What a loop in place of the threads cannot show is shown here: that those of a block all come to a
barrier, that what they share is read before it is written again, and who works on what.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import pytest

from stratagem.executor.cuda.cuda_sources import SOURCE
from tests.support.cuda.host_kernels import compiled, passed

OPTIONS = ("-O1", "-std=c++20", "-Wall", "-Werror", "-fPIC", "-shared", "-pthread")
NO_WARNINGS = ("-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-unused-variable")
THREADS = 256
MOST_BLOCKS = 3
"""Fewer than there is work for, so that each comes back for more."""

BEFORE = r"""
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>
#define __CUDACC__
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static
struct uint4 { unsigned x, y, z, w; };
struct place { unsigned x, y, z; };
static thread_local place threadIdx, blockIdx;
static place blockDim, gridDim;
using Barrier = std::barrier<>;
static std::unique_ptr<Barrier> block;
static std::vector<std::unique_ptr<Barrier>> warps;
static float registers[256];

static void __syncthreads() { block->arrive_and_wait(); }

static float __shfl_xor_sync(unsigned, float given, int step) {
    Barrier &warp = *warps[threadIdx.x / 32];
    registers[threadIdx.x] = given;
    warp.arrive_and_wait();
    const float found = registers[threadIdx.x ^ step];
    warp.arrive_and_wait();
    return found;
}
"""

AFTER = r"""
template <class... Given>
static void launch(void (*kernel)(Given...), int blocks, Given... given) {
    blockDim = {256, 1, 1};
    gridDim = {(unsigned)blocks, 1, 1};
    for (unsigned number = 0; number < (unsigned)blocks; ++number) {
        block = std::make_unique<Barrier>(256);
        warps.clear();
        for (int warp = 0; warp < 8; ++warp) warps.push_back(std::make_unique<Barrier>(32));
        std::vector<std::thread> threads;
        for (unsigned thread = 0; thread < 256; ++thread)
            threads.emplace_back([=] {
                threadIdx = {thread, 0, 0};
                blockIdx = {number, 0, 0};
                kernel(given...);
            });
        for (std::thread &each : threads) each.join();
    }
}

extern "C" void on_threads_loss_sums(int blocks, const void *rows, int type, long long stride,
                                     long long classes, const long long *target,
                                     long long ignored, int team, float *largest, float *sums,
                                     float *own, long long n) {
    launch(loss_sums, blocks, rows, type, stride, classes, target, ignored, team, largest, sums,
           own, n);
}

extern "C" void on_threads_loss_gradient(int blocks, const void *rows, int type,
                                         long long stride, long long classes,
                                         const long long *target, long long ignored, int team,
                                         const float *largest, const float *factors,
                                         const float *addends, void *made, long long n) {
    launch(loss_gradient, blocks, rows, type, stride, classes, target, ignored, team, largest,
           factors, addends, made, n);
}
"""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    options = *OPTIONS, *NO_WARNINGS
    try:
        return compiled(BEFORE + SOURCE + AFTER, "threads.cpp", ("g++",), options)
    except RuntimeError as error:
        if "barrier: No such file" in str(error):
            pytest.skip("the C++ compiler has no barriers")
        raise


def start_on_threads(name: str, num_threads: int, *arguments: Any) -> None:
    """What `cupy_kernels.start` does, with threads of the host for those of a device."""
    blocks = max(1, min(MOST_BLOCKS, -(-num_threads // THREADS)))
    getattr(_library(), f"on_threads_{name}")(ctypes.c_int(blocks), *map(passed, arguments))
