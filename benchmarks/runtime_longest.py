"""The longest sequence that a device trains a model of 7B on: adapters, KV in host memory, one chunk in flight."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from allocations import Allocations
from runtime_batch import Batch, make_batch, qwen2, run_whole

from chunkplan_runtime.devices import synchronize
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import CausalLM, new_model
from chunkplan_runtime.models.trained import add_lora

Row = dict[str, Any]

_RANK = 16
_LONGEST = 1 << 20


def measure_longest(device: torch.device, budget: float, toy: bool) -> Iterator[Row]:
    """32K tokens, 64K, ... 1M, each way until it runs out of memory or the next length would take it over `budget`.

    Every length runs once and nothing is warmed up before, so that the first ones look slower than they are.
    """
    if toy:
        chunk_size, length, longest = 256, 512, 2048
        config, dtype = qwen2(128, 2, 1024, longest), torch.float32
    else:
        chunk_size, length, longest = 8192, 32768, _LONGEST
        config = qwen2(
            3584,
            28,
            152064,
            longest,
            intermediate_size=18944,
            num_attention_heads=28,
            num_key_value_heads=4,
            rope_theta=1e6,
        )
        dtype = torch.bfloat16
    lengths = [length << power for power in range((longest // length).bit_length())]
    model = add_lora(new_model(config, dtype, 0, device=device), rank=_RANK, alpha=2 * _RANK)
    weights = sum(parameter.nbytes for parameter in model.model.parameters())

    def chunked(batch: Batch) -> None:
        model.set_checkpointing("full")
        RankExecutor(model, kv_offload=True).run(batch.work.ranks[0], batch.work.step.num_target_tokens)

    for name, way in {"chunks": chunked, "whole, checkpointing": lambda batch: run_whole(model, batch)}.items():
        left, before = budget, 0.0
        for length in lengths:
            if before * 4 > left:  # attention grows with the square
                yield {"": name, "tokens": length, "peak GB": f"out of time ({budget:.0f} s)", "tokens/s": ""}
                break
            batch = make_batch([length], chunk_size, 1, config.vocab_size)
            row, before = _run(model, way, batch, weights)
            left -= before
            yield {"": name, "tokens": length} | row
            if not row["tokens/s"]:
                break


def _run(model: CausalLM, way: Callable[[Batch], None], batch: Batch, weights: int) -> tuple[Row, float]:
    """Measure peak memory, weights included, and speed of a step; no speed if it ran out of memory."""
    model.model.zero_grad(set_to_none=True)
    gc.collect()
    device = model.device
    allocations = Allocations()
    started = time.perf_counter()
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            way(batch)
            synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
        else:
            with allocations:
                way(batch)
            peak = weights + allocations.peak
    except RuntimeError as error:  # of the GPU, or of page-locked host memory
        if "out of memory" not in str(error):
            raise
        return {"peak GB": f"out of memory: {str(error).splitlines()[0][:60]}", "tokens/s": ""}, 0.0
    seconds = time.perf_counter() - started
    return {"peak GB": round(peak / 1e9, 3), "tokens/s": round(batch.num_tokens / seconds)}, seconds
