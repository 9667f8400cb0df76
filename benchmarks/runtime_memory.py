"""What a step needs beside the KV of split sequences and its gradients: the same however long a sequence is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from allocations import Allocations
from runtime_batch import make_batch, qwen2, zero_gradients

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import CausalLM, new_model

Row = dict[str, Any]

#: Chunks of the sequence; the one that others are compared with first.
_RATIOS = {"cpu": (4, 1, 2, 8, 16, 32), "cuda": (4, 1, 2, 8, 16, 32, 64, 128)}
_CHUNK_SIZE = {"cpu": 256, "cuda": 8192}


def measure_memory(device: torch.device, verbose: bool = False) -> Iterator[Row]:
    """Measure a sequence of 1 to 32 (on a GPU 128) chunks; peaks are what comes to the weights and their gradients."""
    chunk_size, ratios = _CHUNK_SIZE[device.type], _RATIOS[device.type]
    if device.type == "cuda":
        config, dtype = qwen2(1024, 4, 32768, chunk_size * max(ratios)), torch.bfloat16
    else:
        config, dtype = qwen2(256, 2, 512, chunk_size * max(ratios), num_key_value_heads=1), torch.float32
    model = new_model(config, dtype, 0, device=device)
    zero_gradients(model)
    for k in (1, 2):
        for kv_offload in (False, True):
            of_first = 0.0
            for length in ratios:
                row = _measure(model, length * chunk_size, chunk_size, k, kv_offload, verbose)
                of_first = of_first or row["rest MB"]
                over = row["rest MB"] / of_first
                yield (
                    {"K": k, "KV": "host" if kv_offload else "device", "L / C": length}
                    | {name: round(value, 2) for name, value in row.items()}
                    | {"rest over that at 4": round(over, 4), "flat": "" if length < 4 else _yes(abs(over - 1) <= 0.02)}
                )


def _measure(
    model: CausalLM, length: int, chunk_size: int, k: int, kv_offload: bool, verbose: bool
) -> dict[str, float]:
    batch = make_batch([length], chunk_size, k, model.vocab_size)
    executor = RankExecutor(model, kv_offload=kv_offload)
    gc.collect()
    on_gpu = model.device.type == "cuda"
    before = torch.cuda.memory_allocated(model.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)

    def page_bytes() -> int:
        layers = [pages for sequence in executor.stores[0]._sequences.values() for pages in sequence.layers.values()]
        return sum(each.nbytes for pages in layers for page in pages for each in page.tensors + page.gradients)

    with Allocations(page_bytes) as allocations:
        executor.run(batch.work.ranks[0], batch.work.step.num_target_tokens)
    if verbose:
        print(f"\nK {k}, {'host' if kv_offload else 'device'}, {length:,} tokens")
        print("\n".join(allocations.largest_at_peak(12)))
    peak, rest = allocations.peak, allocations.peak_rest
    if on_gpu:
        peak = torch.cuda.max_memory_allocated(model.device) - before
        rest = peak if kv_offload else peak - allocations.most_excluded
    elif kv_offload:
        peak = rest  # pages stand for those in host memory, which a GPU does not hold
    return {"peak MB": peak / 1e6, "KV + dKV MB": allocations.most_excluded / 1e6, "rest MB": rest / 1e6}


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"
