"""What every run loads when it first uses it, for a process that others are forked from."""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import cache

from stratagem.simulator.graph.placement import PARTIAL, REPLICATE
from stratagem.simulator.hardware.device_mesh import AxisLink
from stratagem.simulator.sharding.resharding_paths import Resharder

AT_A_GRADIENT = "torch.fx.experimental.symbolic_shapes"
"""What torch imports at the first gradient, and sympy with it."""

AT_A_CAPTURE = "torch.export._trace"
"""What torch imports at the first export, and its compiler with it."""


@cache
def load_first_uses(*, captures: bool) -> None:
    """Load what ranks would each load in their first step; no result is another one for it.

    Example:
        >>> load_first_uses(captures=False)

    Nothing is computed by torch here, which might start threads or draw random numbers.

    Args:
        captures: whether ranks capture the model, too.
    """
    for name in (AT_A_GRADIENT, *([AT_A_CAPTURE] if captures else [])):
        with suppress(ModuleNotFoundError):  # Another torch has it elsewhere: ranks find it then.
            importlib.import_module(name)
    link = AxisLink(latency=0.0, seconds_per_byte=0.0, crosses_nodes=False, shares_compute=False)
    # Loads numba's compiled kernel of shortest paths, by which every plan is lowered.
    Resharder((2,), (link,)).path((2,), 1, (PARTIAL,), (REPLICATE,))
