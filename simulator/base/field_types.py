"""What users give is of the type that is declared, or refused in a sentence that names it."""

from __future__ import annotations

import math
import numbers
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np


def check_fields(record: Any, where: str = "") -> None:
    """Refuse fields of a dataclass that are of another type than declared; for `__post_init__`.

    Lists become the tuples that they stand for, so that the record can be hashed. A whole number
    counts as a number, a truth value as neither, and what is not a number (nan) as none.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Limits:
        ...     stages: int | None = None
        ...     chunks: tuple[int, ...] = (1,)
        ...     def __post_init__(self):
        ...         check_fields(self, "limits")
        >>> Limits(chunks=[1, 2])
        Limits(stages=None, chunks=(1, 2))
        >>> Limits("2")
        Traceback (most recent call last):
        ValueError: limits: stages is '2'; it must be a whole number or None

    Args:
        record: a dataclass, frozen or not.
        where: what errors call it; nothing is said where that is clear.

    Raises:
        ValueError: names the field, its value and what is expected.
    """
    for name, kind in _declared(record.__class__).items():
        value = getattr(record, name)
        check_type(value, kind, name, where)
        if (settled := _as_tuple(value)) is not value:
            object.__setattr__(record, name, settled)


def check_type(value: object, kind: Any, name: str, where: str = "") -> None:
    """Refuse one value, such as an argument, that is not of a type.

    Example:
        >>> check_type("2", int, "steps", "execute")
        Traceback (most recent call last):
        ValueError: execute: steps is '2'; it must be a whole number

    Raises:
        ValueError: names the value and what is expected.
    """
    if not _is_of(value, kind):
        shown = repr(value)
        shown = shown if len(shown) <= LONGEST_SHOWN else f"a {type(value).__name__}"
        raise ValueError(
            f"{where}{': ' * bool(where)}{name} is {shown}; it must be {_in_words(kind)}"
        )


def check_arguments(where: str, **given: tuple[object, Any]) -> None:
    """Refuse arguments that are not of their types; the first line of a public function.

    Example:
        >>> check_arguments("execute", steps=("2", int), memory=(True, bool))
        Traceback (most recent call last):
        ValueError: execute: steps is '2'; it must be a whole number

    Args:
        where: what errors call the function.
        given: per argument its value and its type.

    Raises:
        ValueError: names the argument, its value and what is expected.
    """
    for name, (value, kind) in given.items():
        check_type(value, kind, name, where)


LONGEST_SHOWN = 60
"""Characters of a value in an error."""

_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text",
    type(None): "None",
}


@cache
def _declared(record: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = get_type_hints(record)
    return {each.name: hints[each.name] for each in fields(record)}


def _is_of(value: object, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return is_number and not math.isnan(value)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return any(_is_of(value, each) for each in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple | list) and _are_of(value, parts)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _is_of(key, parts[0]) and _is_of(each, parts[1]) for key, each in value.items()
        )
    if origin is Callable or kind is Callable:
        return callable(value)
    return isinstance(value, origin or kind)


def _are_of(values: tuple[Any, ...] | list[Any], kinds: tuple[Any, ...]) -> bool:
    """Whether the parts of a tuple are of its types; ``...`` behind one is any number of it."""
    if kinds[-1] is ...:
        return all(_is_of(each, kinds[0]) for each in values)
    return len(values) == len(kinds) and all(map(_is_of, values, kinds))


def _as_tuple(value: Any) -> Any:
    """Tuples for lists, inside of tuples too; itself where there are none."""
    if type(value) not in (list, tuple):
        return value
    made = tuple(map(_as_tuple, value))
    same = type(value) is tuple and all(a is b for a, b in zip(made, value, strict=True))
    return value if same else made


def _in_words(kind: Any) -> str:
    """A type as an error says it."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _WORDS:
        return _WORDS[kind]
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_in_words, parts)))
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple and parts == (Any, ...):
        return "a tuple, such as (x,)"
    if origin is tuple and parts[-1] is ...:
        return f"a tuple, each {_in_words(parts[0])}"
    if origin is tuple:
        return f"a tuple of {' and '.join(map(_in_words, parts))}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping of {_in_words(parts[0])} to {_in_words(parts[1])}"
    if origin is Callable or kind is Callable:
        return "a function"
    if kind is Mapping:
        return "a mapping"
    name = (origin or kind).__name__
    return f"a{'n' * (name[0] in 'AEIOU')} {name}"
