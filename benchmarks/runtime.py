"""Measures the runtime: how exact chunked gradients are, and what chunks cost in memory and in time.

    python benchmarks/runtime.py all                                # on a CPU, 8 minutes on 2 cores
    python benchmarks/runtime.py time --device cuda                 # one part of it
    python benchmarks/runtime.py long-tail --lengths data.parquet   # a column of lengths of your own
    python benchmarks/runtime.py longest --device cuda --budget 1200

Unchunked runs are those of transformers on the same weights, tokens and kind of loss, with SDPA and gradient
checkpointing; chunks run without activation checkpointing unless a row says so. Ways that are compared take turns, and
ratios are of medians. On a CPU memory is that of live tensors (see benchmarks/allocations.py), on a GPU what
torch.cuda.max_memory_allocated says; both without weights and their gradients, but for `longest`, which includes them.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from lengths import lengths
from machine import machine
from planning import print_table
from runtime_long_tail import measure_long_tail
from runtime_longest import measure_longest
from runtime_memory import measure_memory
from runtime_parity import measure_bfloat16, measure_float64
from runtime_time import measure_time
from transformers.utils import logging

from chunkplan_runtime.devices import device_name, find_device


def show_parity(device: torch.device, options: argparse.Namespace) -> None:
    """Show parity in both dtypes."""
    print_table("Worst relative error of a parameter's gradient in float64", measure_float64(device))
    print_table(
        "Error of gradients in bfloat16 beside float64: chunks of 256, K 1, and whole (a sequence of 2,048)",
        measure_bfloat16(device),
    )


def show_memory(device: torch.device, options: argparse.Namespace) -> None:
    """Show memory: the row named `rest` is what has to be flat."""
    print_table("Peak memory of a step of one sequence", measure_memory(device, options.verbose))


def show_time(device: torch.device, options: argparse.Namespace) -> None:
    """Show the time of one sequence, in chunks and whole."""
    print_table("A step in chunks over the same unchunked", measure_time(device, options.repeats))


def show_long_tail(device: torch.device, options: argparse.Namespace) -> None:
    """Show a step of many sequences."""
    if options.lengths:
        values = pq.read_table(options.lengths).column(0).to_numpy()
    else:
        values = lengths("long-tail", 100_000, cap=None)
    what, rows = measure_long_tail(device, values)
    print_table(f"A step of the long tail: {what}", rows)


def show_longest(device: torch.device, options: argparse.Namespace) -> None:
    """Show the longest sequence that fits, which only a GPU has a limit for."""
    if device.type != "cuda" and not options.toy:
        print("\nlongest: needs a GPU (--device cuda); --toy shows the same at a size without meaning")
        return
    print_table("The longest sequence", measure_longest(device, options.budget, options.toy))


PARTS: dict[str, Callable[[torch.device, argparse.Namespace], None]] = {
    "parity": show_parity,
    "memory": show_memory,
    "time": show_time,
    "long-tail": show_long_tail,
    "longest": show_longest,
}


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=Path, help="a .parquet file for the long tail, its first column")
    parser.add_argument("--budget", type=float, default=600, help="seconds for each way of `longest`")
    parser.add_argument("--toy", action="store_true", help="`longest` at a size that runs anywhere")
    parser.add_argument("--verbose", action="store_true", help="memory: what the peaks consist of")
    options = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    device = find_device(options.device)
    found: dict[str, Any] = machine("chunkplan", "torch", "transformers", "peft", "flash-attn")
    print(found | {"device": device_name(device)})
    for name, show in PARTS.items():
        if options.part in (name, "all"):
            started = time.perf_counter()
            show(device, options)
            print(f"\n({name}: {time.perf_counter() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
