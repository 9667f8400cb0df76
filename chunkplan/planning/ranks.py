"""Assigns the sequences of a step to ranks and packs each rank's short ones: which rank runs what, in which chunk.

Work goes first: sequences are assigned by cost, then packed per rank. What chunks cost beside their tokens is known
only then, so that afterwards further sequences are exchanged between the ranks that take longest and shortest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.balance.assign import assign, best_exchange, even_out, exchange, least_gain
from chunkplan.compiled import compiled
from chunkplan.packing.best_fit import best_fit
from chunkplan.packing.bounds import martello_toth


class Sequences(NamedTuple):
    """Sequences, those of a step descending by tokens.

    `tokens` and `work` int64 [n]: work is in ns, without what the chunks of short ones cost beside their tokens.
    `parts` int64 [n + 1]: where the parts of each begin; short ones have none. `part_tokens` int64 and `part_keeps`
    bool [num_parts]: the tokens of each part, and whether its chunk keeps activations.
    """

    tokens: Int64Array
    work: Int64Array
    parts: Int64Array
    part_tokens: Int64Array
    part_keeps: BoolArray


class Rules(NamedTuple):
    """`chunk_ns`: what a chunk costs beside its tokens, forward and backward, which is `passes` forwards."""

    dp: int
    chunk_size: int
    chunk_ns: int
    passes: int
    tail_sharing: bool


class Placement(NamedTuple):
    """Where the sequences of some steps run; all int64.

    `rank_of`, `bin_of` [n]: a bin below the number of the rank's parts is the chunk of that part, counting through its
    groups from the shortest; the others are standalone chunks; -1 for split sequences. `num_standalone`, `rank_bound`
    [num_steps, dp]: a rank's standalone chunks, and the chunks that no packing of its own parts and short sequences can
    do without. `step_bound` [num_steps]: the same for the step, however its sequences are assigned.
    """

    rank_of: Int64Array
    bin_of: Int64Array
    num_standalone: Int64Array
    rank_bound: Int64Array
    step_bound: Int64Array


@compiled
def place_steps(step_starts: Int64Array, sequences: Sequences, rules: Rules) -> Placement:
    """Place the sequences of some steps; `step_starts` int64 [num_steps + 1] says where each step's begin."""
    num_steps = step_starts.size - 1
    placement = Placement(
        np.empty(sequences.tokens.size, np.int64),
        np.full(sequences.tokens.size, -1, np.int64),
        np.zeros((num_steps, rules.dp), np.int64),
        np.zeros((num_steps, rules.dp), np.int64),
        np.zeros(num_steps, np.int64),
    )
    for step in range(num_steps):
        start, stop = step_starts[step], step_starts[step + 1]
        own = step_sequences(sequences, start, stop)
        rank_of = assign(own.work, rules.dp)
        even_out(own.work, rank_of, rules.dp)
        bin_of, num_standalone, _ = settle(own, rules, rank_of)
        placement.rank_of[start:stop] = rank_of
        placement.bin_of[start:stop] = bin_of
        placement.num_standalone[step] = num_standalone
        for rank in range(rules.dp):
            placement.rank_bound[step, rank] = fewest_chunks(own, rules, rank_of == rank)
        anywhere = fewest_chunks(own, rules, np.ones(stop - start, np.bool_))
        placement.step_bound[step] = max(rules.dp, anywhere)
    return placement


@compiled
def step_sequences(sequences: Sequences, start: int, stop: int) -> Sequences:
    """The sequences from `start` to before `stop`, whose parts stay where they are."""
    return Sequences(
        sequences.tokens[start:stop],
        sequences.work[start:stop],
        sequences.parts[start : stop + 1],
        sequences.part_tokens,
        sequences.part_keeps,
    )


@compiled
def settle(sequences: Sequences, rules: Rules, rank_of: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Pack the ranks of one step: (bin of each sequence, standalone chunks of each rank, time of each rank in ns).

    Changes `rank_of` where that makes the slowest rank faster, now that it is known how many chunks each has.
    """
    bin_of = np.full(sequences.tokens.size, -1, np.int64)  # [n]
    num_standalone = np.zeros(rules.dp, np.int64)  # [dp]
    times = np.zeros(rules.dp, np.int64)  # [dp]
    for rank in range(rules.dp):
        num_standalone[rank], times[rank] = _pack_rank(sequences, rules, rank_of, rank, bin_of)
    least = least_gain(times)
    mean = times.sum() // rules.dp
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
            standalone_slowest, time_slowest = _pack_rank(sequences, rules, rank_of, slowest, bin_of)
            standalone_other, time_other = _pack_rank(sequences, rules, rank_of, other, bin_of)
            if max(time_slowest, time_other) <= times[slowest] - least:
                num_standalone[slowest], times[slowest] = standalone_slowest, time_slowest
                num_standalone[other], times[other] = standalone_other, time_other
                searching = True
                break
            exchange(rank_of, given, taken, other, slowest)
            bin_of[:] = before
    return bin_of, num_standalone, times


@compiled
def _pack_rank(
    sequences: Sequences, rules: Rules, rank_of: Int64Array, rank: int, bin_of: Int64Array
) -> tuple[int, int]:
    """Pack one rank into `bin_of`: (its standalone chunks, its time in ns). Every rank has a chunk at least."""
    parts = sequences.parts
    short = np.empty(rank_of.size, np.int64)  # [n], filled from the end
    rooms = np.empty(parts[-1] - parts[0], np.int64)  # [num_parts]
    second_choice = np.empty(rooms.size, np.bool_)  # [num_parts]
    num_short = num_parts = time = 0
    for sequence in range(rank_of.size - 1, -1, -1):  # shortest first
        if rank_of[sequence] != rank:
            continue
        time += sequences.work[sequence]
        if parts[sequence] == parts[sequence + 1]:
            num_short += 1
            short[-num_short] = sequence
        for part in range(parts[sequence], parts[sequence + 1]):
            rooms[num_parts] = rules.chunk_size - sequences.part_tokens[part] if rules.tail_sharing else 0
            second_choice[num_parts] = not sequences.part_keeps[part]
            num_parts += 1
    short = short[short.size - num_short :]
    largest_second = 0  # recomputing with a chunk of another sequence pays where it is cheaper than a chunk
    for index in range(num_short):
        if sequences.work[short[index]] // rules.passes <= rules.chunk_ns:
            largest_second = sequences.tokens[short[index]]
            break
    bins, num_bins = best_fit(
        sequences.tokens[short], rules.chunk_size, rooms[:num_parts], second_choice[:num_parts], largest_second
    )
    for index in range(num_short):
        bin_of[short[index]] = bins[index]
        if bins[index] < num_parts and second_choice[bins[index]]:
            time += sequences.work[short[index]] // rules.passes  # forwarded once more, with its chunk
    num_standalone = num_bins - num_parts if num_bins > 0 else 1
    return num_standalone, time + num_standalone * rules.chunk_ns


@compiled
def fewest_chunks(sequences: Sequences, rules: Rules, chosen: BoolArray) -> int:
    """No packing of the parts and short sequences among the `chosen` [n] has fewer chunks: at least 1."""
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
    if num_parts == 0 or not rules.tail_sharing:
        return max(num_parts + martello_toth(items[:num_items], rules.chunk_size), 1)
    for sequence in range(chosen.size):
        if not chosen[sequence]:
            continue
        for part in range(parts[sequence], parts[sequence + 1]):
            if sequences.part_tokens[part] == rules.chunk_size:
                num_full += 1
            else:
                items[num_items] = sequences.part_tokens[part]
                num_items += 1
    return max(num_parts, num_full + martello_toth(np.sort(items[:num_items]), rules.chunk_size))
