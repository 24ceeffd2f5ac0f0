"""The model, the data and the learning rate that a command line names."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from stratagem.basics.source_places import at_place
from stratagem.executor.training.batches import Data
from stratagem.executor.training.learning_rates import Rate, RateSchedule, Shape
from stratagem.simulator.base.misspelt_names import unknown


def make_model(spec: str, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Call the function that ``module:function`` names, which returns (model, example inputs).

    Every rank calls it after seeding torch alike, so that all start from the same parameters.

    Raises:
        ValueError: when there is no such function, or it returns something else.
    """
    return model_of(spec, made_by(spec, seed))


def made_by(spec: str, seed: int) -> object:
    """What the function that ``module:function`` names returns, torch seeded before.

    Raises:
        ValueError: when there is no such function, or no function is named.
    """
    make = _function(spec, "model")
    torch.manual_seed(seed)
    return make()


def model_of(spec: str, made: object) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and example inputs that were `made_by` a function.

    Raises:
        ValueError: when it returned something else.
    """
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(
            f"model {spec!r} returned a {type(made).__name__}; it must return (model, dict of "
            "example inputs)"
        )
    return made[0], dict(made[1])


def make_data(spec: str, seed: int) -> Data:
    """Call the function that ``module:function`` names, which returns an iterable of batches.

    Every rank calls it after seeding torch alike, and must get the same whole batches.

    Raises:
        ValueError: when there is no such function, or it returns something else.
    """
    make = _function(spec, "--data")
    torch.manual_seed(seed)
    made = make()
    if not isinstance(made, Iterable):
        raise ValueError(
            f"--data {spec!r} returned a {type(made).__name__}; it must return an iterable of "
            f"batches, such as a DataLoader"
        )
    return made


def make_rate(spec: str, warmup: int, steps: int) -> Rate:
    """The learning rate of a command line, by the name of a schedule or ``module:function``.

    Example:
        >>> make_rate("cosine", 2, 10)(1)
        1.0

    Raises:
        ValueError: when there is no such schedule or function.
    """
    if ":" not in spec:
        if spec not in get_args(Shape):
            known = ", ".join(get_args(Shape))
            raise ValueError(f"no learning rate {spec!r}; there are {known} and module:function")
        return RateSchedule(spec, warmup, steps)  # type: ignore[arg-type]
    if warmup:
        raise ValueError(f"--rate {spec!r} is a function of its own; let it warm up itself")
    return _function(spec, "--rate")


def check_function(spec: str, option: str) -> None:
    """Refuse what cannot be the name of a function, such as the file of a graph.

    Example:
        >>> check_function("model.json", "model")
        Traceback (most recent call last):
        ValueError: model 'model.json' is not module:function; name the function that makes it, \
such as examples.small_gpt:build

    Raises:
        ValueError: names what it is for, and shows how one is written.
    """
    name, _, function = spec.rpartition(":")
    if not (name and function):
        raise ValueError(
            f"{option} {spec!r} is not module:function; name the function that makes it, such as "
            "examples.small_gpt:build"
        )


def _function(spec: str, option: str) -> Callable[..., Any]:
    name, _, function = spec.rpartition(":")
    name = name.removeprefix("forward:")  # Which pass is meant, a plan knows.
    check_function(spec, option)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # Last: no file there stands for a package by its name.
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{option} {spec!r} is not module:function of something importable: {error}"
            f"{at_place(error)}"
        ) from error
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if callable(value)]
        raise unknown(f"function of module {name!r} called", function, known, where=option)
    return found
