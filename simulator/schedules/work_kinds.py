"""The kinds of work of a pipeline's macro graph: passes of blocks, and what joins them."""

from __future__ import annotations

NUM_KINDS = 18
"""Rows of a duration table."""


FORWARD, BACKWARD, LAST_BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT = range(6)
"""What a macro task is: the row of the duration table that it reads. The last ones end in the
gradient sync and the update of their stage; where weights are stashed every one does, and the last
ones copy the weights before."""


SEND, SEND_BACK, RESHARD, RESHARD_BACK, TIE, REPLICA_SYNC, REPLICA_UPDATE = range(11, NUM_KINDS)
"""What joins blocks: transfers between ranks, and between stages of one rank; parameters tied
between stages; sums of the gradients of a stage's copies, and what each copy does behind them."""
