"""Counts, shares, durations and sizes, and what a plan was made with, as people say them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig


def counted(number: int, noun: str) -> str:
    """Print how many there are: "1 step", "1,030 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """Print a share of 1 as a percentage."""
    return f"{share:.1%}" if share == 0 or share >= 0.001 else f"{share:.2%}" if share >= 0.0001 else "<0.01%"


def ratio(value: float) -> str:
    """Print how often one thing goes into another: to four places near 1, to two above."""
    return f"{value:.4f}" if value < 1.1 else f"{value:,.2f}"


def seconds(microseconds: float) -> str:
    """Print a duration, given in microseconds."""
    value = microseconds / 1e6
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def k_words(k: int, k_by_length: Iterable[Iterable[int]] | None) -> str:
    """Print K, and what it is for longer sequences."""
    return ", ".join([str(k), *(f"{longer} over {tokens:,}" for tokens, longer in k_by_length or ())])


#: What data-parallel ranks share, by `CostModel.sharding`, as it is called in short and said in full.
ZERO = {"none": "no sharding", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "weights": "ZeRO-3"}
_SHARDED = {"optimizer": "optimizer states", "gradients": "gradients and optimizer states"}
_SHARDED["weights"] = f"weights, {_SHARDED['gradients']}"


def sharding_words(sharding: str, dp: int) -> str:
    """Say what `dp` data-parallel ranks, several, share."""
    if sharding not in _SHARDED:
        return "nothing sharded"
    return f"{_SHARDED[sharding]} sharded over {dp:,} ranks ({ZERO[sharding]})"


def gibibytes(num_bytes: int) -> str:
    """Print a size of memory, given in bytes."""
    return f"{num_bytes / 2**30:,.1f} GiB"


def power_of_two(tokens: int) -> str:
    """Print a power of two as people write it: 512, 8K, 1M (K = 1024)."""
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)


def selection_words(config: PlanConfig, *, num_held_out: int, num_sequences: int) -> list[tuple[str, str]]:
    """List what the plan holds of the data, by name, where that is not every sequence once an epoch.

    The data have `num_sequences`, of which `num_held_out` are held out.
    """
    rows = []
    if config.holdout is not None:
        held_out = f"{num_held_out:,} of {num_sequences:,} sequences"
        rows.append(("held out", held_out + (": these" if config.part == "eval" else "")))
    if config.mix:
        rows.append(("mix", ", ".join(f"{source} x {weight:g}" for source, weight in config.mix.items())))
    return rows
