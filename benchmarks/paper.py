"""Predicts the experiments of ChunkFlow (arXiv 2503.02356) with the cost model and the schedules, beside their figures.

    python benchmarks/paper.py                 # some seconds
    python benchmarks/paper.py --steps 200     # averages over more steps

What the paper does not say is assumed, the same everywhere: the profile of 80 GB H100s (its cloud names instances, not
GPUs; `--hardware a100` shows what the other 80 GB profile makes of it); one data-parallel rank; LMSys-like lengths (its
own are in-house), cut at the context. The baseline is Megatron-LM as the paper runs it: every sequence a micro-batch,
in random order, 1F1B, and full activation checkpointing where the activations of the longest one alone do not fit.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from lengths import lengths

from chunkplan.cost.activations import activation_bytes_per_token
from chunkplan.cost.durations import attention_pairs_of, chunk_times, split_layers
from chunkplan.cost.hardware import Hardware, load_hardware
from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import QWEN2_5_7B, ModelShape, plain_layer
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.packing.packing import pack_lengths
from chunkplan.planfile.chunks import chunks_without_segments
from chunkplan.schedule.families import schedule_ranks

LLAMA_3_8B = ModelShape(
    name="Llama-3-8B",
    hidden_size=4096,
    vocab_size=128256,
    kinds=(
        plain_layer(
            4096,
            num_query_heads=32,
            num_kv_heads=8,
            query_width=4096,
            kv_width=1024,
            mlp_width=14336,
            all_mlp_width=14336,
        ),
    ),
    order=(0,) * 32,
)


def on(hardware: Hardware) -> Hardware:
    """The GPU as the paper's trainer has it: its host keeps up, and a kernel takes what its Table 6 says."""
    return replace(hardware, launch_ns=0.0, kernel_ns=8000)


QWEN = CostModel(shape=QWEN2_5_7B, tp=4, hardware=on(load_hardware("h100")))
LLAMA = replace(QWEN, shape=LLAMA_3_8B, tp=2)
PP = 4
GLOBAL_BATCH = 256

#: Of LongBench with Llama-3-8B: the share of sequences under so many tokens.
LONGBENCH = {256: 0.0, 1024: 0.0026, 4096: 0.2265, 8192: 0.484, 16384: 0.8259, 32768: 0.9806, 65536: 1.0}

Lengths = npt.NDArray[np.int64]


class Step(NamedTuple):
    """The chunks of a step on one rank: tokens int64, pairs float64, group int32 (-1: standalone), keeps bool; [n]."""

    num_tokens: Lengths
    attention_pairs: npt.NDArray[np.float64]
    group_id: npt.NDArray[np.int32]
    keeps: npt.NDArray[np.bool_]


def unpacked(sequences: Lengths, seed: int = 0) -> Step:
    """Make every sequence a chunk, in random order."""
    tokens = np.random.default_rng(seed).permutation(sequences)
    ones = np.ones(tokens.size, np.bool_)
    return Step(tokens, attention_pairs_of(tokens, 0 * tokens), np.full(tokens.size, -1, np.int32), ones)


def chunked(sequences: Lengths, chunk_size: int, k: int) -> Step:
    """Chunk by Algorithm 1: short sequences packed, then long ones split, these in the order of the batch."""
    short, split = sequences[sequences <= chunk_size], sequences[sequences > chunk_size]
    packing = pack_lengths(short, chunk_size, "bfd", certify=False)
    num_parts = -(-split // chunk_size)
    group_id = np.repeat(np.arange(split.size), num_parts)
    index = np.arange(group_id.size) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    part_tokens = np.minimum(chunk_size, np.repeat(split, num_parts) - index * chunk_size)
    bin_of, num_bins = packing.bin_of, packing.num_bins
    bin_pairs = np.bincount(bin_of, attention_pairs_of(short, 0 * short), num_bins)
    return Step(
        np.append(np.bincount(bin_of, short, num_bins).astype(np.int64), part_tokens),
        np.append(bin_pairs, attention_pairs_of(part_tokens, index * chunk_size)),
        np.append(np.full(num_bins, -1), group_id).astype(np.int32),
        np.append(np.ones(num_bins, np.bool_), index >= np.repeat(num_parts, num_parts) - k),
    )


def run_step(
    step: Step, cost: CostModel, schedule: str = "1f1b", memory_tokens: int | None = None
) -> tuple[float, int]:
    """Simulate a step on `PP` stages: milliseconds, and the most tokens whose activations a stage holds."""
    layers = split_layers(cost.shape.num_layers, PP)
    chunks = chunks_without_segments([0, step.keeps.size], step.num_tokens, step.group_id, step.keeps)
    times = chunk_times(step.num_tokens, step.attention_pairs, cost.rates, layers)
    scheduled = schedule_ranks(chunks, times, PP, schedule, memory_tokens, lambda rank: f"rank {rank}")
    return scheduled.stage_end.max() / 1e6, int(scheduled.peak_retained_tokens.max())


def fitting_tokens(cost: CostModel, longest: int, chunk_size: int) -> int:
    """How many tokens' activations fit the first stage beside one split sequence of `longest` tokens."""
    layers = split_layers(cost.shape.num_layers, PP)
    memory = stage_memory(
        cost,
        dp=1,
        layers=layers,
        held=[ResidentTokens(inputs=longest, kv=longest, kv_gradients=longest)] * PP,
        chunk_size=chunk_size,
    )[0]
    [layer] = cost.shape.kinds
    of_token = layers[0] * activation_bytes_per_token(cost, layer)
    return int((cost.hardware.memory_bytes - memory.total) / of_token)


def long_tail(num_steps: int, context: int) -> list[Lengths]:
    """Draw steps of LMSys-like lengths, none over `context`."""
    tokens = np.minimum(lengths("long-tail", num_steps * GLOBAL_BATCH, cap=None), context).astype(np.int64)
    return list(tokens.reshape(num_steps, GLOBAL_BATCH))


def one_long(context: int) -> list[Lengths]:
    """Draw a step in which one sequence is as long as the context, and the others are short chats."""
    short = lengths("long-tail", GLOBAL_BATCH - 1, cap=4096).astype(np.int64)
    return [np.append(short, context)]


def longbench(num_steps: int, least: int = 0) -> list[Lengths]:
    """Draw steps of LongBench-like lengths over `least` tokens, log-uniform between the published quantiles."""
    rng = np.random.default_rng(0)
    shares = rng.uniform(np.interp(least, list(LONGBENCH), list(LONGBENCH.values())), 1, (num_steps, GLOBAL_BATCH))
    tokens = np.exp(np.interp(shares, list(LONGBENCH.values()), np.log(list(LONGBENCH))))
    return list(tokens.astype(np.int64))


def table_6(steps: list[Lengths], cost: CostModel = QWEN) -> dict[str, float]:
    """Qwen2.5-7B at 256K by (ChunkSize, K), of which the product is always 32K: over (8K, 4), which takes `ms`."""
    settings = {"2K,16": (2048, 16), "8K,4": (8192, 4), "32K,1": (32768, 1)}
    time = {
        name: float(np.mean([run_step(chunked(step, *setting), cost)[0] for step in steps]))
        for name, setting in settings.items()
    }
    return {"ms": time["8K,4"], **{name: value / time["8K,4"] for name, value in time.items()}}


def gain(
    steps: list[Lengths], cost: CostModel, context: int, chunk_size: int, k: int, schedule: str = "1f1b"
) -> dict[str, Any]:
    """How many times faster chunks are than the baseline, and the activation checkpointing that this needs."""
    fits = context <= fitting_tokens(cost, 0, context)
    plain = replace(cost, checkpointing="none" if fits else "full")
    memory = fitting_tokens(cost, context, chunk_size) if schedule == "search" else None
    ours = np.mean([run_step(chunked(step, chunk_size, k), cost, schedule, memory)[0] for step in steps])
    baseline, held = np.transpose([run_step(unpacked(step), plain) for step in steps])
    return {
        "ms": float(ours),
        "gain": float(baseline.mean() / ours),
        "baseline": plain.checkpointing,
        "tokens it holds": int(held.max()),
        "tokens that fit": fitting_tokens(cost, context, chunk_size),
    }


def main() -> None:
    """Print all experiments, one a line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of long-tail lengths, to average over")
    parser.add_argument("--hardware", default="h100", help="a hardware profile")
    options = parser.parse_args()
    hardware = on(load_hardware(options.hardware))
    qwen, llama = replace(QWEN, hardware=hardware), replace(LLAMA, hardware=hardware)
    show("Table 6, paper", {"ms": 23774.0, "2K,16": 29810 / 23774, "8K,4": 1.0, "32K,1": 28942 / 23774})
    show("Table 6, long tail", table_6(long_tail(options.steps, 256 << 10), qwen))
    show("Table 6, one of 256K a step", table_6(one_long(256 << 10), qwen))
    for context, k, published in ((32 << 10, 1, ""), (256 << 10, 4, ", paper 4.53")):
        steps = {"long tail": long_tail(options.steps, context), "one such a step": one_long(context)}
        for name, chosen in steps.items():
            show(f"gain at {context >> 10}K, {name}{published}", gain(chosen, qwen, context, 8192, k))
    for schedule in ("1f1b", "search"):
        for name, least in (("LongBench, paper 1.7", 0), ("LongBench over 8K, paper 1.4", 8192)):
            show(f"{name}, {schedule}", gain(longbench(2, least), llama, 64 << 10, 16384, 2, schedule))


def show(name: str, figures: dict[str, Any]) -> None:
    """Print a row as one line of JSON."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"experiment": name, **rounded}))


if __name__ == "__main__":
    main()
