"""What tensors are alive: which memory operators have made, and who of it is still there."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Storages that operators have made: a weak reference to each, whose address is not given away, and its bytes.

    `peak`: the most bytes that were alive after any operator since it was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.num_bytes())
        return result

    def num_bytes(self) -> int:
        """Of those that something still holds."""
        self.made = {place: made for place, made in self.made.items() if not made[0].expired()}
        return sum(size for _, size in self.made.values())
