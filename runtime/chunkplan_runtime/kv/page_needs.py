"""How many pages a step needs at once, found by doing its actions on a store whose pages hold nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chunkplan.operations import BACKWARDS
from chunkplan.planfile.plan import Action
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageSlice
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.sharing import SharedPart, Span


@dataclass
class PageNeeds:
    """The most pages there are at once, and the most of them with gradients, by how many tokens they have room for.

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
    """How many tokens the memory of a page has room for: the next power of two, so that other pages can have it after.

    torch takes page-locked memory in powers of two anyway.
    """
    return 1 << (capacity - 1).bit_length()


def page_needs(
    actions: Sequence[Action],
    parts: dict[int, list[tuple[Span, SharedPart | None]]],
    page_tokens: int,
    windows: Sequence[int | None],
    *,
    with_gradients: bool,
) -> PageNeeds:
    """What the layers with these sliding windows need for `actions`; None is full attention.

    `parts`: of split sequences, by chunk; of those that processes share, how they do.

    Without gradients a sequence is dropped after the forward of its last part.

    Raises:
        DataError: the actions are not in an order that gives exact gradients.
    """
    needs = PageNeeds()
    for window, num_layers in Counter(windows).items():
        counting = _Counting()
        store = StateStore(page_tokens, counting)
        for action in actions:
            for span, shared in parts.get(action.chunk_id, ()):
                _do(action, span, shared, store, window, with_gradients=with_gradients)
        for most, total in ((counting.most_pages, needs.pages), (counting.most_gradients, needs.gradients)):
            for tokens, count in most.items():
                total[tokens] += num_layers * count
        needs.largest = max(needs.largest, counting.largest)
    return needs


_NOTHING = (torch.empty(0),)


def _do(
    action: Action,
    span: Span,
    shared: SharedPart | None,
    store: StateStore,
    window: int | None,
    *,
    with_gradients: bool,
) -> None:
    """Do with the part of a sequence what the executor and the attention do, on a store without memory."""
    if action.op == "backward_weight":
        return  # it is done with keys and values
    if action.op not in BACKWARDS:
        store.start_forward(span, shared)
        store.write(span, 0, _NOTHING)
        if not with_gradients and span.stop == span.length:
            store.drop(span)
    else:
        store.start_backward(span)
        for _ in store.blocks(span, 0, span.first_seen(window), Asked(_NOTHING, with_gradients=True)):
            pass
        store.finish_backward(span)


class _Counting:
    """See `pages.PageMemory`: it counts pages and has no memory for them."""

    keeps_blocks = False

    def __init__(self) -> None:
        self._pages: Counter[int] = Counter()
        self._gradients: Counter[int] = Counter()
        self.most_pages: Counter[int] = Counter()
        self.most_gradients: Counter[int] = Counter()
        self.largest = 0

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        self._pages[room(capacity)] += 1
        self.most_pages |= self._pages  # the larger of each two counts
        self.largest = max(self.largest, capacity)
        return Page(start, capacity, tensors)

    def write(self, page: Page, start: int, tensors: tuple[Tensor, ...]) -> None:
        pass

    def blocks(self, slices: Sequence[PageSlice], asked: Asked) -> Iterator[KVBlock]:
        for page_slice in slices:
            if asked.with_gradients and not page_slice.page.gradients:
                page_slice.page.gradients = _NOTHING
                self._gradients[room(page_slice.page.capacity)] += 1
        self.most_gradients |= self._gradients
        return iter(())

    def give_back(self, page: Page) -> None:
        self._pages[room(page.capacity)] -= 1
        self._gradients[room(page.capacity)] -= bool(page.gradients)

    def hold(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor
