"""Pages in host memory, so that the keys and values on a GPU do not grow with the length of a sequence.

A block is fetched into one of two buffers while the kernels work on the other; gradients are read, added to on the
device, and written back. Reading and writing have a CUDA stream each, for copies alone: a kernel there would get its
turn only when attention leaves room. All waiting is done by the GPU, so that the next layer's first block is on its way
while this layer's products still run. On a CPU the same buffers are filled by plain copies.

Only what a part did not bring along is fetched: its own KV is copied on the device. Ordering: a fetch waits for the
buffer to be free and for the page to be written; kernels wait for the fetch; writing back waits for the kernels.

The memory of pages that are given back is used again, and never returned to the system. Taking it is slow, and may wait
for the whole device: all of it is there before the first action of a step (`HostMemory.reserve`). Who gets memory that
was used before need not wait: all that was read from it was waited for by kernels, after which all writing to it comes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chunkplan_runtime.devices import may_wait, new_host_memory, wide
from chunkplan_runtime.kv.page_needs import PageNeeds, room
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageSlice
from chunkplan_runtime.kv.queue import Queue, queues_of


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


class HostMemory:
    """See `pages.PageMemory`."""

    keeps_blocks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._writing, self._reading = queues_of(device)
        self._buffers: list[_Buffer] = []
        self._turn = 0
        #: Host memory that nobody uses, by its shape [tokens, heads, dim] and dtype.
        self.unused: defaultdict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def reserve(self, needs: PageNeeds, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
        """Take the memory for all pages of a step, before there are any, so that none is taken later.

        `shapes`: (heads, dim) of each tensor of a page.
        """
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
            if with_gradients:
                self._fetch_gradients(buffer, page, page_slice)
        buffer.ready = self._reading.record()

    def _fetch_gradients(self, buffer: _Buffer, page: _HostPage, page_slice: PageSlice) -> None:
        """Start filling a buffer with the gradients that later parts added."""
        if not page.gradients:
            memory = [self._take(page.capacity, tensor, wide(tensor.dtype)) for tensor in page.tensors]
            page.memory += memory
            page.gradients = tuple(tensor[: page.capacity] for tensor in memory)
        added = slice(_first_added(page_slice) - page.start, page_slice.tokens.stop)
        here = slice(added.start - page_slice.tokens.start, page_slice.stop - page_slice.start)
        for held, home in zip(buffer.gradients, page.gradients, strict=True):
            held[here].copy_(home[added], non_blocking=True)

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
        if len(self._buffers) < 2:
            self._buffers.append(self._new_buffer(tensors))
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if not _has_room(buffer.tensors, tensors):
            # The kernels that use the old one's memory come before those that may get it next, in the same stream.
            buffer = self._buffers[self._turn] = self._new_buffer(tensors)
        return buffer

    def _new_buffer(self, tensors: tuple[Tensor, ...]) -> _Buffer:
        held = tuple(torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in tensors)
        gradients = tuple(torch.empty_like(each, dtype=wide(each.dtype)) for each in held)
        # The memory may be that of a tensor which kernels still read.
        return _Buffer(held, gradients, free=Queue.current(self._device).record())

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
