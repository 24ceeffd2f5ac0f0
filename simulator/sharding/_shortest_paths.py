"""All-pairs shortest paths over the placements of one tensor (numba)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stratagem.simulator.base.compiling import kernel


@kernel(cache=True, steps=lambda weights, *_: 2.0 * len(weights) ** 3)
def shortest_paths(
    weights: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    links: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Dense Dijkstra (1959) from every state; of equal costs the lower-numbered state goes first.

    Takes the weight that decides, the seconds and the link mask of every step. Returns per (start,
    state) the state before it on the path (−1 where there is no path; itself at the start), the
    seconds of the path and the union of its link masks.
    """
    count = weights.shape[0]
    origins = np.full((count, count), -1, dtype=np.int64)
    total = np.zeros((count, count), dtype=np.float64)
    used = np.zeros((count, count), dtype=np.int64)
    for start in range(count):
        best = np.full(count, np.inf)
        done = np.zeros(count, dtype=np.bool_)
        best[start] = 0.0
        origins[start, start] = start
        for _ in range(count):
            state = -1
            for i in range(count):
                if not done[i] and best[i] < np.inf and (state < 0 or best[i] < best[state]):
                    state = i
            if state < 0:
                break
            done[state] = True
            before = origins[start, state]
            if state != start:
                total[start, state] = total[start, before] + seconds[before, state]
                used[start, state] = used[start, before] | links[before, state]
            for after in range(count):
                cost = best[state] + weights[state, after]
                if not done[after] and cost < best[after]:
                    best[after] = cost
                    origins[start, after] = state
    return origins, total, used
