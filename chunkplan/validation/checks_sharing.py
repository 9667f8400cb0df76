"""The invariants of chunks that ranks share: context-parallel groups, the slices of each rank, and their order."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array, IntArray, run_starts
from chunkplan.config.plan import PlanConfig
from chunkplan.validation.chunk_columns import ChunkColumns
from chunkplan.validation.violation import Violation

#: What the rows of a chunk that ranks share have in common.
_ALIKE = (
    *("cp_first_rank", "cp_size", "cp_heads", "cp_tokens"),
    *("group_id", "group_index", "group_size", "prefix_tokens", "keeps_activations"),
)


def check_cp_groups(columns: ChunkColumns) -> Violation | None:
    """Blocks are of a size that `cp` allows and begin at a multiple of it; all ranks of one have the same rows."""
    if not columns.may_share:
        return None
    chunks = columns.chunks
    rank, first, size, heads = (
        chunks[name].astype(np.int64) for name in ("dp_rank", "cp_first_rank", "cp_size", "cp_heads")
    )
    odd = (first != rank) | (heads != 1) | (chunks["cp_tokens"] != chunks["num_tokens"])
    found = columns.at(
        "cp-groups",
        lambda row: "cp_size is 1, so expected the rank itself, 1 and num_tokens as cp_first_rank, cp_heads, cp_tokens",
        (size == 1) & odd,
    )
    if found:
        return found
    sizes = _block_sizes(columns.config)
    bad = ~np.isin(size, sizes)
    found = columns.at(
        "cp-groups", lambda row: f"{size[row]} ranks share it, expected one of {', '.join(map(str, sizes))}", bad
    )
    if found:
        return found
    bad = (first < 0) | (first % size != 0) | (rank < first) | (rank >= first + size)
    found = columns.at(
        "cp-groups",
        lambda row: (
            f"shared by {size[row]} ranks from rank {first[row]} on, expected the aligned block of the rank, "
            f"from {rank[row] // size[row] * size[row]} on"
        ),
        bad,
    )
    if found:
        return found
    bad = (heads < 1) | (size % np.maximum(heads, 1) != 0)
    found = columns.at(
        "cp-groups", lambda row: f"{heads[row]} of {size[row]} ranks share heads, expected a divisor", bad
    )
    cost = columns.plan.cost
    kv_heads = cost.shape.num_kv_heads // cost.tp
    found = found or columns.at(
        "cp-groups",
        lambda row: f"{heads[row]} ranks share heads, and {cost.shape.name} has {kv_heads} key and value heads a GPU",
        kv_heads % np.maximum(heads, 1) != 0,
    )
    found = found or columns.at(
        "cp-groups", lambda row: "shared, but of no group", columns.is_shared & ~columns.is_grouped
    )
    return found or _check_alike(columns)


def _block_sizes(config: PlanConfig) -> list[int]:
    """How many ranks may share a sequence: 1, and from one to the next times a prime, smallest first."""
    left = config.cp if isinstance(config.cp, int) else config.dp
    sizes, prime = [1], 2
    while left > 1:
        if left % prime:
            prime += 1
        else:
            sizes.append(sizes[-1] * prime)
            left //= prime
    return sizes


def _check_alike(columns: ChunkColumns) -> Violation | None:
    """All ranks of a block have a chunk of the same number, which says the same of the group."""
    chunks, shared, leader = columns.chunks, columns.shared, columns.leader
    first, size = chunks["cp_first_rank"], chunks["cp_size"]
    bad = np.zeros(columns.num_chunks, bool)
    bad[shared[leader < 0]] = True
    found = columns.at("cp-groups", lambda row: f"rank {first[row]}, of the same block, has no such chunk", bad)
    if found:
        return found
    other = np.arange(columns.num_chunks)
    other[shared] = leader

    def differs(name: str) -> Violation | None:
        values = chunks[name]
        return columns.at(
            "cp-groups",
            lambda row: f"{name} is {values[row]}, but {values[other[row]]} on rank {first[row]} of the same block",
            values != values[other],
        )

    for name in _ALIKE:
        if found := differs(name):
            return found
    num_members = np.bincount(other, minlength=columns.num_chunks)[other]
    return columns.at(
        "cp-groups",
        lambda row: f"{num_members[row]} of the {size[row]} ranks from rank {first[row]} on have it",
        columns.is_shared & (num_members != size),
    )


def check_cp_slices(columns: ChunkColumns) -> Violation | None:
    """Every rank of a block has the slices of a shared chunk that are its own, none of them empty, and nothing else."""
    shared = columns.shared
    if not shared.size:
        return None
    size, heads, rank, first, tokens = (
        columns.chunks[name][shared].astype(np.int64)
        for name in ("cp_size", "cp_heads", "dp_rank", "cp_first_rank", "cp_tokens")
    )
    num_groups = size // heads
    group, member = np.divmod(rank - first, heads)
    begins = columns.segments[columns.leader]  # [num_shared], the segment that the whole chunk begins with
    sequence, prefix = _at(columns.sequence_id, begins), _at(columns.start, begins).astype(np.int64)
    num_slices = np.where(num_groups > 1, 2, 1)
    num_segments = np.diff(columns.segments)[shared]
    wrong = num_segments != num_slices
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

    return columns.at("cp-slices", describe, bad)


def _slice(tokens: Int64Array, index: Int64Array, num_slices: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The index-th of some equal slices of `tokens` tokens: [start, end)."""
    return tokens * index // num_slices, tokens * (index + 1) // num_slices


def _at(values: IntArray, places: Int64Array) -> IntArray:
    """The values at `places`, the last of which may be just behind the end."""
    return np.append(values, -1)[np.minimum(places, values.size)]


def check_cp_order(columns: ChunkColumns) -> Violation | None:
    """Shared chunks come first on a rank and in ascending order of group_id; these are the lowest of the step.

    A group_id is that of one group of a step, on one rank or one block.
    """
    if not columns.may_share:
        return None
    group, is_shared = columns.chunks["group_id"], columns.is_shared
    follows = np.diff(columns.place, prepend=-1) == 0  # a chunk of the same rank
    late = follows & is_shared & ~np.roll(is_shared, 1)
    found = columns.at("cp-order", lambda row: "a shared chunk after one that the rank has to itself", late)
    if found:
        return found
    descends = follows & is_shared & (group < np.roll(group, 1))
    found = columns.at("cp-order", lambda row: f"group {group[row]} after group {group[row - 1]}", descends)
    return found or _check_group_ids(columns)


def _check_group_ids(columns: ChunkColumns) -> Violation | None:
    group, step = columns.chunks["group_id"].astype(np.int64), columns.chunks["step"].astype(np.int64)
    rows = np.flatnonzero(columns.is_grouped)
    key = (step[rows] << 32) + group[rows] + (1 << 31)
    order = np.argsort(key, kind="stable")
    first = np.empty(rows.size, np.int64)  # of each row the first one with its group_id
    first[order] = rows[order][run_starts(key[order])]
    other = np.zeros(columns.num_chunks, np.int64)
    other[rows] = first
    bad: BoolArray = np.zeros(columns.num_chunks, bool)
    bad[rows] = columns.home[rows] != columns.home[first]
    found = columns.at(
        "cp-order",
        lambda row: (
            f"group {group[row]} is that of other ranks already, rank {columns.chunks['dp_rank'][other[row]]} "
            "among them: an id is unique in a step"
        ),
        bad,
    )
    if found:
        return found
    highest = np.full(columns.num_steps, np.iinfo(np.int64).min)
    np.maximum.at(highest, step[columns.shared], group[columns.shared])
    bad = columns.is_grouped & ~columns.is_shared & (group < highest[step])
    return columns.at(
        "cp-order",
        lambda row: (
            f"group {group[row]} is of the rank alone, but group {highest[step[row]]} is shared: those that are "
            "have the lowest ids of a step"
        ),
        bad,
    )
