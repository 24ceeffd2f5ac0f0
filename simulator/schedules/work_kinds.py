"""The kinds of work of a pipeline's macro graph: passes of blocks, and what joins them."""

from __future__ import annotations

NUM_KINDS = 26
"""Rows of a duration table."""


FORWARD, BACKWARD, LAST_BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, LAST_WEIGHT_GRADIENT = range(6)
"""What a macro task is: the row of the duration table that it reads. The last ones end in the
gradient sync and the update of their stage; where weights are stashed every one does, and the last
ones copy the weights before."""


SYNCED_BACKWARD, SYNCED_WEIGHT_GRADIENT, SYNC, UPDATE, BARE_BACKWARD = range(6, 11)
"""Last blocks that end in the gradient sync, that sync alone, the update alone: what is apart
where a rank goes on beside a sync. Where weights are stashed: a backward without both."""


REDUCED_BACKWARD, REDUCED_WEIGHT_GRADIENT = range(11, 13)
"""Where every microbatch sums its gradients (ZeRO-2 and 3): blocks before the last that do."""


LINKS, LINKS_BACKWARD, LINKS_INPUT_GRADIENT, LINKS_WEIGHT_GRADIENT = range(13, 17)
"""What links do about parameters in such blocks, alone: they gather them, and sum gradients."""


LAST_LINKS, LAST_LINKS_WEIGHT_GRADIENT = range(17, 19)
"""The same of last blocks, with the updates behind it."""


SEND, SEND_BACK, RESHARD, RESHARD_BACK, TIE, REPLICA_SYNC, REPLICA_UPDATE = range(19, NUM_KINDS)
"""What joins blocks: transfers between ranks, and between stages of one rank; parameters tied
between stages; sums of the gradients of a stage's copies, and what each copy does behind them."""
