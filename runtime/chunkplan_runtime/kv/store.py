"""The store of keys, values and their gradients of the split sequences in flight, which outlive a chunk.

A sequence takes pages as its parts run forward and gives them back as they have done their backward; one that occurs
twice in a step is two groups and is kept twice. Writes go to the slice of the part, so that writing twice (forward,
then recompute) changes nothing. The gradient of a part's KV is the sum of what all later parts sent to it: it is
complete when, and only when, backwards run in descending order, which is checked. A tree is kept as one sequence, of
which a part has its backward after those that attend to it, and a page is of one part.

Of pages that several processes share, each keeps its own tokens, and fetches those of the others (`GatheredMemory`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chunkplan.errors import DataError
from chunkplan_runtime.devices import wide
from chunkplan_runtime.kv.pages import KVBlock, KVRequest, Page, PageMemory, PageSlice
from chunkplan_runtime.layout import Exchanges, Pending, Run, SharedPart, Span


@dataclass
class _Sequence:
    length: int
    memory: PageMemory
    page_tokens: int
    layers: dict[int, list[Page]] = field(default_factory=dict)
    #: Of recurrent layers, by the token before which they are: states, and gradients of them, by name.
    states: dict[int, dict[Any, Callable[[], Tensor]]] = field(default_factory=dict)
    state_gradients: dict[int, dict[Any, Tensor]] = field(default_factory=dict)
    forwarded: int = 0  # tokens [0, forwarded) have their KV here
    complete_from: int = 0  # tokens [complete_from, length) have begun or done their backward
    #: Of a tree, where parts begin: those that have begun or done their backward; and by the tokens of each part the
    #: last that attends to it.
    complete: set[int] = field(default_factory=set)
    last_dependents: dict[Run, int] = field(default_factory=dict)


class KVStore:
    """Keys, values and their gradients by occurrence of a sequence and by layer. Only split sequences enter it.

    `page_tokens`: how many tokens a page has room for at most; a part that is longer gets a page of its own.
    `exchanges`: with the processes that share sequences.
    """

    def __init__(self, page_tokens: int, memory: PageMemory | None = None, exchanges: Exchanges | None = None) -> None:
        self._page_tokens = page_tokens
        self._memory = memory or PageMemory()
        self.exchanges = exchanges or Exchanges()
        self._sequences: dict[tuple[int, int | None], _Sequence] = {}

    @property
    def is_empty(self) -> bool:
        """True if no sequence is in flight."""
        return not self._sequences

    def start_forward(self, span: Span, shared: SharedPart | None = None) -> None:
        """Begin the forward of a part, `shared` by processes; raises DataError where an earlier part has had none."""
        sequence = self._sequences.get(span.occurrence)
        if sequence is None:
            memory, page_tokens = self._memory, self._page_tokens
            if shared is not None and shared.is_paged:
                # A page is a part: then all processes have the same pages, however many tokens each has of them.
                memory, page_tokens = GatheredMemory(memory, shared, self.exchanges), 1
            elif shared is not None:
                page_tokens *= len(shared.heads)  # of as many times fewer heads
            elif span.tree is not None:
                page_tokens = 1
            sequence = _Sequence(span.length, memory, page_tokens, complete_from=span.length)
            self._sequences[span.occurrence] = sequence
        if span.start > sequence.forwarded:
            raise _out_of_order(span, "forward", f"tokens from {sequence.forwarded} to {span.start} had none")
        sequence.forwarded = max(sequence.forwarded, span.stop)

    def start_backward(self, span: Span) -> None:
        """Begin the backward of a part; raises DataError where a later part has had none, or this one has."""
        sequence = self._sequences.get(span.occurrence)
        is_next = sequence is not None and span.stop == sequence.complete_from
        if sequence is not None and span.tree is not None:
            is_next = span.start not in sequence.complete and sequence.complete.issuperset(span.tree.dependents)
        if sequence is None or not is_next:
            raise _out_of_order(span, "backward", "a later part has none yet, or this one had its own")
        sequence.complete_from = span.start
        sequence.complete.add(span.start)

    def finish_backward(self, span: Span) -> None:
        """End the backward of a part: pages that no earlier part is in are given back."""
        _give_back(self._sequences[span.occurrence], span.start, span.stop)
        if span.start == 0:
            del self._sequences[span.occurrence]

    def finish_forward(self, span: Span) -> None:
        """End the forward of a part, where no backwards will follow: pages no later part attends to are given back."""
        sequence = self._sequences[span.occurrence]
        if span.stop == span.length:
            _give_back(sequence, 0, span.length)
            del self._sequences[span.occurrence]
        elif span.tree is not None:
            sequence.last_dependents[span.start, span.stop] = max(span.tree.dependents, default=span.start)
            for run, last in sequence.last_dependents.items():
                if last <= span.start:
                    _give_back(sequence, *run)

    def write(self, span: Span, layer: int, tensors: tuple[Tensor, ...], *, by_parts: bool = False) -> None:
        """Keep the KV of a part, or what this process has of it: [1, heads, num_tokens, dim] each.

        `by_parts`: in a page of its own, as all parts of the sequence in this layer.
        """
        sequence = self._sequences[span.occurrence]
        pages = sequence.layers.setdefault(layer, [])
        page = next((page for page in reversed(pages) if page.start <= span.start), None)
        if page is None or page.start + page.capacity < span.stop:  # parts ascend: nothing is there from `start` on
            part, page_tokens = span.stop - span.start, 1 if by_parts else sequence.page_tokens
            # Parts are as long as this one, or differ by a token: as many as there is room for leave next to none over.
            whole_parts = max(page_tokens // part, 1) * (part + 1)
            capacity = min(whole_parts, max(page_tokens, part), sequence.length - span.start)
            page = sequence.memory.new_page(span.start, capacity, tensors)
            pages.append(page)
        sequence.memory.write(page, span.start, tensors)

    def blocks(self, span: Span, layer: int, start: int, request: KVRequest) -> Iterator[KVBlock]:
        """The tokens [start, span.stop) that a part attends to, in blocks: the part's own first, then all before it.

        `request` has the tensors of the part, as they were written. A block is given back by asking for the next one,
        which is on its way by then.
        """
        memory, slices = self._slices(span, layer, start)
        coming = memory.fetch(slices[0], request)
        next(coming)
        for following in (*slices[1:], None):
            now = coming
            if following is not None:
                coming = memory.fetch(following, request)
                next(coming)
            block = next(now)
            assert block is not None
            yield block
            del block
            next(now, None)

    def ensure_gradients(self, span: Span, layer: int, start: int) -> None:
        """Allocate gradients of the pages of these tokens, as `blocks` does where these are asked for."""
        memory, slices = self._slices(span, layer, start)
        for page_slice in slices:
            memory.ensure_gradients(page_slice.page)

    def _slices(self, span: Span, layer: int, start: int) -> tuple[PageMemory, list[PageSlice]]:
        sequence = self._sequences[span.occurrence]
        pages = sequence.layers[layer]
        nexts = [*(page.start for page in pages[1:]), span.length]
        slices = []
        for page, following in zip(pages, nexts, strict=True):
            first, stop = max(page.start, start), min(following, page.start + page.capacity, span.stop)
            if first < stop and (span.tree is None or span.tree.sees(first, stop)):
                slices.append(PageSlice(page, first, stop, span.start))
        return sequence.memory, [slices[-1], *slices[:-1]]

    def keep_states(self, span: Span, states: dict[Any, Tensor]) -> None:
        """Keep the states that recurrent layers have at the end of a part."""
        held = {name: self._memory.hold(state) for name, state in states.items()}
        self._sequences[span.occurrence].states[span.stop] = held

    def states_before(self, span: Span) -> dict[Any, Tensor]:
        """The states that a segment begins with: none at the beginning of a sequence."""
        held = self._sequences[span.occurrence].states[span.start] if span.is_split and span.start else {}
        return {name: fetch() for name, fetch in held.items()}

    def give_state_gradients(self, span: Span, gradients: dict[Any, Tensor]) -> None:
        """Keep the gradients of the states that a part began with, for the part before."""
        self._sequences[span.occurrence].state_gradients[span.start] = gradients

    def take_state_gradients(self, span: Span) -> dict[Any, Tensor]:
        """The gradients of the states that a part left, from the part after; none of the last part."""
        return self._sequences[span.occurrence].state_gradients.pop(span.stop, {})


def _give_back(sequence: _Sequence, start: int, stop: int) -> None:
    """Give back the pages that begin in the tokens [start, stop)."""
    for pages in sequence.layers.values():
        for page in pages:
            if start <= page.start < stop:
                sequence.memory.give_back(page)
        pages[:] = [page for page in pages if not start <= page.start < stop]


def _out_of_order(span: Span, what: str, why: str) -> DataError:
    return DataError(
        f"the {what} of tokens {span.start} to {span.stop} of sequence {span.sequence_id} is out of order: {why}",
        where="schedule.parquet",
        hint="`chunkplan validate` names what is wrong with the plan; build it again",
    )


@dataclass
class _SharedPage(Page):
    """A page of the whole sequence; `own` is the page of what this process keeps of it, whose tensors it has."""

    own: Page | None = None


class GatheredMemory(PageMemory):
    """Pages that several processes share, of the sequence that `part` is of; `inner` holds this process's own tokens.

    A block is gathered from all processes; in a backward its gradients go back to those whose tokens they are of, and
    are summed there. One exchange carries all tensors of a page, which have one dtype. All processes ask for the same
    blocks in the same order, also one of whose queries none sees any of it.
    """

    def __init__(self, inner: PageMemory, part: SharedPart, exchanges: Exchanges) -> None:
        self._inner = inner
        self._part = part
        self._exchanges = exchanges
        self._own = part.holdings[part.place]

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        """Implements `pages.PageMemory.new_page`."""
        first = self._own.before(start)
        own = self._inner.new_page(first, self._own.before(start + capacity) - first, tensors)
        return _SharedPage(start, capacity, own.tensors, own=own)

    def write(self, page: Any, start: int, tensors: tuple[Tensor, ...]) -> None:
        """Implements `pages.PageMemory.write`: of this process's tokens from `start` on."""
        self._inner.write(page.own, self._own.before(start), tensors)

    def give_back(self, page: Any) -> None:
        """Implements `pages.PageMemory.give_back`."""
        self._inner.give_back(page.own)

    def ensure_gradients(self, page: Any) -> None:
        """Implements `pages.PageMemory.ensure_gradients`."""
        self._inner.ensure_gradients(page.own)

    def fetch(self, page_slice: PageSlice, request: KVRequest) -> Iterator[KVBlock | None]:
        """Implements `pages.PageMemory.fetch`."""
        page, start, stop, own_start = page_slice
        source = self._inner.fetch(PageSlice(page.own, *map(self._own.before, (start, stop, own_start))), request)
        next(source)
        # Gradients of a block from host memory leave no room for another one that is gathered.
        is_ahead = self._inner.on_device or not request.with_gradients
        if not is_ahead:
            yield None
        own = next(source)
        assert own is not None
        most, pieces = self._pieces(start, stop)
        pending = self._launch(own.tensors, most)
        if is_ahead:
            yield None
        with self._exchanges.waiting(self._words("fetching", page_slice, "from"), self._part.pages):
            gathered = pending.wait()  # [processes x most, width]
        in_order = torch.cat([gathered[row : row + last - first] for first, last, row in pieces])  # [num_tokens, width]
        del pending, gathered
        gradients = torch.zeros_like(in_order, dtype=wide(in_order.dtype)) if request.with_gradients else None
        views = () if gradients is None else _views(gradients, own.tensors)
        yield KVBlock(start, stop, _views(in_order, own.tensors), views)
        if gradients is not None:
            sent = gradients.new_zeros(len(self._part.pages) * most, gradients.shape[1])
            for first, last, row in pieces:
                sent[row : row + last - first] = gradients[first - start : last - start]
            with self._exchanges.waiting(self._words("adding up gradients of", page_slice, "with"), self._part.pages):
                summed = self._exchanges.reduce(sent, self._part.pages)[: own.stop - own.start]  # [own tokens, width]
            for home, added in zip(own.gradients, _views(summed, own.tensors), strict=True):
                home.add_(added)
        next(source, None)

    def _pieces(self, start: int, stop: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Number of rows that each process sends of tokens [start, stop), and the first row of each run of tokens."""
        holdings = self._part.holdings
        most = max(holding.before(stop) - holding.before(start) for holding in holdings)
        pieces = []
        for place, holding in enumerate(holdings):
            runs = holding.within(start, stop)
            pieces += [(*run, place * most + holding.before(run[0]) - holding.before(start)) for run in runs]
        return most, sorted(pieces)

    def _launch(self, tensors: Sequence[Tensor], most: int) -> Pending:
        """Start to gather `most` rows of all processes, of this one what it has of a block."""
        rows = torch.cat([tensor[0].transpose(0, 1).flatten(1) for tensor in tensors], 1)  # [own tokens, width]
        if missing := most - len(rows):
            rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
        return self._exchanges.gather(rows, self._part.pages)

    def _words(self, what: str, page_slice: PageSlice, whom: str) -> str:
        sequence = self._part.span.sequence_id
        return f"{what} the page of tokens {page_slice.start} to {page_slice.stop} of sequence {sequence} {whom}"


def _views(rows: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same rows as [1, heads, num_tokens, dim] each, of the heads and dims of `like`."""
    columns = torch.split(rows, [tensor.shape[1] * tensor.shape[3] for tensor in like], 1)
    return tuple(
        column.view(1, len(rows), tensor.shape[1], tensor.shape[3]).transpose(1, 2)
        for column, tensor in zip(columns, like, strict=True)
    )
