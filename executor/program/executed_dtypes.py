"""In which dtypes a plan runs what was captured in float32 (mixed precision).

Parameters, activations and their gradients take the plan's precision; the loss and what is summed
to a scalar stay in float32, as do running statistics. The optimizer updates a float32 copy of each
parameter (Micikevicius et al. 2018, arXiv 1710.03740).
"""

from __future__ import annotations

from stratagem.simulator.base.precision import is_full
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.operators.operator import Layout


def executed_dtype(training: Training, dtype: str, layout: Layout) -> str:
    """The dtype in which a tensor runs that was captured in `dtype`.

    Example:
        >>> executed_dtype(Training(precision="bfloat16"), "float32", (("sample",), ("feature",)))
        'bfloat16'
        >>> executed_dtype(Training(precision="bfloat16"), "float32", ())
        'float32'
        >>> executed_dtype(Training(precision="bfloat16"), "int64", (("sample",),))
        'int64'
    """
    is_floating = dtype.startswith(("float", "bfloat"))
    stored = training.formats.storage
    return dtype if is_full(stored) or not is_floating or not layout else stored


def gradient_dtype(training: Training, dtype: str) -> str:
    """The dtype in which gradients of a parameter captured in `dtype` are added up."""
    added = training.formats.gradients
    return dtype if is_full(added) else added
