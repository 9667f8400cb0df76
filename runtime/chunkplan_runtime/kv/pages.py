"""Where keys, values and their gradients of split sequences are kept between the chunks that use them.

A sequence is kept in pages of whole parts, each preallocated: a part is written to its slice, a later part reads pages
as they are, and a page is given back as soon as the last of its parts has done its backward. Pages bound what a kernel
call reads at once, and with it what expanding KV heads or fetching from host memory costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from chunkplan_runtime.dtypes import wide


@dataclass
class Page:
    """Tokens from `start` on of one sequence in one layer, room for `capacity`: [capacity, kv_heads, head_dim] each.

    Tokens come first, so that those of a part lie together. The gradients are there after the first backward.
    """

    start: int
    capacity: int
    key: Tensor
    value: Tensor
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        tensors = (self.key, self.value, self.grad_key, self.grad_value)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True)
class KVBlock:
    """Tokens [start, stop) of a sequence, on the device, for one kernel call: [kv_heads, stop - start, head_dim] each.

    The gradients are there to be added to, in at least float32. Good until the next block is asked for.
    """

    start: int
    stop: int
    key: Tensor
    value: Tensor
    grad_key: Tensor | None = None
    grad_value: Tensor | None = None


@dataclass
class Asked:
    """What a part brings along that asks for blocks: its own key and value, [kv_heads, num_tokens, head_dim] each.

    With gradients it gets back `gradients`, those of its own key and value in their dtype, from all parts of the
    sequence: they are there when the last block was given back.
    """

    key: Tensor
    value: Tensor
    with_gradients: bool = False
    gradients: tuple[Tensor, ...] = ()

    def take_own(self, block: KVBlock, own_start: int) -> None:
        """Take the gradients of the tokens from `own_start` on from a block that has the part's own tokens last."""
        if not self.with_gradients or own_start >= block.stop:
            return
        own = slice(own_start - block.start, None)
        assert block.grad_key is not None and block.grad_value is not None
        # Copies: the next block may lie where this one did.
        self.gradients = (
            block.grad_key[:, own].to(self.key.dtype, copy=True),
            block.grad_value[:, own].to(self.value.dtype, copy=True),
        )


@dataclass(frozen=True)
class PageSlice:
    """Tokens [start, stop) of a sequence, which lie in `page`; those from `own_start` on are the asking part's own."""

    page: Page
    start: int
    stop: int
    own_start: int

    @property
    def tokens(self) -> slice:
        """Where these tokens lie in the page."""
        return slice(self.start - self.page.start, self.stop - self.page.start)


class PageMemory(Protocol):
    """What holds pages and hands out blocks of them.

    `keeps_blocks`: whether a block stays good, and its gradients may be added to, after others were asked for.
    """

    keeps_blocks: bool

    def new_page(self, start: int, capacity: int, key: Tensor, value: Tensor) -> Page:
        """Make an empty page for keys and values like `key` and `value`, [kv_heads, num_tokens, head_dim] each."""
        ...

    def write(self, page: Page, start: int, key: Tensor, value: Tensor) -> None:
        """Write the KV [kv_heads, num_tokens, head_dim] of the tokens from `start` on of the sequence."""
        ...

    def blocks(self, slices: Sequence[PageSlice], asked: Asked) -> Iterator[KVBlock]:
        """Yield a block for every slice; a block is given back by asking for the next one."""
        ...

    def give_back(self, page: Page) -> None:
        """Take back the memory of a page, which nobody will ask for again."""
        ...


class DeviceMemory:
    """Holds pages on the device; blocks are views of them."""

    keeps_blocks = True

    def new_page(self, start: int, capacity: int, key: Tensor, value: Tensor) -> Page:
        """See `PageMemory.new_page`."""
        return Page(start, capacity, *(_empty(tensor, capacity) for tensor in (key, value)))

    def write(self, page: Page, start: int, key: Tensor, value: Tensor) -> None:
        """See `PageMemory.write`."""
        tokens = slice(start - page.start, start - page.start + key.shape[1])
        page.key[tokens] = key.transpose(0, 1)
        page.value[tokens] = value.transpose(0, 1)

    def blocks(self, slices: Sequence[PageSlice], asked: Asked) -> Iterator[KVBlock]:
        """See `PageMemory.blocks`."""
        for page_slice in slices:
            page, tokens = page_slice.page, page_slice.tokens
            if asked.with_gradients and page.grad_key is None:
                page.grad_key, page.grad_value = (zeros_wide(tensor) for tensor in (page.key, page.value))
            tensors = (page.key, page.value, *((page.grad_key, page.grad_value) if asked.with_gradients else ()))
            held = (tensor[tokens] for tensor in tensors if tensor is not None)  # [num_tokens, kv_heads, head_dim]
            views = (tensor.transpose(0, 1) for tensor in held)  # [kv_heads, num_tokens, head_dim]
            block = KVBlock(page_slice.start, page_slice.stop, *views)
            yield block
            asked.take_own(block, page_slice.own_start)

    def give_back(self, page: Page) -> None:
        """See `PageMemory.give_back`: its memory is free as soon as nobody holds it."""


def zeros_wide(tensor: Tensor) -> Tensor:
    """Zeros in at least float32: bfloat16 would lose what many small contributions add up to."""
    return torch.zeros_like(tensor, dtype=wide(tensor.dtype))


def _empty(tensor: Tensor, capacity: int) -> Tensor:
    return tensor.new_empty(capacity, tensor.shape[0], tensor.shape[2])  # [capacity, kv_heads, head_dim]
