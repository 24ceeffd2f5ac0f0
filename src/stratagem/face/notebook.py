"""Pictures in notebooks: IPython is told how plans, clusters and graphs are drawn.

Data types know nothing of pictures. Where the package is imported in a running IPython, its
formatter for HTML learns them by name, so that nothing is imported before a picture is wanted.
"""

from __future__ import annotations

import sys
from typing import Any

DRAWN = (
    ("stratagem.simulator.plan.plan", "Plan"),
    ("stratagem.simulator.hardware.cluster", "Cluster"),
    ("stratagem.simulator.graph.operator_graph", "OperatorGraph"),
)
"""Modules and names of what has a picture."""


def register_pictures() -> bool:
    """Tell the running IPython, if there is one, how values are drawn; whether there is one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return False
    formatter = shell.display_formatter.formatters["text/html"]
    for module, name in DRAWN:
        formatter.for_type_by_name(module, name, _picture)
    return True


def _picture(value: Any) -> str:
    from stratagem.simulator.drawing.pictures import picture_of

    return picture_of(value)
