"""A tuning as one JSON document, and back: what `tune` writes, and `build --auto` reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.domains import find_mismatch
from chunkplan.errors import DataError, UsageError
from chunkplan.files.json_file import read_json, write_json
from chunkplan.tuning.baselines import Baseline
from chunkplan.tuning.document_entries import (
    EXPECTED,
    OPTIONAL_ENTRIES,
    PLAN_ENTRIES,
    BaselineEntry,
    ChoiceEntry,
    TuningDocument,
)
from chunkplan.tuning.grid import Choice
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import LayoutEstimate, Tuning
from chunkplan.version import __version__

_STATED = tuple(name for name in PLAN_ENTRIES if name not in OPTIONAL_ENTRIES)

#: Settings that a tuning was found for.
_OPTIONS = (
    *("gpus", "dp", "tp", "pp", "gpu_memory", "precision", "sharding", "lora_rank", "load_in_4bit", "optimizer"),
    *("fused_kernels", "global_batch", "seed", "chunk_sizes", "ks", "schedules", "cp", "keep_attention"),
)

_HINT = "write it again with `chunkplan tune`"


@dataclass(frozen=True)
class Tuned:
    """The part of a tuning that a plan takes over.

    `config` has the entries that were chosen (`PLAN_ENTRIES`), global batch and seed; what else is in it are defaults.
    `token_histogram` and `longest_sequence`: of the data that it was found for.
    """

    config: PlanConfig
    cost: CostModel
    gpu_memory: int
    token_histogram: dict[int, float]
    longest_sequence: int


def tuned(tuning: Tuning) -> Tuned:
    """Take from a tuning what a plan needs: the recommended choice, or where there is none, the fastest."""
    return Tuned(
        config=tuning.best.config,
        cost=tuning.best.cost,
        gpu_memory=tuning.options.gpu_memory,
        token_histogram=tuning.token_histogram,
        longest_sequence=tuning.longest_sequence,
    )


def tuning_document(tuning: Tuning) -> TuningDocument:
    """Return all of a tuning, for JSON. Times are in seconds, memory in bytes.

    `chosen` is what a plan is built with: the recommended choice, where there is one, else the fastest.
    """
    chosen, price = tuning.best, tuning.options.gpu_hour_price
    document = {
        "kind": "tuning",
        "schema_version": 1,
        "tool_version": __version__,
        "options": _options_entry(tuning.options),
        "data": {
            "num_sequences": tuning.num_sequences,
            "longest_sequence": tuning.longest_sequence,
            "tokens_per_step": tuning.tokens_per_step,
            "token_histogram": {str(length): share for length, share in tuning.token_histogram.items()},
            "positions": None if tuning.positions is None else asdict(tuning.positions),
        },
        "baselines": [baseline_entry(row) for row in tuning.baselines],
        "layouts": [_layout_entry(estimate) for estimate in tuning.layouts],
        "choices": [choice_entry(choice) for choice in tuning.choices],
        "pareto": list(tuning.pareto),
        "chosen": choice_entry(chosen),
        "recommended": tuning.recommended is not None,
        "fastest": choice_entry(tuning.chosen),
        "speedup": tuning.baselines[0].step_ns / chosen.step_ns,
        "speedup_over_best": tuning.gain,
        "speedup_over": None if tuning.best_baseline is None else tuning.best_baseline.name,
        "fewest_gpus": tuning.fewest_gpus,
        "epoch_seconds": tuning.epoch_hours * 3600,
        "gpu_hours": tuning.gpu_hours,
        "price": None if price is None else price * tuning.gpu_hours,
        "cost_model": chosen.cost.to_dict(),
    }
    return cast(TuningDocument, document)


def _options_entry(options: TuneOptions) -> dict[str, object]:
    entry = {name: getattr(options, name) for name in _OPTIONS}
    lists = {name: list(value) for name, value in entry.items() if isinstance(value, tuple)}
    said = {"compile": True} if options.compile else {}
    return entry | lists | said | ({"loss": options.loss} if options.loss != "sft" else {})


def answers(document: TuningDocument, options: TuneOptions, given: Collection[str]) -> bool:
    """True if a document is the result of `tune` with those of these options that were `given`, for whatever data."""
    cost = CostModel.from_dict(document["cost_model"], where="")
    entry = _options_entry(options)
    return (
        (cost.shape == options.shape or "shape" not in given)
        and (cost.hardware == options.gpu or not {"hardware", "gpu_memory"}.intersection(given))
        and all(document["options"].get(name) == entry[name] for name in entry if name in given)
    )


def options_asked(document: TuningDocument) -> dict[str, object]:
    """The options that a document was found for, by field of `TuneOptions`."""
    cost = CostModel.from_dict(document["cost_model"], where="")
    entry = {name: tuple(value) if isinstance(value, list) else value for name, value in document["options"].items()}
    layout = ("gpus",) if entry["gpus"] is None else ("dp", "pp")
    left = {name: value for name, value in entry.items() if name not in layout}
    return left | {"shape": cost.shape, "hardware": cost.hardware}


def choice_entry(choice: Choice) -> ChoiceEntry:
    """Return the `ChoiceEntry` of a choice."""
    config, cost = choice.config, choice.cost
    entry = {
        **{name: getattr(config, name) for name in _STATED},
        **{name: getattr(cost, name) for name in ("tp", "checkpointing", "kv_offload", "sharding")},
        "step_seconds": choice.step_ns / 1e9,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "bubble": choice.bubble,
        "recompute_share": choice.recompute_share,
        **({"extra_forward_seconds": choice.extra_ns / 1e9} if choice.extra_ns else {}),
        "memory": {**asdict(choice.memory), "total": choice.memory.total},
        "host_memory": choice.host_bytes,
        "fits": choice.fits,
        "plan_only": choice.plan_only,
        **{name: getattr(config, name) for name, usual in OPTIONAL_ENTRIES.items() if getattr(config, name) != usual},
    }
    return cast(ChoiceEntry, entry)


def _layout_entry(estimate: LayoutEstimate) -> dict[str, object]:
    return estimate.layout._asdict() | {
        "step_seconds": None if estimate.step_ns is None else estimate.step_ns / 1e9,
        "runnable_seconds": None if estimate.runnable_ns is None else estimate.runnable_ns / 1e9,
    }


def baseline_entry(row: Baseline) -> BaselineEntry:
    """Return the `BaselineEntry` of a baseline."""
    entry = {
        **{name: getattr(row, name) for name in ("key", "name", "tokens_per_second", "checkpointing", "sharding")},
        **row.layout._asdict(),
        "step_seconds": row.step_ns / 1e9,
        "largest_micro_batch": row.largest,
        "memory": {**asdict(row.memory), "total": row.memory.total},
        "fits": row.fits,
        "lost_tokens": row.lost,
    }
    return cast(BaselineEntry, entry)


def write_tuning(tuning: Tuning, path: Path) -> None:
    """Write the document to `path`, whole or not at all.

    Raises:
        UsageError: `path` cannot be written.
    """
    write_json(path, tuning_document(tuning), indent=2)


def read_tuning_document(path: Path) -> TuningDocument:
    """Read the document at `path`, and check every entry that is relied on.

    Raises:
        UsageError: there is no such file.
        DataError: it is not a document of `write_tuning`, or damaged.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="`chunkplan tune` writes one")
    document = cast(TuningDocument, read_json(path, hint=_HINT))
    if found := find_mismatch(document, EXPECTED):
        raise DataError(found, where=str(path), hint=_HINT)
    if max(document["pareto"], default=0) >= len(document["choices"]):
        raise DataError("`pareto` names a choice that is not there", where=str(path), hint=_HINT)
    CostModel.from_dict(document["cost_model"], where=str(path))
    return document


def read_tuning(path: Path) -> Tuned:
    """Read what a plan takes from the document at `path`; raises as `read_tuning_document` does."""
    document = read_tuning_document(path)
    chosen, options, data = document["chosen"], document["options"], document["data"]
    stated = cast(Mapping[str, Any], chosen)
    entries = {name: stated.get(name, OPTIONAL_ENTRIES.get(name)) for name in PLAN_ENTRIES}
    try:
        config = PlanConfig(**entries, global_batch=options["global_batch"], seed=options["seed"])
    except UsageError as error:
        raise DataError(error.message, where=str(path), hint=_HINT) from error
    return Tuned(
        config=config,
        cost=CostModel.from_dict(document["cost_model"], where=str(path)),
        gpu_memory=options["gpu_memory"],
        token_histogram={int(length): share for length, share in data["token_histogram"].items()},
        longest_sequence=data["longest_sequence"],
    )
