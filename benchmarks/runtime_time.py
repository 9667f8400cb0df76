"""What chunking costs: a step in chunks, beside the same tokens unchunked with activation checkpointing."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from runtime_batch import Batch, interleaved, make_batch, qwen2, ratio, run_whole, zero_gradients

from chunkplan.planfile.plan import Action
from chunkplan_runtime.devices import synchronize
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.models.model import CausalLM, new_model

Row = dict[str, Any]

#: By type of device: pairs of ChunkSize and how many chunks the sequence has.
_CASES = {"cpu": ((1024, 4), (1024, 8), (2048, 4)), "cuda": ((8192, 4), (8192, 8), (16384, 4), (16384, 8))}
_GOAL = {"cpu": 1.10, "cuda": 1.05}


def measure_time(device: torch.device, repeats: int) -> Iterator[Row]:
    """Measure one sequence of 4 and one of 8 chunks."""
    longest = max(chunk_size * num_chunks for chunk_size, num_chunks in _CASES[device.type])
    if device.type == "cuda":
        config, dtype = qwen2(4096, 4, 32768, longest, num_attention_heads=32, num_key_value_heads=8), torch.bfloat16
    else:
        config, dtype = qwen2(256, 2, 4096, longest), torch.float32
    model = new_model(config, dtype, 0, device=device)
    zero_gradients(model)
    for chunk_size, num_chunks in _CASES[device.type]:
        batches = {k: make_batch([num_chunks * chunk_size], chunk_size, k, config.vocab_size) for k in (1, 2)}

        ways = {f"K {k}": lambda batch=batch: run_chunks(model, batch) for k, batch in batches.items()}
        seconds = interleaved({"whole": lambda batch=batches[1]: run_whole(model, batch), **ways}, repeats, device)
        for k, batch in batches.items():
            over, spread = ratio(seconds[f"K {k}"], seconds["whole"])
            yield {
                "C": chunk_size,
                "L / C": num_chunks,
                "K": k,
                "whole s": round(statistics.median(seconds["whole"]), 2),
                "chunked s": round(statistics.median(seconds[f"K {k}"]), 2),
                "chunked / whole": over,
                "pairs": spread,
                f"at most {_GOAL[device.type]}": "yes" if over <= _GOAL[device.type] else "NO",
                "of which": _shares(model, batch),
            }


def run_chunks(model: CausalLM, batch: Batch) -> float:
    """Run the step in chunks, without activation checkpointing: their size bounds what they hold."""
    return RankExecutor(model).run(batch.work.ranks[0], batch.work.step.num_target_tokens).loss


def _shares(model: CausalLM, batch: Batch) -> str:
    """Measure how the time of a step divides among the kinds of actions."""
    seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(action: Action) -> Iterator[None]:
        synchronize(model.device)
        started = time.perf_counter()
        yield
        synchronize(model.device)
        seconds[action.op] += time.perf_counter() - started

    RankExecutor(model).run(batch.work.ranks[0], batch.work.step.num_target_tokens, timed)
    total = sum(seconds.values())
    return ", ".join(f"{op} {value / total:.0%}" for op, value in seconds.items())
