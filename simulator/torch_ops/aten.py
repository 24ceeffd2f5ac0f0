"""Every aten operator that capture knows, and what makes its operator or view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.simulator.torch_ops.aten_elementwise import ELEMENTWISE_HANDLERS
from stratagem.simulator.torch_ops.aten_operators import OPERATOR_HANDLERS
from stratagem.simulator.torch_ops.aten_views import VIEW_HANDLERS
from stratagem.simulator.torch_ops.calls import Call

HANDLERS: dict[str, Callable[[Call], Any]] = {
    **ELEMENTWISE_HANDLERS,
    **OPERATOR_HANDLERS,
    **VIEW_HANDLERS,
}
"""aten name → handler."""
