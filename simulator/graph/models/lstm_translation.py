"""Recurrent networks: translation by LSTMs with attention, its steps unrolled."""

from __future__ import annotations

from stratagem.simulator.graph.building.contraction_builder import label
from stratagem.simulator.graph.building.graph_builder import GraphBuilder
from stratagem.simulator.graph.building.operator_drafts import (
    DraftTensor,
    part,
    reshape,
    select,
    transpose,
)
from stratagem.simulator.graph.models.layers import check_sizes, linear, parameter
from stratagem.simulator.graph.operator_graph import OperatorGraph
from stratagem.simulator.operators.step_programs import Steps

State = tuple[DraftTensor, DraftTensor]
"""What a layer carries from step to step: its output and its memory cell, (sample, hidden)."""


def nmt(
    *,
    num_layers: int = 2,
    hidden: int = 1024,
    vocabulary: int = 20480,
    sequence: int = 40,
    batch: int = 64,
) -> OperatorGraph:
    """Neural machine translation by LSTMs with attention (Luong et al. 2015, arXiv 1508.04025).

    An encoder and a decoder of equally many LSTM layers; the decoder starts from the states in
    which the encoder ends. Each output of the decoder looks at all of the encoder's (score
    q·(W·k), "general"), and a tanh of both gives the next token. FlexFlow (Jia et al. 2019)
    trained these sizes, its steps unrolled so that every step of every layer is an operator of
    its own: so are they here, and they share the weights of their layer.

    Example: two tables, four layers, attention, and the projection to the vocabulary.
        >>> tables, layers = 2 * 20480 * 1024, 4 * (8 * 1024**2 + 4 * 1024)
        >>> nmt().num_parameters - tables - layers == 3 * 1024**2 + (1024 + 1) * 20480
        True

    Args:
        num_layers: LSTM layers of the encoder, and of the decoder.
        hidden: features of embeddings, cells and outputs.
        vocabulary: rows of each of the two token tables.
        sequence: steps of the source and of the target.
        batch: pairs of sentences of a step of training.

    Gates of the inputs of all steps are one matrix product a layer; a step adds that of the
    output before it. A gate has one bias, where PyTorch keeps the sum of two. The first state is
    zero and needs no product.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {"num_layers": num_layers, "hidden": hidden, "vocabulary": vocabulary}
    check_sizes("nmt", {**sizes, "sequence": sequence, "batch": batch})
    b = GraphBuilder("nmt")
    shape = (batch, sequence)
    source, target, labels = (
        b.input(name, shape, "int64") for name in ("source_ids", "target_ids", "labels")
    )
    table = (vocabulary, hidden)
    seen = b.embedding(source, b.parameter("encoder.embed.weight", table), name="encoder.embed")
    made = b.embedding(target, b.parameter("decoder.embed.weight", table), name="decoder.embed")
    states: list[State | None] = [None] * num_layers
    for i in range(num_layers):
        with b.scope(f"encoder.{i}"):
            seen, states[i] = _layer(b, seen, None)
    for i in range(num_layers):
        with b.scope(f"decoder.{i}"):
            made, _ = _layer(b, made, states[i])
    with b.scope("attention"):
        made = _attend(b, made, seen)
    return b.build(b.cross_entropy(linear(b, "head", made, vocabulary), labels))


def _layer(b: GraphBuilder, x: DraftTensor, state: State | None) -> tuple[DraftTensor, State]:
    """An LSTM (Hochreiter & Schmidhuber 1997) over (sample, sequence, in), and its last state."""
    samples, sequence, hidden = x.shape
    inputs = linear(b, "input", x, 4 * hidden)
    label(reshape(inputs, (samples, sequence, 4, hidden)), [2], "gate", 3)
    weight = parameter(b, "recurrent.weight", (4 * hidden, hidden))
    outputs: list[DraftTensor] = []
    for step in range(sequence):
        with b.scope(b.full_name(f"step{step}")):
            state = _step(b, select(inputs, 1, step), weight, state)
        outputs.append(reshape(state[0], (samples, 1, hidden)))
    assert state is not None
    return b.cat(outputs, dim=1, name="outputs"), state


def _step(b: GraphBuilder, gates: DraftTensor, weight: DraftTensor, state: State | None) -> State:
    """One step: `gates` are those of its input, to which those of the output before are added."""
    if state is None:
        return _cell(b, gates, None)
    output, memory = state
    again = b.linear(output, weight, name="recurrent")
    gates = b.elementwise([again, gates], [["add", [["in", 0], ["in", 1]]]], name="gates")
    return _cell(b, gates, memory)


def _cell(b: GraphBuilder, gates: DraftTensor, memory: DraftTensor | None) -> State:
    """c' = σ(f)·c + σ(i)·tanh(g) and h = σ(o)·tanh(c'); gates are (i, f, g, o) as in PyTorch."""
    into, forget, new, out = (part(gates, 1, each, 4) for each in range(4))
    steps: Steps = [
        ["sigmoid", [["in", 0]]],
        ["tanh", [["in", 1]]],
        ["mul", [["step", 0], ["step", 1]]],
    ]
    if memory is None:
        memory = b.elementwise([into, new], steps, name="memory")
    else:
        steps += [
            ["sigmoid", [["in", 2]]],
            ["mul", [["step", 3], ["in", 3]]],
            ["add", [["step", 2], ["step", 4]]],
        ]
        memory = b.elementwise([into, new, forget, memory], steps, name="memory")
    shown: Steps = [
        ["sigmoid", [["in", 0]]],
        ["tanh", [["in", 1]]],
        ["mul", [["step", 0], ["step", 1]]],
    ]
    return b.elementwise([out, memory], shown, name="output"), memory


def _attend(b: GraphBuilder, made: DraftTensor, seen: DraftTensor) -> DraftTensor:
    """tanh(W·[context, output]) as the sum of two products; contexts are what outputs look at."""
    hidden = made.shape[-1]
    keys = linear(b, "keys", seen, hidden, bias=False)
    scores = b.matmul(made, transpose(keys, 1, 2), name="scores")
    context = b.matmul(b.softmax(scores, name="weights"), seen, name="mixed")
    both = [
        linear(b, "context", context, hidden, bias=False),
        linear(b, "output", made, hidden, bias=False),
    ]
    steps: Steps = [["add", [["in", 0], ["in", 1]]], ["tanh", [["step", 0]]]]
    return b.elementwise(both, steps, name="combined")
