"""A way to train as a row, in the terminal and on pages: what a step of it takes, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.quantities import ZERO, gibibytes, layout_words, percent, seconds
from chunkplan.tuning.document_entries import BaselineEntry, ChoiceEntry

#: Ways to cut long sequences other than at ChunkSize.
_SPLITS = {"even": "parts of equal length", "cost": "parts of equal time", "none": "no sequence split"}

_SCHEDULES = {"algorithm2": "sequential, single stage", "auto": "1F1B, best order found"}


class WayRow(NamedTuple):
    """The words of a way; where it does not fit, `step` says so, and `rate` and `hours` are empty.

    `memory`: of its fullest GPU, or what it would need. `how`: its layout and savings.
    """

    name: str
    step: str
    rate: str
    hours: str
    lost: str
    memory: str
    how: tuple[str, ...]


def way_row(way: ChoiceEntry | BaselineEntry, global_batch: int, num_sequences: int) -> WayRow:
    """Describe a way, or the choice of a tuning, and what an epoch of `num_sequences` takes; `global_batch` a step."""
    name, lost = (way["name"], way["lost_tokens"]) if "name" in way else ("chunkplan", 0.0)
    how = [layout_words(way["dp"], way["tp"], way["pp"])]
    memory = f"{gibibytes(way['memory']['total'])} a GPU"
    cells = ("no fit", "", "")
    if way["fits"]:
        gpus = way["dp"] * way["tp"] * way["pp"]
        hours = -(-num_sequences // global_batch) * way["step_seconds"] / 3600 * gpus
        cells = (seconds(way["step_seconds"] * 1e6), f"{way['tokens_per_second']:,.0f}", f"{hours:,.3g}")
        how += how_words(way)
    else:
        parts = {part: size for part, size in way["memory"].items() if part != "total"}
        if parts:
            most = max(parts, key=lambda part: parts[part])
            what = most.replace("_", " ").replace("kv", "KV")
            memory += f" at least, {gibibytes(parts[most])} of it {what}"
    return WayRow(name, *cells, percent(lost) if lost else "none", memory, tuple(how))


def schedule_words(schedule: str) -> str:
    """Name a schedule as it is called in the field."""
    return _SCHEDULES.get(schedule, schedule)


def how_words(way: Mapping[str, Any]) -> list[str]:
    """The words of a way beside its ChunkSize, K and layout, from entries of its configuration and cost model."""
    words = [schedule_words(way["schedule"])] if "schedule" in way and way["pp"] > 1 else []
    words += [f"layers {','.join(map(str, layers))}"] if (layers := way.get("stage_layers")) else []
    cp = way.get("cp", "off")
    words += [] if cp == "off" else [f"context parallel {'where it pays' if cp == 'auto' else f'(up to {cp})'}"]
    words += [_SPLITS[split]] if (split := way.get("split", "full")) in _SPLITS else []
    words += checkpointing_words(way["checkpointing"])
    words += ["KV offloaded to CPU"] if way.get("kv_offload") else []
    return words + (
        [ZERO[way["sharding"]]] if way.get("sharding", "optimizer") != "optimizer" and way["dp"] > 1 else []
    )
