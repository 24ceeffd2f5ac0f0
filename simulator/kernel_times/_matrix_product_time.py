"""The time of matrix products (numba): their sizes and one vector of constants in, seconds out."""

from __future__ import annotations

import math

import numpy as np

from stratagem.simulator.base.arrays import Floats
from stratagem.simulator.base.compiling import kernel

TILE_ROWS = (256, 128, 128, 128, 64, 64, 64, 32)
TILE_COLUMNS = (128, 256, 128, 64, 128, 64, 32, 64)
"""Output tiles that libraries choose from, largest first."""

MOST_SPLITS = 16
LEAST_SPLIT_DEPTH = 256
"""A reduction is split into up to 16 parts of at least 256 each."""

DEPTH_STEP = 32
"""A tile's loop advances along the reduction by so much."""


STEPS = 400.0
"""That a product takes, about."""

DeviceRates = tuple[float, float, float]
"""Processors of a device, FLOP/s of all of them, bytes/s of its memory."""


@kernel(cache=True, steps=lambda *_: STEPS)
def product_seconds(
    rows: float,
    columns: float,
    depth: float,
    batch: float,
    data_bytes: float,
    rates: DeviceRates,
    constants: Floats,
) -> float:
    """Seconds of `batch` products of (rows × depth) by (depth × columns).

    With tiles of r × c on `units` processors of F FLOP/s together, memory of B bytes/s, and
    a product split s ways along the depth:

        w = ⌈rows/r⌉ · ⌈columns/c⌉ · batch · s / units                                    (waves)
        W = q · ⌈w⌉ + (1 − q) · max(w, 1)
        compute = W · 2·r·c · (depth/s + prologue) · units / (F · e) · (1 + reuse · (1/r + 1/c))
        memory = (data_bytes + (s−1) · split_traffic · 8 · rows · columns · batch) / (B · m)
        seconds = launch + least over (r, c, s) of (computeᵖ + memoryᵖ)^(1/p) (+ split if s > 1)

    `constants` are e, reuse, prologue, q, m, p, split_traffic, split, launch (see
    `ProductConstants`).
    """
    units, flop_rate, byte_rate = rates
    efficiency, reuse, prologue = constants[0], constants[1], constants[2]
    quantisation, sharpness = constants[3], constants[5]
    memory_rate = byte_rate * constants[4]
    partial_bytes = constants[6] * 8.0 * rows * columns * batch
    depth = DEPTH_STEP * math.ceil(depth / DEPTH_STEP)
    best = np.inf
    for i in range(len(TILE_ROWS)):
        tall, wide = TILE_ROWS[i], TILE_COLUMNS[i]
        rate = flop_rate / units * efficiency / (1.0 + reuse * (1.0 / tall + 1.0 / wide))
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide) * batch
        split = 1
        while True:
            waves = tiles * split / units
            counted = quantisation * math.ceil(waves) + (1.0 - quantisation) * max(waves, 1.0)
            compute = counted * 2.0 * tall * wide * (depth / split + prologue) / rate
            memory = (data_bytes + (split - 1) * partial_bytes) / memory_rate
            longer, shorter = max(compute, memory), min(compute, memory)
            if longer < best:
                joined = longer * (1.0 + (shorter / longer) ** sharpness) ** (1.0 / sharpness)
                if split > 1:
                    joined += constants[7]
                best = min(best, joined)
            split *= 2
            if split > MOST_SPLITS or depth < LEAST_SPLIT_DEPTH * split or waves > 2.0:
                break
    seconds: float = best + constants[8]
    return seconds


@kernel(cache=True, steps=lambda products, *_: STEPS * len(products))
def all_product_seconds(
    products: Floats, flop_rates: Floats, units: float, byte_rate: float, constants: Floats
) -> Floats:
    """Seconds of many products, each at a rate of its own.

    Args:
        products: a line each: rows, columns, depth, batch, bytes moved.
        flop_rates: FLOP/s of all processors together, for each product.
        units: processors of the device.
        byte_rate: bytes/s of its memory.
        constants: see `product_seconds`.
    """
    found = np.empty(len(products))
    for k in range(len(products)):
        rows, columns, depth = products[k, 0], products[k, 1], products[k, 2]
        batch, moved, rates = products[k, 3], products[k, 4], (units, flop_rates[k], byte_rate)
        found[k] = product_seconds(rows, columns, depth, batch, moved, rates, constants)
    return found
