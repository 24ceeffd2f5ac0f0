"""What the command line calls a model: ``module:function``, or the file of a captured graph."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.simulator.files import read_text
from stratagem.simulator.graph import OperatorGraph
from stratagem.simulator.graph_io import graph_from_json

if TYPE_CHECKING:
    from torch import Tensor, nn

_SPEC = re.compile(r"[\w.]+:\w+")


def load_graph(spec: str) -> OperatorGraph:
    """The operator graph of a model: captured, or read from a file that `capture` wrote.

    Example:
        >>> load_graph("examples.small_gpt:build")  # doctest: +SKIP

    Raises:
        ValueError: the file is broken or missing, or the function is missing or fails.
    """
    if not _SPEC.fullmatch(spec):
        if not Path(spec).exists():
            raise ValueError(
                f"model {spec!r} is neither module:function nor the file of a captured graph"
            )
        return graph_from_json(read_text(spec, "graph file"))
    from stratagem.simulator.torch_ops.capture import capture

    model, inputs = load_model(spec)
    return capture(model, kwargs=inputs, name=spec.partition(":")[0].rpartition(".")[2])


def load_model(spec: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and example inputs that the function ``module:function`` returns.

    The module is looked for in the current directory too.

    Raises:
        ValueError: there is no such function, or it fails or returns something else.
    """
    from stratagem.executor.models import make_model

    try:
        return make_model(spec, seed=0)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"model {spec!r} failed: {type(error).__name__}: {error}") from error
