"""Well-known models as operator graphs from their sizes alone, without torch.

In:      sizes.
Out:     graphs.
Imports: graph.building and below.
"""

from stratagem.simulator.graph.models.gated_transformers import llama
from stratagem.simulator.graph.models.gpt_bert import (
    ATTENTIONS,
    POSITIONS,
    bert,
    gpt,
    padded_vocabulary,
)
from stratagem.simulator.graph.models.inception import inception_v3
from stratagem.simulator.graph.models.lstm_translation import nmt
from stratagem.simulator.graph.models.mixture_of_experts import DISPATCHES, moe
from stratagem.simulator.graph.models.perceptron import mlp
from stratagem.simulator.graph.models.residual_networks import resnet, wide_resnet

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
