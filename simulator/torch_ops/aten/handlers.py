"""Every aten operator that capture knows, and what makes its operator or view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.simulator.torch_ops.aten.arguments import ReadingFunction
from stratagem.simulator.torch_ops.aten.calls import AtenCall
from stratagem.simulator.torch_ops.aten.elementwise import ELEMENTWISE_HANDLERS
from stratagem.simulator.torch_ops.aten.operators import OPERATOR_HANDLERS
from stratagem.simulator.torch_ops.aten.views import VIEW_HANDLERS

Handler = ReadingFunction[Callable[[AtenCall], Any]]

HANDLERS: dict[str, Handler] = {
    **ELEMENTWISE_HANDLERS,
    **OPERATOR_HANDLERS,
    **VIEW_HANDLERS,
}
"""aten name → handler, and which arguments it reads."""
