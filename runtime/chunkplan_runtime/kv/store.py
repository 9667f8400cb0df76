"""What outlives a chunk: keys, values and their gradients of the split sequences in flight.

A sequence takes pages as its parts run forward and gives them back as they have done their backward; one that occurs
twice in a step is two groups and is kept twice. Writes go to the slice of the part, so that writing twice (forward,
then recompute) changes nothing. The gradient of a part's KV is the sum of what all later parts sent to it: it is
complete when, and only when, backwards run in descending order, which is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from chunkplan.errors import DataError
from chunkplan_runtime.kv.gathered import GatheredMemory
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageMemory, PageSlice
from chunkplan_runtime.sharing import Exchanges, SharedPart, Span


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


class StateStore:
    """Keys, values and their gradients by occurrence of a sequence and by layer. Only split sequences enter it.

    `page_tokens`: how many tokens a page has room for at most; a part that is longer gets a page of its own.
    `exchanges`: with the processes that share sequences.
    """

    def __init__(self, page_tokens: int, memory: PageMemory | None = None, exchanges: Exchanges | None = None) -> None:
        self._page_tokens = page_tokens
        self._memory = PageMemory() if memory is None else memory
        self.exchanges = Exchanges() if exchanges is None else exchanges
        self._sequences: dict[tuple[int, int | None], _Sequence] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is in flight."""
        return not self._sequences

    @property
    def num_tokens(self) -> int:
        """How many tokens of the sequences in flight have run forward: their KV is kept, here or where it is shared."""
        return sum(sequence.forwarded for sequence in self._sequences.values())

    def num_bytes(self) -> int:
        """Bytes of all pages that are held."""
        layers = (pages for sequence in self._sequences.values() for pages in sequence.layers.values())
        return sum(page.num_bytes for pages in layers for page in pages)

    def start_forward(self, span: Span, shared: SharedPart | None = None) -> None:
        """Say that a part is about to run forward; `shared` says how processes share it.

        Raises:
            DataError: an earlier part has not.
        """
        sequence = self._sequences.get(span.occurrence)
        if sequence is None:
            memory, page_tokens = self._memory, self._page_tokens
            if shared is not None and shared.is_paged:
                # A page is a part: then all processes have the same pages, however many tokens each has of them.
                memory, page_tokens = GatheredMemory(memory, shared, self.exchanges), 1
            elif shared is not None:
                page_tokens *= len(shared.heads)  # of as many times fewer heads
            sequence = _Sequence(span.length, memory, page_tokens, complete_from=span.length)
            self._sequences[span.occurrence] = sequence
        if span.start > sequence.forwarded:
            raise _out_of_order(span, "forward", f"tokens from {sequence.forwarded} to {span.start} had none")
        sequence.forwarded = max(sequence.forwarded, span.stop)

    def start_backward(self, span: Span) -> None:
        """Say that a part is about to run backward.

        Raises:
            DataError: a later part has not, or this one has already.
        """
        sequence = self._sequences.get(span.occurrence)
        if sequence is None or span.stop != sequence.complete_from:
            raise _out_of_order(span, "backward", "a later part has none yet, or this one had its own")
        sequence.complete_from = span.start

    def finish_backward(self, span: Span) -> None:
        """Say that a part has run backward; pages that no earlier part is in are given back."""
        self._give_back(self._sequences[span.occurrence], span.start)
        if span.start == 0:
            del self._sequences[span.occurrence]

    def drop(self, span: Span) -> None:
        """Give back all pages of a sequence, where no backward will follow."""
        self._give_back(self._sequences.pop(span.occurrence), 0)

    def _give_back(self, sequence: _Sequence, start: int) -> None:
        """Give back the pages from a token on."""
        for pages in sequence.layers.values():
            while pages and pages[-1].start >= start:
                sequence.memory.give_back(pages.pop())

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

    def blocks(self, span: Span, layer: int, start: int, asked: Asked) -> Iterator[KVBlock]:
        """The tokens [start, span.stop) that a part attends to, in blocks: the part's own first, then all before it.

        `asked` has the tensors of the part, as they were written.
        """
        sequence = self._sequences[span.occurrence]
        pages = sequence.layers[layer]
        stops = [*(page.start for page in pages[1:]), span.length]
        slices = [
            PageSlice(page, max(page.start, start), min(stop, span.stop), span.start)
            for page, stop in zip(pages, stops, strict=True)
            if page.start < span.stop and stop > start
        ]
        return sequence.memory.blocks([slices[-1], *slices[:-1]], asked)

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


def _out_of_order(span: Span, what: str, why: str) -> DataError:
    return DataError(
        f"the {what} of tokens {span.start} to {span.stop} of sequence {span.sequence_id} is out of order: {why}",
        where="schedule.parquet",
        hint="`chunkplan validate` names what is wrong with the plan; build it again",
    )
