"""Well-known models as operator graphs from their sizes alone, without torch."""

from stratagem.simulator.models.perceptron import mlp
from stratagem.simulator.models.transformers import (
    ATTENTIONS,
    POSITIONS,
    bert,
    gpt,
    llama,
    padded_vocabulary,
)
from stratagem.simulator.models.vision import resnet

__all__ = ["ATTENTIONS", "POSITIONS", "bert", "gpt", "llama", "mlp", "padded_vocabulary", "resnet"]
