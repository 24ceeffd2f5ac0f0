"""Imports the libraries that the project's own models are of, as far as they are there."""

from __future__ import annotations

import contextlib
import importlib

from benchmarks.zoo.torchvision_stand_in import import_torchvision

import_torchvision()
for name in ("transformers", "transformers.modeling_utils", "timm", "diffusers", "peft"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
