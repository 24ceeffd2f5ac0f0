"""What a mesh axis may do to an operator: the entries of `Choice.config` and of `Space.pin`.

sg.Space(pin={"h.*.attn.attention": (sg.placements.Shard("head"),)})
"""

from __future__ import annotations

from stratagem.simulator.graph.placement import REPLICATE, Flat, Partial, Pin, Replicate, Shard

__all__ = ["REPLICATE", "Flat", "Partial", "Pin", "Replicate", "Shard"]
