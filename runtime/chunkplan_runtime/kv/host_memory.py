"""Host memory beside a GPU: pages of keys and values, and tensors of a chunk's layers until they are needed again.

Reading and writing have a CUDA stream each, for copies alone: a kernel there would get its turn only when attention
leaves room. All waiting is done by the GPU. On a CPU the same is done by plain copies.

Memory that nobody needs any more is used again, and never returned to the system. Taking it is slow, and may wait for
the whole device: all of it is there before the first action of a step (`reserve`). Who gets memory that was used before
need not wait: all that was read from it was waited for by kernels, after which all writing to it comes.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from chunkplan_runtime.devices import may_wait, new_host_memory, wide
from chunkplan_runtime.kv.pages import KVBlock, KVRequest, Page, PageMemory, PageSlice

#: Tensors of a chunk's layers that are on the device at once: at work, and on its way.
_ON_DEVICE = 2

#: Shape [tokens, heads, dim] and dtype of a tensor of a page.
Kind = tuple[tuple[int, ...], torch.dtype]


class Queue:
    """A CUDA stream, or nothing where copies are done when they are asked for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream

    @classmethod
    def current(cls, device: torch.device) -> Queue:
        """Return the one that kernels are given to."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def wait(self, *events: torch.cuda.Event | None) -> None:
        """Make the stream wait for events."""
        for event in events:
            if self._stream is not None and event is not None:
                self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        """Return the event that all it has been given until now is done."""
        return None if self._stream is None else self._stream.record_event()

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *after: torch.cuda.Event | None, keep: bool = False
    ) -> torch.cuda.Event | None:
        """Copy second tensors to first ones `after` events; returns its end, until which `keep` keeps the second."""
        self.wait(*after)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for home, tensor in pairs:
                home.copy_(tensor, non_blocking=True)
                if keep and self._stream is not None:
                    tensor.record_stream(self._stream)
        return self.record()


@cache
def queues_of(device: torch.device) -> tuple[Queue, Queue]:
    """The streams of copies from a device to the host, and back: the link is one each way."""
    if device.type != "cuda":
        return Queue(None), Queue(None)
    return Queue(torch.cuda.Stream(device)), Queue(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _copy_to_host(
    homes: Sequence[Tensor], tensors: Sequence[Tensor], device: torch.device, *, keep: bool = True
) -> torch.cuda.Event | None:
    """Start to copy tensors to the host, after what was asked of the device until now; see `Queue.copy`."""
    return queues_of(device)[0].copy(zip(homes, tensors, strict=True), Queue.current(device).record(), keep=keep)


@dataclass
class _HostPage(Page):
    memory: list[Tensor] = field(default_factory=list)  # what its tensors are parts of
    added_from: int = 0  # of the tokens from here on gradients were written back; before it is anything
    written: torch.cuda.Event | None = None  # when all KV that was sent to it has arrived
    written_before: torch.cuda.Event | None = None  # all but the last part sent
    added: torch.cuda.Event | None = None  # when its gradients have arrived


@dataclass
class _Buffer:
    """Room for a block on the device, tokens first: [num_tokens, heads, dim] each."""

    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    free: torch.cuda.Event | None = None


class HostMemory(PageMemory):
    """Pages in host memory, see `pages.PageMemory`.

    A block is fetched into one of two buffers while the kernels work on the other; gradients are read, added to on the
    device, and written back. Only what a part did not bring along is fetched: its own KV is copied on the device.
    """

    on_device = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[_Buffer] = deque()  # two, of which the first has its turn
        #: Host memory that nobody uses.
        self.unused: defaultdict[Kind, list[Tensor]] = defaultdict(list)

    def reserve(self, counts: Mapping[Kind, int], largest: Sequence[tuple[Tensor, ...]]) -> None:
        """Take the memory for all pages of a step before there are any, and buffers for tensors like the `largest`."""
        for kind, count in counts.items():
            self.unused[kind] += [self._new(*kind) for _ in range(count - len(self.unused[kind]))]
        for tensors in largest:
            for _ in range(2):
                self._next_buffer(tensors)

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        """Implements `pages.PageMemory.new_page`."""
        memory = [self._take(capacity, tensor[0].transpose(0, 1), tensor.dtype) for tensor in tensors]
        held = tuple(tensor[:capacity] for tensor in memory)
        return _HostPage(start, capacity, held, memory=memory, added_from=start + capacity)

    def give_back(self, page: Any) -> None:
        """Implements `pages.PageMemory.give_back`."""
        for tensor in page.memory:
            self.unused[tensor.shape, tensor.dtype].append(tensor)
        page.memory = []

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Implements `pages.PageMemory.hold`; while links are open, when no memory is taken, it stays on the device."""
        if not may_wait():
            return lambda: tensor
        home = self._new(tensor.shape, tensor.dtype)
        arrived = _copy_to_host([home], [tensor], self._device)

        def fetch() -> Tensor:
            Queue.current(self._device).wait(arrived)
            return home.to(self._device, non_blocking=True, copy=True)

        return fetch

    def write(self, page: Any, start: int, tensors: tuple[Tensor, ...]) -> None:
        """Implements `pages.PageMemory.write`."""
        sent = [tensor.detach()[0].transpose(0, 1).contiguous() for tensor in tensors]  # [num_tokens, heads, dim]
        homes = [home[start - page.start :][: len(sent[0])] for home in page.tensors]
        page.written_before = page.written
        page.written = _copy_to_host(homes, sent, self._device)

    def fetch(self, page_slice: PageSlice, request: KVRequest) -> Iterator[KVBlock | None]:
        """Implements `pages.PageMemory.fetch`."""
        page, start, stop, own_start = page_slice
        num_tokens, num_fetched, tokens = stop - start, min(own_start, stop) - start, page_slice.tokens
        buffer = self._next_buffer(page.tensors)
        tensors, gradients = [held[:num_tokens] for held in buffer.tensors], []
        fetched = slice(num_fetched)
        pairs = [(held[fetched], home[tokens][fetched]) for held, home in zip(tensors, page.tensors, strict=True)]
        after = [buffer.free, page.written if num_fetched == num_tokens else page.written_before]
        # Of so many tokens no gradient is known; to those after them later parts have added some.
        num_new = min(max(page.added_from, start), stop) - start
        known = slice(num_new, None)
        if request.with_gradients:
            self.ensure_gradients(page)
            gradients = [held[:num_tokens] for held in buffer.gradients]
            pairs += [(held[known], home[tokens][known]) for held, home in zip(gradients, page.gradients, strict=True)]
            after.append(page.added)
        ready = queues_of(self._device)[1].copy(pairs, *after)
        yield None
        current = Queue.current(self._device)
        current.wait(ready)
        if num_fetched < num_tokens:
            for held, tensor in zip(tensors, request.tensors, strict=True):
                held[num_fetched:] = tensor[0].transpose(0, 1)
        for held in gradients if num_new else ():
            held[:num_new].zero_()
        views = (tuple([each.transpose(0, 1)[None] for each in held]) for held in (tensors, gradients))
        block = KVBlock(start, stop, *views)
        yield block
        request.take_own(block, own_start)
        if not request.with_gradients:
            buffer.free = current.record()
            return
        # What the part itself was sent is not needed again once it has been taken.
        num_left = num_fetched if request.takes_own else num_tokens
        page.added_from = min(page.added_from, start)
        homes, sent = [home[tokens][:num_left] for home in page.gradients], [held[:num_left] for held in gradients]
        buffer.free = page.added = _copy_to_host(homes, sent, self._device)

    def ensure_gradients(self, page: Any) -> None:
        """Implements `pages.PageMemory.ensure_gradients`: of what later parts have not added to nothing is known."""
        if not page.gradients:
            memory = [self._take(page.capacity, tensor, wide(tensor.dtype)) for tensor in page.tensors]
            page.memory += memory
            page.gradients = tuple(tensor[: page.capacity] for tensor in memory)

    def _next_buffer(self, tensors: tuple[Tensor, ...]) -> _Buffer:
        """The buffer whose turn it is, with room for a page as large as this one, [capacity, heads, dim] each."""
        buffer = self._buffers.popleft() if len(self._buffers) == 2 else _Buffer((), ())
        has_room = len(buffer.tensors) == len(tensors) and all(
            len(held) >= len(other) and held.shape[1:] == other.shape[1:] and held.dtype == other.dtype
            for held, other in zip(buffer.tensors, tensors, strict=True)
        )
        if not has_room:
            # The kernels that use the old one's memory come before those that may get it next, in the same stream.
            held = tuple(torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in tensors)
            gradients = tuple(torch.empty_like(each, dtype=wide(each.dtype)) for each in held)
            # The memory may be that of a tensor which kernels still read.
            buffer = _Buffer(held, gradients, free=Queue.current(self._device).record())
        self._buffers.append(buffer)
        return buffer

    def _take(self, capacity: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor like [any, heads, dim]: of a power of two tokens, as torch takes page-locked memory."""
        kind = (1 << (capacity - 1).bit_length(), *like.shape[1:]), dtype
        return self.unused[kind].pop() if self.unused[kind] else self._new(*kind)

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return new_host_memory(shape, dtype, self._device)


@dataclass(eq=False)
class _ChunkMemory:
    """Host memory of a chunk's tensors, which are put into it one after another, from `device`."""

    memory: Tensor
    device: torch.device
    used: int = 0
    last: HostTensor | None = None


@dataclass(eq=False)
class HostTensor:
    """A tensor: `home` on the host, a part of `chunk`'s memory, and `there` on the device while it is.

    Without that memory it stays there. `ready`: when the last copy of it was done. `before`: what was sent before it.
    """

    there: Tensor | None
    home: Tensor
    chunk: _ChunkMemory | None = None
    before: HostTensor | None = None
    ready: torch.cuda.Event | None = None

    def start_fetch(self) -> Tensor:
        """The tensor on the device, or on its way there."""
        if self.there is None:
            assert self.chunk is not None
            device = self.chunk.device
            self.there = torch.empty_like(self.home, device=device)
            now = Queue.current(device).record()  # kernels may still read what had this memory
            self.ready = queues_of(device)[1].copy([(self.there, self.home)], now, self.ready)
        return self.there

    def leave_device(self) -> None:
        """Free its device memory for later kernels, which wait until its last copy is done."""
        if self.there is not None and self.chunk is not None:
            Queue.current(self.chunk.device).wait(self.ready)
            self.there = None


class HostTensors:
    """Tensors in host memory of all chunks in flight: inputs of layers, and results of attention.

    A tensor is copied to the host while kernels go on, and comes back while those before the ones that need it are at
    work. On the device there are two at most, of the layer at work and of the next one: before a third one leaves,
    kernels wait until the first has arrived. The memory of a chunk is used again when its tensors are gone.
    """

    def __init__(self) -> None:
        #: Host memory that nobody uses, in bytes; and the bytes of all that was taken.
        self.unused: list[Tensor] = []
        self.num_bytes = 0
        self._chunk: _ChunkMemory | None = None
        self._leaving: list[HostTensor] = []

    def reserve(self, num_chunks: int, num_bytes: int, device: torch.device) -> None:
        """Take memory for so many chunks at once, each of at most `num_bytes`, while no chunk is in flight."""
        large = [memory for memory in self.unused if memory.nbytes >= num_bytes]
        if len(large) < num_chunks:
            self.num_bytes -= sum(memory.nbytes for memory in self.unused if memory.nbytes < num_bytes)
            self.unused[:] = large + [self._new(num_bytes, device) for _ in range(num_chunks - len(large))]

    @contextmanager
    def of_chunk(self, num_bytes: int, device: torch.device) -> Iterator[None]:
        """Within the block what is sent is of one chunk, and takes at most `num_bytes`."""
        place = next((place for place, memory in enumerate(self.unused) if memory.nbytes >= num_bytes), None)
        memory = self._new(num_bytes, device) if place is None else self.unused.pop(place)
        self._chunk = _ChunkMemory(memory, device)
        # The tensors of the chunk have it: its memory is free when they are gone.
        weakref.finalize(self._chunk, self.unused.append, memory).atexit = False
        try:
            yield
        finally:
            self._chunk.last = None  # which has the chunk
            self._chunk = None

    def of_layer(self, hidden: Tensor) -> AbstractContextManager[object]:
        """Within the block what autograd saves of `hidden`, the input of a layer, lies in host memory, if that fits."""
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

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def sent(self, tensor: Tensor) -> HostTensor:
        """A tensor on its way to the host, where there is room for it."""
        chunk = self._chunk
        if chunk is None or chunk.used + tensor.nbytes > chunk.memory.nbytes or chunk.used % tensor.itemsize:
            return HostTensor(tensor, tensor)
        flat = chunk.memory[chunk.used : chunk.used + tensor.nbytes].view(tensor.dtype)
        # As it lies on the device, so that it is one copy.
        home = flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())
        chunk.used += tensor.nbytes
        ready = _copy_to_host([home], [tensor], chunk.device, keep=False)
        chunk.last = HostTensor(tensor, home, chunk, chunk.last, ready)
        self._leaving.append(chunk.last)
        while len(self._leaving) > _ON_DEVICE:
            self._leaving.pop(0).leave_device()
        return chunk.last

    def fetched(self, wanted: HostTensor, *following: HostTensor | None) -> Tensor:
        """A tensor on the device, for kernels from now on; those that are needed next are on their way then."""
        for other in self._leaving:
            if other is not wanted and other not in following:
                other.leave_device()
        self._leaving = [other for other in self._leaving if other in following]
        tensor = wanted.start_fetch()
        wanted.leave_device()
        for other in filter(None, following):
            other.start_fetch()
        return tensor

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        self.num_bytes += num_bytes
        return new_host_memory((num_bytes,), torch.uint8, device)
