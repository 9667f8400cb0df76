"""The invariants of sums: target tokens chunk by chunk, the totals of steps, those of the manifest."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.arrow import to_numpy
from chunkplan.planning.selection import describe_selection
from chunkplan.validation.chunk_columns import ChunkColumns
from chunkplan.validation.violation import Violation


def check_targets(columns: ChunkColumns) -> Violation | None:
    """Target tokens are counted in the chunk that predicts them, and sum to the analysis's."""
    expected = columns.per_segment(columns.analysis.num_target_tokens)
    parts = columns.parts
    expected[parts] = _part_targets(
        columns.analysis, columns.sequence_id[parts], columns.start[parts], columns.end[parts]
    )
    per_chunk = columns.per_chunk(expected)
    stated = columns.chunks["num_target_tokens"]
    return columns.at(
        "targets", lambda row: f"{stated[row]} target tokens stated, {per_chunk[row]} counted", stated != per_chunk
    )


def check_totals(columns: ChunkColumns) -> Violation | None:
    """Every step's totals are the sums of its chunks, and the manifest's those of the steps."""
    steps, chunks = columns.steps, columns.chunks
    sums = {
        "num_tokens": sum_runs(chunks["num_tokens"], columns.step_chunks),
        "num_target_tokens": sum_runs(chunks["num_target_tokens"], columns.step_chunks),
        "num_chunks": np.diff(columns.step_chunks),
    }
    for name, actual in sums.items():
        if found := _check_sum(columns, name, actual):
            return found
    bounds = steps["chunks_lower_bound"], steps["packing_lower_bound"], steps["num_chunks"]
    bad = (bounds[0] < 0) | (bounds[1] < bounds[0]) | (bounds[2] < bounds[1])
    bad |= steps["optimal"] != (bounds[2] == bounds[0])
    found = columns.at_step("totals", lambda row: "num_chunks, its lower bounds and `optimal` contradict", bad)
    if found:
        return found
    found = columns.at("totals", lambda row: "a negative cost", chunks["cost"] < 0)
    return found or _check_manifest_totals(columns)


def _check_sum(columns: ChunkColumns, name: str, actual: Int64Array) -> Violation | None:
    stated = columns.steps[name]
    return columns.at_step(
        "totals", lambda row: f"{name} is {stated[row]}, its chunks have {actual[row]}", stated != actual
    )


def _check_manifest_totals(columns: ChunkColumns) -> Violation | None:
    steps, config, manifest = columns.steps, columns.config, columns.plan.manifest
    sums = {name: int(steps[name].sum()) for name in ("num_sequences", "num_tokens", "num_target_tokens", "num_chunks")}
    actual = {
        "totals": {
            "num_steps": columns.num_steps,
            **sums,
            "longest_sequence": max(longest for _, longest in columns.epochs),
            "num_dropped_sequences": sum(size for size, _ in columns.epochs) - sums["num_sequences"],
        },
        "selection": describe_selection(columns.analysis, config),
        "predictions": {name: sum(steps[name].tolist()) for name in ("predicted_us", "lower_bound_us")},
    }
    for entry, values in actual.items():
        for name, value in values.items():
            if manifest[entry][name] != value:
                return Violation("totals", f"manifest says {name} = {manifest[entry][name]}, counted {value}")
    for name, value in (("seed", config.seed), ("epochs", config.epochs)):
        if manifest.get(name) != value:
            return Violation("totals", f"manifest says {name} = {manifest.get(name)}, its config {value}")
    return None


def _part_targets(analysis: Analysis, ids: Int64Array, start: Int32Array, end: Int32Array) -> Int64Array:
    """Count the targets in [start + 1, end + 1) of the sequences `ids`, in any order; int64 [num_parts].

    Raises:
        DataError: the tokens cannot be read.
    """
    stop_target = np.minimum(end.astype(np.int64) + 1, analysis.num_tokens[ids])
    start_target = np.minimum(start.astype(np.int64) + 1, stop_target)
    if not analysis.has_tokens:
        return stop_target - start_target
    counted = np.empty(ids.size, np.int64)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    for first_id, batch in analysis.tokens().batches():
        targets = batch.column("target")
        parts = order[slice(*np.searchsorted(ordered, (first_id, first_id + batch.num_rows)))]  # those in the batch
        if parts.size:
            offset = to_numpy(targets.offsets)[ids[parts] - first_id].astype(np.int64)
            before_stop = _count_bits(targets.values, offset + stop_target[parts])
            counted[parts] = before_stop - _count_bits(targets.values, offset + start_target[parts])
    return counted


def _count_bits(mask: pa.BooleanArray, stops: Int64Array) -> Int64Array:
    """Count how many of mask[:stop] are true, for each of `stops`; int64, of their shape."""
    packed = np.frombuffer(mask.buffers()[1], np.uint8)
    stops = stops + mask.offset
    whole = offsets_of(np.bitwise_count(packed))
    rest = np.append(packed, 0)[stops >> 3] & ((1 << (stops & 7)) - 1)
    counted: Int64Array = whole[stops >> 3] + np.bitwise_count(rest)
    return counted
