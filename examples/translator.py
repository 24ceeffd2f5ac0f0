"""An LSTM translator with attention (Luong et al. 2015, arXiv 1508.04025), its steps unrolled.

The sizes are those that FlexFlow trained (Jia et al. 2019), but for shorter sentences.

stratagem search examples.translator:build --cluster p3.16xlarge --precision float32 \
    --evaluations 1000 --out plan.json
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.job import Job

JOB = Job("p3.16xlarge", precision="float32")
BATCH = 512
SEQUENCE = 20
VOCABULARY = 20480
HIDDEN = 1024

State = tuple[Tensor, Tensor]
"""The output and the memory cell after a step, (sample, hidden) each."""


class LSTM(nn.Module):
    """One layer (Hochreiter & Schmidhuber 1997), step by step."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.given = nn.Linear(hidden, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        given = self.given(x)
        outputs: list[Tensor] = []
        for step in range(x.shape[1]):
            gates = given[:, step]
            if state is not None:
                gates = gates + self.recurrent(state[0])
            into, forget, new, out = gates.view(-1, 4, self.hidden).unbind(1)
            memory = into.sigmoid() * new.tanh()
            if state is not None:
                memory = memory + forget.sigmoid() * state[1]
            state = (out.sigmoid() * memory.tanh(), memory)
            outputs.append(state[0])
        assert state is not None
        return torch.stack(outputs, 1), state


class Translator(nn.Module):
    """An encoder, a decoder that starts where it ended, and attention between their outputs."""

    def __init__(
        self, *, num_layers: int = 2, hidden: int = HIDDEN, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, hidden)
        self.target = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.ModuleList(LSTM(hidden) for _ in range(num_layers))
        self.decoder = nn.ModuleList(LSTM(hidden) for _ in range(num_layers))
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.mix = nn.Linear(2 * hidden, hidden, bias=False)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, source_ids: Tensor, target_ids: Tensor, labels: Tensor) -> Tensor:
        seen, made = self.source(source_ids), self.target(target_ids)
        for encoder, decoder in zip(self.encoder, self.decoder, strict=True):
            seen, state = encoder(seen)
            made, _ = decoder(made, state)
        weights = torch.softmax(made @ self.score(seen).transpose(1, 2), -1)
        mixed = torch.tanh(self.mix(torch.cat([weights @ seen, made], -1)))
        return functional.cross_entropy(self.head(mixed).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and one batch of pairs of sentences on the meta device."""
    with torch.device("meta"):
        return Translator(), _batch(BATCH, SEQUENCE, VOCABULARY)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two narrow layers on each side with random weights, and a batch of random tokens."""
    return Translator(hidden=8, vocabulary=30), _batch(4, 3, 30)


def _batch(size: int, sequence: int, vocabulary: int) -> dict[str, Tensor]:
    names = ("source_ids", "target_ids", "labels")
    return {name: torch.randint(vocabulary, (size, sequence)) for name in names}
