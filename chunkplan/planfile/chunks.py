"""The table of chunks, rank after rank: the planner makes it; schedules, simulations and reports read it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int8Array, Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.compiled import compiled
from chunkplan.config.plan import PlanConfig
from chunkplan.cost.durations import ChunkTimes, ExchangeTimes, Float64Array, attention_pairs_of, chunk_times
from chunkplan.cost.exchange import exchange_times
from chunkplan.cost.model import CostModel
from chunkplan.cost.rates import UNIT
from chunkplan.cost.shape import FULL, AttentionPattern
from chunkplan.operations import KEPT_ATTENTION, NOT_KEPT
from chunkplan.planfile.plan import Chunk, Segment
from chunkplan.planfile.schema import CP_COLUMNS, codes_of, to_numpy

Float32Array = npt.NDArray[np.float32]


class Chunks(NamedTuple):
    """The chunks of some ranks, in the order and the types of chunks.parquet, and their segments.

    `rank_chunks` int64 [num_ranks + 1]: where the chunks of each rank of each step begin. Per chunk [n]: group_id (-1
    for standalone), group_index, group_size, num_tokens, num_target_tokens, prefix_tokens int32, keeps_activations
    bool, kept_attention int8 (its place in `KEPT_ATTENTION`), cost float32 (predicted microseconds); cp_first_rank,
    cp_size, cp_heads, cp_tokens int32, which say nothing where cp_size is 1; last_dependent int32 (the highest
    group_index of the chunks that attend to it); attention_pairs float64 (see `attention_pairs_of`; of a shared chunk
    the rank's share of them).
    `segments` int64 [n + 1]: where the segments of each chunk begin. Per segment: sequence_id int64, start, end int32.
    """

    rank_chunks: Int64Array
    group_id: Int32Array
    group_index: Int32Array
    group_size: Int32Array
    num_tokens: Int32Array
    num_target_tokens: Int32Array
    prefix_tokens: Int32Array
    keeps_activations: BoolArray
    kept_attention: Int8Array
    cost: Float32Array
    cp_first_rank: Int32Array
    cp_size: Int32Array
    cp_heads: Int32Array
    cp_tokens: Int32Array
    last_dependent: Int32Array
    attention_pairs: Float64Array
    segments: Int64Array
    sequence_id: Int64Array
    start: Int32Array
    end: Int32Array


@compiled
def empty_chunks(num_ranks: int, num_chunks: int, num_segments: int) -> Chunks:
    """Room for a table: standalone chunks that hold nothing yet, of ranks that have none yet."""
    return Chunks(
        rank_chunks=np.zeros(num_ranks + 1, np.int64),
        group_id=np.full(num_chunks, -1, np.int32),
        group_index=np.zeros(num_chunks, np.int32),
        group_size=np.ones(num_chunks, np.int32),
        num_tokens=np.zeros(num_chunks, np.int32),
        num_target_tokens=np.zeros(num_chunks, np.int32),
        prefix_tokens=np.zeros(num_chunks, np.int32),
        keeps_activations=np.ones(num_chunks, np.bool_),
        kept_attention=np.zeros(num_chunks, np.int8),
        cost=np.zeros(num_chunks, np.float32),
        cp_first_rank=np.zeros(num_chunks, np.int32),
        cp_size=np.ones(num_chunks, np.int32),
        cp_heads=np.ones(num_chunks, np.int32),
        cp_tokens=np.zeros(num_chunks, np.int32),
        last_dependent=np.zeros(num_chunks, np.int32),
        attention_pairs=np.zeros(num_chunks, np.float64),
        segments=np.zeros(num_chunks + 1, np.int64),
        sequence_id=np.empty(num_segments, np.int64),
        start=np.empty(num_segments, np.int32),
        end=np.empty(num_segments, np.int32),
    )


@compiled
def chunks_of_rank(chunks: Chunks, rank: int) -> Chunks:
    """The view of one rank: the same table without the chunks of others; segments stay where they are."""
    return chunks_of_ranks(chunks, rank, rank + 1)


@compiled
def chunks_of_ranks(chunks: Chunks, first: int, last: int) -> Chunks:
    """The same of the ranks [first, last)."""
    start, stop = chunks.rank_chunks[first], chunks.rank_chunks[last]
    return Chunks(
        rank_chunks=chunks.rank_chunks[first : last + 1] - start,
        group_id=chunks.group_id[start:stop],
        group_index=chunks.group_index[start:stop],
        group_size=chunks.group_size[start:stop],
        num_tokens=chunks.num_tokens[start:stop],
        num_target_tokens=chunks.num_target_tokens[start:stop],
        prefix_tokens=chunks.prefix_tokens[start:stop],
        keeps_activations=chunks.keeps_activations[start:stop],
        kept_attention=chunks.kept_attention[start:stop],
        cost=chunks.cost[start:stop],
        cp_first_rank=chunks.cp_first_rank[start:stop],
        cp_size=chunks.cp_size[start:stop],
        cp_heads=chunks.cp_heads[start:stop],
        cp_tokens=chunks.cp_tokens[start:stop],
        last_dependent=chunks.last_dependent[start:stop],
        attention_pairs=chunks.attention_pairs[start:stop],
        segments=chunks.segments[start : stop + 1],
        sequence_id=chunks.sequence_id,
        start=chunks.start,
        end=chunks.end,
    )


def chunks_of_rows_at(chunks: Chunks, rows: Int64Array) -> Chunks:
    """The chunks `rows` [m] by themselves, as if of one rank: without segments."""
    found = empty_chunks(1, rows.size, 0)
    for name in (*_COUNTS, *_OTHERS, "group_id", "keeps_activations", "kept_attention", "cost", "attention_pairs"):
        getattr(found, name)[:] = getattr(chunks, name)[rows]
    return found


def chunks_without_segments(
    rank_chunks: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    group_id: npt.ArrayLike = -1,
    keeps_activations: npt.ArrayLike = True,
) -> Chunks:
    """A table of chunks of which it does not matter what is in them: [n] each, or one value for all.

    Schedules look at no more than this, and at the times of the chunks.
    """
    offsets = np.array(rank_chunks, np.int64)
    chunks = empty_chunks(offsets.size - 1, int(offsets[-1]), 0)
    chunks.rank_chunks[:], chunks.num_tokens[:] = offsets, num_tokens
    chunks.group_id[:], chunks.keeps_activations[:] = group_id, keeps_activations
    rank = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
    _, group, sizes = np.unique(np.stack([rank, chunks.group_id]), axis=1, return_inverse=True, return_counts=True)
    chunks.last_dependent[:] = np.where(chunks.group_id < 0, 0, sizes[group] - 1)
    return chunks


def read_chunks(table: pa.Table, patterns: Sequence[AttentionPattern] = FULL) -> Chunks:
    """The rows of chunks.parquet, or those of some of its ranks; in `rank_chunks` are the ranks that there are."""
    lists = table.column("segments").combine_chunks()
    offsets = to_numpy(lists.offsets).astype(np.int64)
    segments = offsets - offsets[0]
    flat = lists.flatten()
    sequence_id, start, end = (np.array(to_numpy(flat.field(name))) for name in Segment.__dataclass_fields__)
    step, dp_rank = (to_numpy(table.column(name).combine_chunks()) for name in ("step", "dp_rank"))
    is_next = (np.diff(step) != 0) | (np.diff(dp_rank) != 0)  # [n - 1]
    columns = {
        name: np.array(to_numpy(table.column(name).combine_chunks()))
        for name in Chunks._fields
        if name in table.column_names and name not in ("segments", "group_id", "kept_attention")
    }
    read = empty_chunks(0, table.num_rows, 0)._replace(
        rank_chunks=np.concatenate([[0], np.flatnonzero(is_next) + 1, [table.num_rows]]),
        group_id=np.array(to_numpy(table.column("group_id").combine_chunks().fill_null(-1))),
        kept_attention=np.maximum(codes_of(table.column("kept_attention"), KEPT_ATTENTION), NOT_KEPT),
        segments=segments,
        sequence_id=sequence_id,
        start=start,
        end=end,
        **columns,
    )
    if "last_dependent" not in columns:
        read = read._replace(last_dependent=read.group_size - 1)
    return read._replace(attention_pairs=pairs_of_chunks(read, patterns))


def chunks_of_rows(rows: Sequence[Chunk], patterns: Sequence[AttentionPattern] = FULL) -> Chunks:
    """The table of the chunks of one rank, in order of their ids."""
    flat = [segment for row in rows for segment in row.segments]
    segments = offsets_of([len(row.segments) for row in rows])
    start, end = (np.array([getattr(each, name) for each in flat], np.int32) for name in ("start", "end"))
    table = empty_chunks(1, len(rows), 0)._replace(
        rank_chunks=np.array([0, len(rows)], np.int64),
        group_id=np.array([-1 if row.group_id is None else row.group_id for row in rows], np.int32),
        keeps_activations=np.array([row.keeps_activations for row in rows], np.bool_),
        kept_attention=np.array([_KEPT.get(row.kept_attention, NOT_KEPT) for row in rows], np.int8),
        cost=np.array([row.cost for row in rows], np.float32),
        segments=segments,
        sequence_id=np.array([each.sequence_id for each in flat], np.int64),
        start=start,
        end=end,
    )
    for name in (*_COUNTS, *_OTHERS):
        getattr(table, name)[:] = [getattr(row, name) for row in rows]
    return table._replace(attention_pairs=pairs_of_chunks(table, patterns))


def rows_of_chunks(chunks: Chunks) -> tuple[Chunk, ...]:
    """The rows of a table of one rank, the opposite of `chunks_of_rows`."""
    places = zip(chunks.sequence_id.tolist(), chunks.start.tolist(), chunks.end.tolist(), strict=True)
    segments = list(starmap(Segment, places))
    by_chunk = [tuple(segments[start:stop]) for start, stop in pairwise(chunks.segments.tolist())]
    group_id = [None if group < 0 else group for group in chunks.group_id.tolist()]
    columns = (getattr(chunks, name).tolist() for name in (*_COUNTS, "keeps_activations", "cost"))
    shares = (getattr(chunks, name).tolist() for name in CP_COLUMNS)
    kept = [KEPT_ATTENTION[code] for code in chunks.kept_attention.tolist()]
    others = by_chunk, *shares, kept, chunks.last_dependent.tolist()
    return tuple(starmap(Chunk, zip(range(len(by_chunk)), group_id, *columns, *others, strict=True)))


def exchange_of(chunks: Chunks, cost: CostModel) -> ExchangeTimes | None:
    """Time that ranks wait for each other in chunks that they share; None where they share none."""
    rows = np.flatnonzero(chunks.cp_size > 1)
    if not rows.size:
        return None
    columns = (chunks.cp_tokens, chunks.prefix_tokens, chunks.group_index + 1, chunks.cp_size, chunks.cp_heads)
    found = exchange_times(cost, *(column[rows] for column in columns))
    exchange = ExchangeTimes(*(np.zeros(chunks.num_tokens.size) for _ in found))
    for of_all, of_shared in zip(exchange, found, strict=True):
        of_all[rows] = of_shared
    return exchange


def times_of(chunks: Chunks, cost: CostModel | None, config: PlanConfig, *, with_exchange: bool = True) -> ChunkTimes:
    """The times of chunks. Without `cost` every model stage is one layer, so a stage is `virtual_stages` layers."""
    rates = UNIT if cost is None else cost.rates_on(config.dp)
    layers = config.layers(config.pp * config.virtual_stages if cost is None else cost.shape.num_layers)
    exchange = exchange_of(chunks, cost) if cost is not None and with_exchange else None
    return chunk_times(chunks.num_tokens, chunks.attention_pairs, rates, layers, exchange, chunks.kept_attention)


#: Code by word; unknown words of a file get none, which `validate` refuses.
_KEPT = {word: code for code, word in enumerate(KEPT_ATTENTION)}

_COUNTS = ("group_index", "group_size", "num_tokens", "num_target_tokens", "prefix_tokens")
_OTHERS = (*CP_COLUMNS, "last_dependent")


def pairs_of_chunks(chunks: Chunks, patterns: Sequence[AttentionPattern] = FULL) -> Float64Array:
    """The attention pairs of each chunk [n], where attention sees `patterns`: whole numbers, whose sums of runs stay
    exact, but for shared ones."""
    pairs = attention_pairs_of(chunks.end - chunks.start, chunks.start, patterns).astype(np.int64)
    sums = sum_runs(pairs, chunks.segments).astype(np.float64)
    whole = attention_pairs_of(chunks.cp_tokens, chunks.prefix_tokens, patterns)
    return np.where(chunks.cp_size > 1, whole / chunks.cp_size, sums)
