"""Names and numbers in files of others: what no name may have in it, and no number may be."""

from __future__ import annotations

import unicodedata

LINE_ENDS = "\u2028\u2029"
"""Ends of lines that are no control characters."""

TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that show what follows in another order than it is in."""


def check_texts(value: object, what: str) -> None:
    """Refuse text with characters that end a line, drive a terminal or reorder what is shown.

    Names of files come into programs that are exported, into tables and onto terminals.

    Example:
        >>> check_texts({"name": ["data", "a\\nb"]}, "plan file p.json")
        Traceback (most recent call last):
        ValueError: plan file p.json has character U+000A (position 1) in the text 'a\\nb'; no \
name may have control characters: take it out

    Args:
        value: what was read from JSON: containers of text and other things.
        what: names the file.

    Raises:
        ValueError: names the text, the character and where it is.
    """
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.keys())
            left.extend(each.values())
        elif isinstance(each, (list, tuple)):
            left.extend(each)
        elif isinstance(each, str) and not each.isprintable():
            _check_text(each, what)


def _check_text(text: str, what: str) -> None:
    for position, character in enumerate(text):
        category = unicodedata.category(character)
        if category in ("Cc", "Cs") or character in LINE_ENDS + TURNS:
            shown = repr(text if len(text) <= 40 else f"{text[:40]}…")
            raise ValueError(
                f"{what} has character U+{ord(character):04X} (position {position}) in the text "
                f"{shown}; no name may have control characters: take it out"
            )


def check_numbers(value: object, what: str, *, least: float, most: float) -> None:
    """Refuse numbers that are beyond anything there is, with which nothing can be computed.

    Example:
        >>> check_numbers({"links": [{"cards": 1e308}]}, "file c.json", least=1, most=9)
        Traceback (most recent call last):
        ValueError: file c.json: links[0].cards is 1e+308; 0 or 1 to 9 is expected there

    Args:
        value: builtin containers of numbers and other things.
        what: names the file.
        least: of a number that is not 0, without its sign.
        most: of a number, without its sign.

    Raises:
        ValueError: names the number and where it is.
    """
    left = [("", value)]
    while left:
        path, each = left.pop()
        if isinstance(each, dict):
            left.extend((f"{path}.{key}", part) for key, part in each.items())
        elif isinstance(each, (list, tuple)):
            left.extend((f"{path}[{number}]", part) for number, part in enumerate(each))
        elif isinstance(each, (int, float)) and each and not least <= abs(each) <= most:
            raise ValueError(
                f"{what}: {path.removeprefix('.')} is {each:g}; 0 or {least:g} to {most:g} is "
                f"expected there"
            )


def printable(text: str) -> str:
    """Text for a terminal: what would drive it, or end the line, is shown as a question mark.

    Example:
        >>> printable("a\x1b[2Jb")
        'a?[2Jb'
    """
    return "".join(c if c.isprintable() or c == " " else "?" for c in text)


def python_text(text: str) -> str:
    r"""Text as a literal of Python, in double quotes as formatters have it, whatever is in it.

    Example:
        >>> print(python_text('a"b'))
        "a\"b"
    """
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in "\"'":
        return character.replace('"', '\\"')
    return repr(character)[1:-1]
