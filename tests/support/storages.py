"""The most memory that is alive at once while something runs, every operation looked behind."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Counts the bytes of storages that operators made and nobody has let go, views of `given`
    apart.

    Attributes:
        alive: bytes of those that are there now.
        peak: the most of them at once.
    """

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.alive -= nbytes
