"""The rooms of the code: no ring, none too full, and a picture that shows those that there are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "docs" / "rooms.py"
CHAPTERS = FILE.parent / "design"


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


@pytest.mark.slow
def test_nothing_is_wrong(rooms: ModuleType) -> None:
    assert list(rooms.complaints()) == []


@pytest.mark.slow
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


def test_what_a_docstring_says_of_imports_is_held_to_them(rooms: ModuleType) -> None:
    a, b, c = (f"stratagem.executor.{name}" for name in "abc")
    graph = {
        a: {b},
        b: {c, "stratagem.simulator.base"},
        c: set(),
        "stratagem.simulator.base": set(),
    }
    assert rooms.stated("In: x.\nImports: b, c and\n  below; no torch.") == [
        *("b", "c", "below", "no torch"),
    ]
    assert list(rooms.untrue(a, ["b"], graph)) == []
    assert list(rooms.untrue(b, ["c", "the simulator"], graph)) == []
    assert list(rooms.untrue(b, ["c", "simulator.base"], graph)) == []
    assert list(rooms.untrue(a, ["b", "c"], graph)) == [
        f"{a} says that it imports 'c', and does not"
    ]
    assert list(rooms.untrue(b, ["c"], graph)) == [
        f"{b} imports stratagem.simulator.base, which its docstring does not say"
    ]
    graph[a] = {b, c}
    assert list(rooms.untrue(a, ["b", "below"], graph)) == []
    assert len(list(rooms.untrue(a, ["b"], graph))) == 1


def test_classes_that_are_called_alike_are_found(rooms: ModuleType, tmp_path: Path) -> None:
    known = {name: tmp_path / f"{name}.py" for name in ("one", "other", "third")}
    known["one"].write_text("class Row:\n    pass\n\nclass Place:\n    pass\n")
    known["other"].write_text("def f():\n    class Row:\n        pass\n")
    known["third"].write_text("Place = Row = 1\n")
    said = ["Row is a class of one and of other; give each its own name"]
    assert list(rooms.shared_names(known)) == said


def test_a_module_too_long_is_told(rooms: ModuleType, tmp_path: Path) -> None:
    short, long = tmp_path / "short.py", tmp_path / "long.py"
    short.write_text("x = 1\n" * rooms.LONGEST)
    long.write_text("x = 1\n" * (rooms.LONGEST + 1))
    (told,) = rooms.long_modules({"a.short": short, "a.long": long})
    assert told == "a.long has 601 lines, and a module has at most 600"


def test_torch_is_found_wherever_it_is_imported(rooms: ModuleType, tmp_path: Path) -> None:
    file, room = tmp_path / "m.py", tmp_path / "__init__.py"
    room.write_text("")
    known = {"pkg": room, "pkg.m": file}
    for text in (
        "import torch\n",
        "def f():\n    from torch import nn\n",
        "from stratagem.simulator.torch_ops.kernels.shards import Shards\n",
    ):
        file.write_text(text)
        assert rooms.with_torch("pkg", known) == file
    file.write_text("import torchless\n")
    assert rooms.with_torch("pkg", known) is None


def named_in(chapter: Path) -> list[str]:
    """The rooms that a chapter of the design says it explains."""
    line = re.search(r"^Rooms: (.*?)\.$", chapter.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", line[1]) if line else []


class TestChapters:
    @pytest.mark.slow
    def test_every_room_is_explained(self, rooms: ModuleType) -> None:
        known, _ = rooms.import_graph()
        having = {rooms.room_of(n, known) for n, p in known.items() if p.name != "__init__.py"}
        packages = {"stratagem", *(f"stratagem.{each}" for row in rooms.SHELVES for each in row)}
        explained = {room for chapter in CHAPTERS.glob("*.md") for room in named_in(chapter)}
        explained = {f"stratagem.{room.removeprefix('stratagem.')}" for room in explained}
        assert explained == having - packages

    def test_each_begins_with_the_decision(self) -> None:
        shape = r"# [^\n]+\n\nRooms: [^*]+\.\n\n\*\*Decision\.\*\* .+?\n\n## Why\n"
        for chapter in CHAPTERS.glob("*.md"):
            if chapter.stem not in ("index", "limits"):
                assert re.match(shape, chapter.read_text("utf-8"), re.DOTALL), chapter.name

    def test_the_index_names_the_rooms_of_each(self) -> None:
        index = (CHAPTERS / "index.md").read_text("utf-8")
        rows = re.findall(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| (`.*`) \|$", index, re.MULTILINE)
        assert len(rows) > 20
        for name, listed in rows:
            assert re.findall(r"`([^`]+)`", listed) == named_in(CHAPTERS / name), name


@pytest.mark.slow
def test_the_readme_lists_the_rooms_of_every_package(rooms: ModuleType) -> None:
    known, _ = rooms.import_graph()
    text = (FILE.parents[1] / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(?:src/)?(\w+)/\]\([\w/]+\) \| .* \| (`.*) \|$", text, re.MULTILINE)
    listed = {folder: set(re.findall(r"`(\w+)`", cell)) for folder, cell in rows}
    packages = {"simulator": "simulator", "search": "searcher", "profiler": "profiler"}
    packages |= {"executor": "executor", "stratagem": ""}
    for folder, package in packages.items():
        first = [
            name.removeprefix(f"stratagem.{package}".rstrip(".") + ".")
            for name in known
            if known[name].name == "__init__.py" and rooms._package(name) == package
        ]
        assert listed[folder] == {name for name in first if "." not in name} - {
            "stratagem",
            f"stratagem.{package}",
        }


def test_a_kernel_too_long_or_too_wide_is_told(rooms: ModuleType, tmp_path: Path) -> None:
    def told(body: int, arguments: int) -> list[str]:
        file = tmp_path / "kernels.py"
        taken = ", ".join(f"a{k}" for k in range(arguments))
        lines = ["@kernel(cache=True)", f"def play({taken}):", '    """Not counted."""']
        file.write_text("\n".join([*lines, *["    a0 += 1"] * body]))
        return list(rooms.large_kernels({"some": file}))

    assert told(45, 8) == []
    (long,) = told(46, 8)
    assert "kernel play of some has 46 lines of at most 45" in long
    (wide,) = told(45, 9)
    assert "takes 9 arguments of at most 8" in wide
