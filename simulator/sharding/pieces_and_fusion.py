"""Pieces and fusion: which operators can overlap or join the collectives around them.

An operator that runs in n pieces cuts one dim of its result; each piece is converted for its
readers while the next is computed, and each piece of its input is used as soon as it has arrived
(Jangda et al. 2022, CoCoNet, arXiv 2105.05720):

    whole      ███████ compute ███████▒▒▒▒▒▒▒▒ collective ▒▒▒▒▒▒▒▒
    in pieces  ██████ ██████ ██████ ██████
                      ▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒

Small pieces compute less efficiently, and each pays the latency of its collective. *Streamed*
pieces do neither, as in CoCoNet's overlap, asynchronous tensor parallelism and Flux: they are
parts of one product, one launch, that makes them one after the other in the order in which the
collective wants them and says when each is there; the collective is one too, waits for each part,
and its steps begin with what this rank has first:

    streamed   ███████ product ███████
                      ▒▒▒▒▒▒ ▒▒▒▒▒▒ ▒▒▒▒▒▒ latency

A part takes 1/n of the time of the product, c = C/n, and 1/n of what bytes take of the collective,
g = (T − λ)/n; the latency λ of the collective's hops is paid once. Behind a product it follows the
last part, which has to pass all hops when the others are through:

    max(n·c + g, c + n·g) + λ

Before a product it comes ahead of the first part, which has come all the way, the others close
behind:

    λ + max(n·g + c, g + n·c)

With n = 1 both are C + T. Backward an operator's passes are cut alike: a part of the pass makes
its gradients of inputs and of weights (apart with `inputs_first`).

*Fusion* has the collective do an elementwise operator's work. In a *sum* every device does its
share of it (CoCoNet's fused all-reduce: Jangda et al. 2022, section 5.2): a ring's all-reduce is a
reduce-scatter and an all-gather, between which each of n devices has 1/n of the elements whole. It
computes with these and passes on results, so nobody stores the sum:

    apart      ▒▒ reduce-scatter ▒▒▒▒ all-gather ▒▒███████ dropout, residual ███████
    in a sum   ▒▒ reduce-scatter ▒▒▒▒ all-gather ▒▒
                                ██ ██ ██ a share

With t of a path of T for its last sum, C for the forward pass apart, and s the share of its
elements that a device is the first to have whole, the conversion takes

    T + max(0, C·s − t)         for one all-reduce max(T, C/n)
    T + C·s                     where its collectives keep the cores busy

and the operator nothing, not even a launch. Backward, and forward again, it runs apart.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.graph.placement import Config, local_sizes
from stratagem.simulator.operators.kinds.kind_record import OperatorRole
from stratagem.simulator.operators.kinds.operator_kinds import (
    kind_of,
    role_of,
    saved_inside,
    saved_slots,
)
from stratagem.simulator.operators.operator import DimKind, Edge, Operator, factors


def piece_dim(operator: Operator, sizes: Mapping[str, int], chunks: int) -> str | None:
    """The dim that an operator in `chunks` pieces cuts: the first of its result that can be.

    It counts samples or positions, is free to split, and its local size is a multiple of `chunks`;
    None where there is no such dim. Only matrix products and convolutions run in pieces.
    """
    product = kind_of(operator).product
    if product is None or product.fused:
        return None
    for name in factors(operator.outputs[0].layout):
        dim = operator.dim(name)
        counts = dim.kind in (DimKind.SAMPLE, DimKind.ATTRIBUTE)
        free = not dim.whole and name not in operator.windows
        if counts and free and sizes[name] % chunks == 0:
            return name
    return None


def is_chain(operator: Operator) -> bool:
    """Whether an operator computes each element of its result by itself, from some tensor."""
    return role_of(operator) is OperatorRole.CHAIN and bool(operator.inputs)


def fuses_forward(operator: Operator) -> bool:
    """Whether an operator's forward pass can run inside the conversion of its first input."""
    return not operator.weights and is_chain(operator)


def fuses_in_sum(operator: Operator) -> bool:
    """Whether an operator's forward pass can run inside the sum of an input, share by share.

    So can an elementwise one whose backward needs none of its inputs, nor results inside it: of
    these a device would have its share only. The result is there on all devices that need it, and
    the mask of a dropout is drawn by position, so each draws what it keeps of it.

    Example:
        >>> from stratagem.simulator.graph.models import mlp
        >>> fuses_in_sum(mlp([8, 8, 8], batch=2).operator("relu"))
        True
    """
    if not is_chain(operator):
        return False
    drawn = sum(function == "dropout" for function, _ in operator.attributes["steps"])
    read = saved_slots(operator) | saved_slots(operator, fused=True)
    return not read and saved_inside(operator) == (0, drawn)


def summed_input(graph: OperatorGraph, i: int, inside: Container[int]) -> int | None:
    """The input of operator `i` that may be a pending sum of its stage; None where none may be.

    That is one made by an operator with a dim that the result lacks; of several the one made last,
    for which the others wait.

    Args:
        graph: the model.
        i: the operator's index in it.
        inside: indices of the operators of its stage.
    """
    found: Edge | None = None
    for edge in graph.reads[i]:
        producer = graph.operators[edge.producer]
        if edge.producer not in inside or producer.is_source:
            continue
        kept = set(factors(producer.outputs[edge.output].layout))
        sums = any(dim.name not in kept and not dim.whole for dim in producer.dims)
        if sums and (found is None or edge.producer > found.producer):
            found = edge
    return None if found is None else found.slot


def check_pieces(operator: Operator, config: Config, shape: Sequence[int], chunks: int) -> None:
    """Refuse pieces that an operator cannot run in on a mesh of `shape`.

    Raises:
        ValueError: naming the operator, what was asked for and what it can have.
    """
    if chunks == 1:
        return
    sizes = local_sizes(operator, config, shape)
    if piece_dim(operator, sizes, chunks) is None:
        names = [n for n in factors(operator.outputs[0].layout) if not operator.dim(n).whole]
        have = ", ".join(f"{n} {sizes[n]}" for n in names) or "none"
        raise ValueError(
            f"operator {operator.name!r} ({operator.kind}) cannot run in {chunks} pieces: only "
            f"matrix products and convolutions do, along samples or positions whose local size is "
            f"a multiple of {chunks} (local sizes: {have}); set chunks to 1"
        )


def check_fusion(operator: Operator) -> None:
    """Refuse the fusion of an operator that has nothing to fuse.

    Raises:
        ValueError: naming the operator and which ones can be fused.
    """
    if not operator.weights and not fuses_forward(operator):
        raise ValueError(
            f"operator {operator.name!r} ({operator.kind}) cannot be fused with a collective: "
            f"only elementwise operators and those with parameters can; set fused to false"
        )


def check_in_sum(operator: Operator, *, fused: bool) -> None:
    """Refuse what cannot run inside the sum of its input, or is `fused` with another conversion.

    Raises:
        ValueError: naming the operator and which ones can.
    """
    if not fuses_in_sum(operator):
        raise ValueError(
            f"operator {operator.name!r} ({operator.kind}) cannot run inside a sum: only "
            "elementwise operators can, whose backward pass needs neither an input nor a result "
            "inside them (biases, residual additions, dropout, ReLU); set in_sum to false"
        )
    if fused and fuses_forward(operator):
        raise ValueError(
            f"operator {operator.name!r} ({operator.kind}) is fused and in_sum: its forward pass "
            "runs inside one conversion, that of its first input or that of its sum; set one of "
            "them to false"
        )
