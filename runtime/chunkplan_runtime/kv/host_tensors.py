"""Tensors of a chunk's layers in host memory, until they are needed again: inputs of layers, results of attention.

A tensor is copied to the host while kernels go on, and comes back while those before the ones that need it are at work.
Each way goes through the queue beside the kernels that all copies go through. On a CPU the same is done by plain
copies.

On the device there are two of them at most, of the layer at work and of the next one: before a third one leaves,
kernels wait until the first has arrived. (Memory that is merely marked as in use by another stream is free again only
when the host sees that the copy is done; the host is far ahead, and layers would take as much as without.)

Who gets host memory that was used before need not wait: kernels have waited for all that was read from it, and what is
written to it comes after them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.devices import new_host_memory
from chunkplan_runtime.kv.queue import Queue, queues_of

#: Tensors that are on the device at once: at work, and on its way.
_ON_DEVICE = 2


@dataclass(eq=False)
class _Room:
    """Host memory of a chunk's tensors, which are put into it one after another, from `device`."""

    memory: Tensor
    device: torch.device
    used: int = 0
    last: HostTensor | None = None


@dataclass(eq=False)
class HostTensor:
    """A tensor: `home` on the host, a part of `room`, and `there` on the device while it is.

    Without a room it stays there. `ready`: when the last copy of it was done. `before`: what was sent before it.
    """

    there: Tensor | None
    home: Tensor
    room: _Room | None = None
    before: HostTensor | None = None
    ready: torch.cuda.Event | None = None


class HostTensors:
    """What lies in host memory of all chunks in flight.

    The memory of a chunk is used again when all of its tensors are gone, and never returned to the system. It is taken
    before the first action of a step (`reserve`).
    """

    def __init__(self) -> None:
        #: Host memory that nobody uses, in bytes.
        self.unused: list[Tensor] = []
        #: Bytes of all host memory that was taken.
        self.num_bytes = 0
        self._room: _Room | None = None
        self._leaving: list[HostTensor] = []

    def reserve(self, num_chunks: int, num_bytes: int, device: torch.device) -> None:
        """Take memory for so many chunks at once, each of at most `num_bytes`, while no chunk is in flight."""
        large = [memory for memory in self.unused if memory.nbytes >= num_bytes]
        if len(large) < num_chunks:
            self.num_bytes -= sum(memory.nbytes for memory in self.unused if memory.nbytes < num_bytes)
            self.unused[:] = large
            self.unused += [self._new(num_bytes, device) for _ in range(num_chunks - len(large))]

    @contextmanager
    def of_chunk(self, num_bytes: int, device: torch.device) -> Iterator[None]:
        """Within the block what is sent is of one chunk, and takes at most `num_bytes`."""
        place = next((place for place, memory in enumerate(self.unused) if memory.nbytes >= num_bytes), None)
        memory = self._new(num_bytes, device) if place is None else self.unused.pop(place)
        self._room = _Room(memory, device)
        # The tensors of the chunk have their room: it is free when they are gone.
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

        def pack(tensor: Tensor) -> HostTensor | Tensor:
            nonlocal is_sent
            if is_sent or tensor.data_ptr() != address or tensor.shape != shape:
                return tensor
            is_sent = True
            return self.sent(tensor.detach())

        def unpack(packed: HostTensor | Tensor) -> Tensor:
            # A backward goes from the last layer to the first.
            return packed if isinstance(packed, Tensor) else self.fetched(packed, packed.before)

        hooks: Any = torch.autograd.graph.saved_tensors_hooks
        entered: AbstractContextManager[object] = hooks(pack, unpack)
        return entered

    def sent(self, tensor: Tensor) -> HostTensor:
        """A tensor on its way to the host, where there is room for it."""
        room = self._room
        if room is None or room.used + tensor.nbytes > room.memory.nbytes or room.used % tensor.itemsize:
            return HostTensor(tensor, tensor)
        flat = room.memory[room.used : room.used + tensor.nbytes].view(tensor.dtype)
        # As it lies on the device, so that it is one copy.
        home = flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
        room.used += tensor.nbytes
        queue, _ = queues_of(room.device)
        queue.wait(Queue.current(room.device).record())
        with queue.use():
            home.copy_(tensor, non_blocking=True)
        sent = room.last = HostTensor(tensor, home, room, room.last, queue.record())
        self._leaving.append(sent)
        while len(self._leaving) > _ON_DEVICE:
            _let_go(self._leaving.pop(0))
        return sent

    def fetched(self, asked: HostTensor, *following: HostTensor | None) -> Tensor:
        """A tensor on the device, for kernels from now on; those that are needed next are on their way then."""
        for other in self._leaving:
            if other is not asked and other not in following:
                _let_go(other)
        self._leaving = [other for other in self._leaving if other in following]
        there = on_its_way(asked)
        if asked.room is not None:
            Queue.current(asked.room.device).wait(asked.ready)
            asked.there = None
        for other in filter(None, following):
            on_its_way(other)
        return there

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        self.num_bytes += num_bytes
        return new_host_memory((num_bytes,), torch.uint8, device)


def on_its_way(asked: HostTensor) -> Tensor:
    """A tensor on the device, or on its way there."""
    if asked.there is None:
        assert asked.room is not None
        device = asked.room.device
        asked.there = torch.empty_like(asked.home, device=device)
        _, queue = queues_of(device)
        queue.wait(Queue.current(device).record())  # kernels may still read what had this memory
        queue.wait(asked.ready)  # it has arrived on the host
        with queue.use():
            asked.there.copy_(asked.home, non_blocking=True)
        asked.ready = queue.record()
    return asked.there


def _let_go(sent: HostTensor) -> None:
    """Kernels from now on may have the memory of a tensor, which wait until it has arrived on the host."""
    if sent.there is not None:
        Queue.current(sent.there.device).wait(sent.ready)
        sent.there = None
