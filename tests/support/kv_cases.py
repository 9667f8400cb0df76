"""What processes do in tests of pages: keep tensors of any widths of a sequence, read them, and add to gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chunkplan_runtime.attention.context import ChunkContext, CurrentChunk
from chunkplan_runtime.attention.interface import chunk_attention
from chunkplan_runtime.attention.kernels import Kernels
from chunkplan_runtime.kv.host_memory import HostMemory
from chunkplan_runtime.kv.pages import KVRequest, PageMemory
from chunkplan_runtime.kv.store import KVStore
from chunkplan_runtime.layout import Exchanges, OwnedTokens, RankLayout, Run, SharedPart, Span


def split_by_pages(parts: Sequence[Run], rank: int, size: int) -> list[SharedPart]:
    """Parts of a sequence that `size` processes share by pages: of each part as many slices, one after another."""
    cuts = [[start + (stop - start) * place // size for place in range(size + 1)] for start, stop in parts]
    holdings = tuple(OwnedTokens(tuple((cut[place], cut[place + 1]) for cut in cuts)) for place in range(size))
    return [
        SharedPart(
            Span(7, start, stop, parts[-1][1], 0), (rank,), (holdings[rank].runs,), tuple(range(size)), holdings, rank
        )
        for start, stop in parts
    ]


def split_by_heads(parts: Sequence[Run], rank: int, size: int) -> list[SharedPart]:
    """The same where they share heads."""
    whole = (OwnedTokens(((0, parts[-1][1]),)),)
    slices = [
        tuple(((start + (stop - start) * i // size, start + (stop - start) * (i + 1) // size),) for i in range(size))
        for start, stop in parts
    ]
    return [
        SharedPart(Span(7, start, stop, parts[-1][1], 0), tuple(range(size)), each, (rank,), whole, 0)
        for (start, stop), each in zip(parts, slices, strict=True)
    ]


def read_and_add(
    rank: int, *, tensors: Sequence[Tensor], parts: Sequence[Run], page_tokens: int, on_host: bool, shared: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Run `parts` forward and backward; returns what all read, and the gradients of what this process keeps.

    The i-th part adds (i + 1) times what it reads to the gradients, times the number of the process from 1 on.
    """
    memory: PageMemory = HostMemory(torch.device("cpu")) if on_host else PageMemory()
    size = dist.get_world_size() if shared else 1
    exchanges = Exchanges(RankLayout(dp=size, process=rank), {tuple(range(size)): dist.group.WORLD} if shared else {})
    store = KVStore(page_tokens, memory, exchanges)
    of_processes = split_by_pages(parts, rank, size) if shared else [None] * len(parts)
    spans = [Span(7, start, stop, parts[-1][1], 0) for start, stop in parts]
    owns = [each.runs if each else ((span.start, span.stop),) for span, each in zip(spans, of_processes, strict=True)]
    brought = [tuple(torch.cat([tensor[None, :, a:b] for a, b in own], 2) for tensor in tensors) for own in owns]

    read = [torch.full_like(tensor, torch.nan) for tensor in tensors]
    for span, each, own in zip(spans, of_processes, brought, strict=True):
        store.start_forward(span, each)
        store.write(span, 0, own)
        for block in store.blocks(span, 0, 0, KVRequest(own)):
            for tensor, found in zip(read, block.tensors, strict=True):
                tensor[:, block.start : block.stop] = found[0]
    gradients: list[list[Tensor]] = [[] for _ in tensors]
    for index in reversed(range(len(parts))):
        span, asked = spans[index], KVRequest(brought[index], with_gradients=True)
        store.start_backward(span)
        for block in store.blocks(span, 0, 0, asked):
            for gradient, found in zip(block.gradients, block.tensors, strict=True):
                gradient += (rank + 1) * (index + 1) * found
        store.finish_backward(span)
        for kept, gradient in zip(gradients, asked.gradients, strict=True):
            kept.insert(0, gradient[0])
    assert store.is_empty
    return read, [torch.cat(kept, 1) for kept in gradients]


class _Layer(nn.Module):
    layer_idx = 0
    is_causal = True


def attend_together(
    rank: int, *, tensors: Sequence[Tensor], grad_out: Tensor, parts: Sequence[Run], by_heads: bool
) -> tuple[Tensor, list[Tensor]]:
    """Attention of a sequence that all processes share, as a layer calls it: this process's output and gradients."""
    size = dist.get_world_size()
    exchanges = Exchanges(RankLayout(dp=size, process=rank), {tuple(range(size)): dist.group.WORLD})
    store = KVStore(8, exchanges=exchanges)
    split = split_by_heads if by_heads else split_by_pages
    done: list[tuple[SharedPart, Tensor, tuple[Run, ...]]] = []
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]

    def own(tensor: Tensor, runs: tuple[Run, ...]) -> Tensor:
        return torch.cat([tensor[:, start:stop] for start, stop in runs], 1)[None]

    for part in split(parts, rank, size):
        runs: Any = part.slices[rank] if by_heads else part.runs
        store.start_forward(part.span, part)
        context = ChunkContext((), store, Kernels("reference"), shared=part)
        given = [own(leaf, runs) for leaf in leaves]
        layer = _Layer()
        layer.chunkplan = CurrentChunk(context)
        out, _ = chunk_attention(layer, *given, None, scaling=0.3)
        done.append((part, out[0].transpose(0, 1), runs))
    for part, out, runs in reversed(done):
        store.start_backward(part.span)
        out.backward(own(grad_out, runs)[0])
        store.finish_backward(part.span)
    places = torch.cat([torch.arange(start, stop) for *_, runs in done for start, stop in runs])
    found = torch.zeros_like(grad_out)
    found[:, places] = torch.cat([out.detach() for _, out, _ in done], 1)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return found, gradients
