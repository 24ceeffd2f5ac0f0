"""The examples of docstrings show what they say, room by room."""

from __future__ import annotations

import doctest
import importlib
import os
from collections import defaultdict
from pathlib import Path

import pytest

import stratagem

PACKAGE = Path(stratagem.__file__).parent


def modules_by_room() -> dict[str, list[str]]:
    """Modules with examples, by the package that they lie in; as `import` has their names."""
    rooms = defaultdict(list)
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        room = ".".join(Path(folder).relative_to(PACKAGE.parent).parts)
        for file in sorted(Path(folder, name) for name in names if name.endswith(".py")):
            if ">>>" in file.read_text(encoding="utf-8"):
                rooms[room].append(f"{room}.{file.stem}".removesuffix(".__init__"))
    return dict(sorted(rooms.items()))


ROOMS = modules_by_room()


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_a_room(room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for name in ROOMS[room]:
        for example in doctest.DocTestFinder(exclude_empty=True).find(
            importlib.import_module(name), name
        ):
            runner.run(example, out=told.append)
    assert not runner.summarize(verbose=False).failed, "".join(told)


def test_an_example_that_is_wrong_is_told() -> None:
    told: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "sum", None, None)
    runner.run(wrong, out=told.append)
    assert "Expected:\n    3\nGot:\n    2" in "".join(told)


def test_most_rooms_have_examples() -> None:
    assert len(ROOMS) > 40
    assert sum(map(len, ROOMS.values())) > 200
