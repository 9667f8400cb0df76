"""The invariants of chunks that ranks share: context-parallel groups, the slices of each rank, and their order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chunkplan.arrays import Int64Array, IntArray, run_starts
from chunkplan.config.plan import PlanConfig
from chunkplan.validation.chunk_columns import ChunkColumns, Violation

#: What the rows of a chunk that ranks share have in common.
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
