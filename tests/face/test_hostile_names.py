"""Names that would be code, lines, markup or terminal commands stay names, or are refused."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from stratagem.cli.app import app
from stratagem.cli.shared.rich_tables import simple_table
from stratagem.exports import FORMATS, export
from stratagem.searcher.space.training_setup import TrainingSetup
from stratagem.simulator.base import files
from stratagem.simulator.base.hostile_texts import printable, python_text
from stratagem.simulator.graph.models import gpt
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.plan.plan import Plan
from tests.support.examples import examples
from tests.support.plans import crossed

SMALL = {"hidden": 32, "num_heads": 4, "vocabulary": 64, "sequence": 16, "batch": 16}
CLUSTER = Cluster.preset("dgx-a100", num_nodes=1, devices_per_node=4)
GRAPH = gpt(num_layers=2, **SMALL)
PLAN = TrainingSetup(tensor=2, zero=0).plan(GRAPH, CLUSTER)
AXIS = PLAN.stages[0].mesh.axes[0].name
MODULE = "h"
"""A module of the model, of which operators and parameters have their names."""

CODE = [
    'x": 2, "q": __import__("os").system("touch pwned"), "z',
    "x'); __import__('os').abort(); ('",
    'x\\": 1}\\n',
    "x\\",
    'x"""',
    "x\nimport os",
    "x\r\nimport os",
    "x\0y",
    "x\u2028import os",
    "x\x0cimport os",
    "x # y",
    "[/b]x[bold]",
    "${HOME}$(id)`id`",
]


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Plan, OperatorGraph]:
    """The plan and graph with another name for an axis, a module, the plan and the model."""
    monkeypatch.setattr(files, "check_texts", lambda value, what: None)
    said = json.dumps(name)[1:-1]
    graph = OperatorGraph.from_json(GRAPH.to_json().replace(f'"{MODULE}.', f'"{said}.'))
    text = PLAN.to_json().replace(f'"{MODULE}.', f'"{said}.').replace(f'"{AXIS}"', f'"{said}"')
    plan = replace(Plan.from_json(text), name=name, model=name, fingerprint=graph.fingerprint)
    return plan, replace(graph, name=name)


class WithoutText(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


def tree(text: str) -> str:
    return ast.dump(WithoutText().visit(ast.parse(text)))


@pytest.mark.parametrize("name", crossed(CODE, every=2))
def test_an_export_has_the_same_tree_whatever_things_are_called(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for target in ("dtensor", "fsdp2"):
        harmless = export(*named(monkeypatch, "harmless"), target).text
        hostile = export(*named(monkeypatch, name), target).text
        assert tree(hostile) == tree(harmless)
        assert "harmless" in harmless
        names = [n.value for n in ast.walk(ast.parse(hostile)) if isinstance(n, ast.Constant)]
        assert any(isinstance(each, str) and name in each for each in names)


@pytest.mark.parametrize(
    ("name", "target"),
    crossed(CODE, sorted(set(FORMATS) - {"dtensor", "fsdp2", "deepspeed"}), every=3),
)
def test_no_name_leaves_a_comment(monkeypatch: pytest.MonkeyPatch, target: str, name: str) -> None:
    def lines(name: str) -> list[str]:
        text = export(*named(monkeypatch, name), target).text
        return [line for line in text.split("\n") if not line.startswith("#")]

    try:
        harmless = lines("harmless")
    except ValueError as error:
        pytest.skip(str(error))
    assert lines(name) == harmless
    assert all("\r" not in line for line in harmless)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.text())
def test_any_text_is_a_literal_of_python(text: str) -> None:
    literal = python_text(text)
    assert ast.literal_eval(literal) == text
    assert len(literal.splitlines()) == 1
    assert literal.startswith('"')


CONTROLS = ["a\nb", "a\tb", "a\x1b[2Jb", "a\0b", "a\x7fb", "a\x85b", "a\u2028b", "a\u202eb"]


@pytest.mark.parametrize("name", CONTROLS)
def test_files_with_control_characters_in_a_name_are_refused(tmp_path: Path, name: str) -> None:
    character = f"U\\+{ord(name[1]):04X}"
    said = json.dumps(name)[1:-1]
    texts = {
        "axis": (PLAN.to_json().replace(f'"{AXIS}"', f'"{said}"'), Plan.from_json),
        "operator": (GRAPH.to_json().replace(f'"{MODULE}.', f'"{said}.'), OperatorGraph.from_json),
    }
    for text, read in texts.values():
        with pytest.raises(ValueError, match=f"has character {character} .*take it out"):
            read(text)
    path = tmp_path / "cluster.json"
    path.write_text(CLUSTER.to_json().replace(CLUSTER.name, said))
    with pytest.raises(ValueError, match=f"cluster file {path} has character {character}"):
        Cluster.load(path)


def test_names_of_other_scripts_are_names() -> None:
    text = PLAN.to_json().replace(f'"{AXIS}"', '"données 数据 🙂"')
    assert Plan.from_json(text).stages[0].mesh.axes[0].name == "données 数据 🙂"


def test_markup_in_names_is_not_interpreted(tmp_path: Path) -> None:
    name = "[/b] [bold red]x[/] :smile:"
    replace(PLAN, name=name).save(tmp_path / "plan.json")
    (tmp_path / "graph.json").write_text(GRAPH.to_json())
    runner = CliRunner()
    out = str(tmp_path / "out.py")
    given_ = [str(tmp_path / "plan.json"), "-m", str(tmp_path / "graph.json")]
    done = runner.invoke(app, ["export", *given_, "--to", "fsdp2", "-o", out])
    assert done.exit_code == 0, done.output
    assert name in done.output.replace("\n", " ")
    shown = runner.invoke(app, ["simulate", str(tmp_path / "plan.json"), given_[2]])
    assert shown.exit_code == 0, shown.output
    wide = Console(file=StringIO(), width=200)
    wide.print(simple_table([name], [[name]]))
    assert isinstance(wide.file, StringIO)
    assert wide.file.getvalue().count(name) == 2


def test_what_is_printed_does_not_drive_the_terminal() -> None:
    assert printable("a\x1b[2J\nb é 数") == "a?[2J?b é 数"
