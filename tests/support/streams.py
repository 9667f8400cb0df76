"""Streams of a device, as far as a CPU shows them: what runs on each, and what has to be done before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunkplan_runtime.kv import host_memory
from chunkplan_runtime.kv.host_memory import Queue

KERNELS, TO_HOST, FROM_HOST = range(3)


class Stream:
    """Stands for a CUDA stream. An event is how many operations of each stream are done when it is."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.done = np.zeros(3, np.int64)

    def wait_event(self, event: np.ndarray[Any, Any]) -> None:
        self.done = np.maximum(self.done, event)

    def record_event(self) -> np.ndarray[Any, Any]:
        return self.done.copy()


class Operation(NamedTuple):
    """`done`: how many operations of each stream are done when this one is, itself among those of its own."""

    name: str
    stream: int
    done: np.ndarray[Any, Any]
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]

    @property
    def number(self) -> int:
        return int(self.done[self.stream])


class Streams(TorchDispatchMode):
    """Within the block operators are recorded, with the stream that is current and the memory that they touch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.streams = [Stream(place) for place in range(3)]
        self.operations: list[Operation] = []
        self._current = self.streams[KERNELS]
        self._kept: list[Tensor] = []
        queues = [Queue(stream) for stream in self.streams]  # type: ignore[arg-type]
        monkeypatch.setattr(host_memory, "queues_of", lambda device: (queues[TO_HOST], queues[FROM_HOST]))
        monkeypatch.setattr(Queue, "current", lambda device: queues[self._current.place])
        monkeypatch.setattr(torch.cuda, "stream", self._entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._current)
        # The memory of such a tensor is not used again before the stream is done with it.
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self._kept.append(tensor))

    @contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = function(*args, **kwargs)
        schema = function._schema
        if any(each.alias_info and not each.alias_info.is_write for each in schema.returns):
            return made  # a view touches nothing
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in schema.arguments if each.name in kwargs]
        written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        reads = _ranges([value for _, value in given])
        writes = [] if function.overloadpacket.__name__.startswith(("empty", "new_empty")) else _ranges([written, made])
        if not reads and not writes:
            return made
        stream = self._current
        if stream.place != KERNELS:  # nor that of a tensor on the host, which is page-locked
            self._kept.append(args[0] if stream.place == TO_HOST else args[1])
        stream.done[stream.place] += 1
        name = function.overloadpacket.__name__
        self.operations.append(Operation(name, stream.place, stream.done.copy(), reads, writes))
        return made


def _ranges(values: Any) -> list[tuple[int, int]]:
    """The memory that tensors lie in: addresses [start, stop) each."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]
    return [
        (
            each.data_ptr(),
            each.data_ptr()
            + each.itemsize
            * (1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))),
        )
        for each in tensors
        if each.device.type == "cpu"
    ]


def races(operations: list[Operation]) -> list[str]:
    """Pairs of operations on two streams that touch the same memory, one of them writing, and may run at once."""
    rows = [(place, *each, 0) for place, one in enumerate(operations) for each in one.reads]
    rows += [(place, *each, 1) for place, one in enumerate(operations) for each in one.writes]
    place, start, stop, writes = np.array(rows, np.int64).T
    streams = np.array([one.stream for one in operations])[place]
    done = np.array([one.done for one in operations])[place]
    found = []
    for row in np.flatnonzero(streams != KERNELS):
        others = np.flatnonzero((start < stop[row]) & (stop > start[row]) & ((writes | writes[row]) > 0))
        for each in others[streams[others] != streams[row]]:
            if (
                done[row, streams[each]] < done[each, streams[each]]
                and done[each, streams[row]] < done[row, streams[row]]
            ):
                one, other = operations[place[row]], operations[place[each]]
                found.append(f"{one.name} on {one.stream} and {other.name} on {other.stream}")
    return found
