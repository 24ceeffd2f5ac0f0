"""What the command line calls a model (a function, or a graph file) and a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.basics.source_places import at_place
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.hardware.cluster import Cluster, preset_names

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
        if spec.endswith(".py"):
            raise ValueError(
                f"model {spec!r} is a Python file; name the function in it that returns (model, "
                f"inputs), as {Path(spec).stem}:build"
            )
        return OperatorGraph.load(spec)
    from stratagem.simulator.torch_ops.capture.capture import capture

    model, inputs = load_model(spec)
    return capture(model, kwargs=inputs, name=spec.partition(":")[0].rpartition(".")[2])


def load_model(spec: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and example inputs that the function ``module:function`` returns.

    The module is looked for in the current directory too, after everything that is installed.

    Raises:
        ValueError: there is no such function, or it fails or returns something else.
    """
    from stratagem.executor.running.named_functions import make_model

    try:
        return make_model(spec, seed=0)
    except ValueError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"model {spec!r} failed{at_place(error)}: {said}") from error


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
