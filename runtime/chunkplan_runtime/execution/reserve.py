"""Host memory of a step, taken before it begins: for pages, inputs of layers, and results of attention.

It takes long, and a GPU has nothing to do meanwhile. While links are open none may be taken. How many pages a step
needs at once is found by doing its actions on a store whose pages hold nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate

import torch
from torch import Tensor

from chunkplan.operations import BACKWARDS
from chunkplan.planfile.plan import Action
from chunkplan_runtime.attention.context import KeptResults
from chunkplan_runtime.attention.kept import Shapes, page_shapes
from chunkplan_runtime.devices import wide
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork
from chunkplan_runtime.kv.host_memory import HostMemory, HostTensors, PageNeeds, room
from chunkplan_runtime.kv.pages import Asked, KVBlock, Page, PageMemory, PageSlice
from chunkplan_runtime.kv.store import StateStore
from chunkplan_runtime.models.checks import attention_shape, kv_shapes, windows
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.products import ChunkKey
from chunkplan_runtime.models.recurrent import keeps_kv
from chunkplan_runtime.sharing import SharedPart, Span

_NOTHING = (torch.empty(0),)


def page_needs(
    actions: Sequence[Action],
    parts: dict[int, list[tuple[Span, SharedPart | None]]],
    page_tokens: int,
    windows: Sequence[int | None],
    *,
    with_gradients: bool,
) -> PageNeeds:
    """What the layers with these sliding windows need for `actions`; None is full attention.

    `parts`: of split sequences, by chunk; of those that processes share, how they do. Without gradients a sequence is
    dropped after the forward of its last part.

    Raises:
        DataError: the actions are not in an order that gives exact gradients.
    """
    needs = PageNeeds()
    for window, num_layers in Counter(windows).items():
        counting = _Counting()
        store = StateStore(page_tokens, counting)
        for action in actions:
            for span, shared in parts.get(action.chunk_id, ()) if action.op != "backward_weight" else ():
                if action.op in BACKWARDS:
                    store.start_backward(span)
                    for _ in store.blocks(span, 0, span.first_seen(window), Asked(_NOTHING, with_gradients=True)):
                        pass
                    store.finish_backward(span)
                else:
                    store.start_forward(span, shared)
                    store.write(span, 0, _NOTHING)
                    if not with_gradients and span.stop == span.length:
                        store.drop(span)
        for most, total in ((counting.most_pages, needs.pages), (counting.most_gradients, needs.gradients)):
            for tokens, count in most.items():
                total[tokens] += num_layers * count
        needs.largest = max(needs.largest, counting.largest)
    return needs


class _Counting(PageMemory):
    """Counts pages and has no memory for them."""

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


class KeptAttention:
    """Chunks that keep what attention gave in their forward for keys and values alone, until their recompute takes it.

    By chunk and virtual stage, what is kept now; `host` has what is kept there, in memory of the step before.
    """

    def __init__(self) -> None:
        self.host = HostTensors()
        self.kept: dict[ChunkKey, KeptResults] = {}

    def begin(self, parts: Sequence[CausalLM], work: RankWork) -> None:
        """Begin a step with nothing kept; take the largest one's host memory for all that are kept there at once."""
        self.kept = {}
        on_host = {chunk_id for chunk_id, chunk in work.chunks.items() if chunk.kept_attention == "host"}
        if on_host:
            own = [action for action in work.actions if action.chunk_id in on_host]
            num_bytes = max(attention_bytes(part, work.tensors[chunk_id]) for part in parts for chunk_id in on_host)
            self.host.reserve(most_at_once(own, ("forward_kv",), ("recompute",)), num_bytes, parts[0].device)

    @contextmanager
    def of(self, part: CausalLM, work: RankWork, place: ChunkKey, op: str) -> Iterator[None]:
        """Within the block a chunk is run for an op: what attention gives is kept, or was, where the plan says so."""
        where = work.chunks[place[1]].kept_attention if op == "forward_kv" else ""
        kept = self.kept.pop(place, None) if op == "recompute" else None
        if kept is not None:
            kept.take()
        elif where:
            kept = self.kept[place] = KeptResults(self.host)
        num_bytes = attention_bytes(part, work.tensors[place[1]]) if where == "host" else 0
        part.current.kept = kept
        try:
            with self.host.of_chunk(num_bytes, part.device) if num_bytes else nullcontext():
                yield
        finally:
            part.current.kept = None
        assert where or kept is None or not kept.num_held, "a recompute attends as often as the forward before it"


def attention_bytes(part: CausalLM, tensors: ChunkTensors) -> int:
    """Bytes of out and log-sum-exp of all attentions of a chunk that this process has a part in."""
    shared = tensors.shared
    num_tokens = tensors.input_ids.numel() if shared is None else sum(stop - start for start, stop in shared.runs)
    attends = keeps_kv(part.config)
    own = range(len(attends)) if part.cuts[0].layers is None else part.own_layers
    shapes = [attention_shape(part.config, index) for index in own if attends[index]]
    sizes = (heads * (dim * part.dtype.itemsize + wide(part.dtype).itemsize) for heads, dim in shapes)
    return num_tokens * sum(sizes) // (1 if shared is None else len(shared.heads))


def reserve_pages(
    memory: HostMemory, parts: Sequence[CausalLM], work: RankWork, page_tokens: int, *, with_gradients: bool
) -> None:
    """Take the memory of all pages of all virtual stages, `parts`, each of which has pages of its own."""
    split: dict[int, dict[int, list[tuple[Span, SharedPart | None]]]] = {}  # by how many processes share heads
    for chunk_id, tensors in work.tensors.items():
        num_sharing = 1 if tensors.shared is None else len(tensors.shared.heads)
        split.setdefault(num_sharing, {})[chunk_id] = [(span, tensors.shared) for span in tensors.parts]
    needs: defaultdict[Shapes, PageNeeds] = defaultdict(PageNeeds)
    for virtual_stage, part in enumerate(parts):
        actions = [action for action in work.actions if action.virtual_stage == virtual_stage]
        of_all, attends = windows(part.config), keeps_kv(part.config)
        for num_sharing, by_chunk in split.items():
            own: dict[tuple[Shapes, bool], list[int | None]] = {}  # windows, by what pages keep of a layer
            for index, layer in part.own_layers.items():
                if attends[index]:
                    for each in page_shapes(layer, kv_shapes(part.config, index), num_sharing):
                        own.setdefault(each, []).append(of_all[index])
            for (shapes, by_parts), its_windows in own.items():
                tokens = 1 if by_parts else page_tokens
                needs[shapes].add(page_needs(actions, by_chunk, tokens, its_windows, with_gradients=with_gradients))
    for shapes, found in needs.items():
        memory.reserve(found, shapes, parts[0].dtype)


def reserve_inputs(parts: Sequence[CausalLM], work: RankWork) -> None:
    """Take the host memory of layers' inputs, as much as the largest chunk's for all that are in flight at once."""
    if not parts[0].current.offloaded:
        return
    num_tokens = max((tensors.input_ids.numel() for tensors in work.tensors.values()), default=0)
    most = most_at_once(work.actions, ("forward", "recompute"), BACKWARDS)
    num_bytes = max(part.offloaded_bytes(num_tokens) for part in parts)
    if num_bytes:
        parts[0].current.host_inputs.reserve(most, num_bytes, parts[0].device)


def most_at_once(actions: Sequence[Action], begin: Sequence[str], end: Sequence[str]) -> int:
    """How many chunks there are at most between ops that begin with them and ops that end with them."""
    return max(accumulate((action.op in begin) - (action.op in end) for action in actions), default=0)
