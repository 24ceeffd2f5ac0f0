"""How the model is trained, as far as it decides time and memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stratagem.simulator.base.dtypes import DTYPE_BYTES
from stratagem.simulator.base.misspelt_names import unknown

PRECISIONS = ("float32", "bfloat16", "float16")
FLASH_VERSIONS = (1, 2, 3)
OPTIMIZER_STATES = {"sgd": 0, "adam": 2}


@dataclass(frozen=True)
class Training:
    """Precision and optimizer of a training run.

    Attributes:
        precision: of parameters and activations.
        optimizer: ``sgd`` or ``adam``.
        learning_rate: of the optimizer, where no schedule of a run scales it.
        betas: decay of Adam's means of the gradient and of its square.
        weight_decay: of every parameter: added to the gradient by SGD, taken off the parameter
            itself by Adam (AdamW, Loshchilov and Hutter 2019).
        clip_norm: gradients are made shorter where the norm of all of them is above it (Pascanu et
            al. 2013); 0 for never. It is executed, and priced only where the update is not fused
            (`fused_update`), without the sum of one number over ranks. In float16 the same sum
            tells whether a gradient of any rank is not finite.
        gradient_precision: in which gradients are added up and reduced; empty: as `precision`.
            Megatron-LM adds bfloat16 gradients up in float32.
        flash_version: which FlashAttention runs fused attention, 1 (Dao et al. 2022), 2 (Dao 2023)
            or 3 (Shah et al. 2024, on Hopper).
        fused_loss: whether the cross-entropy is one kernel that leaves the gradient where the
            logits were; otherwise it works on float32 copies of the logits.
        fused_accumulation: whether products add a microbatch's gradients of weights to those
            before where these lie (Megatron-LM's fusion of 2022). Otherwise every microbatch's are
            added in a pass of their own, those of the first to zeros: as autograd and hooks do it.
            It counts in predicted time alone.
        fused_update: whether an update is one kernel, which reads gradients as backward leaves
            them and writes parameters as operators use them (the executor's on GPUs). Otherwise
            optimizers of mixed precision make passes over float32 copies of the gradients, as
            Megatron-LM's does. It counts in predicted time alone: copies are there when
            activations are gone.
        bucketed_gradients: whether gradients that are added up in another precision are also held
            as backward makes them: in the buckets of PyTorch's DistributedDataParallel (Li et al.
            2020), or until all of backward is through. It counts in predicted memory alone; the
            executor holds none.

    Example:
        >>> Training(precision="bfloat16").optimizer_bytes
        12

    Below float32 the optimizer keeps a float32 master copy beside its states (mixed precision,
    Micikevicius et al. 2018). `fused_elementwise` says that a chain of elementwise steps runs as
    one kernel, as a compiler makes it, not as one kernel a step, and that nothing inside is kept
    for backward. The executor runs and keeps steps.

    Raises:
        ValueError: on an unknown precision or optimizer, a beta that is not in [0, 1), or a
            weight decay or a norm below 0.
    """

    precision: str = "float32"
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    gradient_precision: str = ""
    fused_elementwise: bool = False
    flash_version: int = 2
    fused_loss: bool = False
    fused_accumulation: bool = True
    fused_update: bool = True
    bucketed_gradients: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip_norm: float = 0.0

    def unlike(self, other: Training) -> str:
        """In words, the first thing in which another one differs; empty if nothing does.

        Example:
            >>> Training("bfloat16").unlike(Training())
            "precision is 'bfloat16', not 'float32'"
        """
        for each in fields(self):
            mine, its = getattr(self, each.name), getattr(other, each.name)
            if mine != its:
                return f"{each.name} is {mine!r}, not {its!r}"
        return ""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("precision", self.precision, PRECISIONS),
            ("gradient_precision", self.gradient_precision or self.precision, PRECISIONS),
            ("optimizer", self.optimizer, OPTIMIZER_STATES),
        ):
            if value not in known:
                raise unknown(what, value, known)
        if self.flash_version not in FLASH_VERSIONS:
            versions = ", ".join(map(str, FLASH_VERSIONS))
            raise ValueError(f"no flash_version {self.flash_version}; there are {versions}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}; each must be at least 0 and below 1")
        for name, number in (("weight_decay", self.weight_decay), ("clip_norm", self.clip_norm)):
            if number < 0:
                raise ValueError(f"{name} is {number}; it must be 0 or more")

    def bytes_of(self, dtype: str) -> int:
        """Bytes of one scalar: floating tensors take the training precision."""
        return DTYPE_BYTES[self.precision if dtype.startswith(("float", "bfloat")) else dtype]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter."""
        return DTYPE_BYTES[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradient of one parameter."""
        return DTYPE_BYTES[self.gradient_precision or self.precision]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are made or added up in float16, which has none as small as they are.

        Example:
            >>> Training(precision="float16").scales_loss
            True
            >>> Training(precision="bfloat16").scales_loss
            False
        """
        return "float16" in (self.precision, self.gradient_precision)

    @property
    def holds_buckets(self) -> bool:
        """Whether gradients are held a second time, in buckets of the parameters' precision."""
        return self.bucketed_gradients and self.gradient_bytes != self.parameter_bytes

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state per parameter: float32 states and, if needed, a master copy."""
        master = 4 if self.parameter_bytes < 4 else 0
        return master + 4 * OPTIMIZER_STATES[self.optimizer]

    @property
    def update_bytes(self) -> int:
        """Bytes that an update reads and writes per parameter.

        Every state is read and written once, gradients are read, parameters written. Where the
        update is not fused, gradients are copied to float32 and read there, in float16 unscaled in
        place, clipped in place after a pass for their norm, and parameters copied from masters.

        Example:
            >>> Training("float16").update_bytes
            30
            >>> Training("float16", fused_update=False, clip_norm=1.0).update_bytes
            62
        """
        fused = 2 * self.optimizer_bytes + 3 * self.parameter_bytes
        if self.fused_update:
            return fused
        copied = 8 if self.gradient_bytes < 4 else 0  # Read, written, and read by the update.
        masters = 4 if self.parameter_bytes < 4 else 0
        clipped = 12 if self.clip_norm else 0
        return fused + copied + masters + clipped + (8 if self.scales_loss else 0)
