"""What this machine is: GPUs, driver, versions, what is missing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from functools import partial
from importlib import metadata

import torch

from benchmarks.gpu.setting import Case, Figures, Setting, SkippedError

PACKAGES = (
    *("torch", "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13"),
    *("nvidia-nccl-cu12", "triton", "msgspec", "safetensors", "rich", "platformdirs", "scipy"),
    *("cloudpickle", "typer", "simpy", "matplotlib", "pytest", "pytest-timeout"),
)
QUERY = (
    "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory,mig.mode.current"
)


def cases(setting: Setting) -> list[Case]:
    """Packages first: they say why later stages are left out."""
    return [
        Case("packages", _packages),
        Case("devices", partial(_devices, setting)),
        Case("nvidia-smi", _smi),
        Case("doctor", _doctor),
    ]


def _packages() -> Figures:
    found: Figures = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version()}
    missing = []
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    return found | {"missing": missing}


def _devices(setting: Setting) -> Figures:
    if setting.rehearse:
        return {"devices": ["a stand-in"], "processor": platform.machine()}
    known = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "devices": [f"{each.name}, {each.total_memory / 2**30:.1f} GiB" for each in known],
        "cuda": torch.version.cuda,
        "bfloat16": torch.cuda.is_bf16_supported(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn": torch.backends.cudnn.version(),
    }


def _smi() -> Figures:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise SkippedError("there is no nvidia-smi")
    told = subprocess.run(
        [program, f"--query-gpu={QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return {"asked": QUERY, "told": told.stdout.splitlines()}


def _doctor() -> Figures:
    from stratagem.face.diagnosis import doctor

    table = doctor()
    broken = [" ".join(map(str, row)) for row in table.rows if row[1] != "good"]
    return {"not_good": broken, "note": table.note}
