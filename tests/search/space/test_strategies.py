"""Which dims Megatron's rule shards where several chains of a model want the same operators."""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.searcher.space.strategies import independent, tensor_dims
from stratagem.simulator.graph.models import wide_resnet
from tests.support.examples import examples


def test_a_bottleneck_is_split_at_its_widest_channels() -> None:
    """It was split along the residual stream, and its largest weights were left whole."""
    graph = wide_resnet(50, base_channels=16, width_factor=32, batch=8)
    sharded = tensor_dims(graph, 4)
    for operator in graph.operators:
        if operator.name.endswith("conv2"):
            assert sharded[operator.name] == "out_channel"
            assert sharded[operator.name.replace("conv2", "conv3")] == "in_channel"
    read = {w.parameter for op in graph.operators if op.name in sharded for w in op.weights}
    split = sum(math.prod(graph.parameter_index[name].shape) for name in read)
    assert split > 0.9 * graph.num_parameters


@settings(max_examples=examples(200))
@given(st.integers(1, 8), st.data())
def test_what_is_chosen_are_no_rivals_and_weighs_what_is_promised(size: int, data) -> None:
    pairs = list(itertools.combinations(range(size), 2))
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    weights = data.draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
    rivals = [{a + b - n for a, b in edges if n in (a, b)} for n in range(size)]
    chosen = independent(rivals, weights)
    assert not any(b in rivals[a] for a, b in itertools.combinations(chosen, 2))
    promised = sum(w / (len(each) + 1) for w, each in zip(weights, rivals, strict=True))
    assert sum(weights[n] for n in chosen) >= promised - 1e-9
    # And nothing could be added.
    assert all(n in chosen or rivals[n] & set(chosen) for n in range(size))
