"""Assigns the sequences of a step to ranks, and packs each rank's short ones into chunks.

Sequences are assigned by cost, then packed per rank. The overhead of chunks is known only then, so afterwards sequences
are exchanged between the slowest and the fastest ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.balance.assign import assign, best_exchange, even_out, exchange, least_gain
from chunkplan.compiled import compiled, copy_to
from chunkplan.packing.heuristics import best_fit, martello_toth

#: A rank that shares a chunk holds at most so many slices of it, one from either half.
SLICES = 2


class Shares(NamedTuple):
    """Sharing of sequences by ranks, int64 [n]: `size` ranks from `first_rank` on, of which `heads` share the heads.

    1, -1 and 1 if not shared. `work`: time of each of the ranks for its share, in ns.
    """

    size: Int64Array
    heads: Int64Array
    first_rank: Int64Array
    work: Int64Array

    @classmethod
    def none(cls, n: int) -> Shares:
        """The shares of sequences none of which is shared."""
        ones = np.ones(n, np.int64)
        return cls(ones, ones, -ones, 0 * ones)


class Sequences(NamedTuple):
    """Sequences, those of a step descending by tokens.

    `tokens` and `work` int64 [n]: work is in ns, without what the chunks of short ones cost beside their tokens.
    `parts` int64 [n + 1]: where the parts of each begin; short ones have none. `part_tokens` int64 and `part_keeps`
    bool [num_parts]: the tokens of each part, and whether its chunk keeps activations. `cp_size`, `cp_heads`,
    `cp_first_rank` [n]: see `Shares`; a shared sequence has one part at least, and `work` is that of each rank.
    """

    tokens: Int64Array
    work: Int64Array
    parts: Int64Array
    part_tokens: Int64Array
    part_keeps: BoolArray
    cp_size: Int64Array
    cp_heads: Int64Array
    cp_first_rank: Int64Array


class PackingParams(NamedTuple):
    """`chunk_ns`: the fixed time of a chunk, forward and backward, which is that of `forward_equivalents` forwards."""

    dp: int
    chunk_size: int
    chunk_ns: int
    forward_equivalents: int
    tail_sharing: bool


class RankAssignment(NamedTuple):
    """Rank and bin of the sequences of some steps; all int64.

    `rank_of`, `bin_of` [n]: a bin below the number of the rank's parts is the chunk of that part, counting through its
    groups from the shortest; the others are standalone chunks; -1 for split sequences. Those that ranks share are on no
    rank, -1, and count nowhere but in `num_shared` [num_steps, dp]: how many chunks a rank shares with others.
    `num_standalone`, `rank_bound` [num_steps, dp]: a rank's standalone chunks, and the chunks that no packing of its
    own parts and short sequences can do without, shared ones among them. `step_bound` [num_steps]: the same for the
    step, however its sequences are assigned that are not shared.
    """

    rank_of: Int64Array
    bin_of: Int64Array
    num_shared: Int64Array
    num_standalone: Int64Array
    rank_bound: Int64Array
    step_bound: Int64Array


@compiled
def assign_and_pack(step_starts: Int64Array, sequences: Sequences, params: PackingParams) -> RankAssignment:
    """Assign the sequences of some steps to ranks and pack them; `step_starts` int64 [num_steps + 1]: where steps
    begin."""
    num_steps = step_starts.size - 1
    assignment = RankAssignment(
        np.empty(sequences.tokens.size, np.int64),
        np.full(sequences.tokens.size, -1, np.int64),
        np.zeros((num_steps, params.dp), np.int64),
        np.zeros((num_steps, params.dp), np.int64),
        np.zeros((num_steps, params.dp), np.int64),
        np.zeros(num_steps, np.int64),
    )
    for step in range(num_steps):
        start, stop = step_starts[step], step_starts[step + 1]
        own = step_sequences(sequences, start, stop)
        num_shared = assignment.num_shared[step]
        loads = _shared_loads(own, num_shared)
        rank_of = assign(own.work, own.cp_first_rank < 0, loads)
        even_out(own.work, rank_of, loads)
        bin_of, num_standalone, _ = pack_and_rebalance(own, params, rank_of, loads, num_shared)
        copy_to(assignment.rank_of[start:stop], rank_of)
        copy_to(assignment.bin_of[start:stop], bin_of)
        copy_to(assignment.num_standalone[step], num_standalone)
        for rank in range(params.dp):
            assignment.rank_bound[step, rank] = fewest_chunks(own, params, rank_of == rank, num_shared[rank])
        anywhere = fewest_chunks(own, params, own.cp_first_rank < 0, num_shared.sum())
        assignment.step_bound[step] = max(params.dp, anywhere)
    return assignment


@compiled
def _shared_loads(sequences: Sequences, num_shared: Int64Array) -> Int64Array:
    """Time of each rank for its shares of sequences, int64 [dp]; adds their chunks to `num_shared` [dp]."""
    loads = np.zeros(num_shared.size, np.int64)
    for sequence in range(sequences.tokens.size):
        first = sequences.cp_first_rank[sequence]
        if first >= 0:
            num_parts = sequences.parts[sequence + 1] - sequences.parts[sequence]
            for rank in range(first, first + sequences.cp_size[sequence]):
                loads[rank] += sequences.work[sequence]
                num_shared[rank] += num_parts
    return loads


@compiled
def step_sequences(sequences: Sequences, start: int, stop: int) -> Sequences:
    """The sequences from `start` to before `stop`, whose parts stay where they are."""
    return Sequences(
        sequences.tokens[start:stop],
        sequences.work[start:stop],
        sequences.parts[start : stop + 1],
        sequences.part_tokens,
        sequences.part_keeps,
        sequences.cp_size[start:stop],
        sequences.cp_heads[start:stop],
        sequences.cp_first_rank[start:stop],
    )


@compiled
def pack_and_rebalance(
    sequences: Sequences, params: PackingParams, rank_of: Int64Array, loads: Int64Array, num_shared: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pack the ranks of one step: (bin of each sequence, standalone chunks of each rank, time of each rank in ns).

    Changes `rank_of` where that makes the slowest rank faster, as packing tells the number of chunks of each. `loads`
    and `num_shared` int64 [dp]: time in ns and number of the chunks that each rank shares with others.
    """
    bin_of = np.full(sequences.tokens.size, -1, np.int64)  # [n]
    num_standalone = np.zeros(params.dp, np.int64)  # [dp]
    times = np.zeros(params.dp, np.int64)  # [dp]
    for rank in range(params.dp):
        num_standalone[rank], times[rank] = _pack_rank(sequences, params, rank_of, rank, bin_of, loads, num_shared)
    least = least_gain(times)
    mean = times.sum() // params.dp
    searching = True
    while searching:
        searching = False
        slowest = int(times.argmax())
        if times[slowest] - mean <= 2 * least:
            break
        for other in np.argsort(times, kind="mergesort"):
            gap = times[slowest] - times[other]
            if gap <= 2 * least:
                break
            given, taken = best_exchange(sequences.work, rank_of, slowest, other, gap, least)
            if given < 0:
                continue
            before = bin_of.copy()
            exchange(rank_of, given, taken, slowest, other)
            standalone_slowest, time_slowest = _pack_rank(
                sequences, params, rank_of, slowest, bin_of, loads, num_shared
            )
            standalone_other, time_other = _pack_rank(sequences, params, rank_of, other, bin_of, loads, num_shared)
            if max(time_slowest, time_other) <= times[slowest] - least:
                num_standalone[slowest], times[slowest] = standalone_slowest, time_slowest
                num_standalone[other], times[other] = standalone_other, time_other
                searching = True
                break
            exchange(rank_of, given, taken, other, slowest)
            copy_to(bin_of, before)
    return bin_of, num_standalone, times


@compiled
def _pack_rank(
    sequences: Sequences,
    params: PackingParams,
    rank_of: Int64Array,
    rank: int,
    bin_of: Int64Array,
    loads: Int64Array,
    num_shared: Int64Array,
) -> tuple[int, int]:
    """Pack one rank into `bin_of`: (its standalone chunks, its time in ns). Every rank has a chunk at least."""
    parts = sequences.parts
    short = np.empty(rank_of.size, np.int64)  # [n], filled from the end
    rooms = np.empty(parts[-1] - parts[0], np.int64)  # [num_parts]
    second_choice = np.empty(rooms.size, np.bool_)  # [num_parts]
    num_short = num_parts = 0
    time = loads[rank]
    for sequence in range(rank_of.size - 1, -1, -1):  # shortest first
        if rank_of[sequence] != rank:
            continue
        time += sequences.work[sequence]
        if parts[sequence] == parts[sequence + 1]:
            num_short += 1
            short[-num_short] = sequence
        for part in range(parts[sequence], parts[sequence + 1]):
            rooms[num_parts] = params.chunk_size - sequences.part_tokens[part] if params.tail_sharing else 0
            second_choice[num_parts] = not sequences.part_keeps[part]
            num_parts += 1
    short = short[short.size - num_short :]
    largest_second = 0  # recomputing with a chunk of another sequence pays where it is cheaper than a chunk
    for index in range(num_short):
        if sequences.work[short[index]] // params.forward_equivalents <= params.chunk_ns:
            largest_second = sequences.tokens[short[index]]
            break
    bins, num_bins = best_fit(
        sequences.tokens[short], params.chunk_size, rooms[:num_parts], second_choice[:num_parts], largest_second
    )
    for index in range(num_short):
        bin_of[short[index]] = bins[index]
        if bins[index] < num_parts and second_choice[bins[index]]:
            time += sequences.work[short[index]] // params.forward_equivalents  # forwarded once more, with its chunk
    num_standalone = num_bins - num_parts if num_bins + num_shared[rank] > 0 else 1
    return num_standalone, time + num_standalone * params.chunk_ns


@compiled
def fewest_chunks(sequences: Sequences, params: PackingParams, chosen: BoolArray, num_shared: int) -> int:
    """No packing of the parts and short sequences among the `chosen` [n] has fewer chunks: at least 1.

    None of them is shared; the chunks that are, `num_shared`, count too.
    """
    parts = sequences.parts
    items = np.empty(chosen.size + parts[-1] - parts[0], np.int64)  # [n + num_parts]
    num_items = num_parts = num_full = 0
    for sequence in range(chosen.size - 1, -1, -1):
        if not chosen[sequence]:
            continue
        if parts[sequence] == parts[sequence + 1]:
            items[num_items] = sequences.tokens[sequence]
            num_items += 1
        num_parts += parts[sequence + 1] - parts[sequence]
    if num_parts == 0 or not params.tail_sharing:
        return max(num_shared + num_parts + martello_toth(items[:num_items], params.chunk_size), 1)
    for sequence in range(chosen.size):
        if not chosen[sequence]:
            continue
        for part in range(parts[sequence], parts[sequence + 1]):
            if sequences.part_tokens[part] == params.chunk_size:
                num_full += 1
            else:
                items[num_items] = sequences.part_tokens[part]
                num_items += 1
    by_size = np.argsort(items[:num_items], kind="mergesort")
    return num_shared + max(num_parts, num_full + martello_toth(items[by_size], params.chunk_size))
