"""Types and allowed values of the entries of a tuning document that its readers rely on.

A document may come from anywhere. It is checked once, when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, final

from chunkplan.config.plan import KeepAttention, PlanConfig, Split
from chunkplan.cost.model import SHARDINGS
from chunkplan.domains import FLAG, NUMBER, TEXT, Domain, Expected, one_of, or_null, whole
from chunkplan.options import entries_of


class PlanEntries(TypedDict):
    """Entries of a choice that a plan is built with, as a `PlanConfig` has them; see `OPTIONAL_ENTRIES`."""

    chunk_size: int
    k: int
    k_by_length: Sequence[Sequence[int]] | None
    dp: int
    pp: int
    schedule: str
    virtual_stages: int
    equal_chunks: bool
    cp: NotRequired[str | int]
    stage_layers: NotRequired[Sequence[int]]
    split: NotRequired[Split]
    keep_attention: NotRequired[KeepAttention]
    loss: NotRequired[str]


PLAN_ENTRIES = tuple(PlanEntries.__annotations__)

#: Entries that a document leaves out at these values.
OPTIONAL_ENTRIES: Mapping[str, Any] = {
    "cp": "off",
    "stage_layers": None,
    "split": "full",
    "keep_attention": "off",
    "loss": "sft",
}


class OutcomeEntry(TypedDict):
    """Prediction of a way to train. `memory`: bytes by what takes them, and their `total`."""

    tp: int
    checkpointing: str
    sharding: str
    step_seconds: float
    tokens_per_second: float
    memory: dict[str, int]
    fits: bool


@final
class ChoiceEntry(PlanEntries, OutcomeEntry):
    """A configuration that was tried."""

    kv_offload: bool
    mfu: float
    bubble: float
    recompute_share: float
    plan_only: str | None


@final
class BaselineEntry(OutcomeEntry):
    """A baseline, on its best layout. `lost_tokens`: the share of the tokens that it cuts off."""

    name: str
    dp: int
    pp: int
    lost_tokens: float


class LayoutEntry(TypedDict):
    """A layout that was compared; None where nothing fits."""

    dp: int
    tp: int
    pp: int
    step_seconds: float | None


class OptionsEntry(TypedDict):
    """The options that were tuned for. `gpu_memory` is in bytes."""

    gpu_memory: int
    sharding: str
    global_batch: int
    seed: int


class DataEntry(TypedDict):
    """The sequences that were tuned for. `token_histogram`: the share of all tokens by length class."""

    num_sequences: int
    longest_sequence: int
    token_histogram: dict[str, float]


class ShapeEntry(TypedDict):
    """The model that a cost model is for."""

    name: str
    num_layers: int


class HardwareEntry(TypedDict):
    """The GPU that a cost model is for."""

    name: str


class CostModelEntry(TypedDict):
    """A cost model, in the manifest of a plan as in a tuning; some entries are there where they say something."""

    shape: ShapeEntry
    hardware: HardwareEntry
    tp: int
    precision: str
    checkpointing: str
    kv_offload: bool
    sharding: str
    lora_rank: NotRequired[int]
    load_in_4bit: NotRequired[bool]
    optimizer: NotRequired[str]
    fused_kernels: NotRequired[str]
    compile: NotRequired[bool]


class TuningDocument(TypedDict):
    """A tuning, for JSON. `pareto` has places in `choices`; `chosen` is what a plan is built with."""

    kind: str
    schema_version: int
    options: OptionsEntry
    data: DataEntry
    baselines: list[BaselineEntry]
    layouts: list[LayoutEntry]
    choices: list[ChoiceEntry]
    pareto: list[int]
    chosen: ChoiceEntry
    recommended: bool
    speedup_over: str | None
    fewest_gpus: int
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

#: Entries of a choice, and of a baseline.
_OUTCOME: dict[str, Expected] = {
    **{name: whole(1) for name in ("dp", "tp", "pp")},
    "step_seconds": _SECONDS,
    "tokens_per_second": NUMBER,
    "sharding": one_of(*SHARDINGS),
    "memory": {"total": whole(1)},
    "checkpointing": TEXT,
    "fits": FLAG,
}
_CHOICE = {
    **_OUTCOME,
    **{
        f"{name}?" if name in OPTIONAL_ENTRIES else name: domain
        for name, domain in entries_of(PlanConfig).items()
        if name in PLAN_ENTRIES
    },
    "schedule": TEXT,
    "kv_offload": FLAG,
    "mfu": _RATIO,
    "bubble": _RATIO,
    "recompute_share": _RATIO,
    "plan_only": or_null(TEXT),
}

#: `CostModel.from_dict` checks the rest.
EXPECTED: Expected = {
    "kind": one_of("tuning"),
    "schema_version": whole(1, 1),
    "options": {
        "gpu_memory": whole(1),
        "sharding": one_of("auto", *SHARDINGS),
        "global_batch": whole(1),
        "seed": whole(),
    },
    "data": {"num_sequences": whole(1), "longest_sequence": whole(1), "token_histogram": _SHARES},
    "baselines": [{**_OUTCOME, "name": TEXT, "lost_tokens": NUMBER}],
    "choices": [_CHOICE],
    "layouts": [{**{name: whole(1) for name in ("dp", "tp", "pp")}, "step_seconds": or_null(_SECONDS)}],
    "pareto": [whole()],
    "speedup_over": or_null(TEXT),
    "chosen": _CHOICE,
    "cost_model": {},
    "recommended": FLAG,
    "fewest_gpus": whole(1),
}
