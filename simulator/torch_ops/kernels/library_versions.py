"""Names and versions of what runs kernels: other ones may bring other times."""

from __future__ import annotations

import platform
import re
from functools import cache
from pathlib import Path

import torch

from stratagem.simulator.plan.provenance import Environment

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")


def environment_of(device: torch.device, *, threads: int = 1, load: int = 0) -> Environment:
    """The environment of what runs on a device of this machine now.

    Example:
        >>> environment_of(torch.device("cpu"), threads=2).threads
        2
    """
    version = str(torch.__version__)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Environment(name, version, threads, load, **cuda_versions())
    return Environment(_cpu_name(), version, threads, load)


@cache
def _cpu_name() -> str:
    """The processor's model, as far as the system tells; asked once, as every run says it."""
    description = Path("/proc/cpuinfo")
    if description.exists():
        for line in description.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def cuda_versions() -> dict[str, str]:
    """Versions of driver, CUDA, cuDNN and NCCL as `Environment` names them; empty if not there.

    Example:
        >>> sorted(cuda_versions())
        ['cuda', 'cudnn', 'driver', 'nccl']
    """
    return {
        "driver": driver_version(),
        "cuda": str(torch.version.cuda or ""),
        "cudnn": _cudnn_version(),
        "nccl": _nccl_version(),
    }


def driver_version(file: Path = _DRIVER_FILE) -> str:
    """The version of the NVIDIA driver that the kernel has loaded, empty where there is none."""
    if not file.exists():
        return ""
    found = _DRIVER.search(file.read_text(encoding="utf-8"))
    return found[1] if found else ""


def dotted(number: int) -> str:
    """A version that a library gives as one number: 90100 is 9.1.0, and so is the older 8902.

    Example:
        >>> dotted(91002), dotted(8902), dotted(22304), dotted(2708)
        ('9.10.2', '8.9.2', '2.23.4', '2.7.8')
    """
    major = 10000 if number >= 10000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _cudnn_version() -> str:
    if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return ""
    return dotted(int(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]


def _nccl_version() -> str:
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
