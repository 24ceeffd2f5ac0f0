"""What a rank holds at a moment of a step, counted in memory itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from stratagem.executor.actions.operator_actions import Tape
from stratagem.executor.interpreter.interpreter import Interpreter


def held_bytes(interpreter: Interpreter) -> int:
    """Bytes of all tensors that values, tapes, collectives and the optimizer hold, each once.

    For `Interpreter.step(between=…)`: what kernels allocate while they run is not seen, and
    collectives on their way are waited for.

    Example:
        >>> found = []
        >>> look = lambda: found.append(held_bytes(interpreter))  # doctest: +SKIP
        >>> interpreter.step(batch, between=look)  # doctest: +SKIP
        >>> max(found)  # doctest: +SKIP
        73400320
    """
    storages: dict[int, int] = {}
    for held in interpreter.held():
        for tensor in saved_tensors(held) if isinstance(held, Tape) else [held]:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def most_held_bytes(interpreter: Interpreter, batch: Mapping[str, Tensor]) -> int:
    """The most bytes that a rank holds between two instructions of a step, which is run.

    Every rank calls this. The step is slow: all tensors are counted before every instruction.

    Example:
        >>> interpreter.step(batch)  # doctest: +SKIP
        >>> most_held_bytes(interpreter, batch)  # doctest: +SKIP
        73400320
    """
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, held_bytes(interpreter))

    interpreter.step(batch, between=look)
    look()
    return most


def saved_tensors(tape: Tape) -> list[Tensor]:
    """What the graph of a tape keeps; nothing once its backward pass is over."""
    found: list[Tensor] = []
    if not tape.leaves:
        return found
    nodes = [edge.node for edge in tape.edges if edge is not None]
    seen: set[object] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [each for each, _ in node.next_functions if each is not None]
        kept = [_kept(node, name) for name in (*_saved_names(type(node)), "saved_tensors")]
        found += [each for each in pytree.tree_leaves(kept) if isinstance(each, Tensor)]
    return found


@lru_cache(maxsize=1024)
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    """Under which names nodes of a kind save what backward needs."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _kept(node: Node, name: str) -> object:
    """What a node saved under a name; nothing where it only has a note of it."""
    try:
        return getattr(node, name, None)
    except IndexError:
        return None
