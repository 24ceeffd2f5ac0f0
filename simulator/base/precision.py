"""What numbers are held in: formats, and the precision of a training run, a format for each role.

A format is described once, in `FORMATS`, and a precision once, in `PRECISIONS`: memory, what links
carry, copies, optimizers, loss scales and tolerances follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stratagem.simulator.base.misspelt_names import unknown


@dataclass(frozen=True)
class Format:
    """How a floating number is held; torch's dtype of the same name holds one.

    Attributes:
        nbytes: of one.
        tolerance: relative errors that small models have in it, with some room.
        narrow: whether gradients may be smaller than its numbers, so that the loss is scaled.
        stored: whether tensors may be held in it; products may round their operands to any.
    """

    nbytes: int
    tolerance: float
    narrow: bool = False
    stored: bool = True


FORMATS = {
    "float64": Format(8, 1e-9),
    "float32": Format(4, 1e-4),
    "bfloat16": Format(2, 3e-2),
    "float16": Format(2, 5e-3, narrow=True),
}

DTYPE_BYTES = {
    **{name: each.nbytes for name, each in FORMATS.items()},
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of a scalar by the name of its dtype."""

FULL = "float32"
"""The format that models are captured in, and that optimizers work in."""


def is_full(name: str) -> bool:
    """Whether a format has all that optimizers need: what is held in it needs no copy.

    Example:
        >>> is_full("float32"), is_full("bfloat16")
        (True, False)
    """
    return FORMATS[name].nbytes >= FORMATS[FULL].nbytes


STORED = tuple(
    name for name, each in FORMATS.items() if each.stored and each.nbytes <= FORMATS[FULL].nbytes
)
"""Formats that parameters, activations and gradients may be held in."""

PRECISIONS: dict[str, Precision] = {}
"""Presets, by name."""


@dataclass(frozen=True)
class Precision:
    """The formats of a training run, by the role of a tensor.

    Example:
        >>> PRECISIONS["bfloat16"].master, PRECISIONS["float16"].scales_loss
        ('float32', True)
        >>> own = Precision("float32, products in bfloat16", products="bfloat16")
        >>> own.storage, own.kernels
        ('float32', 'float32, products in bfloat16')

    Links carry a tensor as it is held: activations and parameters as they are stored, gradients of
    parameters as they are added up. Losses and sums to a scalar stay as they were captured.

    Attributes:
        name: what words and files call it; that of a preset is the preset's alone.
        storage: of parameters and activations, and of the gradients of activations. Where it is
            `FULL`, all stay as they were captured.
        products: what the operands of matrix products are rounded to, and whose units multiply
            them; empty: as they are stored.
        gradients: in which gradients of parameters are added up and reduced; empty: as stored.

    Raises:
        ValueError: no name, that of another precision, or a format that is not there or cannot
            hold what it is given for.
    """

    name: str
    storage: str = FULL
    products: str = ""
    gradients: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a precision has no name: give it one that no preset has")
        object.__setattr__(self, "products", self.products or self.storage)
        object.__setattr__(self, "gradients", self.gradients or self.storage)
        for what in ("storage", "gradients"):
            if getattr(self, what) not in STORED:
                raise unknown(f"{what} of a precision in", getattr(self, what), STORED)
        if self.products not in FORMATS:
            raise unknown("products of a precision in", self.products, FORMATS)
        if FORMATS[self.products].nbytes > FORMATS[self.storage].nbytes:
            raise ValueError(
                f"precision {self.name!r} has products in {self.products} of what is stored in "
                f"{self.storage}: they take no more bytes than what they read, so store that in "
                f"{self.products} too"
            )
        preset = PRECISIONS.get(self.name)
        if preset not in (None, self):
            raise ValueError(
                f"precision {self.name!r} is a preset with storage {preset.storage}, products "
                f"{preset.products} and gradients {preset.gradients}: give one with storage "
                f"{self.storage}, products {self.products} and gradients {self.gradients} another "
                "name"
            )

    @property
    def rounds_products(self) -> bool:
        """Whether products multiply something else than what is stored."""
        return self.products != self.storage

    @property
    def rounded_to(self) -> str:
        """What operands are rounded to before they are multiplied; empty where they are not."""
        return self.products if self.rounds_products else ""

    @property
    def master(self) -> str:
        """Of the copy of each parameter that the optimizer updates; empty where it needs none."""
        return "" if is_full(self.storage) else FULL

    @property
    def states(self) -> str:
        """Of the optimizer's means."""
        return FULL

    @property
    def scales_loss(self) -> bool:
        """Whether a format of gradients, of activations too, has none as small as they are."""
        return any(FORMATS[each].narrow for each in (self.storage, self.gradients))

    @property
    def kernels(self) -> str:
        """What operators run in: timings are kept by it."""
        rounded = f", products in {self.products}" if self.rounds_products else ""
        return f"{self.storage}{rounded}"

    @property
    def lowest(self) -> str:
        """Of all formats that numbers go through the one that is furthest off."""
        used = (self.storage, self.products, self.gradients)
        return max(used, key=lambda name: FORMATS[name].tolerance)

    def adding_in(self, gradients: str) -> Precision:
        """The same, with gradients added up in another format; itself where that is its own.

        Example:
            >>> PRECISIONS["bfloat16"].adding_in("float32").name
            'bfloat16, gradients in float32'
        """
        if gradients in ("", self.gradients):
            return self
        return replace(self, name=f"{self.name}, gradients in {gradients}", gradients=gradients)


_PRESETS = (
    Precision("float32"),
    Precision("bfloat16", storage="bfloat16"),
    Precision("float16", storage="float16"),
    # Gradients of many microbatches are added up in float32 (Megatron-LM).
    Precision("mixed bfloat16", storage="bfloat16", gradients="float32"),
    Precision("mixed float16", storage="float16", gradients="float32"),
)

PRECISIONS.update({preset.name: preset for preset in _PRESETS})


def precision_named(given: str | Precision) -> Precision:
    """The record of a preset by its name; a record is itself.

    Raises:
        ValueError: there is no preset of that name.
    """
    if isinstance(given, Precision):
        return given
    if given not in PRECISIONS:
        raise unknown("precision", given, PRECISIONS)
    return PRECISIONS[given]
