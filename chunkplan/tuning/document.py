"""A tuning as one JSON document, and back: what `tune --output` writes, and `build --auto --from` reads."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel, Sharding
from chunkplan.domains import FLAG, NUMBER, TEXT, Domain, find_mismatch, one_of, or_null, whole
from chunkplan.errors import DataError, UsageError
from chunkplan.files.json_file import read_json, write_json
from chunkplan.options import entries_of
from chunkplan.tuning.baselines import Baseline
from chunkplan.tuning.grid import Choice
from chunkplan.tuning.tune import Tuning
from chunkplan.version import __version__

#: Of this document.
_VERSION = 1

_HINT = "write it again with `chunkplan tune --output FILE`"

#: Entries of a choice that a plan is built with.
PLAN_ENTRIES = ("chunk_size", "k", "k_by_length", "dp", "pp", "schedule", "virtual_stages", "equal_chunks")

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

#: Of a choice, and of a way of today.
_OUTCOME = {"step_seconds": _SECONDS, "memory": {"total": whole(1)}, "checkpointing": TEXT}

_CHOICE = {
    **_OUTCOME,
    **{name: expected for name, expected in entries_of(PlanConfig).items() if name in PLAN_ENTRIES},
    "schedule": TEXT,
    "tp": whole(1),
    "kv_offload": FLAG,
    "mfu": _RATIO,
    "bubble": _RATIO,
    "recompute_share": _RATIO,
    "fits": FLAG,
    "plan_only": or_null(TEXT),
}

_EXPECTED: dict[str, Any] = {
    "kind": one_of("tuning"),
    "schema_version": whole(_VERSION, _VERSION),
    "options": {
        "gpu_memory": whole(1),
        "sharding": one_of("none", "optimizer", "gradients", "weights"),
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


@dataclass(frozen=True)
class Tuned:
    """What a plan takes from a tuning.

    `settings`: entries of a `PlanConfig`, `PLAN_ENTRIES` and global_batch and seed. `token_histogram` and
    `longest_sequence`: of the data that it was found for.
    """

    settings: dict[str, Any]
    cost: CostModel
    sharding: Sharding
    gpu_memory: int
    token_histogram: dict[int, float]
    longest_sequence: int


def tuned(tuning: Tuning) -> Tuned:
    """What a plan takes: the recommended choice, or where there is none, the fastest."""
    choice = tuning.best
    settings = {name: getattr(choice.config, name) for name in PLAN_ENTRIES}
    return Tuned(
        settings={**settings, "global_batch": tuning.options.global_batch, "seed": tuning.options.seed},
        cost=choice.cost,
        sharding=tuning.options.sharding,
        gpu_memory=tuning.options.gpu_memory,
        token_histogram=tuning.token_histogram,
        longest_sequence=tuning.longest_sequence,
    )


def tuning_document(tuning: Tuning) -> dict[str, Any]:
    """All of it, for JSON. Times are in seconds, memory in bytes.

    `chosen` is what a plan is built with: the recommended choice, where there is one, else the fastest.
    """
    options = tuning.options
    chosen = tuning.best
    today, best = tuning.baselines[0].step_ns, tuning.best_of_today
    return {
        "kind": "tuning",
        "schema_version": _VERSION,
        "tool_version": __version__,
        "options": {
            **{name: getattr(options, name) for name in ("gpus", "gpu_memory", "precision", "sharding")},
            **{name: getattr(options, name) for name in ("global_batch", "seed")},
            **{name: list(getattr(options, name)) for name in ("chunk_sizes", "ks")},
        },
        "data": {
            "num_sequences": tuning.num_sequences,
            "longest_sequence": tuning.longest_sequence,
            "tokens_per_step": tuning.tokens_per_step,
            "token_histogram": {str(length): share for length, share in tuning.token_histogram.items()},
            "positions": tuning.positions and asdict(tuning.positions),
        },
        "baselines": [_baseline(row, tuning.tokens_per_step) for row in tuning.baselines],
        "layouts": [
            {**layout._asdict(), "step_seconds": _seconds(step_ns), "runnable_seconds": _seconds(runnable_ns)}
            for layout, step_ns, runnable_ns in tuning.layouts
        ],
        "choices": [choice_document(choice) for choice in tuning.choices],
        "pareto": list(tuning.pareto),
        "chosen": choice_document(chosen),
        "recommended": tuning.recommended is not None,
        "fastest": choice_document(tuning.chosen),
        "speedup": today / chosen.step_ns,
        "speedup_over_best": None if best is None else best.step_ns / chosen.step_ns,
        "cost_model": chosen.cost.to_dict(),
    }


def choice_document(choice: Choice) -> dict[str, Any]:
    """A choice, for JSON."""
    return {
        **{name: getattr(choice.config, name) for name in PLAN_ENTRIES},
        "tp": choice.cost.tp,
        "checkpointing": choice.cost.checkpointing,
        "kv_offload": choice.cost.kv_offload,
        "step_seconds": choice.step_ns / 1e9,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "bubble": choice.bubble,
        "recompute_share": choice.recompute_share,
        "memory": {**asdict(choice.memory), "total": choice.memory.total},
        "fits": choice.fits,
        "plan_only": choice.plan_only,
    }


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e9


def _baseline(row: Baseline, tokens_per_step: float) -> dict[str, Any]:
    return {
        "name": row.name,
        "step_seconds": row.step_ns / 1e9,
        "tokens_per_second": tokens_per_step * (1 - row.lost) / (row.step_ns / 1e9),
        "largest_micro_batch": row.largest,
        "checkpointing": row.checkpointing,
        "memory": {**asdict(row.memory), "total": row.memory.total},
        "fits": row.fits,
        "lost_tokens": row.lost,
    }


def write_tuning(tuning: Tuning, path: Path) -> None:
    """Write the document to `path`, whole or not at all.

    Raises:
        UsageError: `path` cannot be written.
    """
    write_json(path, tuning_document(tuning), indent=2)


def read_tuning_document(path: Path) -> dict[str, Any]:
    """The document at `path`, with every entry that is relied on checked.

    Raises:
        UsageError: there is no such file.
        DataError: it is not a document of `write_tuning`, or damaged.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="`chunkplan tune --output FILE` writes one")
    document = read_json(path, hint=_HINT)
    if found := find_mismatch(document, _EXPECTED):
        raise DataError(found, where=str(path), hint=_HINT)
    if max(document["pareto"], default=0) >= len(document["choices"]):
        raise DataError("`pareto` names a choice that is not there", where=str(path), hint=_HINT)
    CostModel.from_dict(document["cost_model"], where=str(path))
    return cast(dict[str, Any], document)


def read_tuning(path: Path) -> Tuned:
    """What a plan takes from the document at `path`; raises as `read_tuning_document` does."""
    document = read_tuning_document(path)
    chosen, options, data = document["chosen"], document["options"], document["data"]
    by_length = chosen["k_by_length"]
    settings = {
        **{name: chosen[name] for name in PLAN_ENTRIES},
        "k_by_length": None if by_length is None else tuple((tokens, k) for tokens, k in by_length),
        "global_batch": options["global_batch"],
        "seed": options["seed"],
    }
    try:
        PlanConfig(**settings)
    except UsageError as error:
        raise DataError(error.message, where=str(path), hint=_HINT) from error
    return Tuned(
        settings=settings,
        cost=CostModel.from_dict(document["cost_model"], where=str(path)),
        sharding=options["sharding"],
        gpu_memory=options["gpu_memory"],
        token_histogram={int(length): share for length, share in data["token_histogram"].items()},
        longest_sequence=data["longest_sequence"],
    )
