"""Measures packing: our algorithms and other packers on the same lengths, one after the other in one process.

    python benchmarks/packing_peers.py                                  # everything, about 5 minutes with TRL
    python benchmarks/packing_peers.py --only long-tail:1000000 --exact # one set; also the slow exact algorithm
    python benchmarks/packing_peers.py --json                           # the same figures as one document

The peers are TRL (`pip install trl`) and seqpacker (`pip install seqpacker`); those that are missing are named and left
out. Every packer takes an array of lengths and says in which bin each item lies. TRL's function also moves the tokens:
those copies are left out here, as its time would be mostly theirs. `certified` rows pack and prove a bound as
`pack_lengths` does; `core` rows only pack. Everything is compiled and imported before; times are the best of three
runs, of one where that takes over 5 s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from lengths import lengths
from machine import machine

from chunkplan.packing import PACKERS, pack_lengths
from chunkplan.packing.histogram import histogram

CAPACITY = 8192
SETS = ("long-tail:1000000", "uniform:1000000", "quarter:1000000", "triplet:1000000", "long-tail:10000000")
REPEATS = 3
SLOW_SECONDS = 5.0

Lengths = npt.NDArray[np.int32]
Packer = Callable[[Lengths], Callable[[], int]]  # prepares the input; what it returns packs and says how many bins


def our_core(algorithm: str) -> Packer:
    """Make a packer that gives the bin of each item, without a certificate."""

    def prepare(values: Lengths) -> Callable[[], int]:
        def pack() -> int:
            items = histogram(values)
            solution = PACKERS[algorithm](items, CAPACITY)
            items.in_item_order(solution.sorted_bins)
            return solution.num_bins

        return pack

    return prepare


def our_certified(algorithm: str) -> Packer:
    """Make a packer that gives the bin of each item and a certified bound."""
    return lambda values: lambda: pack_lengths(values, CAPACITY, algorithm).num_bins


def trl_bfd() -> Packer:
    """Make a packer of TRL's best-fit decreasing, on token lists without content, and without copying them."""
    import pyarrow as pa
    import pyarrow.compute

    data_utils: Any = import_module("trl.data_utils")

    class WithoutCopies:
        """Arrow's functions, but those that only reorder or trim tokens return what they are given."""

        filter = list_slice = take = staticmethod(lambda values, *_: values)

        def __getattr__(self, name: str) -> Any:
            return getattr(pyarrow.compute, name)

    def prepare(values: Lengths) -> Callable[[], int]:
        offsets = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        tokens = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
        table = pa.table({"input_ids": tokens})

        def pack() -> int:
            data_utils.pc = WithoutCopies()
            try:
                return len(data_utils._pack_bfd(table, CAPACITY))
            finally:
                data_utils.pc = pyarrow.compute

        return pack

    return prepare


def seqpacker(strategy: str) -> Packer:
    """Make a packer of seqpacker, asked for flat arrays, which is its fastest way."""
    packer: Any = import_module("seqpacker").Packer(capacity=CAPACITY, strategy=strategy)

    def prepare(values: Lengths) -> Callable[[], int]:
        as_int64 = values.astype(np.int64)
        return lambda: len(packer.pack_flat(as_int64)[1]) + 1

    return prepare


def packers(with_exact: bool) -> tuple[dict[str, Packer], list[str]]:
    """The packers there are, by name, and the names of peers that are not installed."""
    present = {f"{name} core": our_core(name) for name in ("bfd", "mbs")}
    ours = [name for name in PACKERS if with_exact or name != "exact"]
    present |= {f"{name} certified": our_certified(name) for name in ours}
    absent = []
    for name, load in {
        "trl bfd": trl_bfd,
        "seqpacker bfd": lambda: seqpacker("bfd"),
        "seqpacker obfd": lambda: seqpacker("obfd"),
    }.items():
        try:
            present[name] = load()
        except ModuleNotFoundError as error:
            absent.append(f"{name} ({error.name} is not installed)")
    return present, absent


def measure(pack: Callable[[], int]) -> tuple[float, int]:
    """Measure the best of several times in seconds, and count the bins."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        num_bins = pack()
        seconds = time.perf_counter() - start
        best = min(best, seconds)
        if seconds > SLOW_SECONDS:
            break
    return best, num_bins


def measure_set(name: str, present: dict[str, Packer]) -> dict[str, Any]:
    """Measure all packers on one set of lengths."""
    kind, size = name.split(":")
    values = lengths(kind, int(size))
    bound = pack_lengths(values, CAPACITY).lower_bound
    if "exact certified" in present:
        bound = max(bound, pack_lengths(values, CAPACITY, "exact").lower_bound)
    rows: list[dict[str, Any]] = []
    for packer, prepare in present.items():
        seconds, num_bins = measure(prepare(values))
        rows.append({"packer": packer, "seconds": seconds, "bins": num_bins, "gap": num_bins / bound - 1})
    by_name = {row["packer"]: row["seconds"] for row in rows}
    for row in rows:
        for peer in ("trl bfd", "seqpacker bfd", "seqpacker obfd"):
            if peer in by_name:
                row[f"times faster than {peer}"] = by_name[peer] / row["seconds"]
    return {"kind": kind, "items": values.size, "capacity": CAPACITY, "certified bound": bound, "packers": rows}


def print_table(result: dict[str, Any]) -> None:
    """Print one set of lengths, with a line for each packer."""
    print(f"\n{result['kind']}, {result['items']:,} items, certified bound {result['certified bound']:,}")
    for row in result["packers"]:
        name, seconds, bins, gap = row["packer"], row["seconds"], row["bins"], row["gap"]
        peers = {key.removeprefix("times faster than "): row[key] for key in row if key.startswith("times")}
        faster = "".join(f"  {ratio:9,.1f} x {peer}" for peer, ratio in peers.items() if peer != name)
        print(f"  {name:28} {seconds:9.4f} s {bins:9,} bins {gap:9.4%} gap{faster}", flush=True)


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=SETS, metavar="KIND:N", help=f"of these sets: {', '.join(SETS)}")
    parser.add_argument("--exact", action="store_true", help="also the exact algorithm: tens of seconds a set")
    parser.add_argument("--json", action="store_true", help="print one document in place of tables")
    options = parser.parse_args()
    present, absent = packers(options.exact)
    for prepare in present.values():
        prepare(lengths("quarter", 1000))()
    results = []
    for name in options.only:
        results.append(measure_set(name, present))
        if not options.json:
            print_table(results[-1])
    found = machine("chunkplan", "numpy", "numba", "ortools", "trl", "pyarrow", "seqpacker")
    if options.json:
        print(json.dumps({"machine": found, "absent": absent, "sets": results}, indent=2))
    else:
        print("\n" + "\n".join([*(f"left out: {missing}" for missing in absent), str(found)]))


if __name__ == "__main__":
    main()
