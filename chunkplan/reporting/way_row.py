"""A way to train as a row, in the terminal and on pages: what a step of it takes, and how it is run."""

from __future__ import annotations

from typing import NamedTuple

from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.quantities import ZERO, gibibytes, percent, seconds
from chunkplan.tuning.document_entries import BaselineEntry, ChoiceEntry

_FULL = "full activation checkpointing"


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
    layout = {axis: size for axis, size in (("dp", way["dp"]), ("tp", way["tp"]), ("pp", way["pp"])) if size > 1}
    how = [", ".join(f"{axis} {size}" for axis, size in layout.items()) or "one GPU"]
    memory = f"{gibibytes(way['memory']['total'])} a GPU"
    cells = ("no fit", "", "")
    if way["fits"]:
        gpus = way["dp"] * way["tp"] * way["pp"]
        hours = -(-num_sequences // global_batch) * way["step_seconds"] / 3600 * gpus
        cells = (seconds(way["step_seconds"] * 1e6), f"{way['tokens_per_second']:,.0f}", f"{hours:,.3g}")
        how += checkpointing_words(way["checkpointing"], _FULL)
        how += ["KV offload"] if way.get("kv_offload") else []
        how += [ZERO[way["sharding"]]] if way["sharding"] != "optimizer" and way["dp"] > 1 else []
    else:
        parts = {part: size for part, size in way["memory"].items() if part != "total"}
        if parts:
            most = max(parts, key=lambda part: parts[part])
            what = most.replace("_", " ").replace("kv", "KV")
            memory += f" at least, {gibibytes(parts[most])} of it {what}"
    return WayRow(name, *cells, percent(lost) if lost else "none", memory, tuple(how))
