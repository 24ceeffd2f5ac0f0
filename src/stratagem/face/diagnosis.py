"""What this machine can do: cores, devices, communication, packages, the timing cache."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stratagem.basics.extras import EXTRAS, install_command
from stratagem.basics.version import __version__
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.base.units import format_bytes


class CheckState(Enum):
    """How something is found."""

    GOOD = "good"
    MISSING = "not here"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What was found of one thing, and what to do where it is not good."""

    what: str
    state: CheckState
    found: str
    remedy: str = ""


def doctor() -> Table:
    """Say what this machine can do and what is missing.

    Example:
        >>> print(sg.doctor())  # doctest: +SKIP
        what        state     found                                 remedy
        cores       good      16 of 16, 126 GiB of memory
        GPUs        not here  torch sees no CUDA device             …

    Returns:
        A row for each thing that a verb may need. What is not here limits some verbs; what is
        broken keeps this package from training at all, or on the GPUs that are here.
    """
    findings = [
        Finding(
            "stratagem", CheckState.GOOD, f"{__version__}, Python {platform.python_version()}"
        ),
        _cores(),
        *(_required(module) for module in ("torch", "numba", "scipy")),
        *_torch_findings(),
        *_extras(),
        _cache(),
    ]
    columns = {"what": Unit.TEXT, "state": Unit.TEXT, "found": Unit.TEXT, "remedy": Unit.TEXT}
    rows = tuple((each.what, each.state.value, each.found, each.remedy) for each in findings)
    return Table("what this machine can do", columns, rows, note=_verbs(findings))


def _verbs(findings: list[Finding]) -> str:
    """What can be done with what was found, in a sentence."""
    state = {each.what: each.state for each in findings}
    good = {what for what, each in state.items() if each is CheckState.GOOD}
    if {"torch", "numba", "scipy"} - good:
        return "Nothing works before the required packages are installed."
    if "kernels" in good:
        return "Plans can be searched, simulated and measured on its GPUs, and run here."
    if "GPUs" in good:
        return (
            "Plans can be searched and simulated, and operators measured on its GPUs, but not run "
            "on them before the remedy above; --backend gloo runs them on its CPU."
        )
    run = "and run on processes of its CPU" if "gloo" in good else "but not run, for want of gloo"
    return (
        "Plans for any cluster can be searched and simulated here, operators measured on the CPU; "
        f"plans of CPU clusters can be found {run}."
    )


def _cores() -> Finding:
    usable, whole = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding(
        "cores", CheckState.GOOD, f"{usable} of {whole}, {format_bytes(memory)} of memory"
    )


def _version(module: str) -> str:
    """The version of an installed package that holds a module; empty if there is none."""
    if module not in sys.modules and importlib.util.find_spec(module) is None:
        return ""
    packages = _distributions().get(module, [])
    return importlib.metadata.version(packages[0]) if packages else "of unknown version"


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The packages that hold each module, found among the files of all that are installed."""
    return importlib.metadata.packages_distributions()


def _required(module: str) -> Finding:
    version = _version(module)
    if version:
        return Finding(module, CheckState.GOOD, version)
    return Finding(module, CheckState.BROKEN, "not installed", "pip install stratagem")


def _torch_findings() -> list[Finding]:
    """What torch can do here: devices, and the backends of its communication."""
    if not _version("torch"):
        return []
    import torch
    from torch import distributed

    found = [_gloo(distributed.is_available() and distributed.is_gloo_available())]
    if not torch.cuda.is_available():
        return [*found, _no_gpu(torch.version.cuda or "")]
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    listed = ", ".join(f"{gpu.name} ({format_bytes(gpu.total_memory)})" for gpu in names)
    found.append(
        Finding("GPUs", CheckState.GOOD, f"{len(names)}: {listed}, CUDA {torch.version.cuda}")
    )
    return [*found, *_for_gpus()]


def _gloo(is_here: bool) -> Finding:
    if is_here:
        return Finding("gloo", CheckState.GOOD, "of torch.distributed")
    remedy = "install a torch that is built with torch.distributed"
    return Finding("gloo", CheckState.BROKEN, "torch has none: nothing can be run here", remedy)


def _no_gpu(cuda: str) -> Finding:
    from stratagem.simulator.torch_ops.kernels.library_versions import driver_version

    driver = driver_version()
    if driver and not cuda:
        found = f"driver {driver} is loaded, but torch is built without CUDA"
        return Finding(
            "GPUs", CheckState.MISSING, found, "install a torch built for CUDA: pytorch.org"
        )
    if driver:
        found = f"driver {driver} is loaded, but torch sees no device"
        return Finding(
            "GPUs", CheckState.MISSING, found, "look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    return Finding(
        "GPUs", CheckState.MISSING, "no NVIDIA driver is loaded", "needed to measure GPUs"
    )


def _for_gpus() -> list[Finding]:
    """What training on GPUs needs beside torch: CuPy, NCCL through it, the executor's kernels."""
    from stratagem.executor.cuda.cupy_kernels import (
        INSTALL,
        compile_kernels,
        cupy_fault,
        cupy_versions,
        has_cupy,
    )

    fault = cupy_fault()
    if fault:
        state = CheckState.BROKEN if has_cupy() else CheckState.MISSING
        return [Finding("CuPy", state, fault, INSTALL)]
    versions = cupy_versions()
    found = [
        Finding("CuPy", CheckState.GOOD, f"{versions.cupy}, CUDA {versions.cuda}"),
        Finding("NCCL", CheckState.GOOD, f"{versions.nccl}, through CuPy"),
    ]
    try:
        compile_kernels()
    except Exception as error:
        told = f"cannot be compiled: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return [*found, Finding("kernels", CheckState.BROKEN, told, INSTALL)]
    return [*found, Finding("kernels", CheckState.GOOD, "of the executor, compiled")]


def _extras() -> list[Finding]:
    """The optional packages, by the extra that brings them."""
    found = []
    for extra in dict.fromkeys(EXTRAS.values()):
        modules = [module for module, of in EXTRAS.items() if of == extra]
        versions = {module: _version(module) for module in modules}
        missing = [module for module, version in versions.items() if not version]
        told = ", ".join(f"{m} {v}" for m, v in versions.items() if v)
        what = f"extra {extra}"
        if missing:
            words = f"not installed: {', '.join(missing)}"
            remedy = install_command(missing[0])
            found.append(Finding(what, CheckState.MISSING, words, remedy))
        else:
            found.append(Finding(what, CheckState.GOOD, told))
    return found


def _cache() -> Finding:
    from stratagem.profiler.cache.timing_cache import TimingCache, cache_path

    path = cache_path()
    remedy = "name another file in STRATAGEM_CACHE"
    if not path.exists():
        folder = _existing(path.parent)
        if os.access(folder, os.W_OK):
            return Finding("timing cache", CheckState.GOOD, f"{path}, not there yet")
        return Finding("timing cache", CheckState.BROKEN, f"{folder} cannot be written", remedy)
    try:
        with TimingCache(path) as cache:
            count = len(cache)
    except (ValueError, TimeoutError) as error:
        return Finding("timing cache", CheckState.BROKEN, str(error), remedy)
    size = format_bytes(path.stat().st_size)
    return Finding("timing cache", CheckState.GOOD, f"{path}: {count:,} times, {size}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder
