"""The invariants of steps and chunks, each a function over columns that returns the first violation or None."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chunkplan.arrays import sum_runs
from chunkplan.errors import UsageError
from chunkplan.operations import KEPT_ATTENTION, NOT_KEPT
from chunkplan.planning.selection import check_selection
from chunkplan.validation.checks_sequences import check_groups, check_one_place, check_prefix, check_tokens_once
from chunkplan.validation.checks_sharing import check_cp_groups, check_cp_order, check_cp_slices
from chunkplan.validation.checks_totals import check_targets, check_totals
from chunkplan.validation.chunk_columns import ChunkColumns
from chunkplan.validation.violation import Violation


def check_chunk_ids(columns: ChunkColumns) -> Violation | None:
    """Rows are sorted by (step, dp_rank, chunk_id), ids run 0.. without gaps, every rank of every step has a chunk."""
    chunks, dp, place = columns.chunks, columns.config.dp, columns.place
    rank_start = np.searchsorted(place, place)
    bad = (chunks["chunk_id"] != np.arange(place.size) - rank_start) | (np.diff(place, prepend=0) < 0)
    bad |= (chunks["dp_rank"] < 0) | (chunks["dp_rank"] >= dp)
    found = columns.at("chunk-ids", lambda row: "chunk_id or dp_rank is out of place (ids run 0.. in each rank)", bad)
    if found:
        return found
    num_places = columns.num_steps * dp
    found = columns.at("chunk-ids", lambda row: "chunks of a step not in steps.parquet", place >= num_places)
    if found:
        return found
    present = place[np.flatnonzero(np.diff(place, prepend=-1))]
    if present.size < num_places:
        gaps = np.flatnonzero(present != np.arange(present.size))
        absent = int(gaps[0]) if gaps.size else present.size
        return Violation("chunk-ids", "a rank without chunks", absent // dp, absent % dp)
    return None


def check_steps(columns: ChunkColumns) -> Violation | None:
    """Steps run 0.. without gaps over all epochs; batches are as configured; only an epoch's last one may be short."""
    steps, config, num_steps = columns.steps, columns.config, columns.num_steps
    try:
        check_selection(columns.analysis, config)
    except UsageError as error:
        return Violation("batch-sizes", f"the plan's config does not fit the analysis: {error.message}")
    full, rest = np.divmod(np.array([size for size, _ in columns.epochs], np.int64), config.global_batch)
    per_epoch = full + ((rest > 0) & (config.last_batch == "keep"))
    if per_epoch.size < config.epochs or per_epoch.sum() != num_steps:
        more = " or more" if per_epoch.size < config.epochs else ""
        return Violation("batch-sizes", f"{num_steps} steps, expected {per_epoch.sum()}{more}")
    epochs = np.repeat(np.arange(per_epoch.size), per_epoch)
    bad = (steps["step"] != np.arange(num_steps)) | (steps["epoch"] != epochs)
    found = columns.at_step("batch-sizes", lambda row: "step or epoch is out of order", bad)
    if found:
        return found
    is_short = np.diff(epochs, append=-1).astype(bool) & ((rest > 0) & (config.last_batch == "keep"))[epochs]
    expected = np.where(is_short, rest[epochs], config.global_batch)
    num_beginnings = columns.per_chunk((columns.start == 0) & (columns.end > 0))  # [num_chunks]
    actual = sum_runs(num_beginnings, columns.step_chunks)  # [num_steps], occurrences, each by its first segment
    bad = (actual != expected) | (steps["num_sequences"] != expected)
    return columns.at_step(
        "batch-sizes",
        lambda row: f"{actual[row]} sequences ({steps['num_sequences'][row]} stated), expected {expected[row]}",
        bad,
    )


def check_equal_chunks(columns: ChunkColumns) -> Violation | None:
    """Where the plan's configuration says so, every rank of a step has the same number of chunks."""
    if not columns.config.equal_chunks:
        return None
    counts = np.diff(columns.rank_chunks).reshape(columns.num_steps, -1)
    most = counts.max(axis=1, keepdims=True)
    steps, ranks = np.nonzero(counts < most)
    if not steps.size:
        return None
    step, rank = int(steps[0]), int(ranks[0])
    message = f"{counts[step, rank]} chunks, another rank of the step has {most[step, 0]}"
    return Violation("equal-chunks", message, step, rank, count=steps.size)


def check_chunk_size(columns: ChunkColumns) -> Violation | None:
    """No chunk is over ChunkSize, and its num_tokens is the sum of its segments, none of which is empty."""
    size = columns.config.chunk_size
    length = np.subtract(columns.end, columns.start, dtype=np.int64)
    tokens = columns.per_chunk(length)
    bad = (tokens > size) | (tokens != columns.chunks["num_tokens"]) | columns.holds(np.flatnonzero(length < 1))
    return columns.at(
        "chunk-size",
        lambda row: f"segments hold {tokens[row]} tokens ({columns.chunks['num_tokens'][row]} stated), at most {size}",
        bad,
    )


def check_kept_attention(columns: ChunkColumns) -> Violation | None:
    """Attention is kept somewhere known, by chunks alone that are run again, alike on all ranks that share one."""
    kept, shared = columns.chunks["kept_attention"], columns.shared
    words = ", ".join(f'"{word}"' for word in KEPT_ATTENTION)
    found = columns.at("kept-attention", lambda row: f"kept_attention is none of {words}", kept < 0)
    found = found or columns.at(
        "kept-attention",
        lambda row: f'kept_attention is "{KEPT_ATTENTION[kept[row]]}", and the chunk keeps its activations',
        (kept != NOT_KEPT) & columns.chunks["keeps_activations"],
    )
    if found or columns.config.keep_attention == "off":
        what = 'kept_attention is not "", and keep_attention is off'
        return found or columns.at("kept-attention", lambda row: what, kept != NOT_KEPT)
    other = np.arange(columns.num_chunks)
    other[shared] = columns.leader

    def differ(row: int) -> str:
        own, first = (KEPT_ATTENTION[kept[each]] for each in (row, other[row]))
        return f'kept_attention is "{own}", but "{first}" on rank {columns.chunks["cp_first_rank"][row]} of the block'

    return columns.at("kept-attention", differ, kept != kept[other])


#: Run in this order. The checks after one of `STRUCTURAL` rely on it and say nothing sensible where it fails.
#: `WITHOUT_ANALYSIS` look at the plan alone.
STRUCTURAL = frozenset({"chunk-ids", "cp-groups", "batch-sizes", "tokens-once"})
WITHOUT_ANALYSIS = frozenset(
    {"chunk-ids", "cp-groups", "cp-slices", "cp-order", "kept-attention", "equal-chunks", "chunk-size"}
)
CHUNK_CHECKS: dict[str, Callable[[ChunkColumns], Violation | None]] = {
    "chunk-ids": check_chunk_ids,
    "cp-groups": check_cp_groups,
    "cp-slices": check_cp_slices,
    "cp-order": check_cp_order,
    "kept-attention": check_kept_attention,
    "batch-sizes": check_steps,
    "equal-chunks": check_equal_chunks,
    "chunk-size": check_chunk_size,
    "tokens-once": check_tokens_once,
    "one-step-one-rank": check_one_place,
    "groups": check_groups,
    "prefix": check_prefix,
    "targets": check_targets,
    "totals": check_totals,
}
