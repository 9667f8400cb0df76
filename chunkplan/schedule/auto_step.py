"""`auto`, and `zero-bubble`, of all ranks of a step: effort goes where the step can be done sooner."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.compiled import compiled
from chunkplan.cost.durations import ChunkTimes
from chunkplan.planfile.chunks import Chunks, chunks_of_rank
from chunkplan.schedule.actions import Actions, times_of_rank
from chunkplan.schedule.auto import as_template, auto, order_bound

#: Where state-aware 1F1B is as near to the lower bound of a step, one part in so many, nothing else is tried.
_NEAR = 50


@compiled
def auto_step(chunks: Chunks, times: ChunkTimes, pp: int, memory_tokens: int, splits_backward: bool) -> Actions:
    """The order of all ranks of a step, [num_ranks * pp] stages: the rank that is done last counts.

    Ranks that share chunks are scheduled together. Others are one by one, the slowest of state-aware 1F1B first: none
    need be done sooner than those before it could be, or than the bound of the step, and of those that are alike one is
    looked at. Groups of different ranks have different numbers.
    """
    actions, _, _, ends = as_template(chunks, times, pp, memory_tokens, splits_backward)
    enough = order_bound(chunks, times, pp, splits_backward)
    if np.max(ends) <= enough + enough // _NEAR:
        return actions
    if np.any(chunks.cp_size > 1):
        return auto(chunks, times, pp, memory_tokens, 0, splits_backward)[0]
    slowest_first = np.argsort(-ends, kind="mergesort")
    for place, rank in enumerate(slowest_first):
        if ends[rank] <= enough:
            break
        twin = _twin(chunks, times, rank, slowest_first[:place])
        to = slice(actions.stages[rank * pp], actions.stages[(rank + 1) * pp])
        if twin >= 0:
            of = slice(actions.stages[twin * pp], actions.stages[(twin + 1) * pp])
            actions.ops[to], actions.chunk_ids[to] = actions.ops[of], actions.chunk_ids[of]
            continue
        rank_chunks, rank_times = chunks_of_rank(chunks, rank), times_of_rank(chunks, times, rank)
        found, end = auto(rank_chunks, rank_times, pp, memory_tokens, enough, splits_backward)
        actions.ops[to], actions.chunk_ids[to] = found.ops, found.chunk_ids
        enough = max(enough, end)
    return actions


@compiled
def _twin(chunks: Chunks, times: ChunkTimes, rank: int, others: Int64Array) -> int:
    """The first of some ranks whose chunks are those of `rank`, which are of the same kinds and take as long, or -1."""
    start, stop = chunks.rank_chunks[rank], chunks.rank_chunks[rank + 1]
    for other in others:
        shift = chunks.rank_chunks[other] - start
        is_twin = chunks.rank_chunks[other + 1] - shift == stop
        chunk = start
        while is_twin and chunk < stop:
            twin = chunk + shift
            is_twin = chunks.num_tokens[chunk] == chunks.num_tokens[twin]
            is_twin &= chunks.keeps_activations[chunk] == chunks.keeps_activations[twin]
            is_twin &= (chunks.group_id[chunk] < 0) == (chunks.group_id[twin] < 0)
            if chunk > start and chunks.group_id[chunk] >= 0:
                same = chunks.group_id[chunk] == chunks.group_id[chunk - 1]
                is_twin &= same == (chunks.group_id[twin] == chunks.group_id[twin - 1])
            is_twin &= np.all(times.durations[:, :, chunk] == times.durations[:, :, twin])
            chunk += 1
        if is_twin:
            return int(other)
    return -1
