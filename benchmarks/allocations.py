"""Counts the bytes of live tensors, operator by operator, where the allocator keeps no count of its own (a CPU).

Storages are followed by weak references, so that views count once and a tensor counts until the last one lets go of it,
autograd included. What an operator allocates for itself and frees before it returns is not seen, nor is anything that
was there before.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Within the block: the most bytes alive at once, in all (`peak`) and without what `excluded` counts (`peak_rest`).

    `most_excluded` is the most that `excluded` came to. `at_peak` describes the tensors alive at `peak_rest`, those of
    `excluded` too.
    """

    def __init__(self, excluded: Callable[[], int] = lambda: 0) -> None:
        super().__init__()
        self.peak = self.peak_rest = self.most_excluded = 0
        self.at_peak: list[tuple[str, tuple[int, ...], int]] = []
        self._excluded = excluded
        self._alive: dict[int, tuple[weakref.ref[Any], str, tuple[int, ...], int]] = {}
        self._num_bytes = 0
        self._changes = 0  # how often it did: counting what is excluded takes time

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it has made."""
        given = {id(tensor.untyped_storage()) for tensor in _tensors((*args, *(kwargs or {}).values()))}
        before = self._changes
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if id(tensor.untyped_storage()) not in given:
                self._add(tensor, str(function))
        if self._changes == before:
            return result
        excluded = self._excluded()
        self.peak = max(self.peak, self._num_bytes)
        self.most_excluded = max(self.most_excluded, excluded)
        if self._num_bytes - excluded > self.peak_rest:
            self.peak_rest = self._num_bytes - excluded
            self.at_peak = [description for _, *description in self._alive.values()]
        return result

    def largest_at_peak(self, count: int) -> list[str]:
        """Describe what has most bytes at `peak_rest`: MB, number of tensors, shape, the operator that made them."""
        tensors = Counter((operator, tuple(shape)) for operator, shape, _ in self.at_peak)
        num_bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for operator, shape, size in self.at_peak:
            num_bytes[operator, tuple(shape)] += size
        return [
            f"{size / 1e6:8.2f} MB  {tensors[operator, shape]:4} x {list(shape)} of {operator}"
            for (operator, shape), size in num_bytes.most_common(count)
        ]

    def _add(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._alive:
            reference = weakref.ref(storage, lambda _: self._remove(key))
            self._alive[key] = reference, operator, tuple(tensor.shape), storage.nbytes()
            self._num_bytes += storage.nbytes()
            self._changes += 1

    def _remove(self, key: int) -> None:
        self._num_bytes -= self._alive.pop(key)[-1]
        self._changes += 1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or the results of an operator, which are tensors or flat lists of them."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
