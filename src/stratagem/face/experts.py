"""Blocks of experts in plain PyTorch that `capture` reads, and a capacity for those without.

x = sg.experts.dispatch(tokens, gates, top_k=2, capacity=sg.experts.capacity(1024, 8, 2))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.basics.names_on_demand import names_on_demand

if TYPE_CHECKING:
    from stratagem.simulator.torch_ops.blocks.experts import capacity as capacity
    from stratagem.simulator.torch_ops.blocks.experts import combine as combine
    from stratagem.simulator.torch_ops.blocks.experts import dispatch as dispatch
    from stratagem.simulator.torch_ops.blocks.experts import linear as linear
    from stratagem.simulator.torch_ops.blocks.module_rules import limit_capacity as limit_capacity
else:
    __all__, __getattr__, __dir__ = names_on_demand(__name__)
