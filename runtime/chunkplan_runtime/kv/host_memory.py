"""Host memory beside a GPU: pages of keys and values, and tensors of a chunk's layers until they are needed again.

So the keys and values on a GPU do not grow with the length of a sequence. Reading and writing have a CUDA stream each,
for copies alone: a kernel there would get its turn only when attention leaves room. All waiting is done by the GPU, so
that the next layer's first block is on its way while this layer's products still run. On a CPU the same is done by
plain copies.

Memory that nobody needs any more is used again, and never returned to the system. Taking it is slow, and may wait for
the whole device: all of it is there before the first action of a step (`reserve`). Who gets memory that was used before
need not wait: all that was read from it was waited for by kernels, after which all writing to it comes.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from chunkplan_runtime.devices import may_wait, new_host_memory, wide
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageMemory, PageSlice

#: Tensors of a chunk's layers that are on the device at once: at work, and on its way.
_ON_DEVICE = 2


class Queue:
    """A CUDA stream, or nothing where copies are done when they are asked for."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self.copies = stream is not None

    @classmethod
    def current(cls, device: torch.device) -> Queue:
        """Return the one that kernels are given to."""
        return cls(torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def use(self) -> AbstractContextManager[object]:
        """Within the block copies go into it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """What comes into it from now on waits for an event."""
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        """Return the event that all it has been given until now is done."""
        return None if self._stream is None else self._stream.record_event()


@cache
def queues_of(device: torch.device) -> tuple[Queue, Queue]:
    """Of all copies from a device to the host, and of all copies from there: the link is one each way."""
    if device.type != "cuda":
        return Queue(None), Queue(None)
    return Queue(torch.cuda.Stream(device)), Queue(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


@dataclass
class PageNeeds:
    """The most pages there are at once, and with gradients, by how many tokens they have room for.

    `largest`: the capacity of the largest page.
    """

    pages: Counter[int] = field(default_factory=Counter)
    gradients: Counter[int] = field(default_factory=Counter)
    largest: int = 0

    def add(self, other: PageNeeds) -> None:
        """Count as well those that others need at the same time."""
        self.pages += other.pages
        self.gradients += other.gradients
        self.largest = max(self.largest, other.largest)


def room(capacity: int) -> int:
    """How many tokens the memory of a page has room for: the next power of two, as torch takes page-locked memory."""
    return 1 << (capacity - 1).bit_length()


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
    ready: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None


class HostMemory(PageMemory):
    """Pages in host memory, see `pages.PageMemory`.

    A block is fetched into one of two buffers while the kernels work on the other; gradients are read, added to on the
    device, and written back. Only what a part did not bring along is fetched: its own KV is copied on the device. A
    fetch waits for the buffer to be free and for the page to be written; kernels wait for the fetch; writing back waits
    for the kernels.
    """

    keeps_blocks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writing, self._reading = queues_of(device)
        self._buffers: list[_Buffer] = []
        self._turn = 1  # of the two buffers
        #: Host memory that nobody uses, by its shape [tokens, heads, dim] and dtype.
        self.unused: defaultdict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def reserve(self, needs: PageNeeds, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """Take the memory for all pages of a step, before there are any; `shapes`: (heads, dim) of a page's tensors."""
        wanted: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        for counts, held_as in ((needs.pages, dtype), (needs.gradients, wide(dtype))):
            for tokens, count in counts.items():
                for shape in shapes:
                    wanted[(tokens, *shape), held_as] += count
        for (room_for, held_as), count in wanted.items():
            unused = self.unused[room_for, held_as]
            unused += [new_host_memory(room_for, held_as, self._device) for _ in range(count - len(unused))]
        if needs.largest:
            largest = tuple(torch.empty(needs.largest, *shape, dtype=dtype, device="meta") for shape in shapes)
            for _ in range(2):
                self._next_buffer(largest)

    def num_buffer_bytes(self) -> int:
        """Bytes of the two buffers on the device."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer.tensors + buffer.gradients)

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        """See `pages.PageMemory.new_page`."""
        memory = [self._take(capacity, tensor[0].transpose(0, 1), tensor.dtype) for tensor in tensors]
        held = tuple(tensor[:capacity] for tensor in memory)
        return _HostPage(start, capacity, held, memory=memory, added_from=start + capacity)

    def give_back(self, page: Page) -> None:
        """See `pages.PageMemory.give_back`."""
        assert isinstance(page, _HostPage)
        for tensor in page.memory:
            self.unused[tensor.shape, tensor.dtype].append(tensor)
        page.memory = []

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See `pages.PageMemory.hold`. While links are open, when no memory is taken, it stays on the device."""
        if not may_wait():
            return lambda: tensor
        home = new_host_memory(tensor.shape, tensor.dtype, self._device)
        there = self._write_back([home], [tensor])

        def fetch() -> Tensor:
            Queue.current(self._device).wait(there)
            return home.to(self._device, non_blocking=True, copy=True)

        return fetch

    def write(self, page: Page, start: int, tensors: tuple[Tensor, ...]) -> None:
        """See `pages.PageMemory.write`."""
        assert isinstance(page, _HostPage)
        sent = [tensor.detach()[0].transpose(0, 1).contiguous() for tensor in tensors]  # [num_tokens, heads, dim]
        homes = [home[start - page.start :][: len(rows)] for home, rows in zip(page.tensors, sent, strict=True)]
        page.written_before = page.written
        page.written = self._write_back(homes, sent)

    def blocks(self, slices: Sequence[PageSlice], asked: Asked) -> Iterator[KVBlock]:
        """See `pages.PageMemory.blocks`."""
        with_gradients = asked.with_gradients
        current = Queue.current(self._device)
        buffers = [self._next_buffer(slices[0].page.tensors)]
        self._fetch(buffers[0], slices[0], with_gradients)
        for index, page_slice in enumerate(slices):
            if index + 1 < len(slices):
                buffers.append(self._next_buffer(slices[index + 1].page.tensors))
                self._fetch(buffers[-1], slices[index + 1], with_gradients)
            buffer = buffers[index]
            current.wait(buffer.ready)
            num_tokens = page_slice.stop - page_slice.start
            num_fetched = min(page_slice.own_start, page_slice.stop) - page_slice.start
            if num_fetched < num_tokens:
                for held, tensor in zip(buffer.tensors, asked.tensors, strict=True):
                    held[num_fetched:num_tokens] = tensor[0].transpose(0, 1)
            gradients = buffer.gradients if with_gradients else ()
            if num_new := _first_added(page_slice) - page_slice.start:
                for held in gradients:
                    held[:num_new].zero_()
            views = (
                tuple(each[:num_tokens].transpose(0, 1)[None] for each in held) for held in (buffer.tensors, gradients)
            )
            block = KVBlock(page_slice.start, page_slice.stop, *views)
            yield block
            asked.take_own(block, page_slice.own_start)
            if with_gradients:
                # What the part itself was sent is not needed again once it has been taken.
                num_left = num_fetched if asked.takes_own else num_tokens
                page, tokens = page_slice.page, slice(page_slice.tokens.start, page_slice.tokens.start + num_left)
                assert isinstance(page, _HostPage)
                page.added_from = min(page.added_from, page_slice.start)
                buffer.free = page.added = self._write_back(
                    [home[tokens] for home in page.gradients], [held[:num_left] for held in gradients]
                )
            else:
                buffer.free = current.record()

    def _fetch(self, buffer: _Buffer, page_slice: PageSlice, with_gradients: bool) -> None:
        """Start filling a buffer with what the asking part did not bring along."""
        page = page_slice.page
        assert isinstance(page, _HostPage)
        num_fetched = min(page_slice.own_start, page_slice.stop) - page_slice.start
        tokens = slice(page_slice.tokens.start, page_slice.tokens.start + num_fetched)
        self._reading.wait(buffer.free)
        self._reading.wait(page.written if num_fetched == page_slice.stop - page_slice.start else page.written_before)
        self._reading.wait(page.added if with_gradients else None)
        with self._reading.use():
            for held, home in zip(buffer.tensors, page.tensors, strict=True):
                held[:num_fetched].copy_(home[tokens], non_blocking=True)
            if with_gradients:  # those that later parts added
                if not page.gradients:
                    memory = [self._take(page.capacity, tensor, wide(tensor.dtype)) for tensor in page.tensors]
                    page.memory += memory
                    page.gradients = tuple(tensor[: page.capacity] for tensor in memory)
                added = slice(_first_added(page_slice) - page.start, page_slice.tokens.stop)
                here = slice(added.start - page_slice.tokens.start, page_slice.stop - page_slice.start)
                for held, home in zip(buffer.gradients, page.gradients, strict=True):
                    held[here].copy_(home[added], non_blocking=True)
        buffer.ready = self._reading.record()

    def _write_back(self, homes: Sequence[Tensor], tensors: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start copying tensors to their homes on the host, after what was asked of the device until now."""
        self._writing.wait(Queue.current(self._device).record())
        with self._writing.use():
            for home, tensor in zip(homes, tensors, strict=True):
                home.copy_(tensor, non_blocking=True)
                if self._writing.copies:
                    tensor.record_stream(torch.cuda.current_stream(self._device))
        return self._writing.record()

    def _next_buffer(self, tensors: tuple[Tensor, ...]) -> _Buffer:
        """The buffer whose turn it is, with room for any page as large as this one, [capacity, heads, dim] each."""
        self._turn = (self._turn + 1) % 2
        buffer = self._buffers[self._turn] if self._turn < len(self._buffers) else None
        if buffer is None or not _has_room(buffer.tensors, tensors):
            # The kernels that use the old one's memory come before those that may get it next, in the same stream.
            held = tuple(torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in tensors)
            gradients = tuple(torch.empty_like(each, dtype=wide(each.dtype)) for each in held)
            # The memory may be that of a tensor which kernels still read.
            buffer = _Buffer(held, gradients, free=Queue.current(self._device).record())
            self._buffers[self._turn : self._turn + 1] = [buffer]
        return buffer

    def _take(self, capacity: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor of a page, like [any, heads, dim]."""
        shape = room(capacity), *like.shape[1:]
        unused = self.unused[shape, dtype]
        return unused.pop() if unused else new_host_memory(shape, dtype, self._device)


def _has_room(tensors: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Whether `tensors` have room for as many tokens of the same: [tokens, heads, dim] each."""
    return len(tensors) == len(wanted) and all(
        held.shape[0] >= other.shape[0] and held.shape[1:] == other.shape[1:] and held.dtype == other.dtype
        for held, other in zip(tensors, wanted, strict=True)
    )


def _first_added(page_slice: PageSlice) -> int:
    """The token of a slice from which on later parts have added gradients; of those before it none is known."""
    page = page_slice.page
    assert isinstance(page, _HostPage)
    return min(max(page.added_from, page_slice.start), page_slice.stop)


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
    """What lies in host memory of all chunks in flight: inputs of layers, and results of attention.

    A tensor is copied to the host while kernels go on, and comes back while those before the ones that need it are at
    work. On the device there are two of them at most, of the layer at work and of the next one: before a third one
    leaves, kernels wait until the first has arrived. (Memory that is merely marked as in use by another stream is free
    again only when the host sees that the copy is done; the host is far ahead, and layers would take as much as
    without.) The memory of a chunk is used again when all of its tensors are gone.
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
        """Within the block what autograd saves of `hidden`, the input of a layer, lies in host memory, if it has room.

        There may be none for what models pass on beside hidden states.
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

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

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
