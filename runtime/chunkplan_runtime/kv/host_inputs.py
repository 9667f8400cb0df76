"""Inputs of layers in host memory, between the forward of a chunk and its backward.

A checkpoint holds the input of its layer; here that is copied to the host while the next layer computes, and comes back
while the layer after it runs backward. Both ways go through one queue beside the kernels, in which a copy into memory
comes after all earlier ones from it. On a CPU the same is done by plain copies.

On the device there are two inputs at most, of the layer at work and of the next one: before a third one leaves, kernels
wait until the first has arrived. (Memory that is merely marked as in use by another stream is free again only when the
host sees that the copy is done; the host is far ahead, and layers would take as much as without.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.device_waits import new_host_memory
from chunkplan_runtime.kv.queue import Queue

#: Inputs that are on the device at once: at work, and on its way.
_ON_DEVICE = 2


@dataclass(eq=False)
class _Room:
    """Host memory of a chunk's inputs, which are put into it one after another."""

    memory: Tensor
    used: int = 0
    last: _Input | None = None


@dataclass(eq=False)
class _Input:
    """An input of a layer: `home` on the host, a part of `room`, and `there` on the device while it is.

    `ready`: when the last copy of it was done. `before`: of the layer before, which a backward needs next.
    """

    home: Tensor
    room: _Room
    before: _Input | None
    there: Tensor | None
    ready: torch.cuda.Event | None = None


class HostInputs:
    """The inputs of a model's layers that lie in host memory, of all chunks in flight.

    The memory of a chunk is used again when its backward is done, and never returned to the system. It is taken before
    the first action of a step (`reserve`).
    """

    def __init__(self) -> None:
        #: Host memory that nobody uses, in bytes.
        self.unused: list[Tensor] = []
        #: Bytes of all host memory that was taken.
        self.num_bytes = 0
        self._room: _Room | None = None
        self._leaving: list[_Input] = []
        self._queues: dict[torch.device, Queue] = {}

    def reserve(self, num_chunks: int, num_bytes: int, device: torch.device) -> None:
        """Take memory for so many chunks at once, each of at most `num_bytes`, while no chunk is in flight."""
        large = [memory for memory in self.unused if memory.nbytes >= num_bytes]
        if len(large) < num_chunks:
            self.num_bytes -= sum(memory.nbytes for memory in self.unused if memory.nbytes < num_bytes)
            self.unused[:] = large
            self.unused += [self._new(num_bytes, device) for _ in range(num_chunks - len(large))]

    @contextmanager
    def of_chunk(self, num_bytes: int, device: torch.device) -> Iterator[None]:
        """Within the block layers are those of one chunk, whose inputs take at most `num_bytes`."""
        place = next((place for place, memory in enumerate(self.unused) if memory.nbytes >= num_bytes), None)
        memory = self._new(num_bytes, device) if place is None else self.unused.pop(place)
        self._room = _Room(memory)
        # The graph of the chunk has its inputs, and they have their room: it is free when the graph is gone.
        weakref.finalize(self._room, self.unused.append, memory).atexit = False
        try:
            yield
        finally:
            self._room.last = None  # which has the room
            self._room = None

    def of_layer(self, hidden: Tensor) -> AbstractContextManager[object]:
        """Within the block what autograd saves of `hidden`, the input of a layer, lies in host memory.

        What does not fit the memory of the chunk stays where it is: of models that pass on more than hidden states.
        """
        address, shape = hidden.data_ptr(), hidden.shape  # not the tensor: the graph keeps what packs
        is_sent = False

        def pack(tensor: Tensor) -> _Input | Tensor:
            nonlocal is_sent
            if is_sent or tensor.data_ptr() != address or tensor.shape != shape:
                return tensor
            is_sent = True
            return self._sent(tensor.detach()) or tensor

        def unpack(packed: _Input | Tensor) -> Tensor:
            return packed if isinstance(packed, Tensor) else self._fetched(packed)

        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        entered: AbstractContextManager[object] = hooks(pack, unpack)
        return entered

    def _sent(self, tensor: Tensor) -> _Input | None:
        """An input on its way to the host; None where there is no room for it."""
        room = self._room
        if room is None or room.used + tensor.nbytes > room.memory.nbytes:
            return None
        home = room.memory[room.used : room.used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        room.used += tensor.nbytes
        queue = self._queue(tensor.device)
        queue.wait(Queue.current(tensor.device).record())
        with queue.use():
            home.copy_(tensor, non_blocking=True)
        sent = room.last = _Input(home, room, room.last, tensor, queue.record())
        self._leaving.append(sent)
        while len(self._leaving) > _ON_DEVICE:
            self._let_go(self._leaving.pop(0))
        return sent

    def _fetched(self, asked: _Input) -> Tensor:
        """An input on the device, for kernels from now on; that of the layer before is on its way then."""
        for other in self._leaving:
            if other is not asked and other is not asked.before:
                self._let_go(other)
        self._leaving = [other for other in self._leaving if other is asked.before]
        there = self._coming(asked)
        Queue.current(there.device).wait(asked.ready)
        asked.there = None
        if asked.before is not None:
            self._coming(asked.before)
        return there

    def _coming(self, asked: _Input) -> Tensor:
        """An input on the device, or on its way there."""
        if asked.there is None:
            [device] = self._queues
            asked.there = torch.empty_like(asked.home, device=device)
            queue = self._queues[device]
            queue.wait(Queue.current(device).record())  # kernels may still read what had this memory
            with queue.use():
                asked.there.copy_(asked.home, non_blocking=True)
            asked.ready = queue.record()
        return asked.there

    def _let_go(self, sent: _Input) -> None:
        """Kernels from now on may have the memory of an input, which wait until it has arrived on the host."""
        if sent.there is not None:
            Queue.current(sent.there.device).wait(sent.ready)
            sent.there = None

    def _queue(self, device: torch.device) -> Queue:
        if device not in self._queues:
            self._queues = {device: Queue.new(device)}
        return self._queues[device]

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        self.num_bytes += num_bytes
        return new_host_memory((num_bytes,), torch.uint8, device)
