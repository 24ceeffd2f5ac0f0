"""Files of annotations: YAML that a person writes.

mesh: {data: 2, model: 4}
annotations:
  "*": {data: sample}
  h.*.mlp.up: {model: out}
microbatches: 2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from stratagem.searcher.semi_automatic.annotated_plans import Asking
from stratagem.simulator.base.files import read_text, reading, understood


@dataclass(frozen=True)
class _AskingFile:
    mesh: dict[str, int]
    annotations: dict[str, dict[str, str | None]] = field(default_factory=dict)
    layout: dict[str, str] = field(default_factory=dict)
    microbatches: int = 1
    recompute: str = "none"
    zero: int = 0


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without aliases, with which a short file may stand for an endless one."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse an alias where it stands."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise ValueError(f"line {mark.line + 1} has an alias; write out what it stands for")
        return super().compose_node(parent, index)


def read_annotations(path: str | Path) -> Asking:
    """What a file of annotations asks for.

    Example:
        >>> _ = Path("asked.yaml").write_text("mesh: {data: 8}\\nlayout: {batch: data}\\n")
        >>> read_annotations("asked.yaml").layout
        {'batch': 'data'}

    Raises:
        ValueError: names the file, and the line or the field that is wrong.
    """
    what = f"annotation file {path}"
    text = read_text(path, "annotation file")
    with reading(what):
        given = _loaded(text)
        if not isinstance(given, Mapping):
            raise ValueError("it has no fields; it begins with mesh: {data: 8}")
        file = msgspec.convert(given, _AskingFile)
    file = understood(file, given, what)
    return Asking(
        file.mesh, file.annotations, file.layout, file.microbatches, file.recompute, file.zero
    )


def _loaded(text: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
