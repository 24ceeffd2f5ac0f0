"""Lets wheels of torchvision for GPUs be imported beside torch for CPUs.

Such a wheel cannot load its own operators there, and then fails as it says what their shapes are.
None of the models here calls them.
"""

from __future__ import annotations

import torch

_SUPPRESSION = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def import_torchvision() -> None:
    """Import torchvision if it is there, with names for the operators that it lacks."""
    try:
        import torchvision
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in ("nms", "qnms"):
            _LIBRARY.define(f"{name}{_SUPPRESSION}")
        import torchvision  # noqa: F401
