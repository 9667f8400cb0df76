"""Measures the stream of a plan: tokens a second of one core, from the page cache and from disk. Linux only.

    python benchmarks/streaming.py                     # about 3 minutes and 1 GB of disk
    python benchmarks/streaming.py --sequences 20000   # less of both

What is measured is the whole way from the files to the tensors of every chunk, everything opened anew, without reading
ahead. "warm" is the processor time of all threads in the median of five passes with all files in the page cache; "cold"
is the time on the clock of one pass after their pages were dropped. A step's share of both stands beside the time that
the plan predicts for it on an H100 (Qwen2.5-7B, one data-parallel rank).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from lengths import lengths
from machine import machine
from planning import print_table

import chunkplan
from chunkplan.config.plan import PlanConfig
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan_runtime.feed.stream import PlanStream, open_plan

VOCAB_SIZE = 150_000
WARM_PASSES = 5

Lengths = Callable[[int], np.ndarray]

#: Name of a dataset -> lengths that have as many tokens as that many sequences of the long tail, about.
DATASETS: dict[str, Lengths] = {
    "long-tail": lambda num_sequences: lengths("long-tail", num_sequences, cap=None),
    "all of 300": lambda num_sequences: np.full(num_sequences * 3 // 2, 300),
    "all of 32,000": lambda num_sequences: np.full(num_sequences // 70, 32_000),
}


def write_analysis(folder: Path, values: np.ndarray) -> None:
    """Write random tokens, of which the last two thirds of each sequence are targets."""
    folder.mkdir()
    random = np.random.default_rng(0)
    writer = AnalysisWriter(folder)
    for record, length in enumerate(values.tolist()):
        writer.add(0, record, random.integers(0, VOCAB_SIZE, length, np.int32), np.arange(length) > length // 3)
    writer.finish(exact=True, sources=[])


def measure(name: str, chunk_size: int, folder: Path) -> dict[str, Any]:
    """Measure passes over the plan of one dataset."""
    plan = chunkplan.build(folder / "analysis", folder / "plan", PlanConfig(chunk_size=chunk_size, k=4))
    totals, predicted_us = plan.manifest["totals"], plan.manifest["predictions"]["predicted_us"]
    for path in folder.rglob("*.*"):
        drop_pages(path)
    cold = one_pass(folder)
    warm = statistics.median(one_pass(folder).processor_seconds for _ in range(WARM_PASSES))
    num_tokens, num_steps = totals["num_tokens"], totals["num_steps"]
    return {
        "lengths": name,
        "chunk size": chunk_size,
        "tokens": num_tokens,
        "warm M tokens/s": round(num_tokens / warm / 1e6, 1),
        "cold M tokens/s": round(num_tokens / cold.seconds / 1e6, 1),
        "read cold MB": round(cold.bytes_read / 1e6),
        "warm ms a step": round(warm / num_steps * 1e3, 2),
        "cold ms a step": round(cold.seconds / num_steps * 1e3, 2),
        "H100 ms a step": round(predicted_us / num_steps / 1e3),
    }


@dataclass(frozen=True)
class Pass:
    """Describe what one pass over all steps took, and what of it came from disk."""

    seconds: float
    processor_seconds: float
    bytes_read: int


def one_pass(folder: Path) -> Pass:
    """Open everything anew and go over all steps."""
    gc.collect()
    blocks = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    started, processor = time.perf_counter(), time.process_time()
    plan, analysis = open_plan(folder / "plan")
    stream = PlanStream(plan, analysis, vocab_size=VOCAB_SIZE, max_positions=1 << 20, prefetch=0)
    num_tokens = sum(work.step.num_tokens for work in stream)
    seconds, processor_seconds = time.perf_counter() - started, time.process_time() - processor
    assert num_tokens == plan.manifest["totals"]["num_tokens"]
    return Pass(seconds, processor_seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - blocks) * 512)


def drop_pages(path: Path) -> None:
    """Let the next read of a file come from disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name, make in DATASETS.items():
            folder = Path(tempfile.mkdtemp(dir=root))
            write_analysis(folder / "analysis", make(options.sequences))
            for chunk_size in (8192, 2048):
                rows.append(measure(name, chunk_size, folder))
    found = machine("chunkplan", "numpy", "pyarrow", "torch")
    if options.json:
        print(json.dumps({"machine": found, "streaming": rows}, indent=2))
    else:
        print_table("Streaming a plan with its tokens on one core (global batch 256)", rows)
        print(f"\n{found}")


if __name__ == "__main__":
    main()
