"""Chooses the chunks that keep the output of attention from their first forward for their recompute, on GPU or host.

A chunk that keeps nothing but keys and values runs attention twice, which takes longer the longer its prefix is; output
and log-sum-exp, all that its backward needs, take the same bytes anywhere. With them the recompute skips attention.
"""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import BoolArray, Int64Array
from chunkplan.compiled import compiled
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.operations import ON_GPU, ON_HOST
from chunkplan.planfile.chunks import Chunks, chunks_of_rows_at, times_of
from chunkplan.planning.memory import memory_of_stages, memory_rates_of
from chunkplan.schedule.actions import FORWARD_KV, RECOMPUTE, Actions
from chunkplan.schedule.holdings import ATTENTION, highest_peak, peak_snapshots, snapshot_bytes

#: Bytes by which sums of rounded parts may be off.
_ROUNDED = 64


def keep_on_host(chunks: Chunks, config: PlanConfig, cost: CostModel) -> None:
    """Choose the chunks that keep attention in host memory, where that pays: writes `chunks.kept_attention`.

    The output of attention is sent to the host while the first forward runs other layers, and fetched while the
    recompute does, over one link per direction, shared with inputs of layers and offloaded keys and values: an action
    takes longer by the time that the link takes longer than the layers. It pays if the recompute gets shorter, and
    neither action longer, on any model stage: then no order of actions takes longer. Ranks that share a chunk agree.
    """
    rows = np.flatnonzero(~chunks.keeps_activations & (config.keep_attention != "off"))
    if rows.size:
        before = times_of(chunks_of_rows_at(chunks, rows), cost, config).durations
        chunks.kept_attention[rows[_pays(chunks, rows, before, ON_HOST, config, cost)]] = ON_HOST


def keep_on_gpu(
    chunks: Chunks, durations: Int64Array, actions: Actions, config: PlanConfig, cost: CostModel
) -> Int64Array:
    """Choose the chunks that keep attention on the GPU, as far as it fits in the order of `actions`: writes
    `kept_attention`; `durations` are those of the chunks so far.

    Chunks with most attention per token come first, as all take as many bytes per token. One keeps it if every stage of
    every rank that shares the chunk has room for it from the first forward to the recompute, beside the peak of
    everything else and what others keep then. With offloaded keys and values, which means a lack of room, none does.
    Returns the chunks, int64 [num_kept].
    """
    rows = np.flatnonzero(~chunks.keeps_activations & (config.keep_attention != "off") & (not cost.kv_offload))
    if rows.size:
        rows = rows[_pays(chunks, rows, durations[:, :, rows], ON_GPU, config, cost)]
    if not rows.size:
        return rows
    held = memory_rates_of(config, cost)
    snapshots = peak_snapshots(chunks, actions, held)  # [num_ranks, pp, 8]
    most, _ = highest_peak(snapshots, held)
    totals = np.array([stage.total for stage in memory_of_stages(config, cost, most)])  # [pp]
    others = totals - snapshot_bytes(most[None], held)[0] + snapshot_bytes(snapshots, held)  # [num_ranks, pp]
    room = (cost.hardware.memory_bytes - _ROUNDED - others) // np.maximum(held.tokens[:, ATTENTION], 1e-9)
    first = first_of_block(chunks, config.dp)
    order = rows[first[rows] == rows]
    order = order[np.argsort(-chunks.attention_pairs[order] / chunks.num_tokens[order], kind="stable")]
    kept = np.flatnonzero(_fill_room(chunks, actions, order, np.minimum(room, 2.0**62).astype(np.int64), config.dp))
    chunks.kept_attention[kept] = ON_GPU
    return kept


def first_of_block(chunks: Chunks, dp: int) -> Int64Array:
    """The copy of each chunk on the first rank that shares it, or the chunk itself; int64 [num_chunks]."""
    own = np.arange(chunks.num_tokens.size)
    rank = np.repeat(np.arange(chunks.rank_chunks.size - 1), np.diff(chunks.rank_chunks))
    first_rank = np.where(chunks.cp_size > 1, rank // dp * dp + chunks.cp_first_rank, rank)
    return own - chunks.rank_chunks[rank] + chunks.rank_chunks[first_rank]


def _pays(
    chunks: Chunks, rows: Int64Array, before: Int64Array, where: int, config: PlanConfig, cost: CostModel
) -> BoolArray:
    """True for those of the chunks `rows`, now of durations `before`, for which keeping attention shortens an action
    and lengthens none, on all ranks that share them; bool [n]."""
    own = chunks_of_rows_at(chunks, rows)
    after = times_of(own._replace(kept_attention=np.full(rows.size, where, np.int8)), cost, config).durations
    pays = (after <= before).all(axis=(0, 1)) & ((after < before).any(axis=(0, 1)) | (own.kept_attention != 0))
    first = first_of_block(chunks, config.dp)[rows]
    agreed = np.ones(chunks.num_tokens.size, np.bool_)
    agreed[first[~pays]] = False
    return agreed[first]


@compiled
def _fill_room(chunks: Chunks, actions: Actions, order: Int64Array, room: Int64Array, dp: int) -> BoolArray:
    """The chunks that keep attention on the GPU, bool [num_chunks]: greedily those of `order` whose tokens fit the
    remaining `room`, int64 [num_ranks, pp]."""
    num_ranks, pp = room.shape
    num_parts = np.max(actions.virtual_stages) + 1
    begins = np.zeros((chunks.num_tokens.size, num_parts * pp), np.int64)
    ends = np.zeros((chunks.num_tokens.size, num_parts * pp), np.int64)
    for row in range(num_ranks * pp):
        for action in range(actions.stages[row], actions.stages[row + 1]):
            chunk = chunks.rank_chunks[row // pp] + actions.chunk_ids[action]
            part = actions.virtual_stages[action] * pp + row % pp
            if actions.ops[action] == FORWARD_KV:
                begins[chunk, part] = action
            elif actions.ops[action] == RECOMPUTE:
                ends[chunk, part] = action
    given = np.zeros(actions.ops.size, np.int64)
    is_kept = np.zeros(chunks.num_tokens.size, np.bool_)
    for first in order:
        first_rank = np.searchsorted(chunks.rank_chunks, first, side="right") - 1
        fits, number = True, first - chunks.rank_chunks[first_rank]
        for give in (1, -1):
            for rank in range(first_rank, first_rank + chunks.cp_size[first]):
                chunk = chunks.rank_chunks[rank] + number
                is_kept[chunk] = give > 0
                for part in range(num_parts * pp):
                    for action in range(begins[chunk, part], ends[chunk, part]):
                        given[action] += give * chunks.num_tokens[chunk]
                        fits = fits and (give < 0 or given[action] <= room[rank, part % pp])
            if fits:
                break
    return is_kept
