"""An option of the command line for each option of choices that a search may try."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from stratagem.simulator.sharding.choice import OPTIONS, USUAL_TRIES, ChoiceOption

Verb = Callable[..., None]


def takes_tried_options(behind: str) -> Callable[[Verb], Verb]:
    """Have a verb take what its search may try, in a dict `tried`, as options of their own.

    Example:
        >>> @takes_tried_options(behind="model")
        ... def verb(model: str, *, tried: dict[str, Any]) -> None:
        ...     print(model, tried)
        >>> verb(model="gpt", fuse=True, chunks=[4, 2])
        gpt {'chunks': (1, 2, 4), 'fuse': True, 'regather': False, 'stream': False}

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
    return [(each.tried_by, USUAL_TRIES[each.tried_by]) for each in OPTIONS if each.tried_by]


def _parameter(option: ChoiceOption) -> inspect.Parameter:
    """A flag, or numbers of which each is given by itself."""
    name, lists = option.tried_by, isinstance(USUAL_TRIES[option.tried_by], tuple)
    told = typer.Option(f"--{name.replace('_', '-')}", help=option.help)
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None if lists else False,
        annotation=Annotated[list[int] | None, told] if lists else Annotated[bool, told],
    )


def _asked(given: Any, usual: Any) -> Any:
    """What is tried beside what is usual."""
    if isinstance(usual, tuple):
        return tuple(sorted({*usual, *(given or ())}))
    return bool(given)
