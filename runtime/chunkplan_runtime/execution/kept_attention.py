"""Chunks that keep what attention gave in their forward for keys and values alone, until their recompute takes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from chunkplan_runtime.attention.kept_results import KeptResults
from chunkplan_runtime.dtypes import wide
from chunkplan_runtime.execution.reserve import most_at_once
from chunkplan_runtime.feed.stream import ChunkTensors, RankWork
from chunkplan_runtime.kv.host_tensors import HostTensors
from chunkplan_runtime.models.checks import attention_shape
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.products import Place
from chunkplan_runtime.models.recurrent import keeps_kv


class KeptAttention:
    """By chunk and virtual stage, what is kept now; `host` has what is kept there, in memory of the step before."""

    def __init__(self) -> None:
        self.host = HostTensors()
        self.kept: dict[Place, KeptResults] = {}

    def begin(self, parts: Sequence[CausalLM], work: RankWork) -> None:
        """Begin a step with nothing kept; take the host memory of as many chunks as are kept there at once.

        All get as much as the largest one takes where there are most layers.
        """
        self.kept = {}
        on_host = {chunk_id for chunk_id, chunk in work.chunks.items() if chunk.kept_attention == "host"}
        if on_host:
            own = [action for action in work.actions if action.chunk_id in on_host]
            num_bytes = max(attention_bytes(part, work.tensors[chunk_id]) for part in parts for chunk_id in on_host)
            self.host.reserve(most_at_once(own, ("forward_kv",), ("recompute",)), num_bytes, parts[0].device)

    @contextmanager
    def of(self, part: CausalLM, work: RankWork, place: Place, op: str) -> Iterator[None]:
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
