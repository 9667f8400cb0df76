"""Counts, shares, durations and sizes, and what a plan was made with, as people say them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkplan.config.plan import PlanConfig


def counted(number: int, noun: str) -> str:
    """Print how many there are: "1 step", "1,030 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_repr(result: Any) -> str:
    """The `repr` of a dataclass without what is as by default: numbers, names and paths; of other values the size or
    type."""

    def shown(value: Any) -> str:
        if value is None or isinstance(value, (bool, int, float, str, Path)):
            return repr(str(value) if isinstance(value, Path) else value)
        return f"<{len(value)}>" if hasattr(value, "__len__") else f"<{type(value).__name__}>"

    values = ((one, getattr(result, one.name)) for one in fields(result) if one.repr)
    entries = (f"{one.name}={shown(value)}" for one, value in values if one.default is not value)
    return f"{type(result).__name__}({', '.join(entries)})"


def percent(share: float) -> str:
    """Print a share of 1 as a percentage."""
    return f"{share:.1%}" if share == 0 or share >= 0.001 else f"{share:.2%}" if share >= 0.0001 else "<0.01%"


def ratio(value: float) -> str:
    """Print how often one thing goes into another: to four places near 1, to two below 10, whole above."""
    return f"{value:.4f}" if value < 1.1 else f"{value:.2f}" if value < 9.995 else f"{value:,.0f}"


def seconds(microseconds: float) -> str:
    """Print a duration, given in microseconds."""
    value = microseconds / 1e6
    if value >= 7200:
        return f"{value / 3600:,.1f} h"
    if value >= 120:
        return f"{value / 60:.1f} min"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def left_words(seconds_left: float) -> str:
    """Print how long work still takes, in a unit that people think of such a time in."""
    if seconds_left >= 5400:
        return f"{seconds_left / 3600:,.1f} h left"
    return f"{seconds_left / 60:.0f} min left" if seconds_left >= 90 else f"{seconds_left:.0f} s left"


class Pace:
    """Rate of progress, estimated from what was done at which time.

    It counts from the first report, because what comes before that is often other work, such as to compile, and then
    from the middle of that time on, because parts of the work may go at other rates.
    """

    #: A rate is told after so many seconds and so much of the work, or after so many seconds whatever is done.
    _SECONDS, _SHARE, _ANY_SHARE_SECONDS = 10.0, 0.05, 120.0

    #: Of work whose parts are alike it is told after so many seconds from the beginning.
    ALIKE_SECONDS = 5.0

    def __init__(self, began: float | None = None) -> None:
        """Begin without any report; `began`: when, in seconds, of work whose parts are alike."""
        self._began = began
        self._first: tuple[float, int] | None = None
        self._later: deque[tuple[float, int]] = deque()

    def rate(self, done: int, total: int, now: float) -> float | None:
        """Report that `done` of `total` is done at the time `now` in seconds; return the rate in what is done a
        second, or None as long as there is too little to tell it from."""
        if self._first is None:
            self._first = now, done
            self._later.append(self._first)
        began, done_then = self._first
        middle = (began + now) / 2
        while len(self._later) > 1 and self._later[1][0] <= middle:
            self._later.popleft()
        since, done_since = self._later[0]
        if now >= self._later[-1][0] + 0.1:
            self._later.append((now, done))
        elapsed = now - began
        if self._began is not None:
            is_enough = now - self._began >= self.ALIKE_SECONDS
            if done_since == done:  # nothing since the first report
                since, done_since = self._began, 0
        else:
            is_enough = elapsed >= self._SECONDS and done - done_then >= self._SHARE * total
            is_enough |= elapsed >= self._ANY_SHARE_SECONDS
        if not is_enough or done <= done_since:
            return None
        return (done - done_since) / (now - since)


def k_words(k: int, k_by_length: Iterable[Iterable[int]] | None) -> str:
    """Print K, and what it is for longer sequences."""
    return ", ".join([str(k), *(f"{longer} over {tokens:,}" for tokens, longer in k_by_length or ())])


def layout_words(dp: int, tp: int, pp: int) -> str:
    """Name the kinds of parallelism, and over how many GPUs each goes."""
    return ", ".join(f"{axis} {size}" for axis, size in (("dp", dp), ("tp", tp), ("pp", pp)) if size > 1) or "one GPU"


#: What data-parallel ranks share, by `CostModel.sharding`, as it is called in short and said in full.
ZERO = {"none": "no sharding", "optimizer": "ZeRO-1", "gradients": "ZeRO-2", "weights": "ZeRO-3"}
_SHARDED = {"optimizer": "optimizer states", "gradients": "gradients and optimizer states"}
_SHARDED["weights"] = f"weights, {_SHARDED['gradients']}"


def sharding_words(sharding: str, dp: int) -> str:
    """Name what `dp` data-parallel ranks, several, share."""
    if sharding not in _SHARDED:
        return "nothing sharded"
    return f"{_SHARDED[sharding]} sharded over {dp:,} ranks ({ZERO[sharding]})"


_KEPT = {"gpu": "on the GPU", "host": "in host memory"}


def kept_words(where: str) -> str:
    """Name where a chunk keeps attention for its recompute; "" if it keeps none, or in a damaged plan."""
    return _KEPT.get(where, "")


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
    """List what of the data is held out, and how often an epoch takes its sources where that is not once.

    The data have `num_sequences`, of which `num_held_out` are held out.
    """
    rows = [("eval", "none (build with --holdout 0.01)")]
    if num_held_out:
        held_out = f"{num_held_out:,} of {num_sequences:,} sequences held out"
        rows = [("eval", held_out + (": these" if config.part == "eval" else ""))]
    if config.mix:
        rows.append(("mix", ", ".join(f"{source} x {weight:g}" for source, weight in config.mix.items())))
    return rows


def trained_words(lora_rank: int, load_in_4bit: bool) -> str:
    """Name the trained part of a model with these entries of its cost model."""
    if not lora_rank:
        return "all weights trained"
    return f"adapters of rank {lora_rank}" + (" on weights in 4 bits" if load_in_4bit else "")
