"""A tuning as one JSON document, and back: what `tune` writes, and `build --auto` reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.domains import find_mismatch
from chunkplan.errors import DataError, UsageError
from chunkplan.files.json_file import read_json, write_json
from chunkplan.tuning.baselines import Baseline
from chunkplan.tuning.document_entries import (
    EXPECTED,
    VERSION,
    BaselineEntry,
    ChoiceEntry,
    CostModelEntry,
    LayoutEntry,
    OptionsEntry,
    TuningDocument,
)
from chunkplan.tuning.grid import Choice
from chunkplan.tuning.options import TuneOptions
from chunkplan.tuning.tune import FirstLook, Tuning
from chunkplan.version import __version__

_HINT = "write it again with `chunkplan tune`"


@dataclass(frozen=True)
class Tuned:
    """What a plan takes from a tuning.

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
    options, chosen = tuning.options, tuning.best
    first = tuning.baselines[0].step_ns
    return {
        "kind": "tuning",
        "schema_version": VERSION,
        "tool_version": __version__,
        "options": _options_entry(options),
        "data": {
            "num_sequences": tuning.num_sequences,
            "longest_sequence": tuning.longest_sequence,
            "tokens_per_step": tuning.tokens_per_step,
            "token_histogram": {str(length): share for length, share in tuning.token_histogram.items()},
            "positions": None if tuning.positions is None else asdict(tuning.positions),
        },
        "baselines": [_baseline_entry(row, tuning.tokens_per_step) for row in tuning.baselines],
        "layouts": [_layout_entry(look) for look in tuning.layouts],
        "choices": [_choice_entry(choice) for choice in tuning.choices],
        "pareto": list(tuning.pareto),
        "chosen": _choice_entry(chosen),
        "recommended": tuning.recommended is not None,
        "fastest": _choice_entry(tuning.chosen),
        "speedup": first / chosen.step_ns,
        "speedup_over_best": tuning.gain,
        "fewest_gpus": tuning.fewest_gpus,
        "epoch_seconds": tuning.epoch_hours * 3600,
        "gpu_hours": tuning.gpu_hours,
        "price": None if options.gpu_hour_price is None else options.gpu_hour_price * tuning.gpu_hours,
        "cost_model": cast(CostModelEntry, chosen.cost.to_dict()),
    }


def _options_entry(options: TuneOptions) -> OptionsEntry:
    entry: OptionsEntry = {
        "gpus": options.gpus,
        "dp": options.dp,
        "tp": options.tp,
        "pp": options.pp,
        "gpu_memory": options.gpu_memory,
        "precision": options.precision,
        "sharding": options.sharding,
        "lora_rank": options.lora_rank,
        "load_in_4bit": options.load_in_4bit,
        "optimizer": options.optimizer,
        "fused_kernels": options.fused_kernels,
        "global_batch": options.global_batch,
        "seed": options.seed,
        "chunk_sizes": list(options.chunk_sizes),
        "ks": list(options.ks),
        "schedules": None if options.schedules is None else list(options.schedules),
        "cp": options.cp,
        "keep_attention": options.keep_attention,
    }
    return entry | {"compile": True} if options.compile else entry  # earlier versions did not have it


def answers(document: TuningDocument, options: TuneOptions) -> bool:
    """Whether a document is what `tune` with these options has found, for whatever data."""
    cost = CostModel.from_dict(document["cost_model"], where="")
    same = (cost.shape, cost.hardware) == (options.shape, options.gpu)
    return same and document["options"] == _options_entry(options)


def _choice_entry(choice: Choice) -> ChoiceEntry:
    config = choice.config
    entry: ChoiceEntry = {
        "chunk_size": config.chunk_size,
        "k": config.k,
        "k_by_length": config.k_by_length,
        "dp": config.dp,
        "pp": config.pp,
        "schedule": config.schedule,
        "virtual_stages": config.virtual_stages,
        "equal_chunks": config.equal_chunks,
        "tp": choice.cost.tp,
        "checkpointing": choice.cost.checkpointing,
        "kv_offload": choice.cost.kv_offload,
        "sharding": choice.cost.sharding,
        "step_seconds": choice.step_ns / 1e9,
        "tokens_per_second": choice.tokens_per_second,
        "mfu": choice.mfu,
        "bubble": choice.bubble,
        "recompute_share": choice.recompute_share,
        "memory": {**asdict(choice.memory), "total": choice.memory.total},
        "host_memory": choice.host_bytes,
        "fits": choice.fits,
        "plan_only": choice.plan_only,
    }
    if config.cp != "off":
        entry["cp"] = config.cp
    if config.stage_layers is not None:
        entry["stage_layers"] = config.stage_layers
    if config.split != "full":
        entry["split"] = config.split
    if config.keep_attention != "off":
        entry["keep_attention"] = config.keep_attention
    return entry


def _layout_entry(look: FirstLook) -> LayoutEntry:
    return {
        "dp": look.layout.dp,
        "tp": look.layout.tp,
        "pp": look.layout.pp,
        "step_seconds": None if look.step_ns is None else look.step_ns / 1e9,
        "runnable_seconds": None if look.runnable_ns is None else look.runnable_ns / 1e9,
    }


def _baseline_entry(row: Baseline, tokens_per_step: float) -> BaselineEntry:
    return {
        "name": row.name,
        "dp": row.layout.dp,
        "tp": row.layout.tp,
        "pp": row.layout.pp,
        "step_seconds": row.step_ns / 1e9,
        "tokens_per_second": tokens_per_step * (1 - row.lost) / (row.step_ns / 1e9),
        "largest_micro_batch": row.largest,
        "checkpointing": row.checkpointing,
        "sharding": row.sharding,
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


def read_tuning_document(path: Path) -> TuningDocument:
    """Read the document at `path`, and check every entry that is relied on.

    Raises:
        UsageError: there is no such file.
        DataError: it is not a document of `write_tuning`, or damaged.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="`chunkplan tune` writes one")
    document = read_json(path, hint=_HINT)
    if found := find_mismatch(document, EXPECTED):
        raise DataError(found, where=str(path), hint=_HINT)
    if max(document["pareto"], default=0) >= len(document["choices"]):
        raise DataError("`pareto` names a choice that is not there", where=str(path), hint=_HINT)
    CostModel.from_dict(document["cost_model"], where=str(path))
    return cast(TuningDocument, document)


def read_tuning(path: Path) -> Tuned:
    """Read what a plan takes from the document at `path`; raises as `read_tuning_document` does."""
    document = read_tuning_document(path)
    chosen, options, data = document["chosen"], document["options"], document["data"]
    by_length = chosen["k_by_length"]
    cost = CostModel.from_dict(document["cost_model"], where=str(path))
    if "sharding" not in document["cost_model"] and options["sharding"] != "auto":  # one for all, in older documents
        cost = replace(cost, sharding=options["sharding"])
    try:
        config = PlanConfig(
            chunk_size=chosen["chunk_size"],
            k=chosen["k"],
            k_by_length=None if by_length is None else tuple((tokens, k) for tokens, k in by_length),
            dp=chosen["dp"],
            pp=chosen["pp"],
            schedule=chosen["schedule"],
            virtual_stages=chosen["virtual_stages"],
            equal_chunks=chosen["equal_chunks"],
            cp=chosen.get("cp", "off"),
            stage_layers=None if "stage_layers" not in chosen else tuple(chosen["stage_layers"]),
            split=chosen.get("split", "full"),
            keep_attention=chosen.get("keep_attention", "off"),
            global_batch=options["global_batch"],
            seed=options["seed"],
        )
    except UsageError as error:
        raise DataError(error.message, where=str(path), hint=_HINT) from error
    return Tuned(
        config=config,
        cost=cost,
        gpu_memory=options["gpu_memory"],
        token_histogram={int(length): share for length, share in data["token_histogram"].items()},
        longest_sequence=data["longest_sequence"],
    )
