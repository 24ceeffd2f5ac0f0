"""Every claim, in the order of the page."""

from __future__ import annotations

from benchmarks.papers import alpa, coconet, megatron, operator_splits, pipelines, zero
from benchmarks.papers.claims import Claim

CLAIMS: tuple[Claim, ...] = (
    *operator_splits.CLAIMS,
    *pipelines.CLAIMS,
    *zero.CLAIMS,
    *megatron.CLAIMS,
    *alpa.CLAIMS,
    *coconet.CLAIMS,
)
