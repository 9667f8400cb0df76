"""Host memory of a step, taken before it begins: for pages, inputs of layers, and results of attention.

It takes long, and a GPU has nothing to do meanwhile. While links are open none may be taken. How many pages a step
needs at once is found by doing its actions on pages without memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from chunkplan.operations import BACKWARDS
from chunkplan.planfile.plan import Action
from chunkplan_runtime.attention.context import KeptResults
from chunkplan_runtime.attention.latents import page_shapes
from chunkplan_runtime.devices import wide
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork
from chunkplan_runtime.kv.host_memory import HostMemory, HostTensors, Kind
from chunkplan_runtime.kv.pages import Page
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.models.checks import attention_shape, kv_shapes, windows
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.products import ChunkKey
from chunkplan_runtime.models.recurrent import keeps_kv


def reserve_pages(
    memory: HostMemory, parts: Sequence[CausalLM], work: RankWork, page_tokens: int, *, with_gradients: bool
) -> None:
    """Take the memory of all pages of all virtual stages, `parts`, each of which has pages of its own.

    Raises DataError: the actions are not in an order that gives exact gradients.
    """
    split: dict[int, dict[int, ChunkTensors]] = {}  # chunks by how many processes share heads of them
    for chunk_id, tensors in work.tensors.items():
        split.setdefault(len(tensors.shared.heads) if tensors.shared else 1, {})[chunk_id] = tensors
    counts: Counter[Kind] = Counter()
    largest: list[tuple[Tensor, ...]] = []
    for virtual_stage, part in enumerate(parts):
        own = [each for each in work.actions if each.virtual_stage == virtual_stage and each.op != "backward_weight"]
        of_all, attends = windows(part.config), keeps_kv(part.config)
        for num_sharing, chunks in split.items():
            actions = [(action.op, chunks[action.chunk_id]) for action in own if action.chunk_id in chunks]
            layers: Counter[Any] = Counter()  # by what pages keep of them, and their windows
            for index, layer in part.own_layers.items():
                if attends[index]:
                    shapes = page_shapes(layer, kv_shapes(part.config, index), num_sharing)
                    layers.update((*each, of_all[index]) for each in shapes)
            for (shapes, by_parts, window), num_layers in layers.items():
                pages = _DryRun()
                like = tuple(torch.empty(1, heads, 0, dim, dtype=part.dtype, device="meta") for heads, dim in shapes)
                _replay_accesses(actions, KVStore(1 if by_parts else page_tokens, pages), like, window, with_gradients)
                largest += filter(None, [pages.largest])
                counts += Counter({kind: num_layers * len(unused) for kind, unused in pages.unused.items()})
    memory.reserve(counts, largest)


def _replay_accesses(
    actions: list[tuple[str, ChunkTensors]],
    store: KVStore,
    like: tuple[Tensor, ...],
    window: int | None,
    with_gradients: bool,
) -> None:
    """Replay on pages the accesses of a layer with this window, or full attention; they keep tensors `like` these.

    Without gradients pages are given back as no later part attends to them.
    """
    for op, tensors in actions:
        for span in tensors.parts:
            if op in BACKWARDS:
                store.start_backward(span)
                store.ensure_gradients(span, 0, span.first_seen(window))
                store.finish_backward(span)
            else:
                store.start_forward(span, tensors.shared)
                store.write(span, 0, like)
                if not with_gradients:
                    store.finish_forward(span)


class _DryRun(HostMemory):
    """Pages without memory; `unused` has as many in the end as there were at once. `largest`: tensors of that page."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.largest: tuple[Tensor, ...] = ()

    def new_page(self, start: int, capacity: int, tensors: tuple[Tensor, ...]) -> Page:
        page = super().new_page(start, capacity, tensors)
        if not self.largest or capacity > len(self.largest[0]):
            self.largest = page.tensors
        return page

    def write(self, page: Any, start: int, tensors: tuple[Tensor, ...]) -> None:
        pass

    def _new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


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
            self.host.reserve(_most_at_once(own, ("forward_kv",), ("recompute",)), num_bytes, parts[0].device)

    @contextmanager
    def of(self, part: CausalLM, work: RankWork, key: ChunkKey, op: str) -> Iterator[None]:
        """Within the block a chunk is run for an op: what attention gives is kept, or was, where the plan says so."""
        where = work.chunks[key[1]].kept_attention if op == "forward_kv" else ""
        kept = self.kept.pop(key, None) if op == "recompute" else None
        if kept is not None:
            kept.take()
        elif where:
            kept = self.kept[key] = KeptResults(self.host)
        num_bytes = attention_bytes(part, work.tensors[key[1]]) if where == "host" else 0
        part.current.kept = kept
        try:
            with self.host.of_chunk(num_bytes, part.device) if num_bytes else nullcontext():
                yield
        finally:
            part.current.kept = None
        assert where or kept is None or not kept.held, "a recompute attends as often as the forward before it"


def attention_bytes(part: CausalLM, tensors: ChunkTensors) -> int:
    """Bytes of out and log-sum-exp of all attentions of a chunk that this process has a part in."""
    shared = tensors.shared
    num_tokens = tensors.input_ids.numel() if shared is None else sum(stop - start for start, stop in shared.runs)
    attends = keeps_kv(part.config)
    own = range(len(attends)) if part.stages[0].layers is None else part.own_layers
    shapes = [attention_shape(part.config, index) for index in own if attends[index]]
    sizes = (heads * (dim * part.dtype.itemsize + wide(part.dtype).itemsize) for heads, dim in shapes)
    return num_tokens * sum(sizes) // (1 if shared is None else len(shared.heads))


def reserve_inputs(parts: Sequence[CausalLM], work: RankWork) -> None:
    """Take the host memory of layers' inputs, as much as the largest chunk's for all that are in flight at once."""
    if not parts[0].current.offloaded:
        return
    num_tokens = max((tensors.input_ids.numel() for tensors in work.tensors.values()), default=0)
    most = _most_at_once(work.actions, ("forward", "recompute"), BACKWARDS)
    num_bytes = max(part.offloaded_bytes(num_tokens) for part in parts)
    if num_bytes:
        parts[0].current.host_inputs.reserve(most, num_bytes, parts[0].device)


def _most_at_once(actions: Sequence[Action], begin: Sequence[str], end: Sequence[str]) -> int:
    """The largest number of chunks at once between the ops that begin with them and those that end with them."""
    return max(accumulate((action.op in begin) - (action.op in end) for action in actions), default=0)
