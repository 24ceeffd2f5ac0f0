"""Which gates are shut (see `shared_conversions`), in numba."""

from __future__ import annotations

import numpy as np

from stratagem.simulator.base.arrays import Flags, Ints
from stratagem.simulator.base.compiling import kernel


@kernel()
def is_shut(
    gate: int, choice: Ints, starts: Ints, operators: Ints, offsets: Ints,
    ids: Ints,
) -> bool:  # fmt: skip
    """Whether another reader makes what is behind a gate."""
    if gate < 0:
        return False
    begin, end = starts[gate], starts[gate + 1]
    if end - begin < 2:
        return False
    mine = ids[offsets[begin] + choice[operators[begin]]]
    if mine < 0:
        return False
    found = False
    for k in range(begin + 1, end):
        found = found or ids[offsets[k] + choice[operators[k]]] == mine
    return found


@kernel(cache=True, steps=lambda gates, *_: 10.0 * len(gates))
def all_shut(
    gates: Ints, choice: Ints, starts: Ints, operators: Ints, offsets: Ints,
    ids: Ints,
) -> Flags:  # fmt: skip
    found = np.zeros(gates.size, dtype=np.bool_)
    for k in range(gates.size):
        found[k] = is_shut(gates[k], choice, starts, operators, offsets, ids)
    return found
