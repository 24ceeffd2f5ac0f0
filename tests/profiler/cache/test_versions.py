"""Which versions tell two environments apart."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from stratagem.profiler import Environment, describe_environment
from stratagem.simulator.torch_ops.kernels.library_versions import (
    cuda_versions,
    dotted,
    driver_version,
)

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  "
    "(dvs-builder@U16-I3-A16-06-2)  Thu Jan 23\nGCC version:  gcc version 12.3.0\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
)


@pytest.mark.parametrize(
    ("text", "version"), [(OPEN, "570.86.15"), (CLOSED, "535.104.05"), ("something else", "")]
)
def test_the_driver_as_the_kernel_names_it(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version


def test_no_driver(tmp_path):
    assert driver_version(tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("number", "version"), [(90100, "9.1.0"), (8902, "8.9.2"), (22304, "2.23.4"), (2708, "2.7.8")]
)
def test_versions_in_one_number(number, version):
    assert dotted(number) == version


def test_a_cpu_has_no_versions_of_a_gpu():
    here = describe_environment("cpu", threads=2)
    assert here == Environment(here.device, torch.__version__, 2, 0)
    assert here.device


def test_on_cuda_every_version_is_in_the_environment(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = describe_environment("cuda")
    assert (found.device, found.cuda, found.cudnn, found.nccl) == (
        "NVIDIA H200",
        "12.8",
        "9.10.2",
        "2.27.3",
    )
    assert {*cuda_versions()} <= {field.name for field in dataclasses.fields(Environment)}
