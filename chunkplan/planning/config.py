"""What a plan is built with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from chunkplan.errors import HELP_HINT, UsageError
from chunkplan.packing import PACKERS
from chunkplan.planfile.manifest_entries import MAX_DP, MAX_PP, MAX_VIRTUAL
from chunkplan.schedule.families import SCHEDULES

Split = Literal["full", "even", "cost", "none"]
Balance = Literal["spread", "search"]
LastBatch = Literal["keep", "drop"]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What a plan is built with.

    `chunk_size` tokens at most in a chunk; at most `k` chunks of a group hold activations, or, of sequences longer than
    the `tokens` of a pair (tokens, K) in `k_by_length`, K; `global_batch` sequences a step; `epochs` passes over the
    data; a short last batch of an epoch is kept or dropped; `dp` data-parallel ranks of `pp` pipeline stages each;
    `seed` of the shuffle.

    `schedule`: one of `chunkplan.schedule.families.SCHEDULES`; None stands for "algorithm2" on one stage and "1f1b" on
    more. `virtual_stages`: model parts of a stage, more than 1 only with "interleaved"; None stands for 2 there.
    `memory_tokens`: the most tokens whose activations a stage may hold.

    `split`: a sequence over ChunkSize is cut at ChunkSize ("full"), into parts of equal length ("even") or of equal
    predicted time ("cost"), or refused ("none"). `tail_sharing`: whole short sequences fill the free room in the chunks
    of split ones; None stands for yes on one stage, and no on a pipeline, where chunks that wait for no other fill
    bubbles. `packing`: one of `chunkplan.packing.PACKERS`, for the ranks that best-fit decreasing is not proved to pack
    best. `balance`: "search" looks with CP-SAT for a better spread of every step than the heuristic's. `equal_chunks`:
    every rank of a step has the same number of chunks; zero-loss chunks fill up.

    `holdout`: a share of the sequences (below 1) or a number of them that is not trained on; `part`: whether this plan
    is of those ("eval") or of the others ("train"). `mix`: how often an epoch holds the sequences of a source, by the
    source's path; 1 for those not named.

    Raises:
        UsageError: a value is out of range.
    """

    chunk_size: int
    k: int
    k_by_length: tuple[tuple[int, int], ...] | None = None
    global_batch: int = 256
    epochs: int = 1
    last_batch: LastBatch = "keep"
    dp: int = 1
    pp: int = 1
    schedule: str | None = None
    virtual_stages: int | None = None
    memory_tokens: int | None = None
    seed: int = 0
    split: Split = "full"
    tail_sharing: bool | None = None
    packing: str = "auto"
    balance: Balance = "spread"
    equal_chunks: bool = False
    holdout: int | float | None = None
    part: Literal["train", "eval"] = "train"
    mix: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.tail_sharing is None:
            object.__setattr__(self, "tail_sharing", self.pp == 1)
        if self.schedule is None:
            object.__setattr__(self, "schedule", "algorithm2" if self.pp == 1 else "1f1b")
        if self.virtual_stages is None:
            object.__setattr__(self, "virtual_stages", 2 if self.schedule == "interleaved" else 1)
        for name in ("chunk_size", "k", "global_batch", "epochs", "dp", "pp", "virtual_stages", "seed"):
            value = getattr(self, name)
            least, most = int(name != "seed"), _MOST.get(name, 2**31 - 1)
            if type(value) is not int or not least <= value <= most:
                raise _refusal(name, value, f"a whole number from {least} to {most}")
        for name, choices in (
            ("last_batch", get_args(LastBatch)),
            ("split", get_args(Split)),
            ("balance", get_args(Balance)),
            ("packing", tuple(PACKERS)),
            ("schedule", tuple(SCHEDULES)),
            ("part", ("train", "eval")),
        ):
            if getattr(self, name) not in choices:
                raise _refusal(name, getattr(self, name), " or ".join(choices))
        for name in ("tail_sharing", "equal_chunks"):
            if type(getattr(self, name)) is not bool:
                raise _refusal(name, getattr(self, name), "true or false")
        self._check_schedule()
        if self.holdout is not None and not _is_holdout(self.holdout):
            raise _refusal("holdout", self.holdout, "a share between 0 and 1, or a whole number of sequences from 1")
        if self.part == "eval" and self.holdout is None:
            raise UsageError("part is eval, but nothing is held out", hint="set holdout, for example to 0.01")
        if self.mix is not None and not isinstance(self.mix, Mapping):
            raise _refusal("mix", self.mix, "weights by source")
        for source, weight in (self.mix or {}).items():
            if type(weight) not in (int, float) or not math.isfinite(weight) or weight < 0:
                raise _refusal(f"mix {source}", weight, "a number from 0")

    def _check_schedule(self) -> None:
        if (self.schedule == "algorithm2") != (self.pp == 1):
            raise UsageError(
                f"schedule {self.schedule} is for {'one stage' if self.pp > 1 else 'two stages or more'}, "
                f"pp is {self.pp}",
                hint="leave schedule out, or set pp",
            )
        if self.virtual_stages != 1 and self.schedule != "interleaved":
            raise UsageError(
                f"schedule {self.schedule} has one virtual stage, virtual-stages is {self.virtual_stages}",
                hint="virtual stages are for schedule interleaved",
            )
        if self.memory_tokens is not None:
            if type(self.memory_tokens) is not int or not 1 <= self.memory_tokens < 2**62:
                raise _refusal("memory_tokens", self.memory_tokens, "a whole number from 1")
            if self.memory_tokens < self.chunk_size:
                raise UsageError(
                    f"memory-tokens is {self.memory_tokens:,}: below one chunk of {self.chunk_size:,}",
                    hint="a stage holds one chunk at least: raise memory-tokens or lower chunk-size",
                )
        if self.k_by_length is not None:
            if not _is_k_by_length(self.k_by_length):
                raise _refusal("k_by_length", self.k_by_length, "pairs of tokens and K, both from 1, tokens ascending")
            object.__setattr__(self, "k_by_length", tuple((tokens, k) for tokens, k in self.k_by_length) or None)


_MOST = {"dp": MAX_DP, "pp": MAX_PP, "virtual_stages": MAX_VIRTUAL}


def _is_k_by_length(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in value)
        and all(type(number) is int and 1 <= number < 2**31 for pair in value for number in pair)
        and all(before[0] < after[0] for before, after in pairwise(value))
    )


def _is_holdout(value: Any) -> bool:
    return (type(value) is int and value >= 1) or (type(value) is float and 0 < value < 1)


def _refusal(name: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"{name.replace('_', '-')} is {value!r}, expected {expected}", hint=HELP_HINT)
