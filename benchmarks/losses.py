"""Measures what a step of a loss by name takes beside one of cross-entropy of the same tokens.

    python benchmarks/losses.py --window 4096  # memory by length, then a step of a pair of 128K tokens each: 3 minutes
    python benchmarks/losses.py --toy          # the same of short ones

Memory is that of live tensors (see benchmarks/allocations.py), without weights and their gradients, and once more
without keys, values and their gradients of split sequences.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from allocations import Allocations
from machine import machine
from planning import print_table
from runtime_batch import make_batch, qwen2, zero_gradients

from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.execution.losses import find_loss
from chunkplan_runtime.feed.samples import StepSamples
from chunkplan_runtime.feed.stream import StepWork
from chunkplan_runtime.models.model import CausalLM, new_model
from chunkplan_runtime.training.train_step import StepExecutor

Row = dict[str, Any]

_PAIR = StepSamples(
    "preference", np.array([0, 1]), {"group": np.array([0, 0]), "label": np.array([True, False])}, np.array([0, 1])
)


class _Reference:
    """Stands for the scores of a reference model."""

    def at_tokens(self, sequence_ids: Any, positions: Any) -> Any:
        return np.full(len(positions), -6.0, np.float32)


def measure_memory(chunk_size: int, most: int) -> Iterator[Row]:
    """Peaks of a pair of 1, 2, 4 ... `most` chunks each, with SFT and with DPO."""
    model = new_model(qwen2(256, 2, 512, chunk_size * most, num_key_value_heads=1), torch.float32, 0)
    zero_gradients(model)
    for power in range(most.bit_length()):
        length = chunk_size << power
        work = _pair(length, chunk_size, model)
        peaks = {loss: _peaks(model, work, loss) for loss in ("sft", "dpo")}
        rests = [peaks[loss][1] for loss in ("sft", "dpo")]
        numbers = (rests[1] - rests[0]) / (2 * (length - 1))
        yield {
            "chunks of each answer": 1 << power,
            **{f"{loss}, MB": round(peaks[loss][0] / 1e6, 2) for loss in peaks},
            **{f"{loss} without KV, MB": round(peaks[loss][1] / 1e6, 2) for loss in peaks},
            "more, bytes a target token": round(numbers, 1),
        }


def measure_step(length: int, chunk_size: int, window: int | None) -> Iterator[Row]:
    """Processor seconds and peak of a step of a pair of `length` tokens each; a token sees `window`, None: all."""
    windows = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}
    config = qwen2(64, 1, 512, length, num_key_value_heads=1, **windows)
    model = new_model(config, torch.float32, 0)
    zero_gradients(model)
    work = _pair(length, chunk_size, model)
    of_sft = 0.0
    for loss in ("sft", "dpo", "simpo"):
        gc.collect()
        started = time.process_time()
        with Allocations() as allocations:
            _run(model, work, loss)
        seconds = time.process_time() - started
        of_sft = of_sft or seconds
        peak = round(allocations.peak / 1e6, 1)
        yield {
            "loss": loss,
            "tokens": 2 * length,
            "processor s": round(seconds, 1),
            "over SFT": f"{seconds / of_sft:.2f}",
            "MB": peak,
        }


def _pair(length: int, chunk_size: int, model: CausalLM) -> StepWork:
    return replace(make_batch([length, length], chunk_size, 1, model.vocab_size).work, samples=_PAIR)


def _run(model: CausalLM, work: StepWork, loss: str) -> RankExecutor:
    executor = RankExecutor(model)
    reference: Any = _Reference()
    StepExecutor(executor).run_by(work, find_loss(loss), reference=reference)
    return executor


def _peaks(model: CausalLM, work: StepWork, loss: str) -> tuple[int, int]:
    """The most bytes alive at once, in all and without keys and values of split sequences."""
    gc.collect()
    executor = RankExecutor(model)
    reference: Any = _Reference()

    def page_bytes() -> int:
        layers = [pages for sequence in executor.stores[0]._sequences.values() for pages in sequence.layers.values()]
        return sum(each.nbytes for pages in layers for page in pages for each in page.tensors + page.gradients)

    with Allocations(page_bytes) as allocations:
        StepExecutor(executor).run_by(work, find_loss(loss), reference=reference)
    return allocations.peak, allocations.peak_rest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--window", type=int, help="tokens that a token of the long pair sees")
    options = parser.parse_args()
    toy = options.toy
    print(machine())
    print_table(
        "Peak memory of a step of a pair, ChunkSize 256, K 1, two layers", measure_memory(256, 4 if toy else 16)
    )
    sizes = (512, 128) if toy else (1 << 17, 8192)
    print_table("A step of one pair, one layer of width 64, K 1", measure_step(*sizes, options.window))
