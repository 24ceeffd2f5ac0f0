"""An option of the command line for each option of choices that a search may try."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from stratagem.searcher.space.skeletons import Options
from stratagem.simulator.sharding.choice import OPTIONS, ChoiceOption

Verb = Callable[..., None]
_TRIED = Options()
"""What searches try that are told nothing."""


def takes_tried_options(behind: str) -> Callable[[Verb], Verb]:
    """Have a verb take what its search may try, in a dict `tried`, as options of their own.

    Example:
        >>> @takes_tried_options(behind="model")
        ... def verb(model: str, *, tried: dict[str, Any]) -> None:
        ...     print(model, tried["chunks"], tried["fuse"])
        >>> verb(model="gpt", fuse=True, chunks=[4, 2])
        gpt (1, 2, 4) True

    Args:
        behind: the parameter behind which they are listed.
    """

    def decorate(verb: Verb) -> Verb:
        hints = get_type_hints(verb, include_extras=True)
        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(verb).parameters.values():
            if each.name != "tried":
                parameters.append(each.replace(annotation=hints[each.name]))
            if each.name == behind:
                parameters += [_parameter(option) for option in OPTIONS if option.tried_by]

        @wraps(verb)
        def run(**given: Any) -> None:
            tried = {name: _asked(given.pop(name, None), usual) for name, usual in _usual()}
            verb(**given, tried=tried)

        run.__dict__["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _usual() -> list[tuple[str, Any]]:
    named = (option.tried_by for option in OPTIONS if option.tried_by)
    return [(name, getattr(_TRIED, name)) for name in named]


def _parameter(option: ChoiceOption) -> inspect.Parameter:
    """A flag, or numbers of which each is given by itself."""
    name, usual = option.tried_by, getattr(_TRIED, option.tried_by)
    flag, lists = name.replace("_", "-"), isinstance(usual, tuple)
    names = f"--{flag}/--no-{flag}" if usual is True else f"--{flag}"
    told = typer.Option(names, help=option.help)
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None if lists else usual,
        annotation=Annotated[list[int] | None, told] if lists else Annotated[bool, told],
    )


def _asked(given: Any, usual: Any) -> Any:
    """What is tried: numbers beside what is usual, or what was said."""
    if isinstance(usual, tuple):
        return tuple(sorted({*usual, *(given or ())}))
    return usual if given is None else bool(given)
