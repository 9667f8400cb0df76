"""Pages of keys and values of split sequences, which are kept between the chunks that use them.

A page has room for whole parts of a sequence and is preallocated: a part is written to its slice, later parts read
pages as they are, and a page is given back as soon as the last of its parts has done its backward. It is a tuple of
tensors, of any number of heads and any width each: what a layer's attention keeps of a token (`attention.latents`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chunkplan_runtime.devices import wide


@dataclass
class Page:
    """Tokens from `start` on of one sequence in one layer, room for `capacity`.

    Tokens come first in memory, so that those of a part lie together: [1, heads, capacity, dim] each on the device, and
    [capacity, heads, dim] on the host. Gradients, one for each of the `tensors`, are there after the first backward.
    """

    start: int
    capacity: int
    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...] = ()


class KVBlock(NamedTuple):
    """Tokens [start, stop) of a sequence, on the device, for one kernel call: [1, heads, stop - start, dim] each.

    The gradients, where they were asked for, are there to be added to, in at least float32.
    """

    start: int
    stop: int
    tensors: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...] = ()


@dataclass
class KVRequest:
    """A part's request for blocks, with its own `tensors`, [1, heads, num_tokens, dim] each.

    With gradients it gets back `gradients`, those of its own tensors in their dtypes, from all parts of the sequence:
    they are there when the last block was given back. Unless it `takes_own`, they stay in the page for who asks next.
    """

    tensors: tuple[Tensor, ...]
    with_gradients: bool = False
    takes_own: bool = True
    gradients: tuple[Tensor, ...] = ()

    def take_own(self, block: KVBlock, own_start: int) -> None:
        """Take the gradients of the tokens from `own_start` on from a block that has the part's own tokens last."""
        if not self.with_gradients or not self.takes_own or own_start >= block.stop:
            return
        own = rows(block.gradients, slice(own_start - block.start, block.stop - block.start))
        # Copies: the next block may lie where this one did.
        self.gradients = tuple(
            torch.empty_like(tensor).copy_(gradient) for gradient, tensor in zip(own, self.tensors, strict=True)
        )


class PageSlice(NamedTuple):
    """Tokens [start, stop) of a sequence, in `page`; those from `own_start` on are the requesting part's own."""

    page: Any  # of the memory that it is given to
    start: int
    stop: int
    own_start: int

    @property
    def tokens(self) -> slice:
        """The slice of the page that holds these tokens."""
        return slice(self.start - self.page.start, self.stop - self.page.start)


class PageMemory:
    """Holds pages and hands out blocks of them: here on the device, where blocks are views of pages."""

    on_device = True

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        """Make an empty page for tensors like these, [1, heads, num_tokens, dim] each."""
        empty = [each.new_empty(1, capacity, each.shape[1], each.shape[3]).transpose(1, 2) for each in tensors]
        return Page(start, capacity, tuple(empty))

    def write(self, page: Any, start: int, tensors: tuple[Tensor, ...]) -> None:
        """Write the tensors [1, heads, num_tokens, dim] of the tokens from `start` on of the sequence."""
        for home, tensor in zip(page.tensors, tensors, strict=True):
            home.narrow(2, start - page.start, tensor.size(2)).copy_(tensor)

    def fetch(self, page_slice: PageSlice, request: KVRequest) -> Iterator[KVBlock | None]:
        """Yield twice: None when a block is on its way, and the block; it is given back by going on."""
        yield None
        page, tokens = page_slice.page, page_slice.tokens
        if request.with_gradients:
            self.ensure_gradients(page)
        gradients = page.gradients if request.with_gradients else ()
        block = KVBlock(page_slice.start, page_slice.stop, rows(page.tensors, tokens), rows(gradients, tokens))
        yield block
        request.take_own(block, page_slice.own_start)

    def ensure_gradients(self, page: Any) -> None:
        """Allocate zero gradients of a page, if it has none."""
        page.gradients = page.gradients or tuple(zeros_wide(tensor) for tensor in page.tensors)

    def give_back(self, page: Any) -> None:
        """Take back the memory of a page, which nobody will ask for again; on the device nobody holds it then."""

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor that is no page; what comes back gives it, on the device."""
        return lambda: tensor


def rows(tensors: tuple[Tensor, ...], here: slice) -> tuple[Tensor, ...]:
    """Some tokens of [1, heads, num_tokens, ...] each: the tensors themselves where those are all."""
    length = here.stop - here.start
    if not tensors or length == tensors[0].size(2):
        return tensors
    return tuple([each.narrow(2, here.start, length) for each in tensors])


def zeros_wide(tensor: Tensor) -> Tensor:
    """Zeros in at least float32: bfloat16 would lose what many small contributions add up to."""
    return torch.zeros_like(tensor, dtype=wide(tensor.dtype))
