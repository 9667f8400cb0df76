"""Pages in host memory, so that the keys and values on a GPU do not grow with the length of a sequence.

A block is fetched into one of two buffers while the kernels work on the other; gradients are read, added to on the
device, and written back. Reading and writing have a CUDA stream each, and all waiting is done by the GPU, so that the
next layer's first block is on its way while this layer's products still run. On a CPU the same buffers are filled by
plain copies.

Only what a part did not bring along is fetched: its own KV is copied on the device. Ordering: a fetch waits for the
buffer to be free and for the page to be written; kernels wait for the fetch; writing back waits for the kernels.

The memory of pages that are given back is used again, and never returned to the system: taking it may wait for the
whole device. So it is all there before links are opened (`HostMemory.reserve`). Who gets memory that was used before
need not wait: all that was read from it was waited for by kernels, after which all writing to it comes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chunkplan_runtime.device_waits import new_host_memory
from chunkplan_runtime.dtypes import wide
from chunkplan_runtime.kv.page_needs import PageNeeds, room
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageSlice


class _Queue:
    """A CUDA stream, or nothing where copies are done when they are asked for."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self.copies = stream is not None
        self._device = device

    @classmethod
    def new(cls, device: torch.device) -> _Queue:
        return cls(device, torch.cuda.Stream(device) if device.type == "cuda" else None)  # type: ignore[no-untyped-call]

    @classmethod
    def current(cls, device: torch.device) -> _Queue:
        return cls(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)

    def use(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self, event: torch.cuda.Event | None) -> None:
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)

    def record(self) -> torch.cuda.Event | None:
        return None if self._stream is None else self._stream.record_event()


@dataclass
class _HostPage(Page):
    memory: list[Tensor] = field(default_factory=list)  # what its tensors are parts of
    added_from: int = 0  # of the tokens from here on gradients were written back; before it is anything
    written: torch.cuda.Event | None = None  # when all KV that was sent to it has arrived
    written_before: torch.cuda.Event | None = None  # all but the last part sent
    added: torch.cuda.Event | None = None  # when its gradients have arrived


@dataclass
class _Buffer:
    """Room for a block on the device, tokens first: [num_tokens, kv_heads, head_dim] each."""

    key: Tensor
    value: Tensor
    grad_key: Tensor
    grad_value: Tensor
    ready: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None


class HostMemory:
    """See `pages.PageMemory`."""

    keeps_blocks = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reading = _Queue.new(device)
        self._writing = _Queue.new(device)
        self._buffers: list[_Buffer] = []
        self._turn = 0
        #: Host memory that nobody uses, by its shape [tokens, kv_heads, head_dim] and dtype.
        self.unused: defaultdict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def reserve(self, needs: PageNeeds, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        """Take the memory for all pages of a step, before there are any, so that none is taken later."""
        wanted: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()
        for counts, held_as in ((needs.pages, dtype), (needs.gradients, wide(dtype))):
            for tokens, count in counts.items():
                wanted[(tokens, kv_heads, head_dim), held_as] += 2 * count  # for keys and for values
        for (shape, held_as), count in wanted.items():
            unused = self.unused[shape, held_as]
            unused += [new_host_memory(shape, held_as, self._device) for _ in range(count - len(unused))]
        if needs.largest:
            kv = torch.empty(needs.largest, kv_heads, head_dim, dtype=dtype, device="meta")
            for _ in range(2):
                self._next_buffer(_HostPage(0, needs.largest, kv, kv))

    def num_buffer_bytes(self) -> int:
        """Bytes of the two buffers on the device."""
        return sum(
            tensor.nbytes
            for buffer in self._buffers
            for tensor in (buffer.key, buffer.value, buffer.grad_key, buffer.grad_value)
        )

    def new_page(self, start: int, capacity: int, key: Tensor, value: Tensor) -> Page:
        """See `pages.PageMemory.new_page`."""
        memory = [self._take(capacity, each, each.dtype) for each in (key, value)]
        held_key, held_value = (tensor[:capacity] for tensor in memory)
        return _HostPage(start, capacity, held_key, held_value, memory=memory, added_from=start + capacity)

    def give_back(self, page: Page) -> None:
        """See `pages.PageMemory.give_back`."""
        assert isinstance(page, _HostPage)
        for tensor in page.memory:
            self.unused[tensor.shape, tensor.dtype].append(tensor)
        page.memory = []

    def write(self, page: Page, start: int, key: Tensor, value: Tensor) -> None:
        """See `pages.PageMemory.write`."""
        assert isinstance(page, _HostPage)
        tokens = slice(start - page.start, start - page.start + key.shape[1])
        sent = [
            tensor.detach().transpose(0, 1).contiguous() for tensor in (key, value)
        ]  # [num_tokens, kv_heads, head_dim]
        page.written_before = page.written
        page.written = self._write_back([(page.key[tokens], sent[0]), (page.value[tokens], sent[1])])

    def blocks(self, slices: Sequence[PageSlice], asked: Asked) -> Iterator[KVBlock]:
        """See `pages.PageMemory.blocks`."""
        with_gradients = asked.with_gradients
        current = _Queue.current(self._device)
        buffers = [self._next_buffer(slices[0].page)]
        self._fetch(buffers[0], slices[0], with_gradients)
        for index, page_slice in enumerate(slices):
            if index + 1 < len(slices):
                buffers.append(self._next_buffer(slices[index + 1].page))
                self._fetch(buffers[-1], slices[index + 1], with_gradients)
            buffer = buffers[index]
            current.wait(buffer.ready)
            num_tokens = page_slice.stop - page_slice.start
            num_fetched = min(page_slice.own_start, page_slice.stop) - page_slice.start
            if num_fetched < num_tokens:
                buffer.key[num_fetched:num_tokens] = asked.key.transpose(0, 1)
                buffer.value[num_fetched:num_tokens] = asked.value.transpose(0, 1)
            names = ("key", "value", "grad_key", "grad_value") if with_gradients else ("key", "value")
            held = {name: getattr(buffer, name)[:num_tokens] for name in names}  # [num_tokens, kv_heads, head_dim]
            views = {name: tensor.transpose(0, 1) for name, tensor in held.items()}  # [kv_heads, num_tokens, head_dim]
            block = KVBlock(page_slice.start, page_slice.stop, **views)
            yield block
            asked.take_own(block, page_slice.own_start)
            if with_gradients:
                # What the part itself was sent has been taken and is not needed again.
                page, tokens = page_slice.page, slice(page_slice.tokens.start, page_slice.tokens.start + num_fetched)
                assert isinstance(page, _HostPage)
                pairs = [
                    (home[tokens], held[name][:num_fetched])
                    for name, home in (("grad_key", page.grad_key), ("grad_value", page.grad_value))
                    if home is not None
                ]
                page.added_from = min(page.added_from, page_slice.start)
                buffer.free = page.added = self._write_back(pairs)
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
            buffer.key[:num_fetched].copy_(page.key[tokens], non_blocking=True)
            buffer.value[:num_fetched].copy_(page.value[tokens], non_blocking=True)
            if with_gradients:
                self._fetch_gradients(buffer, page, page_slice)
        buffer.ready = self._reading.record()

    def _fetch_gradients(self, buffer: _Buffer, page: _HostPage, page_slice: PageSlice) -> None:
        """Start filling a buffer with the gradients that later parts added; zeros for tokens that none of them saw."""
        if page.grad_key is None or page.grad_value is None:
            kv = (page.key, page.value)
            memory = [self._take(page.capacity, each.transpose(0, 1), wide(each.dtype)) for each in kv]
            page.memory += memory
            page.grad_key, page.grad_value = (tensor[: page.capacity] for tensor in memory)
        known = slice(min(max(page.added_from, page_slice.start), page_slice.stop) - page.start, page_slice.tokens.stop)
        num_new, num_tokens = known.start - page_slice.tokens.start, page_slice.stop - page_slice.start
        for held, home in ((buffer.grad_key, page.grad_key), (buffer.grad_value, page.grad_value)):
            held[:num_new].zero_()
            held[num_new:num_tokens].copy_(home[known], non_blocking=True)

    def _write_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Start copying (to the host, from the device), after what was asked of the device until now."""
        self._writing.wait(_Queue.current(self._device).record())
        with self._writing.use():
            for home, tensor in pairs:
                home.copy_(tensor, non_blocking=True)
                if self._writing.copies:
                    tensor.record_stream(torch.cuda.current_stream(self._device))
        return self._writing.record()

    def _next_buffer(self, page: Page) -> _Buffer:
        """The buffer whose turn it is, with room for any page as large as this one."""
        if len(self._buffers) < 2:
            self._buffers.append(self._new_buffer(page))
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        fits = (
            buffer.key.shape[0] >= page.capacity
            and buffer.key.shape[1:] == page.key.shape[1:]
            and buffer.value.shape[1:] == page.value.shape[1:]
            and buffer.key.dtype == page.key.dtype
        )
        if not fits:
            # The kernels that use the old one's memory come before those that may get it next, in the same stream.
            buffer = self._buffers[self._turn] = self._new_buffer(page)
        return buffer

    def _new_buffer(self, page: Page) -> _Buffer:
        key, value = (
            torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device) for tensor in (page.key, page.value)
        )
        gradients = torch.empty_like(key, dtype=wide(key.dtype)), torch.empty_like(value, dtype=wide(value.dtype))
        # The memory may be that of a tensor which kernels still read.
        return _Buffer(key, value, *gradients, free=_Queue.current(self._device).record())

    def _take(self, capacity: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """PageMemory for a page, of keys or values like [kv_heads, any, head_dim]."""
        shape = room(capacity), like.shape[0], like.shape[2]
        unused = self.unused[shape, dtype]
        return unused.pop() if unused else new_host_memory(shape, dtype, self._device)
