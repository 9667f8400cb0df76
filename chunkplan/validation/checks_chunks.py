"""The invariants of steps and chunks by name: each looks at columns and yields what it finds, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, IntArray, offsets_of, run_starts, sum_runs
from chunkplan.config.plan import PlanConfig
from chunkplan.operations import KEPT_ATTENTION, NOT_KEPT
from chunkplan.planning.selection import describe_selection
from chunkplan.validation.checks_prefixes import check_last_dependent, check_prefixes, check_tree_groups
from chunkplan.validation.checks_steps import check_equal_chunks, check_steps, check_whole_groups
from chunkplan.validation.chunk_columns import ChunkColumns, Parts, Violation, part_targets

# The invariants of sequences: each occurs as often as it should, whole or cut into the parts of one group.
#
# An *occurrence* of a sequence is a whole segment, or the parts of a group from its first token to its last.


def check_tokens_once(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Every token of a kept sequence comes exactly as often as the sequence occurs in the epoch: once, as a rule.

    `batch-sizes` must hold: where an epoch has as many occurrences as it should and no sequence has too many, none has
    too few.
    """
    unknown = columns.holds(np.flatnonzero(~columns.is_known))
    yield columns.at(unknown, lambda row: "a sequence that the analysis does not have")
    parts = columns.parts
    start, end = columns.start[parts], columns.end[parts]
    wrong = parts[(start < 0) | (end <= start) | (end > columns.sequence_tokens[parts])]
    if not wrong.size:
        epoch = columns.steps["epoch"][columns.chunks["step"][columns.part_chunk]].astype(np.int64)
        key = epoch * columns.analysis.num_sequences + columns.sequence_id[parts]
        wrong = np.append(parts[_unchained(columns, key)], _too_many(columns))
    yield columns.at(columns.holds(wrong), lambda row: "tokens of a sequence are missing or come twice in an epoch")


def check_one_place(columns: ChunkColumns) -> Iterator[Violation | None]:
    """An occurrence never leaves its step and never spans two ranks, or blocks of ranks that share it."""
    astray = _unchained(columns, columns.home[columns.part_chunk] << 32 | columns.sequence_id[columns.parts])
    bad = columns.holds(columns.parts[astray])
    yield columns.at(bad, lambda row: "a part of a sequence whose other parts run elsewhere")


def check_groups(columns: ChunkColumns) -> Iterator[Violation | None]:
    """A group is one split sequence: parts 0..size-1 in ascending chunks, without gaps.

    Each chunk of a group holds exactly one part (and whole sequences beside it), or a rank's slices of it; a standalone
    chunk holds whole sequences only and keeps its activations.
    """
    yield from check_tree_groups(columns)
    chunks, grouped, parts = columns.chunks, columns.is_grouped & ~columns.is_tree, columns.group_parts
    own = ~columns.is_tree[parts.chunk]
    parts = Parts(parts.chunk[own], parts.sequence_id[own], parts.start[own], parts.end[own])
    num_parts = np.bincount(parts.chunk, minlength=columns.num_chunks)
    yield columns.at(
        num_parts != grouped,
        lambda row: f"holds {num_parts[row]} parts of split sequences, expected {int(grouped[row])}",
    )
    standalone = (chunks["group_index"] == 0) & (chunks["group_size"] == 1) & chunks["keeps_activations"]
    yield columns.at(
        ~columns.is_grouped & ~standalone, lambda row: "a standalone chunk has index 0 of 1 and keeps its activations"
    )
    key = columns.place[parts.chunk] << 32 | chunks["group_id"][parts.chunk].astype(np.int64) + (1 << 31)
    order = np.argsort(key, kind="stable")  # rows are sorted by chunk_id within a rank
    key = key[order]
    rows, sequence, start, end = (values[order] for values in parts)
    first = run_starts(key)  # [num_parts], the first part of each part's group
    is_first, size = first == np.arange(first.size), np.bincount(first)[first]
    wrong = (chunks["group_index"][rows] != np.arange(rows.size) - first) | (chunks["group_size"][rows] != size)
    wrong |= (start != np.where(is_first, 0, np.roll(end, 1))) | (sequence != sequence[first])
    bad = np.zeros(columns.num_chunks, bool)
    bad[rows[wrong]] = True
    yield columns.at(bad, lambda row: "parts of a group have a gap, are out of order or of two sequences")


def check_prefix(columns: ChunkColumns) -> Iterator[Violation | None]:
    """A chunk's prefix_tokens is where its part starts, of a shared one the whole part, and 0 for a standalone one.

    In a tree it is the tokens of the group's chunks before it.
    """
    parts, before = columns.group_parts, offsets_of(columns.chunks["num_tokens"])[:-1]
    start = np.bincount(parts.chunk, weights=parts.start, minlength=columns.num_chunks).astype(np.int64)  # exact
    start[columns.is_tree] = (before - before[columns.group_start])[columns.is_tree]
    bad = columns.chunks["prefix_tokens"] != start
    yield columns.at(bad, lambda row: f"prefix_tokens is not {start[row]}, where its part starts")


def _too_many(columns: ChunkColumns) -> Int64Array:
    """The segments, in order, with which an occurrence begins that its epoch should not have; int64."""
    borders = np.flatnonzero(np.diff(columns.steps["epoch"], prepend=-1))
    first_segment = np.append(columns.segments[columns.step_chunks[borders]], columns.segments[-1])
    found = []
    epochs = columns.steps["epoch"][borders].tolist()
    for epoch, (start, stop) in zip(epochs, pairwise(first_segment), strict=True):
        ids, expected = columns.sequence_id[start:stop], columns.occurrences(epoch)
        later = columns.parts[slice(*np.searchsorted(columns.parts, (start, stop)))]
        surplus = np.bincount(ids, minlength=expected.size)
        surplus -= expected
        np.subtract.at(surplus, columns.sequence_id[later[columns.start[later] != 0]], 1)
        if (surplus > 0).any():
            beginnings = np.flatnonzero((surplus[ids] > 0) & (columns.start[start:stop] == 0))
            beginnings = beginnings[np.argsort(ids[beginnings], kind="stable")]
            nth = np.arange(beginnings.size) - run_starts(ids[beginnings])
            found.append(start + beginnings[nth >= expected[ids[beginnings]]])
    return np.concatenate([np.empty(0, np.int64), *found])


def _unchained(columns: ChunkColumns, key: Int64Array) -> BoolArray:
    """Find the parts that cannot, with those of the same key, be strung together to whole sequences; [num_parts].

    Parts can be if as many start at a token as end before it, for every token between, and as many start at the first
    one as end with the last: however many occurrences there are, and wherever each of them is cut.

    Args:
        key: int64 [num_parts], from 0; parts of different sequences have different ones.
    """
    parts = columns.parts
    start, end = columns.start[parts].astype(np.int64), columns.end[parts].astype(np.int64)
    end[end == columns.sequence_tokens[parts]] = 0
    ordered = np.sort(key)
    keys = ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]
    number = np.searchsorted(keys, key)
    starts, ends = number << 31 | start, number << 31 | end
    loose = np.zeros(parts.size, bool)
    if np.array_equal(np.sort(starts), np.sort(ends)):
        return loose
    borders, inverse = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    starts, ends = inverse[: parts.size], inverse[parts.size :]
    excess = np.bincount(starts, minlength=borders.size) - np.bincount(ends, minlength=borders.size)
    loose = (excess[starts] > 0) & (start > 0)
    is_named = np.zeros(keys.size, bool)
    is_named[number[loose]] = True
    loose |= (excess[ends] < 0) & (end > 0) & ~is_named[number]
    return loose


# The invariants of sums: target tokens chunk by chunk, the totals of steps, those of the manifest.


def check_targets(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Target tokens are counted in the chunk that predicts them, and sum to the analysis's."""
    expected = columns.per_segment(columns.analysis.num_target_tokens)
    parts, begin = np.flatnonzero(columns.is_part | (columns.begin > 0)), columns.begin
    expected[parts] = part_targets(
        columns.analysis, columns.sequence_id[parts], (columns.start + begin)[parts], (columns.end + begin)[parts]
    )
    counted, stated = columns.per_chunk(expected), columns.chunks["num_target_tokens"]
    yield columns.at(stated != counted, lambda row: f"{stated[row]} target tokens stated, {counted[row]} counted")


def check_totals(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Every step's totals are the sums of its chunks, with what sequences share, and the manifest's those of the
    steps."""
    steps, chunks, config, manifest = columns.steps, columns.chunks, columns.config, columns.plan.manifest
    step, sequence, _, shared = columns.prefixes
    again = part_targets(columns.analysis, sequence, np.zeros_like(shared), shared)
    sums = {
        name: sum_runs(chunks[name], columns.step_chunks)
        + np.bincount(step, more, minlength=columns.num_steps).astype(np.int64)
        for name, more in (("num_tokens", shared), ("num_target_tokens", again))
    }
    sums["num_chunks"] = np.diff(columns.step_chunks)

    def differs(name: str) -> Violation | None:
        stated, actual = steps[name], sums[name]
        return columns.at_step(stated != actual, lambda row: f"{name} is {stated[row]}, its chunks have {actual[row]}")

    yield from map(differs, sums)
    fewest, packed, number = steps["chunks_lower_bound"], steps["packing_lower_bound"], steps["num_chunks"]
    bad = (fewest < 0) | (packed < fewest) | (number < packed) | (steps["optimal"] != (number == fewest))
    yield columns.at_step(bad, lambda row: "num_chunks, its lower bounds and `optimal` contradict")
    yield columns.at(chunks["cost"] < 0, lambda row: "a negative cost")
    totals = {name: int(steps[name].sum()) for name in ("num_sequences", *sums)}
    entries = {
        "totals": {
            "num_steps": columns.num_steps,
            **totals,
            "longest_sequence": max(longest for _, longest in columns.epochs),
            "num_dropped_sequences": sum(size for size, _ in columns.epochs) - totals["num_sequences"],
            **({"num_run_tokens": int(chunks["num_tokens"].sum())} if config.share_prefixes else {}),
        },
        "selection": describe_selection(columns.analysis, config),
        "predictions": {name: sum(steps[name].tolist()) for name in ("predicted_us", "lower_bound_us")},
    }
    for entry, values in entries.items():
        for name, value in values.items():
            if (stated := manifest[entry].get(name)) != value:
                yield Violation("", f"manifest says {name} = {stated}, counted {value}")
    for name, value in (("seed", config.seed), ("epochs", config.epochs)):
        if manifest.get(name) != value:
            yield Violation("", f"manifest says {name} = {manifest.get(name)}, its config {value}")


def check_chunk_ids(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Rows are sorted by (step, dp_rank, chunk_id), ids run 0.. without gaps, every rank of every step has a chunk."""
    chunks, dp, place = columns.chunks, columns.config.dp, columns.place
    bad = (chunks["chunk_id"] != np.arange(place.size) - np.searchsorted(place, place)) | (
        np.diff(place, prepend=0) < 0
    )
    bad |= (chunks["dp_rank"] < 0) | (chunks["dp_rank"] >= dp)
    yield columns.at(bad, lambda row: "chunk_id or dp_rank is out of place (ids run 0.. in each rank)")
    num_places = columns.num_steps * dp
    yield columns.at(place >= num_places, lambda row: "chunks of a step not in steps.parquet")
    absent = np.flatnonzero(np.bincount(place, minlength=num_places) == 0)
    if absent.size:
        yield Violation("", "a rank without chunks", int(absent[0]) // dp, int(absent[0]) % dp)


def check_chunk_size(columns: ChunkColumns) -> Iterator[Violation | None]:
    """No chunk is over ChunkSize, and its num_tokens is the sum of its segments, none of which is empty."""
    size, stated = columns.config.chunk_size, columns.chunks["num_tokens"]
    length = np.subtract(columns.end, columns.start, dtype=np.int64)
    tokens = columns.per_chunk(length)
    yield columns.at(
        (tokens > size) | (tokens != stated) | columns.holds(np.flatnonzero(length < 1)),
        lambda row: f"segments hold {tokens[row]} tokens ({stated[row]} stated), at most {size}",
    )


def check_kept_attention(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Attention is kept somewhere known, by chunks alone that are run again, alike on all ranks that share one."""
    kept = columns.chunks["kept_attention"]
    words = ", ".join(f'"{word}"' for word in KEPT_ATTENTION)
    yield columns.at(kept < 0, lambda row: f"kept_attention is none of {words}")
    yield columns.at(
        (kept != NOT_KEPT) & columns.chunks["keeps_activations"],
        lambda row: f'kept_attention is "{KEPT_ATTENTION[kept[row]]}", and the chunk keeps its activations',
    )
    if columns.config.keep_attention == "off":
        yield columns.at(kept != NOT_KEPT, lambda row: 'kept_attention is not "", and keep_attention is off')
    other = np.arange(columns.num_chunks)
    other[columns.shared] = columns.leader

    def differ(row: int) -> str:
        own, first = (KEPT_ATTENTION[kept[each]] for each in (row, other[row]))
        return f'kept_attention is "{own}", but "{first}" on rank {columns.chunks["cp_first_rank"][row]} of the block'

    yield columns.at(kept != kept[other], differ)


# The invariants of chunks that ranks share: context-parallel groups, the slices of each rank, and their order.

#: Columns that are equal in all rows of a chunk that ranks share.
_ALIKE = (
    *("cp_first_rank", "cp_size", "cp_heads", "cp_tokens"),
    *("group_id", "group_index", "group_size", "prefix_tokens", "keeps_activations"),
)


def check_cp_groups(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Blocks are of a size that `cp` allows and begin at a multiple of it; all ranks of one have the same rows."""
    if not columns.may_share:
        return
    chunks, cost = columns.chunks, columns.plan.cost
    rank, first, size, heads = (
        chunks[name].astype(np.int64) for name in ("dp_rank", "cp_first_rank", "cp_size", "cp_heads")
    )
    yield columns.at(
        (size == 1) & ((first != rank) | (heads != 1) | (chunks["cp_tokens"] != chunks["num_tokens"])),
        lambda row: "cp_size is 1, so expected the rank itself, 1 and num_tokens as cp_first_rank, cp_heads, cp_tokens",
    )
    sizes = _block_sizes(columns.config)
    yield columns.at(
        ~np.isin(size, sizes), lambda row: f"{size[row]} ranks share it, expected one of {', '.join(map(str, sizes))}"
    )
    yield columns.at(
        (first < 0) | (first % size != 0) | (rank < first) | (rank >= first + size),
        lambda row: (
            f"shared by {size[row]} ranks from rank {first[row]} on, expected the aligned block of the rank, "
            f"from {rank[row] // size[row] * size[row]} on"
        ),
    )
    yield columns.at(
        (heads < 1) | (size % np.maximum(heads, 1) != 0),
        lambda row: f"{heads[row]} of {size[row]} ranks share heads, expected a divisor",
    )
    kv_heads = cost.shape.num_kv_heads // cost.tp
    yield columns.at(
        kv_heads % np.maximum(heads, 1) != 0,
        lambda row: f"{heads[row]} ranks share heads, and {cost.shape.name} has {kv_heads} key and value heads a GPU",
    )
    yield columns.at(columns.is_shared & ~columns.is_grouped, lambda row: "shared, but of no group")
    absent = np.zeros(columns.num_chunks, bool)
    absent[columns.shared[columns.leader < 0]] = True
    yield columns.at(absent, lambda row: f"rank {first[row]}, of the same block, has no such chunk")
    other = np.arange(columns.num_chunks)
    other[columns.shared] = columns.leader

    def differs(name: str) -> Violation | None:
        values = chunks[name]
        return columns.at(
            values != values[other],
            lambda row: f"{name} is {values[row]}, but {values[other[row]]} on rank {first[row]} of the same block",
        )

    yield from map(differs, _ALIKE)
    num_members = np.bincount(other, minlength=columns.num_chunks)[other]
    yield columns.at(
        columns.is_shared & (num_members != size),
        lambda row: f"{num_members[row]} of the {size[row]} ranks from rank {first[row]} on have it",
    )


def _block_sizes(config: PlanConfig) -> list[int]:
    """The numbers of ranks that may share a sequence: 1, and each the one before times a prime, smallest first."""
    left = config.cp if isinstance(config.cp, int) else config.dp
    sizes, prime = [1], 2
    while left > 1:
        if left % prime:
            prime += 1
        else:
            sizes.append(sizes[-1] * prime)
            left //= prime
    return sizes


def check_cp_slices(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Every rank of a block has the slices of a shared chunk that are its own, none of them empty, and nothing else."""
    shared = columns.shared
    if not shared.size:
        return
    size, heads, rank, first, tokens = (
        columns.chunks[name][shared].astype(np.int64)
        for name in ("cp_size", "cp_heads", "dp_rank", "cp_first_rank", "cp_tokens")
    )
    num_groups = size // heads
    group, member = np.divmod(rank - first, heads)
    begins = columns.segments[columns.leader]  # [num_shared], the segment that the whole chunk begins with
    sequence, prefix = _at(columns.sequence_id, begins), _at(columns.start, begins).astype(np.int64)
    num_slices = np.where(num_groups > 1, 2, 1)
    wrong = np.diff(columns.segments)[shared] != num_slices
    expected = []
    for half, index in enumerate((np.where(num_groups > 1, group, 0), 2 * num_groups - 1 - group)):
        num_cuts = np.where(num_groups > 1, 2 * num_groups, 1)
        start, end = _slice(tokens, index, num_cuts)
        within = _slice(end - start, member, heads)
        start, end = prefix + start + within[0], prefix + start + within[1]
        segment = columns.segments[shared] + half
        differs = (_at(columns.start, segment) != start) | (_at(columns.end, segment) != end)
        differs |= (_at(columns.sequence_id, segment) != sequence) | (end <= start)
        wrong |= (half < num_slices) & differs
        expected.append((start, end))
    bad = np.zeros(columns.num_chunks, bool)
    bad[shared[wrong]] = True

    def describe(row: int) -> str:
        at = int(np.searchsorted(shared, row))
        own = range(columns.segments[row], columns.segments[row + 1])
        found = [f"[{columns.start[i]}, {columns.end[i]}) of sequence {columns.sequence_id[i]}" for i in own]
        slices = [f"[{start[at]}, {end[at]})" for start, end in expected[: num_slices[at]]]
        return f"holds {' and '.join(found) or 'nothing'}, expected {' and '.join(slices)} of sequence {sequence[at]}"

    yield columns.at(bad, describe)


def _slice(tokens: Int64Array, index: Int64Array, num_slices: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The index-th of some equal slices of `tokens` tokens: [start, end)."""
    return tokens * index // num_slices, tokens * (index + 1) // num_slices


def _at(values: IntArray, places: Int64Array) -> IntArray:
    """The values at `places`, the last of which may be just behind the end."""
    return np.append(values, -1)[np.minimum(places, values.size)]


def check_cp_order(columns: ChunkColumns) -> Iterator[Violation | None]:
    """Shared chunks come first on a rank and in ascending order of group_id; these are the lowest of the step.

    A group_id is that of one group of a step, on one rank or one block.
    """
    if not columns.may_share:
        return
    group, step = (columns.chunks[name].astype(np.int64) for name in ("group_id", "step"))
    is_shared = columns.is_shared
    follows = np.diff(columns.place, prepend=-1) == 0  # a chunk of the same rank
    late = follows & is_shared & ~np.roll(is_shared, 1)
    yield columns.at(late, lambda row: "a shared chunk after one that the rank has to itself")
    descends = follows & is_shared & (group < np.roll(group, 1))
    yield columns.at(descends, lambda row: f"group {group[row]} after group {group[row - 1]}")
    rows = np.flatnonzero(columns.is_grouped)
    key = (step[rows] << 32) + group[rows] + (1 << 31)
    order = np.argsort(key, kind="stable")
    other = np.arange(columns.num_chunks)  # of each row the first one with its group_id
    other[rows[order]] = rows[order][run_starts(key[order])]
    yield columns.at(
        columns.home != columns.home[other],
        lambda row: (
            f"group {group[row]} is that of other ranks already, rank {columns.chunks['dp_rank'][other[row]]} "
            "among them: an id is unique in a step"
        ),
    )
    highest = np.full(columns.num_steps, np.iinfo(np.int64).min)
    np.maximum.at(highest, step[columns.shared], group[columns.shared])
    yield columns.at(
        columns.is_grouped & ~is_shared & (group < highest[step]),
        lambda row: (
            f"group {group[row]} is of the rank alone, but group {highest[step[row]]} is shared: those that are "
            "have the lowest ids of a step"
        ),
    )


#: Run in this order. The checks after one of `STRUCTURAL` rely on it and say nothing sensible where it fails.
#: `WITHOUT_ANALYSIS` look at the plan alone.
STRUCTURAL = frozenset({"chunk-ids", "prefixes", "cp-groups", "batch-sizes", "tokens-once"})
WITHOUT_ANALYSIS = frozenset(
    {"chunk-ids", "cp-groups", "cp-slices", "cp-order", "kept-attention", "equal-chunks", "chunk-size"}
)
CHUNK_CHECKS: dict[str, Callable[[ChunkColumns], Iterator[Violation | None]]] = {
    "chunk-ids": check_chunk_ids,
    "prefixes": check_prefixes,
    "cp-groups": check_cp_groups,
    "cp-slices": check_cp_slices,
    "cp-order": check_cp_order,
    "kept-attention": check_kept_attention,
    "batch-sizes": check_steps,
    "equal-chunks": check_equal_chunks,
    "chunk-size": check_chunk_size,
    "tokens-once": check_tokens_once,
    "whole-groups": check_whole_groups,
    "one-step-one-rank": check_one_place,
    "groups": check_groups,
    "last-dependent": check_last_dependent,
    "prefix": check_prefix,
    "targets": check_targets,
    "totals": check_totals,
}


def first_violation(invariant: str, columns: ChunkColumns) -> Violation | None:
    """The first violation found by one of `CHUNK_CHECKS`, which then stops."""
    found = next(filter(None, CHUNK_CHECKS[invariant](columns)), None)
    return found and replace(found, invariant=invariant)
