"""Where times come from: the device and the versions that took them, and the run that did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from stratagem.simulator.plan.plan import Plan

ProcessBackend = Literal["gloo", "nccl"]
"""What ranks that are processes talk by: on CPUs, on GPUs."""
PROCESS_BACKENDS: tuple[ProcessBackend, ...] = get_args(ProcessBackend)


@dataclass(frozen=True)
class Environment:
    """Where a time was taken: another value of any field may mean another time.

    Example:
        >>> Environment("NVIDIA H200", "2.11.0+cu128", driver="570.86", cuda="12.8").name
        'NVIDIA H200, torch 2.11.0+cu128, driver 570.86, CUDA 12.8'

    Attributes:
        device: the name that the device gives itself; on a CPU that of the processor.
        torch: its version; empty where torch had no part in it.
        threads: of one kernel on a CPU.
        load: how many other processes ran the same operator meanwhile.
        driver: version of the GPU's driver.
        cuda: version of the CUDA runtime.
        cudnn: version of cuDNN.
        nccl: version of NCCL.

    What does not apply, or is not known of an imported time, is empty. It never stands for a
    version: times of an unknown driver answer for no known one.
    """

    device: str
    torch: str
    threads: int = 1
    load: int = 0
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    nccl: str = ""

    @property
    def name(self) -> str:
        """What a person tells it by; fields with their usual values are left out."""
        versions = (
            ("torch", self.torch),
            ("driver", self.driver),
            ("CUDA", self.cuda),
            ("cuDNN", self.cudnn),
            ("NCCL", self.nccl),
        )
        parts = [self.device, *(f"{what} {version}" for what, version in versions if version)]
        if self.threads != 1:
            parts.append(f"{self.threads} threads")
        if self.load:
            parts.append(f"load {self.load}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Provenance:
    """What ran a plan, to which its times belong.

    Example:
        >>> where = Environment("NVIDIA H200", "2.11.0+cu128")
        >>> run = Provenance("nccl", "bfloat16", where, ("NVIDIA H200",) * 8, "0.1.0", "3.12.3")
        >>> str(run)
        'nccl on 8 × NVIDIA H200 in bfloat16'

    Attributes:
        backend: ``local``, ``gloo`` or ``nccl``.
        precision: that of the plan's training.
        environment: device and versions of rank 0, as the timing cache names them.
        devices: the name of every rank's device.
        stratagem: its version.
        python: its version.
    """

    backend: str
    precision: str
    environment: Environment
    devices: tuple[str, ...]
    stratagem: str
    python: str

    def __str__(self) -> str:
        kinds = dict.fromkeys(self.devices)
        told = [f"{self.devices.count(kind)} × {kind}" for kind in kinds]
        return f"{self.backend} on {' and '.join(told)} in {self.precision}"

    def elsewhere(self, plan: Plan) -> str:
        """In words, which devices it runs on that are none of the plan's; empty if all are."""
        names = ", ".join(device.name for device in plan.device_types)
        on_gpus = self.backend == "nccl"
        if not on_gpus:
            strange = [] if {"cpu"} == {d.name for d in plan.device_types} else ["CPUs"]
        else:
            strange = [
                name
                for name in dict.fromkeys(self.devices)
                if not any(device.is_called(name) for device in plan.device_types)
            ]
        if not strange:
            return ""
        return (
            f"plan {plan.name!r} is for {names}, but runs on {', '.join(strange)}: its times say "
            f"nothing of {names}"
        )
