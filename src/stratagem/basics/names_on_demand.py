"""Modules whose names are imported when they are first used."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def names_on_demand(
    module: str,
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """What is `__all__`, `__getattr__` and `__dir__` of a module that imports nothing by itself.

    Its names are those that it imports for type checkers, so that an editor and a running program
    are told of the same ones, in one list:

        if TYPE_CHECKING:
            from stratagem.simulator.plan.plan import Plan as Plan
        else:
            __all__, __getattr__, __dir__ = names_on_demand(__name__)

    Example:
        >>> import stratagem
        >>> names, getattr_, _ = names_on_demand("stratagem")
        >>> "Plan" in names, getattr_("Plan").__name__
        (True, 'Plan')

    Args:
        module: its name; it is being imported, or has been.
    """
    homes = _homes(module)
    names = sorted(homes)

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = _value(homes[name], name)
        setattr(sys.modules[module], name, value)
        return value

    return names, find, lambda: names


def _homes(module: str) -> dict[str, str]:
    """Per name that a module imports for type checkers the module that has it."""
    source = importlib.util.find_spec(module)
    assert source is not None
    assert source.origin is not None
    with open(source.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return {
        alias.asname or alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in branch.body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


def _value(home: str, name: str) -> Any:
    """A name of a module, or a module of a package."""
    found = importlib.import_module(home)
    if not hasattr(found, name):
        return importlib.import_module(f"{home}.{name}")
    return getattr(found, name)
