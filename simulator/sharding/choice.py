"""What a plan decides about one operator."""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.simulator.graph.placement import Config


@dataclass(frozen=True)
class Choice:
    """What a strategy decides for one operator.

    Example:
        >>> Choice((REPLICATE,), zero=1, chunks=4).fused
        False

    Attributes:
        config: what each mesh axis does to it.
        zero: the ZeRO stage of its parameters (Rajbhandari et al. 2020): 0 keeps everything on
            every data-parallel rank; 1 shards the optimizer state; 2 also the gradients,
            reduce-scattered after every microbatch; 3 also the parameters, gathered before every
            use.
        recompute: what it makes for its own segment is dropped after the forward pass and made
            again in the backward pass, with the conversions of its inputs (see
            `checkpoint_segments`).
        chunks: in how many pieces its passes run, so that a piece's conversion to or from its
            neighbours overlaps with the next piece (CoCoNet, Jangda et al. 2022).
        fused: its elementwise work runs inside the kernel of the collective that feeds it
            (CoCoNet): the update of an operator with parameters in their gradient sync, the
            forward pass of an elementwise one in the conversion of its first input.
        regather: what its inputs are converted from is kept for backward, not the copies, and
            backward converts them again: with sequence parallelism a shard instead of what was
            gathered (Korthikanti et al. 2022, arXiv 2205.05198). What is recomputed converts its
            inputs again anyway.
        streamed: its pieces are parts of one product, and what goes with them is one collective
            that waits for each part (CoCoNet; see `pieces_and_fusion`). Predicted only: the
            executor has a product and a collective for each piece.

    Raises:
        ValueError: if the ZeRO stage is not 0 to 3, `chunks` is below 1, or `streamed` has no
            pieces.
    """

    config: Config
    zero: int = 0
    recompute: bool = False
    chunks: int = 1
    fused: bool = False
    regather: bool = False
    streamed: bool = False

    def __post_init__(self) -> None:
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage {self.zero}; it must be 0, 1, 2 or 3")
        if self.chunks < 1:
            raise ValueError(f"{self.chunks} chunks; there must be at least 1")
        if self.streamed and self.chunks == 1:
            raise ValueError(
                "streamed with 1 chunk: one piece has nothing to stream; set chunks to 2 or more, "
                "or streamed to false"
            )

    @property
    def num_products(self) -> int:
        """How many products a pass is, each a launch of its own: streamed pieces are parts of one.

        Example:
            >>> Choice((), chunks=4).num_products, Choice((), chunks=4, streamed=True).num_products
            (4, 1)
        """
        return 1 if self.streamed else self.chunks
