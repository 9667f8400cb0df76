"""What the document of a tuning holds: the type of each part, and what an entry that is relied on may be.

A document may come from anywhere. It is checked once, when it is read; what is `NotRequired` is written, and not
relied on by who reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict, final

from chunkplan.config.plan import KeepAttention, PlanConfig, Split
from chunkplan.cost.model import SHARDINGS, Sharding
from chunkplan.domains import FLAG, NUMBER, TEXT, Domain, Expected, one_of, or_null, whole
from chunkplan.options import entries_of

#: Of the document.
VERSION = 1


class PlanEntries(TypedDict):
    """Entries of a choice that a plan is built with, as a `PlanConfig` has them."""

    chunk_size: int
    k: int
    k_by_length: Sequence[Sequence[int]] | None
    dp: int
    pp: int
    schedule: str
    virtual_stages: int
    equal_chunks: bool
    cp: NotRequired[str | int]  # missing where no sequence may be shared
    stage_layers: NotRequired[Sequence[int]]  # missing where they are as even as they come
    split: NotRequired[Split]  # missing where long sequences are cut at ChunkSize ("full")
    keep_attention: NotRequired[KeepAttention]  # missing where none is kept ("off")


PLAN_ENTRIES = tuple(PlanEntries.__annotations__)


@final
class ChoiceEntry(PlanEntries):
    """A configuration that was tried. `memory`: bytes by what takes them, and their `total`.

    `host_memory`: bytes that a GPU keeps there.
    """

    tp: int
    checkpointing: str
    kv_offload: bool
    sharding: NotRequired[str]  # missing in documents that have one for all, in `options`
    step_seconds: float
    tokens_per_second: NotRequired[float]
    mfu: float
    bubble: float
    recompute_share: float
    memory: dict[str, int]
    host_memory: NotRequired[int]
    fits: bool
    plan_only: str | None


@final
class BaselineEntry(TypedDict):
    """A baseline, on its best layout. `lost_tokens`: the share of the tokens that it cuts off."""

    name: str
    dp: NotRequired[int]
    tp: NotRequired[int]
    pp: NotRequired[int]
    step_seconds: float
    tokens_per_second: NotRequired[float]
    largest_micro_batch: NotRequired[int]
    checkpointing: str
    sharding: NotRequired[str]
    memory: dict[str, int]
    fits: bool
    lost_tokens: float


class LayoutEntry(TypedDict):
    """A layout, and by a first look at it the seconds of a step, and of one that the runtime can run."""

    dp: int
    tp: int
    pp: int
    step_seconds: float | None
    runnable_seconds: float | None


class OptionsEntry(TypedDict):
    """What was tuned for. `gpu_memory` is in bytes."""

    gpus: NotRequired[int | None]
    dp: NotRequired[int]
    tp: NotRequired[int]
    pp: NotRequired[int]
    gpu_memory: int
    precision: NotRequired[str]
    sharding: Sharding | Literal["auto"]
    lora_rank: NotRequired[int]
    load_in_4bit: NotRequired[bool]
    optimizer: NotRequired[str]
    fused_kernels: NotRequired[str]
    compile: NotRequired[bool]
    global_batch: int
    seed: int
    chunk_sizes: NotRequired[list[int]]
    ks: NotRequired[list[int]]
    schedules: NotRequired[list[str] | None]
    cp: NotRequired[str | int]
    keep_attention: NotRequired[str]


class DataEntry(TypedDict):
    """The sequences that were tuned for.

    `token_histogram`: the share of all tokens by length class. `positions`: as `chunkplan.lengths.Positions` has them.
    """

    num_sequences: NotRequired[int]
    longest_sequence: int
    tokens_per_step: NotRequired[float]
    token_histogram: dict[str, float]
    positions: NotRequired[dict[str, int] | None]


class ShapeEntry(TypedDict):
    """The model that a cost model is for."""

    name: str
    num_layers: int


class HardwareEntry(TypedDict):
    """The GPU that a cost model is for."""

    name: str


class CostModelEntry(TypedDict):
    """A cost model, in the manifest of a plan as in a tuning; these of its entries are relied on."""

    shape: ShapeEntry
    hardware: HardwareEntry
    tp: int
    precision: NotRequired[str]
    checkpointing: str
    kv_offload: bool
    sharding: NotRequired[str]  # missing in plans that have `weight_shards`
    lora_rank: NotRequired[int]  # these five only where they say something
    load_in_4bit: NotRequired[bool]
    optimizer: NotRequired[str]
    fused_kernels: NotRequired[str]
    compile: NotRequired[bool]


class TuningDocument(TypedDict):
    """A tuning, for JSON. `pareto` has places in `choices`; `chosen` is what a plan is built with."""

    kind: str
    schema_version: int
    tool_version: NotRequired[str]
    options: OptionsEntry
    data: DataEntry
    baselines: list[BaselineEntry]
    layouts: NotRequired[list[LayoutEntry]]
    choices: list[ChoiceEntry]
    pareto: list[int]
    chosen: ChoiceEntry
    recommended: bool
    fastest: NotRequired[ChoiceEntry]
    speedup: NotRequired[float]
    speedup_over_best: NotRequired[float | None]
    fewest_gpus: NotRequired[int]
    epoch_seconds: NotRequired[float]
    gpu_hours: NotRequired[float]
    price: NotRequired[float | None]
    cost_model: CostModelEntry


_SHARES = Domain(
    lambda value: (
        isinstance(value, dict)
        and all(key.isdecimal() and 0 < int(key) < 2**63 and NUMBER.holds(share) for key, share in value.items())
    ),
    "shares by number of tokens",
)

#: Rounding may take what is nothing below zero.
_RATIO = Domain(lambda value: type(value) in (int, float) and math.isfinite(value), "a number")

#: No step takes no time, and what is nowhere near a step cannot be drawn beside one.
_SECONDS = Domain(lambda value: NUMBER.holds(value) and 1e-9 <= value <= 1e12, "seconds, from 1e-9 to 1e12")

#: Of a choice, and of a baseline.
_OUTCOME: dict[str, Expected] = {"step_seconds": _SECONDS, "memory": {"total": whole(1)}, "checkpointing": TEXT}

_CHOICE = {
    **_OUTCOME,
    **{
        f"{name}?" if name in ("cp", "stage_layers", "split", "keep_attention") else name: expected
        for name, expected in entries_of(PlanConfig).items()
        if name in PLAN_ENTRIES
    },
    "schedule": TEXT,
    "tp": whole(1),
    "kv_offload": FLAG,
    "sharding?": one_of(*SHARDINGS),
    "mfu": _RATIO,
    "bubble": _RATIO,
    "recompute_share": _RATIO,
    "fits": FLAG,
    "plan_only": or_null(TEXT),
}

#: What `CostModel.from_dict` checks is not said again.
EXPECTED: Expected = {
    "kind": one_of("tuning"),
    "schema_version": whole(VERSION, VERSION),
    "options": {
        "gpu_memory": whole(1),
        "sharding": one_of("auto", *SHARDINGS),
        "global_batch": whole(1),
        "seed": whole(),
    },
    "data": {"longest_sequence": whole(1), "token_histogram": _SHARES},
    "baselines": [{**_OUTCOME, "name": TEXT, "fits": FLAG, "lost_tokens": NUMBER}],
    "choices": [_CHOICE],
    "pareto": [whole()],
    "chosen": _CHOICE,
    "cost_model": {},
    "recommended": FLAG,
}
