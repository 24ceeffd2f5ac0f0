"""The model that a command line names."""

from __future__ import annotations

import importlib
import os
import sys

import torch
from torch import Tensor, nn


def make_model(spec: str, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Call the function that ``module:function`` names, which returns (model, example inputs).

    Every rank calls it after seeding torch alike, so that all start from the same parameters.

    Raises:
        ValueError: when there is no such function, or it returns something else.
    """
    module, _, function = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--model {spec!r} is not module:function of something importable: {error}"
        ) from error
    torch.manual_seed(seed)
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"--model {spec!r} must return (model, dict of example inputs)")
    return made[0], dict(made[1])
