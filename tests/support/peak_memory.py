"""The most memory that is alive at once while something runs, every operation looked behind."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(TorchDispatchMode):
    """Counts bytes of storages that operations give while it is entered; `most` is their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in pytree.tree_leaves(made):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {n: kept for n, kept in self._alive.items() if not kept[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._alive.values()))
        return made
