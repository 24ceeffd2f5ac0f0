"""Writing the report of a search as one HTML page."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from stratagem.basics.version import __version__
from stratagem.searcher.driver.budget import Budget
from stratagem.searcher.driver.incumbent import ProgressReport as Progress
from stratagem.searcher.driver.result import SearchResult
from stratagem.searcher.report.hardware_changes import hardware_changes
from stratagem.searcher.report.page_content import page_content
from stratagem.searcher.space.constraints import Space
from stratagem.simulator.base.files import write_text
from stratagem.simulator.drawing.plan_picture import plan_picture
from stratagem.simulator.kernel_times.cost_model import CostModel
from stratagem.simulator.kernel_times.fitted_kernels import costs_or_default

QUICK = Budget(evaluations=300, seconds=15.0)
"""Of the search on one node more."""

SCRIPTS = ("report.js", "drawings.js")
"""Joined to the script of the page, in this order."""


def report(
    result: SearchResult,
    path: str | Path,
    *,
    costs: CostModel | None = None,
    space: Space | None = None,
    budget: Budget = QUICK,
    progress: Progress | None = None,
) -> None:
    """Write what a search found as one HTML page, which needs no network.

    Example:
        >>> report(sg.search(graph, cluster), "report.html")  # doctest: +SKIP

    It holds the plan in words and as a picture, the known strategies beside it, the timeline to
    zoom into, memory over time, how each operator is sharded, the certificate, and what faster
    links and one node more would do. For the latter the plan is simulated anew, and a quick search
    is made.

    Args:
        result: of `search`.
        path: of the page. It appears whole or not at all.
        costs: prices of operators, those of the search; the device model when left out.
        space: that of the search, for the search on one node more.
        budget: of the search on one node more; 0 evaluations compare known strategies only.
        progress: called often with a `Progress`.

    Raises:
        OSError: the page cannot be written.
    """
    changes = hardware_changes(
        result,
        costs_or_default(costs),
        budget=budget,
        space=space,
        progress=progress,
    )
    content = page_content(result, changes, __version__)
    write_text(path, render(content, picture=plan_picture(result.plan), curve=result.curve))


def render(content: dict[str, Any], *, picture: str, curve: str) -> str:
    """The page of some content: template, pictures, style, script and data in one text."""
    folder = resources.files(__package__)
    # Data stands in a script element, which only a "<" could end.
    data = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {
        "title": html.escape(str(content["title"])),
        "picture": picture,
        "curve": curve,
        "style": (folder / "report.css").read_text("utf-8"),
        "script": "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS),
        "data": data.replace("<", "\\u003c"),
    }
    template = (folder / "template.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
