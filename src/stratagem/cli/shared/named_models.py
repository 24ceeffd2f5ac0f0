"""What the command line calls a model and a cluster.

A model is a function ``module:function`` that returns it or its graph, a graph file, or a builder
of `sg.models` with its arguments: ``sg.models:gpt(num_layers=12, batch=64)``. With ``forward:``
in front it is the forward pass of that model.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.basics.source_places import at_place
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.graph import models
from stratagem.simulator.graph.forward_pass import forward_pass
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster, preset_names

if TYPE_CHECKING:
    from torch import Tensor, nn

FORWARD = "forward:"
"""In front of what a model is called, where its forward pass is meant."""

_SPEC = re.compile(r"[\w.]+:\w+")
_BUILDER = re.compile(r"sg\.models:(\w+)(\(.*\))?", re.DOTALL)


def load_graph(spec: str) -> OperatorGraph:
    """The operator graph of a model: captured, built, or read from a file that `capture` wrote.

    Example:
        >>> load_graph("examples.small_gpt:build")  # doctest: +SKIP
        >>> load_graph("sg.models:mlp([8, 16, 4], batch=32)").num_parameters
        212
        >>> load_graph("forward:sg.models:mlp([8, 16, 4], batch=32)").is_forward
        True

    Raises:
        ValueError: the file is broken or missing, or the function is missing or fails.
    """
    model = spec.removeprefix(FORWARD)
    if model == spec or not (":" in model or Path(model).exists()):  # A module may be called so.
        return _graph_of(spec, forward=False)
    graph = _graph_of(model, forward=True)
    return graph if graph.is_forward else forward_pass(graph)


def _graph_of(spec: str, *, forward: bool) -> OperatorGraph:
    """The graph that a model has or is; one that is captured may be of its forward pass."""
    if builder := _BUILDER.fullmatch(spec):
        return _built(spec, builder[1], builder[2] or "()")
    if not _SPEC.fullmatch(spec):
        if not Path(spec).exists():
            raise ValueError(
                f"model {spec!r} is neither module:function nor the file of a captured graph"
            )
        if spec.endswith(".py"):
            raise ValueError(
                f"model {spec!r} is a Python file; name the function in it that returns (model, "
                f"inputs), as {Path(spec).stem}:build"
            )
        return OperatorGraph.load(spec)
    from stratagem.executor.running.named_functions import model_of
    from stratagem.simulator.torch_ops.capture.capture import capture

    made = _made(spec)
    if isinstance(made, OperatorGraph):
        return made
    model, inputs = model_of(spec, made)
    name = spec.partition(":")[0].rpartition(".")[2]
    return capture(model, kwargs=inputs, name=name, forward=forward)


def load_model(spec: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and example inputs that the function ``module:function`` returns.

    The module is looked for in the current directory too, after everything that is installed.

    Raises:
        ValueError: there is no such function, or it fails or returns something else.
    """
    from stratagem.executor.running.named_functions import model_of

    return model_of(spec, _made(spec))


def _made(spec: str) -> object:
    """What a named function returns; its errors name it and the line of it."""
    from stratagem.executor.running.named_functions import made_by

    try:
        return made_by(spec, seed=0)
    except ValueError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"model {spec!r} failed{at_place(error)}: {said}") from error


def _built(spec: str, name: str, arguments: str) -> OperatorGraph:
    """The graph of a builder of `sg.models`, its arguments numbers, texts and lists of such."""
    builders = {each: getattr(models, each) for each in models.__all__ if each.islower()}
    if name not in builders:
        raise unknown("builder of sg.models called", name, builders)
    try:
        call = ast.parse(f"f{arguments}", mode="eval").body
        assert isinstance(call, ast.Call)
        given = [ast.literal_eval(each) for each in call.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(
            f"model {spec!r} has arguments that are no numbers, texts or lists; write "
            f"sg.models:{name}(batch=64)"
        ) from None
    try:
        made = builders[name](*given, **named)
    except TypeError as error:
        signature = ", ".join(inspect.signature(builders[name]).parameters)
        raise ValueError(f"model {spec!r}: {error}; {name} takes {signature}") from error
    if not isinstance(made, OperatorGraph):
        raise ValueError(f"model {spec!r} makes no graph but a {type(made).__name__}")
    return made


def load_cluster(name: str, nodes: int | None = None, devices: int | None = None) -> Cluster:
    """A preset, or a file where the name is that of one, perhaps in another size.

    Example:
        >>> load_cluster("dgx-a100", nodes=2).num_devices
        16

    Args:
        name: of a preset, or the path of a cluster file.
        nodes: how many it is to have.
        devices: how many each node is to have.

    Raises:
        ValueError: there is neither, the file is broken, or a size is below 1.
    """
    if name in preset_names() or not (name.endswith(".json") or Path(name).exists()):
        return Cluster.preset(name, num_nodes=nodes, devices_per_node=devices)
    return Cluster.load(name).resized(num_nodes=nodes, devices_per_node=devices)
