"""Measures the planner: a whole plan, its validation, how even its ranks are, what it proves.

    python benchmarks/planning.py                              # everything, about 5 minutes on 2 cores
    python benchmarks/planning.py --only plan --sizes 100000   # one part of it
    python benchmarks/planning.py --real lengths.parquet       # a distribution of your own beside the synthetic one

Times are whole commands in processes of their own, the second run of each (the first one compiles and warms caches).
benchmarks/packing_peers.py measures packing alone, beside other packers. Where TRL is installed, its best-fit
decreasing is timed here too, on the same number of sequences: packing alone, the one part of planning it does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from lengths import lengths
from machine import machine
from packing_peers import trl_bfd

import chunkplan
from chunkplan.config.plan import PlanConfig

Row = dict[str, Any]


def measure_plan(sizes: list[int], folder: Path) -> list[Row]:
    """Measure `chunkplan build --dp 8 --cp off` and `chunkplan validate` on long-tail lengths, as a user runs them."""
    rows = []
    for size in sizes:
        source = write_lengths(folder / f"{size}.parquet", lengths("long-tail", size, cap=None))
        options = ["--chunk-size", "8192", "--k", "4", "--dp", "8", "--cp", "off"]
        build = ["build", source, *options, "--output", folder / "plan"]
        validate = ["validate", folder / "plan"]
        run(build)
        build_seconds, build_bytes, _ = run(build)
        run(validate)
        validate_seconds, validate_bytes, _ = run(validate)
        rows.append(
            {
                "sequences": size,
                "build s": round(build_seconds, 2),
                "build GB": round(build_bytes / 1e9, 2),
                "validate s": round(validate_seconds, 2),
                "validate GB": round(validate_bytes / 1e9, 2),
                "plan MB": round(sum(path.stat().st_size for path in (folder / "plan").iterdir()) / 1e6, 1),
            }
        )
        if trl := trl_seconds(size):
            rows[-1] |= {"TRL bfd s": round(trl, 1), "TRL / build": round(trl / build_seconds, 1)}
    return rows


def trl_seconds(size: int) -> float | None:
    """Measure how long TRL takes to pack these sequences, clipped to ChunkSize; None where it is not installed."""
    try:
        pack = trl_bfd()(lengths("long-tail", size))
    except ModuleNotFoundError:
        return None
    started = time.perf_counter()
    pack()
    return time.perf_counter() - started


def measure_layouts(sizes: list[int], folder: Path) -> list[Row]:
    """Measure `chunkplan build` of several layouts: on a shared machine, compare processor seconds."""
    rows = []
    for size in sizes:
        source = write_lengths(folder / f"{size}.parquet", lengths("long-tail", size, cap=None))
        for layout in ("--dp 8 --cp off", "--dp 8", "--dp 8 --pp 4", "--dp 8 --pp 4 --cp off"):
            options = ["--chunk-size", "8192", "--k", "4", *layout.split()]
            build = ["build", source, *options, "--output", folder / "plan"]
            run(build)
            seconds, _, processor = run(build)
            rows.append({"sequences": size, "layout": layout, "build s": round(seconds, 1)})
            rows[-1]["of a processor"] = round(processor, 1)
    return rows


def run(arguments: list[Any]) -> tuple[float, int, float]:
    """Measure a `chunkplan` command, which uses threads and no further processes: seconds, peak bytes, and seconds of
    all processors."""
    command = [sys.executable, "-m", "chunkplan_cli.main", *map(str, arguments)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    num_bytes = usage.ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    return time.perf_counter() - started, num_bytes, usage.ru_utime + usage.ru_stime


def measure_balance(distributions: dict[str, np.ndarray], folder: Path) -> list[Row]:
    """Measure balance over all steps, and over those in which no sequence costs more than a rank's share."""
    rows = []
    for name, values in distributions.items():
        for dp in (8, 16):
            for chunk_size in (2048, 8192):
                plan = build(values, folder, chunk_size=chunk_size, k=4, dp=dp, cp="off")
                steps, chunks = plan.steps(), plan.chunks()
                summary = chunkplan.summarize_plan(steps, chunks, plan.manifest)
                rest = steps.filter(pc.invert(steps.column("exceeds_share")))
                rest_chunks = chunks.filter(pc.is_in(chunks.column("step"), rest.column("step").combine_chunks()))
                spread = chunkplan.summarize_plan(rest, rest_chunks, plan.manifest)
                rows.append(
                    {
                        "lengths": name,
                        "dp": dp,
                        "chunk size": chunk_size,
                        "steps": summary.num_steps,
                        "heaviest / mean": f"{summary.heaviest_over_mean:.4f}",
                        "heaviest / (work / dp)": f"{summary.heaviest_over_work:.4f}",
                        "one exceeds": summary.num_exceeding_steps,
                        "of the imbalance": f"{summary.exceeding_share:.2%}",
                        "heaviest / mean, the other steps": f"{spread.heaviest_over_mean:.4f}",
                    }
                )
    return rows


def measure_certificates(distributions: dict[str, np.ndarray], folder: Path) -> list[Row]:
    """Count the steps proved to have the fewest chunks, on one rank and without tail sharing."""
    rows = []
    for name, values in distributions.items():
        for chunk_size in (2048, 8192):
            for packing in ("bfd", "auto"):
                started = time.perf_counter()
                plan = build(values, folder, chunk_size=chunk_size, k=4, tail_sharing=False, packing=packing)
                seconds = time.perf_counter() - started
                steps = plan.steps()
                optimal = np.array(steps.column("optimal"))
                num_chunks, bound = (
                    np.array(steps.column(column)).sum() for column in ("num_chunks", "chunks_lower_bound")
                )
                rows.append(
                    {
                        "lengths": name,
                        "chunk size": chunk_size,
                        "packing": packing,
                        "steps": optimal.size,
                        "optimal": f"{optimal.mean():.4%}",
                        "not proved": int((~optimal).sum()),
                        "gap": f"{num_chunks / bound - 1:.4%}",
                        "s": round(seconds, 1),
                    }
                )
    return rows


def build(values: np.ndarray, folder: Path, **config: Any) -> Any:
    """Build a plan of sequences of these lengths."""
    source = write_lengths(folder / "lengths.parquet", values)
    return chunkplan.build(source, folder / "plan", PlanConfig(**config))


def write_lengths(path: Path, values: np.ndarray) -> Path:
    """Write a file of lengths, and return its path."""
    pq.write_table(pa.table({"length": values}), path)
    return path


def measure_all(
    parts: dict[str, Callable[[Path], list[Row]]],
    titles: dict[str, str],
    found: dict[str, str | int | None],
    *,
    as_json: bool,
) -> None:
    """Measure every part in an empty folder, and print its table or, in the end, all rows as JSON.

    `titles` are those of the tables, by part; `found` is the machine.
    """
    result: dict[str, Any] = {"machine": found}
    for name, part in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            result[name] = part(Path(folder))
        if not as_json:
            print_table(titles[name], result[name])
    print(json.dumps(result, indent=2) if as_json else f"\n{found}")


def print_table(title: str, rows: Iterable[Row]) -> None:
    """Print rows as a table in Markdown, each as it comes."""
    print(f"\n{title}\n", flush=True)
    for number, row in enumerate(rows):
        if number == 0:
            print("| " + " | ".join(row) + " |\n" + "| --- " * len(row) + "|")
        cells = (f"{value:,}" if type(value) is int else str(value) for value in row.values())
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["plan", "layouts", "balance", "certificates"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--steps-of", type=int, default=1_000_000, help="synthetic sequences for balance")
    parser.add_argument("--real", type=Path, nargs="*", default=[], help=".parquet files with a column of lengths")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    real = {path.stem: pq.read_table(path).column(0).to_numpy() for path in options.real}
    parts: dict[str, Callable[[Path], list[Row]]] = {
        "plan": lambda folder: measure_plan(options.sizes, folder),
        "layouts": lambda folder: measure_layouts(options.sizes, folder),
        "balance": lambda folder: measure_balance(
            {"long-tail": lengths("long-tail", options.steps_of, cap=None), **real}, folder
        ),
        "certificates": lambda folder: measure_certificates(
            {"long-tail": lengths("long-tail", max(options.sizes), cap=None), **real}, folder
        ),
    }
    chosen = {name: part for name, part in parts.items() if options.only in (None, name)}
    packages = ("chunkplan", "numpy", "numba", "pyarrow", "polars", "ortools", "trl")
    measure_all(chosen, TITLES, machine(*packages), as_json=options.json)


TITLES = {
    "plan": "Whole plan: read, batch, balance, pack, certify, write (global batch 256, dp 8, C 8192)",
    "layouts": "Layouts (long-tail lengths, global batch 256, C 8192, K 4)",
    "balance": "Balance (global batch 256)",
    "certificates": "Steps proved to have the fewest chunks (dp 1, no tail sharing, global batch 256)",
}


if __name__ == "__main__":
    main()
