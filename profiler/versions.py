"""Versions of what runs a CUDA device: other ones may bring other kernels."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")


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
