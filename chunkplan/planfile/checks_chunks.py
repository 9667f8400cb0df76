"""The invariants of steps and chunks, each a function over columns that returns the first violation or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.planfile.violation import Violation


@dataclass(frozen=True)
class ChunkColumns:
    """steps.parquet and chunks.parquet as arrays; segments are flattened, `segment_chunk` is the row they belong to."""

    plan: Plan
    analysis: Analysis
    steps: dict[str, Any]
    chunks: dict[str, Any]
    segment_chunk: Int64Array
    sequence_id: Int64Array
    start: Int64Array
    end: Int64Array

    @classmethod
    def read(cls, plan: Plan, analysis: Analysis) -> ChunkColumns:
        """Read both files whole."""
        steps, chunks = plan.steps(), plan.chunks()
        segments = chunks.column("segments").combine_chunks()
        flat = segments.flatten()
        columns = {name: chunks.column(name).to_numpy() for name in chunks.column_names if name not in _NESTED}
        columns["group_id"] = chunks.column("group_id").fill_null(-1).to_numpy()
        return cls(
            plan=plan,
            analysis=analysis,
            steps={name: steps.column(name).to_numpy() for name in steps.column_names},
            chunks=columns,
            segment_chunk=np.repeat(np.arange(len(segments)), np.diff(segments.offsets.to_numpy())),
            sequence_id=flat.field("sequence_id").to_numpy(),
            start=flat.field("start").to_numpy().astype(np.int64),
            end=flat.field("end").to_numpy().astype(np.int64),
        )

    @property
    def config(self) -> dict[str, Any]:
        """The plan's configuration."""
        return self.plan.config

    @property
    def segment_epoch(self) -> Int64Array:
        """The epoch each segment runs in."""
        epoch_of_step = np.zeros(int(self.chunks["step"].max(initial=0)) + 1, np.int64)
        known = self.steps["step"] < epoch_of_step.size
        epoch_of_step[self.steps["step"][known]] = self.steps["epoch"][known]
        epochs: Int64Array = epoch_of_step[self.chunks["step"][self.segment_chunk]]
        return epochs

    @property
    def is_known(self) -> BoolArray:
        """Whether each segment's sequence is one of the analysis."""
        return (self.sequence_id >= 0) & (self.sequence_id < self.analysis.num_sequences)

    @property
    def is_part(self) -> BoolArray:
        """Whether each segment is less than its whole sequence."""
        length = self.analysis.num_tokens[np.where(self.is_known, self.sequence_id, 0)]
        parts: BoolArray = (self.start != 0) | (self.end != length)
        return parts

    @property
    def part_start(self) -> Int64Array:
        """Where the part in each chunk starts, int64 [num_chunks]; 0 for standalone chunks."""
        return self.per_chunk(np.where(self.is_part, self.start, 0))

    def per_chunk(self, values: Any) -> Int64Array:
        """Sum over the segments of each chunk."""
        sums = np.zeros(len(self.chunks["step"]), np.int64)
        np.add.at(sums, self.segment_chunk, values)
        return sums

    def at(self, invariant: str, message: Callable[[int], str], bad: BoolArray) -> Violation | None:
        """The violation of the first chunk where `bad` [num_chunks] holds."""
        rows = np.flatnonzero(bad)
        if rows.size == 0:
            return None
        row = int(rows[0])
        step, dp_rank, chunk_id = (int(self.chunks[name][row]) for name in ("step", "dp_rank", "chunk_id"))
        return Violation(invariant, message(row), step, dp_rank, chunk_id, count=rows.size)

    def at_step(self, invariant: str, message: Callable[[int], str], bad: BoolArray) -> Violation | None:
        """The violation of the first step where `bad` [num_steps] holds."""
        rows = np.flatnonzero(bad)
        if rows.size == 0:
            return None
        return Violation(invariant, message(int(rows[0])), int(self.steps["step"][rows[0]]), count=rows.size)


_NESTED = ("segments", "group_id")


def check_chunk_ids(columns: ChunkColumns) -> Violation | None:
    """Rows sorted by (step, dp_rank, chunk_id), ids 0.. without gaps, a chunk or more for every rank of every step."""
    chunks, dp = columns.chunks, columns.config["dp"]
    place = chunks["step"].astype(np.int64) * dp + chunks["dp_rank"]
    first = np.searchsorted(place, place)
    bad = (chunks["chunk_id"] != np.arange(len(place)) - first) | (np.diff(place, prepend=0) < 0)
    bad |= (chunks["dp_rank"] < 0) | (chunks["dp_rank"] >= dp)
    found = columns.at("chunk-ids", lambda row: "chunk_id or dp_rank is out of place (ids run 0.. in each rank)", bad)
    if found:
        return found
    num_steps = len(columns.steps["step"])
    found = columns.at("chunk-ids", lambda row: "chunks of a step not in steps.parquet", place >= num_steps * dp)
    if found:
        return found
    present = np.unique(place)
    if len(present) < num_steps * dp:
        gaps = np.flatnonzero(present != np.arange(len(present)))
        absent = int(gaps[0]) if gaps.size else len(present)
        return Violation("chunk-ids", "a rank without chunks", absent // dp, absent % dp)
    return None


def check_steps(columns: ChunkColumns) -> Violation | None:
    """Steps run 0.. without gaps over all epochs; batches are as configured; only an epoch's last one may be short."""
    steps, config = columns.steps, columns.config
    num_sequences, batch = columns.analysis.num_sequences, config["global_batch"]
    full, rest = divmod(num_sequences, batch)
    sizes = [batch] * full + ([rest] if rest and config["last_batch"] == "keep" else [])
    num_steps = len(sizes) * config["epochs"]
    if len(steps["step"]) != num_steps:
        return Violation("batch-sizes", f"{len(steps['step'])} steps, expected {num_steps}")
    expected = np.tile(np.array(sizes, np.int64), config["epochs"])
    epochs = np.repeat(np.arange(config["epochs"]), len(sizes))
    bad = (steps["step"] != np.arange(len(expected))) | (steps["epoch"] != epochs)
    found = columns.at_step("batch-sizes", lambda row: "step or epoch is out of order", bad)
    if found:
        return found
    owners = np.unique(np.stack([columns.chunks["step"][columns.segment_chunk], columns.sequence_id]), axis=1)[0]
    actual = np.bincount(owners[owners < len(expected)], minlength=len(expected))
    bad = (actual != expected) | (steps["num_sequences"] != expected)
    return columns.at_step(
        "batch-sizes",
        lambda row: f"{actual[row]} sequences ({steps['num_sequences'][row]} stated), expected {expected[row]}",
        bad,
    )


def check_chunk_size(columns: ChunkColumns) -> Violation | None:
    """No chunk over ChunkSize; a chunk's num_tokens is the sum of its segments."""
    size = columns.config["chunk_size"]
    length = columns.end - columns.start
    tokens = columns.per_chunk(length)
    empty = columns.per_chunk(length < 1) > 0
    bad = (tokens > size) | (tokens != columns.chunks["num_tokens"]) | empty
    return columns.at(
        "chunk-size",
        lambda row: f"segments hold {tokens[row]} tokens ({columns.chunks['num_tokens'][row]} stated), at most {size}",
        bad,
    )


def check_tokens_once(columns: ChunkColumns) -> Violation | None:
    """Every token of every kept sequence exactly once an epoch."""
    unknown = columns.per_chunk(~columns.is_known) > 0
    found = columns.at("tokens-once", lambda row: "a sequence that the analysis does not have", unknown)
    if found or not len(columns.sequence_id):
        return found
    order = np.lexsort((columns.start, columns.sequence_id, columns.segment_epoch))
    key = (columns.segment_epoch * columns.analysis.num_sequences + columns.sequence_id)[order]
    start, end = columns.start[order], columns.end[order]
    is_first = np.diff(key, prepend=-1) != 0
    is_last = np.append(is_first[1:], True)
    expected_start = np.where(is_first, 0, np.append(0, end[:-1]))
    length = columns.analysis.num_tokens[columns.sequence_id[order]]
    wrong = order[(start != expected_start) | (is_last & (end != length))]
    bad = np.zeros(len(columns.chunks["step"]), bool)
    bad[columns.segment_chunk[wrong]] = True
    return columns.at("tokens-once", lambda row: "tokens of a sequence are missing or come twice in an epoch", bad)


def check_one_place(columns: ChunkColumns) -> Violation | None:
    """A sequence never leaves its step and never spans two ranks."""
    place = columns.chunks["step"].astype(np.int64) * columns.config["dp"] + columns.chunks["dp_rank"]
    key = columns.segment_epoch * max(columns.analysis.num_sequences, 1) + columns.sequence_id
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    mine = place[columns.segment_chunk]
    astray = columns.per_chunk(mine != mine[first][inverse]) > 0
    return columns.at("one-step-one-rank", lambda row: "a part of a sequence whose other parts run elsewhere", astray)


def check_groups(columns: ChunkColumns) -> Violation | None:
    """A group is one split sequence: parts 0..size-1 in ascending chunks, without gaps.

    Each chunk of a group holds exactly one part (and whole sequences beside it); a standalone chunk holds whole
    sequences only and keeps its activations.
    """
    chunks = columns.chunks
    grouped = chunks["group_id"] >= 0
    parts = columns.per_chunk(columns.is_part)
    bad = parts != grouped
    message = "holds {} parts of split sequences, expected {}"
    found = columns.at("groups", lambda row: message.format(parts[row], int(grouped[row])), bad)
    if found:
        return found
    standalone = (chunks["group_index"] == 0) & (chunks["group_size"] == 1) & chunks["keeps_activations"]
    found = columns.at(
        "groups", lambda row: "a standalone chunk has index 0 of 1 and keeps its activations", ~grouped & ~standalone
    )
    if found:
        return found
    rows = np.flatnonzero(grouped)
    if rows.size == 0:
        return None
    place = chunks["step"].astype(np.int64) * columns.config["dp"] + chunks["dp_rank"]
    order = rows[np.lexsort((chunks["chunk_id"][rows], chunks["group_id"][rows], place[rows]))]
    key = np.stack([place[order], chunks["group_id"][order]])
    is_first = np.append(True, (np.diff(key) != 0).any(axis=0))
    group = np.cumsum(is_first) - 1
    index = np.arange(order.size) - np.flatnonzero(is_first)[group]
    size = np.bincount(group)[group]
    sequence = columns.per_chunk(np.where(columns.is_part, columns.sequence_id, 0))[order]
    part_start = columns.part_start
    part_end = part_start + columns.per_chunk(np.where(columns.is_part, columns.end - columns.start, 0))
    expected_start = np.where(is_first, 0, np.append(0, part_end[order][:-1]))
    wrong = (chunks["group_index"][order] != index) | (chunks["group_size"][order] != size)
    wrong |= (part_start[order] != expected_start) | (sequence != sequence[np.flatnonzero(is_first)[group]])
    bad = np.zeros(len(grouped), bool)
    bad[order[wrong]] = True
    return columns.at("groups", lambda row: "parts of a group have a gap, are out of order or of two sequences", bad)


def check_prefix(columns: ChunkColumns) -> Violation | None:
    """prefix_tokens is where the chunk's part starts; 0 for standalone chunks."""
    start = columns.part_start
    bad = columns.chunks["prefix_tokens"] != start
    return columns.at("prefix", lambda row: f"prefix_tokens is not {start[row]}, where its part starts", bad)


def check_targets(columns: ChunkColumns) -> Violation | None:
    """Target tokens are counted in the chunk that predicts them, and sum to the analysis's."""
    expected = np.zeros(len(columns.sequence_id), np.int64)
    whole = ~columns.is_part
    expected[whole] = columns.analysis.num_target_tokens[columns.sequence_id[whole]]
    parts = np.flatnonzero(~whole)
    parts = parts[np.argsort(columns.sequence_id[parts], kind="stable")]
    tokens = columns.analysis.tokens() if columns.analysis.has_tokens else None
    for sequence, segments in _runs(columns.sequence_id, parts):
        start, end = columns.start[segments], columns.end[segments]
        length = int(columns.analysis.num_tokens[sequence])
        if tokens is None:
            expected[segments] = np.minimum(end + 1, length) - (start + 1)
        else:
            target = tokens(sequence)[1]
            expected[segments] = [target[low + 1 : high + 1].sum() for low, high in zip(start, end, strict=True)]
    per_chunk = columns.per_chunk(expected)
    stated = columns.chunks["num_target_tokens"]
    return columns.at(
        "targets", lambda row: f"{stated[row]} target tokens stated, {per_chunk[row]} counted", stated != per_chunk
    )


def check_totals(columns: ChunkColumns) -> Violation | None:
    """Every step's totals are the sums of its chunks, and the manifest's those of the steps."""
    steps, chunks = columns.steps, columns.chunks
    num_steps = len(steps["step"])
    for name in ("num_tokens", "num_target_tokens", "num_chunks"):
        actual = np.zeros(num_steps, np.int64)
        np.add.at(actual, chunks["step"], 1 if name == "num_chunks" else chunks[name])
        message = f"{name} is {{}}, its chunks have {{}}"
        found = columns.at_step(
            "totals",
            lambda row, message=message, name=name, actual=actual: message.format(steps[name][row], actual[row]),  # type: ignore[misc]
            steps[name] != actual,
        )
        if found:
            return found
    bad = (steps["num_chunks"] < steps["chunks_lower_bound"]) | (
        steps["optimal"] != (steps["num_chunks"] == steps["chunks_lower_bound"])
    )
    found = columns.at_step("totals", lambda row: "num_chunks, its lower bound and `optimal` contradict", bad)
    if found:
        return found
    found = columns.at("totals", lambda row: "a negative cost", chunks["cost"] < 0)
    return found or _check_manifest_totals(columns)


def _check_manifest_totals(columns: ChunkColumns) -> Violation | None:
    steps, config, manifest = columns.steps, columns.config, columns.plan.manifest
    num_sequences = columns.analysis.num_sequences
    sums = {name: int(steps[name].sum()) for name in ("num_sequences", "num_tokens", "num_target_tokens", "num_chunks")}
    actual = {
        "totals": {
            "num_steps": len(steps["step"]),
            **sums,
            "longest_sequence": int(columns.analysis.num_tokens.max()),
            "num_dropped_sequences": config["epochs"] * num_sequences - sums["num_sequences"],
        },
        "predictions": {name: sum(steps[name].tolist()) for name in ("predicted_us", "lower_bound_us")},
    }
    for entry, values in actual.items():
        for name, value in values.items():
            if manifest[entry][name] != value:
                return Violation("totals", f"manifest says {name} = {manifest[entry][name]}, counted {value}")
    for name in ("seed", "epochs"):
        if manifest.get(name) != config[name]:
            return Violation("totals", f"manifest says {name} = {manifest.get(name)}, its config {config[name]}")
    return None


def _runs(values: Int64Array, order: Int64Array) -> list[tuple[int, Int64Array]]:
    """(value, positions) of equal values along `order`, which sorts them."""
    if order.size == 0:
        return []
    borders = np.flatnonzero(np.diff(values[order])) + 1
    return [(int(values[run[0]]), run) for run in np.split(order, borders)]


#: Run in this order. The checks after one of `STRUCTURAL` rely on it and say nothing sensible where it fails.
STRUCTURAL = frozenset({"chunk-ids", "batch-sizes", "tokens-once"})
CHUNK_CHECKS: dict[str, Callable[[ChunkColumns], Violation | None]] = {
    "chunk-ids": check_chunk_ids,
    "batch-sizes": check_steps,
    "chunk-size": check_chunk_size,
    "tokens-once": check_tokens_once,
    "one-step-one-rank": check_one_place,
    "groups": check_groups,
    "prefix": check_prefix,
    "targets": check_targets,
    "totals": check_totals,
}
