"""Well-known models as operator graphs from their sizes alone, without torch."""

from stratagem.simulator.models.gated import llama
from stratagem.simulator.models.inception import inception_v3
from stratagem.simulator.models.mixture import DISPATCHES, moe
from stratagem.simulator.models.perceptron import mlp
from stratagem.simulator.models.recurrent import nmt
from stratagem.simulator.models.transformers import (
    ATTENTIONS,
    POSITIONS,
    bert,
    gpt,
    padded_vocabulary,
)
from stratagem.simulator.models.vision import resnet, wide_resnet

__all__ = [
    "ATTENTIONS",
    "DISPATCHES",
    "POSITIONS",
    "bert",
    "gpt",
    "inception_v3",
    "llama",
    "mlp",
    "moe",
    "nmt",
    "padded_vocabulary",
    "resnet",
    "wide_resnet",
]
