"""Memory that a plan leaves free for what no simulator sees.

Three things take it. The context of the device and cuBLAS's workspace are in the `reserved_gib` of
a device's type, as each kind has its own. NCCL's communicators take `COMMUNICATOR_BYTES` each, as
measured on one H100 (docs/gpu-results.md), by themselves or split from another one. PyTorch's
allocator breaks memory into pieces that nothing fits, and peaks are predicted too low on some
devices: both are shares of the memory.

`FREE_SHARE` is fitted to 1,583 runs of Llama models on 8 to 512 H100s, of which 1,027 ran
(`python -m benchmarks.headroom`). With six communicators beside it 0.11 is wrong on the fewest of
them: on 153, where 137 are predicted to fit and did not run, and 16 the other way round. With all
of the memory it is wrong on 186. Fragments alone are the lesser part: the allocator kept 3 to 7 %
of its memory beyond what was in use in 20 runs on B200s.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratagem.simulator.base.field_types import check_fields
from stratagem.simulator.base.units import format_bytes
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import GIB

FREE_SHARE = 0.11
"""Of a device's memory what fragments take, and errors of predicted peaks."""
COMMUNICATOR_BYTES = 388 * 2**20
"""What NCCL takes for one communicator."""
MOST_KINDS = 3
"""Kinds of groups that ranks talk in at once: over data, within an operator, between stages. Each
has two communicators: of a group for gradients and for all else, of a pair for its directions."""
MEASURED = "measured"
"""What asks for the headroom as it was fitted."""


@dataclass(frozen=True)
class Headroom:
    """What of each device's memory stays free: a share of what plans may use, and fixed bytes.

    Example:
        >>> Headroom(0.1, 5).usable(100)
        85
        >>> print(Headroom(0.11, 2**31))
        11 % and 2.00 GiB of each device

    Attributes:
        share: of the bytes that plans may use, 0 or more and less than 1.
        fixed_bytes: beside that share.

    Raises:
        ValueError: on a share outside [0, 1), or less than no bytes.
    """

    share: float = 0.0
    fixed_bytes: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "headroom")
        if not 0 <= self.share < 1:
            raise ValueError(
                f"headroom is {self.share}; it is a share of the memory, from 0 to below 1"
            )
        if self.fixed_bytes < 0:
            raise ValueError(f"headroom of {self.fixed_bytes} bytes; leave 0 or more free")

    def __bool__(self) -> bool:
        return self.share > 0 or self.fixed_bytes > 0

    def usable(self, capacity: int) -> int:
        """What a plan may take of so many bytes of a device: one, where all are to stay free."""
        return max(1, int(capacity * (1.0 - self.share)) - self.fixed_bytes)

    def __str__(self) -> str:
        parts = [f"{100 * self.share:.3g} %"] if self.share else []
        parts += [format_bytes(self.fixed_bytes)] if self.fixed_bytes else []
        return f"{' and '.join(parts)} of each device" if parts else "nothing"


NO_HEADROOM = Headroom()


def measured_headroom(cluster: Cluster) -> Headroom:
    """What plans on a cluster should leave free, as fitted to measured runs.

    Nothing on CPUs, which swap instead of failing. Without other devices there are no
    communicators, and those that a cluster's calibration reserves are not counted twice.

    Example:
        >>> print(measured_headroom(Cluster.preset("dgx-a100", num_nodes=1)))
        11 % and 2.27 GiB of each device
        >>> print(measured_headroom(Cluster.preset("local-cpu")))
        nothing
    """
    if all(device.is_cpu for device in cluster.device_types):
        return NO_HEADROOM
    kinds = min(MOST_KINDS, cluster.num_devices.bit_length() - 1)
    reserved = round(cluster.calibration.reserved_gib * GIB)
    return Headroom(FREE_SHARE, max(0, 2 * kinds * COMMUNICATOR_BYTES - reserved))


def headroom_of(asked: float | str | Headroom, cluster: Cluster) -> Headroom:
    """The headroom that is asked for: a share, itself, or the measured one by name.

    Example:
        >>> headroom_of(0.15, Cluster.preset("dgx-a100", num_nodes=1))
        Headroom(share=0.15, fixed_bytes=0)
    """
    if isinstance(asked, Headroom):
        return asked
    return measured_headroom(cluster) if isinstance(asked, str) else Headroom(asked)
