"""The rooms of the code: no ring, none too full, and a picture that shows those that there are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "docs" / "rooms.py"


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_rooms", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_nothing_is_wrong(rooms: ModuleType) -> None:
    assert list(rooms.complaints()) == []


def test_the_picture_is_of_these_rooms(rooms: ModuleType) -> None:
    shown = rooms.PICTURE.read_text(encoding="utf-8")
    assert shown == rooms.draw(), "python docs/rooms.py --draw"


def test_imports_count_wherever_they_stand(rooms: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.b import B\n"
        "def f():\n    from pkg import c\n    import pkg.d\n"
    )
    known = {"pkg", "pkg.b", "pkg.c", "pkg.d"}
    assert rooms.imports("pkg.a", file, known) == {"pkg.b", "pkg.c", "pkg.d"}


def test_a_ring_is_found(rooms: ModuleType) -> None:
    assert rooms.ring_of({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    ring = rooms.ring_of({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert set(ring) == {"a", "b", "c"}
    assert ring[0] == ring[-1]
