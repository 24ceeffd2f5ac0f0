"""Device types: data-sheet figures, the constants of their cost models, and the bundled ones."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources

import numpy as np
import numpy.typing as npt

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.files import decode
from stratagem.simulator.base.misspelt_names import unknown

GIB = 2**30

DEVICE_FOLDER = "devices"


@dataclass(frozen=True)
class ProductConstants:
    """How matrix products of operands in one format run on a device: what `product_seconds` reads.

    `efficiency` is the share of the peak that an endless product in endless tiles reaches;
    `reuse` how much loading operands slows down a tile of r × c, by reuse · (1/r + 1/c);
    `prologue` the length of reduction that filling and emptying a tile's pipeline is worth;
    `quantisation` the part of a last wave's idle processors that is lost (0: none, as if tiles of
    other sizes filled them); `memory_efficiency` the share of the memory bandwidth;
    `sharpness` how sharply compute and memory time become their maximum (large: at once);
    `split_traffic` the times that each part of a split reduction writes and reads its float32
    result, `split_us` what joining them costs; `launch_us` the least time of a kernel.

    `batched` and `backward` are the rates of batched products and of the two products of a
    backward pass (whose operands lie otherwise) to plain forward ones; `winograd` and
    `winograd_backward` the gain of 3 × 3 convolutions of stride 1 from doing fewer
    multiplications. A product is misaligned where its columns or depth are no multiple of 16
    bytes: `misaligned` is its rate to that of an aligned one, and where it is batched it runs on
    the vector units.

    `relative_error` is that of shapes held out of the fit; `derived_from` names the device whose
    constants these are where its own were not measured.
    """

    efficiency: float
    reuse: float
    prologue: float
    quantisation: float
    memory_efficiency: float
    sharpness: float
    split_traffic: float
    split_us: float
    launch_us: float
    relative_error: float
    batched: float = 1.0
    backward: float = 1.0
    winograd: float = 1.0
    winograd_backward: float = 1.0
    misaligned: float = 0.5
    derived_from: str = ""

    def __post_init__(self) -> None:
        _positive(
            "products",
            efficiency=self.efficiency,
            memory_efficiency=self.memory_efficiency,
            sharpness=self.sharpness,
            batched=self.batched,
            backward=self.backward,
            winograd=self.winograd,
            winograd_backward=self.winograd_backward,
            misaligned=self.misaligned,
        )

    @cached_property
    def _vector(self) -> npt.NDArray[np.float64]:
        return np.array(
            [
                self.efficiency,
                self.reuse,
                self.prologue,
                self.quantisation,
                self.memory_efficiency,
                self.sharpness,
                self.split_traffic,
                self.split_us * 1e-6,
                self.launch_us * 1e-6,
            ]
        )

    @property
    def vector(self) -> npt.NDArray[np.float64]:
        """The constants in the order of `product_seconds`, in seconds."""
        return self._vector


@dataclass(frozen=True)
class MemoryConstants:
    """How operators that only move bytes run on a device.

    `shares` is the part of the memory bandwidth that each family of kernels reaches, forward under
    its name and backward with ``_backward`` behind it; what is not listed counts as
    ``elementwise``. The first `l2_mib` that a kernel moves go `l2_gain` times as fast; `launch_us`
    is the least time of a kernel.
    """

    shares: dict[str, float]
    launch_us: float
    l2_mib: float
    l2_gain: float
    relative_error: float
    derived_from: str = ""

    def __post_init__(self) -> None:
        if "elementwise" not in self.shares:
            known = ", ".join(self.shares)
            raise ValueError(
                f"memory: shares name {known or 'nothing'}; they need at least 'elementwise'"
            )
        _positive("memory", l2_gain=self.l2_gain, **self.shares)

    def share(self, family: str) -> float:
        """The part of the bandwidth that a family reaches."""
        return self.shares.get(family, self.shares["elementwise"])


@dataclass(frozen=True)
class AttentionConstants:
    """How a fused attention kernel runs on a device.

    `forward` and `backward` are the shares of the peak for long sequences and heads of 128; heads
    of d dims reach d / (d + `head_dim`) of what endless ones would, and n keys n / (n + `keys`).
    """

    forward: float
    backward: float
    head_dim: float
    keys: float
    relative_error: float
    derived_from: str = ""

    def __post_init__(self) -> None:
        _positive("attention", forward=self.forward, backward=self.backward)


@dataclass(frozen=True)
class DeviceType:
    """A kind of device: its memory and the constants of its cost model.

    Example:
        >>> DeviceType.preset("A100-80GB").num_units
        108

    `matmul_tflops` and `vector_tflops` are peaks by dtype; `num_units` is how many tiles of a
    matrix product run at once (streaming multiprocessors), `launch_us` what the host takes to
    launch a kernel. `products` (by format), `memory` and `attention` are fitted constants.
    Where there are none a roofline answers: `matmul_efficiency` is the share of the peak that
    large matrix products reach, `memory_efficiency` the same for `memory_bandwidth_gb_s`, `tile`
    the edge of an output tile. `reserved_gib` of the memory is taken by the driver, the runtime
    and communicators. `torch_names` is what ``torch.cuda.get_device_name()`` calls such a device:
    no other GPU is timed as one. Names do not count where two types are compared.

    Raises:
        ValueError: on a figure that is not above 0, a share above 1, or more memory reserved than
            there is.
    """

    name: str
    memory_gib: float
    matmul_tflops: dict[str, float]
    vector_tflops: float
    memory_bandwidth_gb_s: float
    matmul_efficiency: float = 0.8
    memory_efficiency: float = 0.8
    launch_us: float = 5.0
    num_units: int = 1
    tile: int = 1
    reserved_gib: float = 0.0
    products: dict[str, ProductConstants] = field(default_factory=dict)
    memory: MemoryConstants | None = None
    attention: AttentionConstants | None = None
    torch_names: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_fields(self, f"device {self.name!r}")
        if self.launch_us < 0:
            raise ValueError(
                f"device {self.name!r}: launch_us is {self.launch_us}; it must be 0 or more"
            )
        _positive(
            f"device {self.name!r}",
            memory_gib=self.memory_gib,
            vector_tflops=self.vector_tflops,
            memory_bandwidth_gb_s=self.memory_bandwidth_gb_s,
            matmul_efficiency=self.matmul_efficiency,
            memory_efficiency=self.memory_efficiency,
            num_units=self.num_units,
            tile=self.tile,
            **{f"matmul_tflops[{k}]": v for k, v in self.matmul_tflops.items()},
        )
        for name in ("matmul_efficiency", "memory_efficiency"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"device {self.name!r}: {name} is {getattr(self, name)}; it is the share of a "
                    "peak that is reached, at most 1 (80 % is 0.8)"
                )
        if not 0 <= self.reserved_gib < self.memory_gib:
            raise ValueError(
                f"device {self.name!r}: reserved_gib is {self.reserved_gib}; it must be from 0 to "
                f"below its memory_gib of {self.memory_gib}"
            )

    @property
    def is_cpu(self) -> bool:
        """Whether it is a core of a CPU, on which torch runs other kernels than on GPUs.

        Example:
            >>> DeviceType.preset("H200").is_cpu
            False
        """
        return self.name == "cpu"

    def is_called(self, name: str) -> bool:
        """Whether a GPU that torch calls `name` is one of this type.

        Example:
            >>> DeviceType.preset("H200").is_called("NVIDIA H200")
            True
        """
        return name == self.name or name in (self.torch_names or _bundled_names(self.name))

    def launched(self, launch_us: float) -> DeviceType:
        """The same device under a host that takes `launch_us` to launch a kernel."""
        if launch_us not in self._launched:
            self._launched[launch_us] = replace(self, launch_us=launch_us)
        return self._launched[launch_us]

    @cached_property
    def _launched(self) -> dict[float, DeviceType]:
        return {}

    @property
    def memory_bytes(self) -> int:
        """Bytes that a plan may use."""
        return int((self.memory_gib - self.reserved_gib) * GIB)

    def peak_flops(self, products: str) -> float:
        """Peak FLOP/s of matrix products whose operands are in a format.

        Raises:
            ValueError: when the device has no figure for it.
        """
        peak = self.matmul_tflops.get(products)
        if peak is None:
            known = ", ".join(self.matmul_tflops)
            raise ValueError(
                f"device {self.name!r} has no matmul_tflops for {products!r}, "
                f"only for {known}; add it to the cluster file"
            )
        return peak * 1e12

    @classmethod
    def preset(cls, name: str) -> DeviceType:
        """A bundled device.

        Raises:
            ValueError: on an unknown name.
        """
        known = device_names()
        if name not in known:
            raise unknown("bundled device", name, known)
        file = resources.files(__package__) / DEVICE_FOLDER / f"{name}.json"
        return decode(file.read_text("utf-8"), cls, f"bundled device {name}")


def device_names() -> tuple[str, ...]:
    """Names of the bundled devices."""
    folder = resources.files(__package__) / DEVICE_FOLDER
    return tuple(sorted(p.name.removesuffix(".json") for p in folder.iterdir()))


def _bundled_names(name: str) -> tuple[str, ...]:
    """What torch calls a bundled device, for files from before types said it themselves."""
    return DeviceType.preset(name).torch_names if name in device_names() else ()


def _positive(what: str, **fields: float) -> None:
    for name, value in fields.items():
        if not value > 0:
            raise ValueError(f"{what}: {name} is {value}; it must be above 0")
