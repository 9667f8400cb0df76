"""Measures what sharing prefixes saves by the cost model, Qwen2.5-7B on eight H100s: rollouts and traces that branch.

    python benchmarks/prefixes.py                          # seconds
    python benchmarks/prefixes.py --traces traces.jsonl    # prompts and answers as long as those of your own messages

Rollouts: 16 prompts a step with 8 to 64 answers each. Branching traces: 16 prompts, from each of which four turns go
on, and from each of these four more, three times: 64 traces. Lengths are log-normal (prompts of 1,000 tokens at the
median, answers of 2,000, turns of 600), or those of traces, at four characters a token. Of each the whole step is
planned with and without sharing, in chunks of 8,192 with K = 2.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from planning import print_table

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.hardware import load_hardware
from chunkplan.cost.model import CostModel
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.memory import memory_of_stages
from chunkplan.planning.method import Dataset, Planned, plan_block

PROMPTS, ROLLOUTS, DEPTH, WIDTH = 16, (8, 16, 32, 64), 3, 4
MOST_TOKENS, CHARACTERS = 32_768, 4

Row = dict[str, Any]


def drawn(random: np.random.Generator, median: int, sigma: float, count: int) -> Int64Array:
    """Log-normal lengths in tokens."""
    return np.clip(np.exp(random.normal(np.log(median), sigma, count)), 16, MOST_TOKENS).astype(np.int64)


def read_traces(path: Path) -> tuple[Int64Array, Int64Array]:
    """The lengths of what comes before the last message of each record, its tools included, and of that message."""
    prompts, answers = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        *before, last = [len(json.dumps(message, ensure_ascii=False)) for message in record["messages"]]
        prompts.append((sum(before) + len(str(record.get("tools") or ""))) // CHARACTERS)
        answers.append(last // CHARACTERS)
    return np.array(prompts), np.array(answers)


def rollouts(random: np.random.Generator, prompts: Int64Array, answers: Int64Array, each: int) -> list[Int32Array]:
    """`each` answers, of lengths drawn from `answers`, to each of `prompts`."""
    found = []
    for length in prompts.tolist():
        prompt = random.integers(0, 150_000, length)
        for size in random.choice(answers, each).tolist():
            found.append(np.concatenate([prompt, random.integers(0, 150_000, size)]).astype(np.int32))
    return found


def branching(random: np.random.Generator, prompts: Int64Array) -> Iterator[Int32Array]:
    """Traces of `DEPTH` turns after each prompt, each of which `WIDTH` turns follow."""
    for length in prompts.tolist():
        traces = [random.integers(0, 150_000, length)]
        for _ in range(DEPTH):
            traces = [
                np.concatenate([trace, random.integers(0, 150_000, size)])
                for trace in traces
                for size in drawn(random, 600, 0.8, WIDTH).tolist()
            ]
        yield from (trace.astype(np.int32) for trace in traces)


def plan(sequences: list[Int32Array], config: PlanConfig, cost: CostModel) -> Planned:
    """Plan one step of these sequences."""
    lengths = np.array([each.size for each in sequences], np.int32)
    masks = [np.arange(length) > 0 for length in lengths.tolist()]
    block = StepBlock(0, 0, np.arange(lengths.size, dtype=np.int32), np.array([lengths.size]))
    dataset = Dataset(lengths, lengths - 1, masks.__getitem__, lambda each: (sequences[each], masks[each]))
    return plan_block(block, dataset, config, cost, lambda: False)


def measure(name: str, sequences: list[Int32Array], sharding: str) -> Row:
    """A row of what a step takes with prefixes shared, beside without."""
    cost = CostModel(hardware=load_hardware("h100"), checkpointing="full", sharding=sharding)
    row: Row = {"of each prompt": name, "sequences": len(sequences), "tokens": sum(each.size for each in sequences)}
    found = {}
    for is_shared in (False, True):
        config = PlanConfig(chunk_size=8192, k=2, dp=8, global_batch=len(sequences), cp="off", share_prefixes=is_shared)
        plan(sequences[:4], config, cost)  # compiles
        start = time.perf_counter()
        planned = plan(sequences, config, cost)
        seconds = time.perf_counter() - start
        (step,) = planned.tables["steps"].to_pylist()
        (memory,) = memory_of_stages(config, cost, planned.peaks)
        found[is_shared] = step["predicted_us"], memory.total / 2**30, planned.chunks
        if is_shared:
            row["tokens run"] = int(planned.chunks.num_tokens.sum())
            row["chunks"] = planned.chunks.num_tokens.size
            row["planned in s"] = round(seconds, 2)
            row["over bound"] = round(step["predicted_us"] / step["lower_bound_us"], 3)
    row["run"] = round(row["tokens run"] / row["tokens"], 3)
    row["time"] = round(found[True][0] / found[False][0], 3)
    row["GiB shared"], row["GiB apart"] = round(found[True][1], 1), round(found[False][1], 1)
    return row


def main() -> None:
    """Print a row for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharding", default="optimizer", help="what ranks share: optimizer, gradients, weights")
    parser.add_argument("--traces", type=Path, help="JSONL of messages, whose lengths are taken")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    prompts, answers = drawn(random, 1000, 0.8, PROMPTS), drawn(random, 2000, 1.0, 10_000)
    if arguments.traces:
        prompts, answers = read_traces(arguments.traces)
        prompts = random.choice(prompts, PROMPTS)
    rows = [
        measure(f"{each} rollouts", rollouts(random, prompts, answers, each), arguments.sharding) for each in ROLLOUTS
    ]
    rows.append(measure("branching traces", list(branching(random, prompts)), arguments.sharding))
    print(json.dumps(machine("numpy", "numba", "pyarrow")))
    print_table("A step of 16 prompts", rows)


if __name__ == "__main__":
    main()
