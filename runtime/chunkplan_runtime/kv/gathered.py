"""Pages that several processes share: each keeps its own tokens of them, and fetches those of the others.

What holds the own tokens is another memory. A block is gathered from all processes and put into the order of the
sequence; in a backward its gradients, in at least float32, go back to those whose tokens they are of, and are summed
there. One exchange carries all tensors of a page, which have one dtype. All processes ask for the same blocks in the
same order, also one of whose queries none sees any of it. Where it costs no more than memory, the next block is on its
way while one is attended to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chunkplan_runtime.devices import wide
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageMemory, PageSlice
from chunkplan_runtime.sharing import Exchanges, Pending, SharedPart


@dataclass
class _SharedPage(Page):
    """A page of the whole sequence; `own` is the page of what this process keeps of it, whose tensors it has."""

    own: Page | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.own is None else self.own.num_bytes


class GatheredMemory(PageMemory):
    """See `pages.PageMemory`. `inner` holds what this process keeps of the sequence that `part` is of."""

    keeps_blocks = False

    def __init__(self, inner: PageMemory, part: SharedPart, exchanges: Exchanges) -> None:
        self._inner = inner
        self._part = part
        self._exchanges = exchanges
        self._own = part.holdings[part.place]

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        """See `pages.PageMemory.new_page`."""
        first = self._own.before(start)
        own = self._inner.new_page(first, self._own.before(start + capacity) - first, tensors)
        return _SharedPage(start, capacity, own.tensors, own=own)

    def write(self, page: Page, start: int, tensors: tuple[Tensor, ...]) -> None:
        """See `pages.PageMemory.write`: of this process's tokens from `start` on."""
        self._inner.write(_own(page), self._own.before(start), tensors)

    def give_back(self, page: Page) -> None:
        """See `pages.PageMemory.give_back`."""
        self._inner.give_back(_own(page))

    def blocks(self, slices: Sequence[PageSlice], asked: Asked) -> Iterator[KVBlock]:
        """See `pages.PageMemory.blocks`."""
        before = self._own.before
        own_slices = [
            PageSlice(_own(each.page), before(each.start), before(each.stop), before(each.own_start)) for each in slices
        ]
        if self._inner.keeps_blocks:
            sources = [self._inner.blocks([each], asked) for each in own_slices]
        else:
            sources = [self._inner.blocks(own_slices, asked)] * len(slices)
        # The inner memory takes back gradients when it is asked for the next block: unless it keeps blocks, they have
        # to be there by then.
        is_ahead = self._inner.keeps_blocks or not asked.with_gradients
        coming = self._launch(slices[0], sources[0])
        for index, source in enumerate(sources):
            if coming is None:  # memory that counts and holds nothing
                return
            (own, pending), last, page_slice = coming, index + 1 == len(slices), slices[index]
            coming = self._launch(slices[index + 1], sources[index + 1]) if is_ahead and not last else None
            in_order = self._arrived(page_slice, pending)  # [num_tokens, width]
            del pending  # and with it the rows of all
            like = own.tensors
            gradients = torch.zeros_like(in_order, dtype=wide(in_order.dtype)) if asked.with_gradients else None
            views = () if gradients is None else _views(gradients, like)
            yield KVBlock(page_slice.start, page_slice.stop, _views(in_order, like), views)
            if gradients is not None:
                self._send_back(page_slice, own, gradients)
            del in_order, gradients, views  # before there is another one
            if self._inner.keeps_blocks or last:
                next(source, None)  # which is done with it
            if not is_ahead and not last:
                coming = self._launch(slices[index + 1], sources[index + 1])

    def _launch(self, page_slice: PageSlice, source: Iterator[KVBlock]) -> tuple[KVBlock, Pending] | None:
        """Start to fetch a block: this process's tokens of it, and the rows of all on their way."""
        own = next(source, None)
        if own is None:
            return None
        rows = torch.cat([tensor[0].transpose(0, 1).flatten(1) for tensor in own.tensors], 1)  # [own tokens, width]
        if missing := self._most(page_slice) - len(rows):
            rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
        return own, self._exchanges.gather(rows, self._part.pages)

    def _arrived(self, page_slice: PageSlice, pending: Pending) -> Tensor:
        """Wait for a block, and put its tokens into the order of the sequence: [num_tokens, width]."""
        with self._exchanges.waiting(self._words("fetching", page_slice, "from"), self._part.pages):
            rows = pending.wait()  # [processes x most tokens, width]
        most = self._most(page_slice)
        pieces = [
            (first, rows[place * most + offset :][: stop - first])
            for place, offset, first, stop in self._pieces(page_slice)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda piece: piece[0])])

    def _send_back(self, page_slice: PageSlice, own: KVBlock, gradients: Tensor) -> None:
        """Give the gradients [num_tokens, width] of a block to those whose tokens they are of, and take one's own."""
        most, width = self._most(page_slice), gradients.shape[1]
        by_process: list[list[Tensor]] = [[] for _ in self._part.pages]
        for place, _, first, stop in self._pieces(page_slice):
            by_process[place].append(gradients[first - page_slice.start : stop - page_slice.start])
        for pieces in by_process:
            pieces.append(gradients.new_zeros(most - sum(len(piece) for piece in pieces), width))
        rows = torch.cat([piece for pieces in by_process for piece in pieces])  # [processes x most tokens, width]
        with self._exchanges.waiting(self._words("adding up gradients of", page_slice, "with"), self._part.pages):
            summed = self._exchanges.reduce(rows, self._part.pages)[: own.stop - own.start]  # [own tokens, width]
        for home, added in zip(own.gradients, _views(summed, own.tensors), strict=True):
            home.add_(added)

    def _pieces(self, page_slice: PageSlice) -> Iterator[tuple[int, int, int, int]]:
        """(process, where among its tokens of the slice, [first, stop) of the sequence) of all that each has of it."""
        for place, holding in enumerate(self._part.holdings):
            offset = 0
            for first, stop in holding.within(page_slice.start, page_slice.stop):
                yield place, offset, first, stop
                offset += stop - first

    def _most(self, page_slice: PageSlice) -> int:
        """The most tokens that a process has of it: all send as many."""
        return max(
            holding.before(page_slice.stop) - holding.before(page_slice.start) for holding in self._part.holdings
        )

    def _words(self, what: str, page_slice: PageSlice, whom: str) -> str:
        sequence = self._part.span.sequence_id
        return f"{what} the page of tokens {page_slice.start} to {page_slice.stop} of sequence {sequence} {whom}"


def _own(page: Page) -> Page:
    assert isinstance(page, _SharedPage) and page.own is not None
    return page.own


def _views(rows: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same rows as [1, heads, num_tokens, dim] each, of the heads and dims of `like`."""
    columns = torch.split(rows, [tensor.shape[1] * tensor.shape[3] for tensor in like], 1)
    return tuple(
        column.view(1, len(rows), tensor.shape[1], tensor.shape[3]).transpose(1, 2)
        for column, tensor in zip(columns, like, strict=True)
    )
