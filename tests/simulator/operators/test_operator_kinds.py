"""What a kind of operator is stands in its record: no other module asks for its name."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stratagem.simulator.operators.kinds.operator_kinds import KINDS, kind_of, product_of
from stratagem.simulator.operators.operator import Operator

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "simulator": "stratagem.simulator",
    "search": "stratagem.searcher",
    "profiler": "stratagem.profiler",
    "executor": "stratagem.executor",
    "src/stratagem": "stratagem",
    "benchmarks": "benchmarks",
    "examples": "examples",
}
FRONTIER = ("simulator/torch_ops/", "simulator/operators/kinds/")
"""Kernels and handlers of torch, each of one kind; and the records themselves."""


def modules() -> Iterator[tuple[str, str]]:
    """Every file of ours beyond the frontier, and how its module is imported."""
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            linked = any((ROOT / folder / part).is_symlink() for part in inside.parts[:1])
            name = str(path.relative_to(ROOT))
            if not linked and not name.startswith(FRONTIER):
                parts = inside.with_suffix("").parts
                yield name, ".".join([package, *(p for p in parts if p != "__init__")])


def asks(tree: ast.AST, names: Mapping[str, Any]) -> Iterator[int]:
    """Lines that compare a kind with the name of one, or look it up in a table by such names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "is_source":
            for inner in ast.walk(node):
                inner.lineno = 0  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if getattr(node, "lineno", 1) == 0:
            continue
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Subscript):
            sides = [node.value, node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            sides = [node.func.value, *node.args]
        elif isinstance(node, ast.Match):
            sides = [node.subject, *(case.pattern for case in node.cases)]
        else:
            continue
        kinds = [side for side in sides if any(map(is_kind, parts(side)))]
        others = [side for side in sides if side not in kinds] or sides
        if kinds and any(KINDS.keys() & strings(each, names) for each in others):
            yield node.lineno


def parts(node: ast.AST) -> Iterable[ast.AST]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def is_kind(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "kind") or (
        isinstance(node, ast.Name) and node.id == "kind"
    )


def strings(node: ast.AST, names: Mapping[str, Any]) -> set[str]:
    """The strings in an expression, those of tables that it names among them."""
    found: set[str] = set()
    for each in ast.walk(node):
        value = each.value if isinstance(each, ast.Constant) else None
        if isinstance(each, ast.Name):
            value = names.get(each.id)
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, (dict, set, frozenset, tuple, list)):
            found |= {one for one in value if isinstance(one, str)}
    return found


@pytest.mark.parametrize(
    "line",
    [
        'operator.kind == "linear"',
        '"linear" != graph.operators[i].kind',
        'kind in ("attention", "matmul")',
        'draft.kind not in {"softmax": 1}',
        "operator.kind in TABLE",
        "operator.kind == ONE",
        "TABLE[operator.kind]",
        "TABLE.get(operator.kind, 3)",
        'operator.kind.startswith("linear")',
        '(operator.kind, index) == ("embedding", 0)',
        'match operator.kind:\n    case "linear":\n        pass',
    ],
)
def test_a_question_is_found_in_every_way_to_ask_it(line: str) -> None:
    assert list(asks(ast.parse(line), {"TABLE": {"linear": -1}, "ONE": "prefix"}))


@pytest.mark.parametrize(
    "line",
    [
        'task.kind == "forward"',
        "action.kind in KINDS_OF_TASKS",
        'replace(operator, kind="linear_sum")',
        "kind_of(operator).product is not None",
        'def is_source(self):\n    return self.kind == "source"',
    ],
)
def test_other_things_have_kinds_too(line: str) -> None:
    assert not list(asks(ast.parse(line), {"KINDS_OF_TASKS": ("forward", "backward")}))


@pytest.mark.slow
def test_nobody_beyond_the_frontier_of_torch_asks_for_the_name_of_a_kind() -> None:
    """A hundred such questions gave three answers to whether a kind is a matrix product."""
    found = []
    for file, module in modules():
        source = (ROOT / file).read_text("utf-8")
        if "kind" in source and "__main__" not in module:
            names = vars(importlib.import_module(module))
            found += [f"{file}:{line}" for line in asks(ast.parse(source), names)]
    assert found == []


def test_a_kind_that_nobody_registered_is_refused() -> None:
    unheard = Operator("here", "sofmax", (), (), (), ())
    with pytest.raises(ValueError, match=r"'here' of kind 'sofmax' .did you mean 'softmax'"):
        kind_of(unheard)
    with pytest.raises(ValueError, match="'here' of kind 'cat' runs no matrix product"):
        product_of(Operator("here", "cat", (), (), (), ()))
