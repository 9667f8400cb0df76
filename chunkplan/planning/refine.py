"""Refines what the fast pass could not prove best: the packing of a rank, the assignment of a step's sequences."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.balance.search import search_ranks
from chunkplan.packing import pack_lengths
from chunkplan.planning.ranks import (
    PackingParams,
    RankAssignment,
    Sequences,
    fewest_chunks,
    pack_and_rebalance,
    step_sequences,
)

#: A linear program takes as long as planning hundreds of steps: it has to be able to gain this part of a rank's time.
_LP_GAIN_PARTS = 500

#: Deterministic seconds of CP-SAT for a step.
_EFFORT = 0.1


def refine_packing(
    step_starts: Int64Array,
    sequences: Sequences,
    params: PackingParams,
    assignment: RankAssignment,
    is_cancelled: Callable[[], bool],
    algorithm: str,
) -> None:
    """Pack ranks that have more chunks than their bound with `algorithm`; keep what has fewer, and better bounds.

    Changes `assignment`. With tail sharing the parts of chunks that keep activations go in as items of their own: their
    chunks are bins that other items may join, but two parts may not share one. (A bound counts only where no other
    chunk has room.) With "auto" there is no more than minimum bin slack where all that could be gained, the chunks over
    the bound, is below 1/_LP_GAIN_PARTS of the rank's time.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still something to do.
    """
    num_parts = parts_per_rank(step_starts, sequences, assignment)
    num_chunks = assignment.num_shared + assignment.num_standalone + num_parts
    for step, rank in np.argwhere(num_chunks > assignment.rank_bound).tolist():
        if is_cancelled():
            raise CancelledError
        start, stop = step_starts[step], step_starts[step + 1]
        own = start + np.flatnonzero(assignment.rank_of[start:stop] == rank)  # [sequences of the rank]
        is_split = np.diff(sequences.parts)[own] > 0  # [sequences of the rank]
        short = own[~is_split]
        parts = np.array(
            [part for i in own[is_split][::-1] for part in range(sequences.parts[i], sequences.parts[i + 1])], np.int64
        )
        rooms = params.chunk_size - sequences.part_tokens[parts]
        has_room = (rooms > 0) & params.tail_sharing
        shared = np.flatnonzero(has_room & sequences.part_keeps[parts])
        items = np.concatenate([sequences.tokens[short], sequences.part_tokens[parts[shared]]])
        closed = assignment.num_shared[step, rank] + parts.size - shared.size
        gap_ns = (num_chunks[step, rank] - assignment.rank_bound[step, rank]) * params.chunk_ns
        everything_ns = sequences.work[own].sum() + assignment.num_standalone[step, rank] * params.chunk_ns
        pays = algorithm != "auto" or gap_ns * _LP_GAIN_PARTS >= everything_ns
        packing = pack_lengths(items, params.chunk_size, algorithm if pays else "mbs", certify=pays)
        if shared.size == has_room.sum():
            assignment.rank_bound[step, rank] = max(assignment.rank_bound[step, rank], closed + packing.lower_bound)
        bins_of_parts = packing.bin_of[short.size :]
        if closed + packing.num_bins >= num_chunks[step, rank] or np.unique(bins_of_parts).size < shared.size:
            continue
        chunk_of_bin = np.full(packing.num_bins, -1)
        chunk_of_bin[bins_of_parts] = shared
        standalone = chunk_of_bin < 0
        chunk_of_bin[standalone] = parts.size + np.arange(standalone.sum())
        assignment.bin_of[short] = chunk_of_bin[packing.bin_of[: short.size]]
        assignment.num_standalone[step, rank] = standalone.sum()
    if params.dp == 1:
        assignment.step_bound[:] = np.maximum(assignment.step_bound, assignment.rank_bound[:, 0])


def refine_assignment(
    step_starts: Int64Array,
    sequences: Sequences,
    params: PackingParams,
    assignment: RankAssignment,
    is_cancelled: Callable[[], bool],
    *,
    equal_chunks: bool,
) -> None:
    """Look for an assignment of each step's sequences to ranks with CP-SAT; keep it where it is faster.

    It is hinted with the one there is. Changes `assignment`. With `equal_chunks` every rank takes as many chunks as the
    one that has most.

    Raises:
        CancelledError: `is_cancelled()` was true while there was still something to do.
    """
    for step in range(step_starts.size - 1):
        if is_cancelled():
            raise CancelledError
        here = slice(int(step_starts[step]), int(step_starts[step + 1]))
        own = step_sequences(sequences, here.start, here.stop)
        num_parts = np.diff(own.parts)
        hint = assignment.rank_of[here].copy()
        found = search_ranks(
            costs=own.work - num_parts * params.chunk_ns,
            demands=np.where(num_parts > 0, _demand_of_parts(own, params), own.tokens),
            own_chunks=num_parts,
            hint=hint,
            dp=params.dp,
            chunk_size=params.chunk_size,
            chunk_cost=params.chunk_ns,
            equal_chunks=equal_chunks,
            effort=_EFFORT,
        )
        old, new = (_Assignment(own, params, rank_of, equal_chunks) for rank_of in (hint, found))
        if new.slowest_ns < old.slowest_ns:
            assignment.rank_of[here], assignment.bin_of[here] = new.rank_of, new.bin_of
            assignment.num_standalone[step] = new.num_standalone
            for rank in range(params.dp):
                assignment.rank_bound[step, rank] = fewest_chunks(own, params, new.rank_of == rank, 0)


class _Assignment:
    """The sequences of a step assigned to ranks and packed, and when its slowest rank is done."""

    def __init__(self, sequences: Sequences, params: PackingParams, rank_of: Int64Array, equal_chunks: bool) -> None:
        self.rank_of = rank_of.astype(np.int64)
        none = np.zeros(params.dp, np.int64)
        self.bin_of, self.num_standalone, times = pack_and_rebalance(sequences, params, self.rank_of, none, none)
        num_chunks = self.num_standalone.copy()
        np.add.at(num_chunks, self.rank_of, np.diff(sequences.parts))
        filled_up = (num_chunks.max() - num_chunks) * params.chunk_ns if equal_chunks else 0
        self.slowest_ns = int((times + filled_up).max())


def _demand_of_parts(sequences: Sequences, params: PackingParams) -> Int64Array:
    """Tokens that split sequences take of shared chunks: minus the room their own chunks leave, if that is shared."""
    room = np.diff(sequences.parts) * params.chunk_size - sequences.tokens
    return -room if params.tail_sharing else 0 * room


def parts_per_rank(step_starts: Int64Array, sequences: Sequences, assignment: RankAssignment) -> Int64Array:
    """Parts of split sequences that each rank has to itself, int64 [num_steps, dp]."""
    num_steps, dp = assignment.num_standalone.shape
    rank = np.repeat(np.arange(num_steps), np.diff(step_starts)) * dp + assignment.rank_of
    counts = np.zeros(num_steps * dp, np.int64)
    is_own = assignment.rank_of >= 0
    np.add.at(counts, rank[is_own], np.diff(sequences.parts)[is_own])
    return counts.reshape(num_steps, dp)


def equalize_chunks(step_starts: Int64Array, sequences: Sequences, assignment: RankAssignment) -> None:
    """Give every rank of a step as many chunks as the one that has most, by zero-loss chunks; bounds follow."""
    own = assignment.num_standalone + parts_per_rank(step_starts, sequences, assignment)
    num_chunks = assignment.num_shared + own
    assignment.num_standalone[:] += num_chunks.max(axis=1, keepdims=True) - num_chunks
    assignment.rank_bound[:] = assignment.rank_bound.max(axis=1, keepdims=True)
    dp = assignment.num_standalone.shape[1]
    assignment.step_bound[:] = -(-assignment.step_bound // dp) * dp
