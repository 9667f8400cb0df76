"""Measures context-parallel groups: how even they make the ranks, what that takes, and what rules of others do.

    python benchmarks/groups.py                                        # long-tail lengths, about a minute
    python benchmarks/groups.py --lengths a.parquet b.parquet          # mixtures of your own: columns of lengths
    python benchmarks/groups.py --only 10M                             # planning and validating 10M sequences
    python benchmarks/groups.py --only rules --megatron hybrid_cp_schedule.py   # that of Megatron-LM too

The figure is the sum over all steps of the time of the slowest rank, over the sum of forward and backward of all
sequences, / dp / pp, without recompute, overhead of chunks or exchange: 1 where every GPU always does nothing else. It
is predicted, of Qwen2.5-7B on h100, and the same on any machine. Seconds are of this one: planning without writing, the
second time; of 10M sequences whole commands.

Rules of others (benchmarks/group_rules.py) get the same batches, and are timed by the same cost model. Those that have
a bound of tokens a rank get the one with which they are fastest here: ChunkSize for Skrull, the least that holds the
longest sequence for Megatron-LM. That rule is read from a file of Megatron-LM, wherever you have put it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from group_rules import Rule, megatron, skrull, static_groups
from lengths import lengths
from machine import machine
from planning import Row, measure_all, run, write_lengths

from chunkplan.arrays import Int64Array
from chunkplan.building import build_plans
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import attention_pairs_of, work_ns
from chunkplan.cost.model import CostModel
from chunkplan.planning.batches import batch_sizes, epoch_order

CHUNK_SIZE, K = 8192, 4

#: dp, pp, ChunkSize.
LAYOUTS = [
    *((8, 1, CHUNK_SIZE), (16, 1, CHUNK_SIZE), (32, 1, CHUNK_SIZE)),
    *((8, 1, 2048), (8, 1, 4096), (8, 1, 16384), (16, 1, 2048), (16, 1, 4096), (16, 1, 16384)),
    *((8, 2, CHUNK_SIZE), (8, 4, CHUNK_SIZE)),
]
#: Ranks of a group of others, beside all that there are.
DEGREES = (2, 4, 8)

COLUMNS = ("predicted_us", "lower_bound_us")


class Times(NamedTuple):
    """Sums over all steps in ns, and the seconds it took to plan them."""

    predicted: float
    bound: float
    seconds: float


def plan_times(source: Path, config: PlanConfig) -> Times:
    """Plan twice without writing; the second time counts."""
    for _ in range(2):
        started = time.perf_counter()
        [plan] = build_plans(source, source.with_name("plan"), config, dry_run=True).values()
        seconds = time.perf_counter() - started
    predicted, bound = (float(np.sum(plan.steps[name].to_numpy(), dtype=float)) for name in COLUMNS)
    return Times(1e3 * predicted, 1e3 * bound, seconds)


def measure_figures(mixtures: dict[str, Int64Array], folder: Path) -> list[Row]:
    """Measure the figure without and with groups, and the least that any sharing could reach."""
    rows = []
    for name, values in mixtures.items():
        source = write_lengths(folder / f"{name}.parquet", values)
        work = work_ns(CostModel(), values, attention_pairs_of(values, 0 * values)).sum()
        for dp, pp, chunk_size in LAYOUTS:
            config = partial(PlanConfig, chunk_size=chunk_size, k=K, dp=dp, pp=pp)
            off, auto = (plan_times(source, config(cp=cp)) for cp in ("off", "auto"))
            share = work / dp / pp
            rows.append(
                {
                    "lengths": name,
                    "dp": dp,
                    "pp": pp,
                    "ChunkSize": chunk_size,
                    "K": K,
                    "without": f"{off.predicted / share:.3f}",
                    "with groups": f"{auto.predicted / share:.3f}",
                    "bound": f"{auto.bound / share:.3f}",
                    "with / bound": f"{auto.predicted / auto.bound:.3f}",
                    "s without": f"{off.seconds:.2f}",
                    "s with": f"{auto.seconds:.2f}",
                }
            )
    return rows


def measure_rules(mixtures: dict[str, Int64Array], source_of_megatron: Path | None, folder: Path) -> list[Row]:
    """Measure the rules of others on the batches of our plans, beside these."""
    cost, rows = CostModel(), []
    for name, values in mixtures.items():
        source = write_lengths(folder / f"{name}.parquet", values)
        for dp in (8, 16, 32):
            config = PlanConfig(chunk_size=CHUNK_SIZE, k=K, dp=dp, cp="auto")
            ours = plan_times(source, config).predicted
            rules: dict[str, Rule] = {}
            for degree in sorted({*DEGREES, dp}):
                rules[f"static, {degree} ranks"] = static_groups(cost, dp, degree, CHUNK_SIZE)
            for degree in DEGREES:
                rules[f"Skrull, {degree} ranks"] = skrull(cost, dp, degree, CHUNK_SIZE)
            if source_of_megatron:
                most = max(CHUNK_SIZE, -(-int(values.max()) // dp))
                rules["Megatron-LM, dynamic"] = megatron(source_of_megatron, cost, dp, most)
            off = plan_times(source, PlanConfig(chunk_size=CHUNK_SIZE, k=K, dp=dp, cp="off")).predicted
            rows.append(row(name, dp, "chunkplan --cp auto", 1.0, CHUNK_SIZE))
            rows.append(row(name, dp, "chunkplan --cp off", off / ours, CHUNK_SIZE))
            for rule, step in rules.items():
                steps = [step(batch) for batch in batches(values, config)]
                rows.append(row(name, dp, rule, sum(one.ns for one in steps) / ours, max(one.tokens for one in steps)))
    return rows


def row(lengths_of: str, dp: int, rule: str, relative: float, tokens: int) -> Row:
    """A row of the table of rules."""
    return {
        "lengths": lengths_of,
        "dp": dp,
        "rule": rule,
        "time / that with groups": f"{relative:.2f}",
        "largest chunk, tokens a rank": tokens,
    }


def batches(values: Int64Array, config: PlanConfig) -> list[Int64Array]:
    """The lengths of the sequences of each step, descending, as `config` has the steps."""
    order = epoch_order(np.ones(values.size, np.int32), config.seed, 0)
    stops = np.cumsum(batch_sizes(values.size, config))[:-1]
    return [-np.sort(-values[ids]) for ids in np.split(order, stops)]


def measure_ten_million(folder: Path) -> list[Row]:
    """Measure `chunkplan build` and `chunkplan validate` of 10M sequences, without and with groups, as users do."""
    source = write_lengths(folder / "lengths.parquet", lengths("long-tail", 10_000_000, cap=None))
    rows: list[Row] = []
    for cp in ("off", "auto"):
        plan = folder / f"plan-{cp}"
        options = ["--chunk-size", CHUNK_SIZE, "--k", K, "--dp", 8, "--cp", cp]
        commands = {
            "plan": ["build", source, *options, "--dry-run"],
            "build": ["build", source, *options, "--output", plan],
            "validate": ["validate", plan],
        }
        found: Row = {"--cp": cp}
        for name, command in commands.items():
            run(command)
            seconds, num_bytes, _ = run(command)
            found |= {f"{name} s": f"{seconds:.2f}", f"{name} GB": f"{num_bytes / 1e9:.2f}"}
        rows.append(found)
    return rows


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*TITLES], nargs="+", default=["figures", "rules"])
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], help=".parquet files with a column of lengths")
    parser.add_argument("--megatron", type=Path, help="megatron/core/pipeline_parallel/hybrid_cp_schedule.py")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    mixtures = {path.stem: pq.read_table(path).column(0).to_numpy().astype(np.int64) for path in options.lengths}
    mixtures = mixtures or {"long-tail": lengths("long-tail", 100_000, cap=None).astype(np.int64)}
    parts: dict[str, Callable[[Path], list[Row]]] = {
        "figures": partial(measure_figures, mixtures),
        "rules": partial(measure_rules, mixtures, options.megatron),
        "10M": measure_ten_million,
    }
    chosen = {name: part for name, part in parts.items() if name in options.only}
    measure_all(chosen, TITLES, machine("chunkplan", "numpy", "numba", "pyarrow", "polars"), as_json=options.json)


TITLES = {
    "figures": "The slowest rank of every step, over forward and backward alone / dp / pp (global batch 256)",
    "rules": f"Other rules on the same batches, under the same cost model (ChunkSize {CHUNK_SIZE:,}, K {K})",
    "10M": f"10M long-tail sequences, whole commands (dp 8, ChunkSize {CHUNK_SIZE:,}, K {K})",
}


if __name__ == "__main__":
    main()
