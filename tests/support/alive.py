"""What tensors are alive: which memory operators have made, and who of it is still there."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunkplan_runtime.feed.stream import ChunkTensors
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Span
from chunkplan_runtime.models.model import CausalLM


class Alive(TorchDispatchMode):
    """Storages that operators have made, each a weak reference, whose address is not given away.

    `peak`: the most bytes that were alive after any operator since it was set. Of tensors that processes share, their
    own rows count; of storages that are freed in place and taken again, as FSDP2 does, what they have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, StorageWeakRef] = {}
        self.peak = 0
        #: Of storages that operators have been given or have made, how large they were then.
        self._sizes: dict[int, int] = {}
        #: No more bytes are alive: those at the last count, and all that have come since.
        self._at_most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata: each.untyped_storage() for each in _own_tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _own_tensors(result):
            if (storage := tensor.untyped_storage())._cdata not in given:
                self.made[storage._cdata] = StorageWeakRef(storage)
                self._sizes[storage._cdata] = 0
                given[storage._cdata] = storage
        for place, storage in given.items():
            if place in self.made and (grown := storage.nbytes() - self._sizes.get(place, 0)):
                self._at_most += max(0, grown)
                self._sizes[place] = storage.nbytes()
        if self._at_most > self.peak:  # else there is nothing to count
            self._at_most = self.num_bytes()
            self.peak = max(self.peak, self._at_most)
        return result

    def forget(self, tensor: torch.Tensor) -> None:
        """Leave out what holds a tensor."""
        self.made.pop(tensor.untyped_storage()._cdata, None)

    def num_bytes(self) -> int:
        """Of those that something still holds."""
        self.made = {place: made for place, made in self.made.items() if not made.expired()}
        storages = (torch.UntypedStorage._new_with_weak_ptr(made.cdata) for made in self.made.values())  # type: ignore[attr-defined]
        return sum(storage.nbytes() for storage in storages if storage is not None)


def _own_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree; of one that processes share, the rows of this process."""
    tensors = [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
    return [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]


def held_bytes(model: CausalLM, num_tokens: int = 64) -> float:
    """Bytes of a token that are held after the forward of a chunk."""
    places = torch.arange(num_tokens, dtype=torch.int32)[None]
    span = Span(0, 0, num_tokens, num_tokens, 0, None)
    labels = torch.zeros(num_tokens, dtype=torch.int64)
    with Alive() as alive:
        hidden = model.hidden_states(ChunkTensors(0 * places, places, labels, (span,)), KVStore(num_tokens))
        gc.collect()
        found = alive.num_bytes() - model.current.host_inputs.num_bytes
        del hidden
    return found / num_tokens


def store_bytes(store: KVStore) -> int:
    """The bytes of all pages that a store holds."""
    pages = [page for sequence in store._sequences.values() for own in sequence.layers.values() for page in own]
    return sum(tensor.nbytes for page in pages for tensor in page.tensors + page.gradients)
