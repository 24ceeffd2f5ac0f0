"""Lets the reference show the doctests of docstrings, which call their section ``Example:``."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:(?=.*\n\s+>>> )", flags=re.MULTILINE)
"""The heading of a section of doctests, with or without a title."""


class ExampleSections(griffe.Extension):
    """Calls a section of doctests what the parser of the reference calls it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section in the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
