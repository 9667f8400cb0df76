"""A step of long-tail lengths in chunks, beside the baselines: one sequence a row, and packed to the longest."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from allocations import Allocations
from runtime_batch import as_baseline, interleaved, make_batch, qwen2, run_rows, run_whole, zero_gradients
from runtime_time import run_chunks

from chunkplan_runtime.models.model import new_model

Row = dict[str, Any]

#: By type of device: sequences, the longest, ChunkSize, K.
_STEP = {"cpu": (32, 4096, 1024, 1), "cuda": (256, 65536, 8192, 1)}


_REPEATS = 3


def measure_long_tail(device: torch.device, lengths: npt.NDArray[np.integer]) -> tuple[str, list[Row]]:
    """What was run, and a row for every way.

    Raises:
        SystemExit: the ways do not come to the same loss.
    """
    num_sequences, cap, chunk_size, k = _STEP[device.type]
    # At even quantiles, the longest among them: a step of its own would have one now and then only.
    step = np.minimum(np.quantile(lengths, np.linspace(0, 1, num_sequences), method="nearest"), cap).astype(int)
    if device.type == "cuda":
        config, dtype = qwen2(2048, 16, 32768, cap), torch.bfloat16
    else:
        config, dtype = qwen2(256, 2, 4096, cap), torch.float32
    model = new_model(config, dtype, 0, device=device)
    zero_gradients(model)
    batch = make_batch(step.tolist(), chunk_size, k, config.vocab_size)
    num_targets = batch.work.step.num_target_tokens

    def packed() -> float:
        with as_baseline(model):
            return run_rows(model, batch.packed, num_targets)

    def chunked_checkpointing() -> float:
        model.set_checkpointing("full")
        loss = run_chunks(model, batch)
        model.set_checkpointing("none")
        return loss

    ways: dict[str, Callable[[], float]] = {
        "unpacked, checkpointing": lambda: run_whole(model, batch),
        "packed to the longest, checkpointing": packed,
        "chunks": lambda: run_chunks(model, batch),
        "chunks, checkpointing": chunked_checkpointing,
    }
    losses, peaks = {}, {}
    for name, way in ways.items():
        losses[name], peaks[name] = _with_peak(way, device)
        print(f"{name}: loss {losses[name]:.6f}, peak {peaks[name] / 1e6:.0f} MB", file=sys.stderr, flush=True)
    reference = losses["unpacked, checkpointing"]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    if any(abs(loss / reference - 1) > tolerance for loss in losses.values()):
        raise SystemExit(f"the losses do not agree, the comparison is void: {losses}")
    seconds = interleaved(ways, _REPEATS, device)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    num_rows = dict.fromkeys(ways, len(batch.work.ranks[0].chunks))
    num_rows |= {"unpacked, checkpointing": len(batch.rows), "packed to the longest, checkpointing": len(batch.packed)}
    baselines = "unpacked, checkpointing", "packed to the longest, checkpointing"
    rows = [
        {
            "": name,
            "forwards": num_rows[name],
            "tokens/s": round(batch.num_tokens / medians[name]),
            "peak MB": round(peaks[name] / 1e6),
            "loss": f"{losses[name]:.6f}",
            "speed over unpacked, packed": " ".join(f"{medians[other] / medians[name]:.2f}" for other in baselines),
            "peak over unpacked, packed": " ".join(f"{peaks[name] / peaks[other]:.2f}" for other in baselines),
        }
        for name in ways
    ]
    what = (
        f"{num_sequences} sequences, {batch.num_tokens:,} tokens, the longest {cap:,}, "
        f"{np.mean(step < 1024):.0%} below 1K; ChunkSize {chunk_size:,}, K {k}"
    )
    return what, rows


def _with_peak(way: Callable[[], float], device: torch.device) -> tuple[float, int]:
    """Measure the loss, and the most bytes that a way adds to the weights and their gradients."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = way()
        return loss, torch.cuda.max_memory_allocated(device) - before
    with Allocations() as allocations:
        loss = way()
    return loss, allocations.peak
