"""Makes the tables of the contract for some consecutive steps from the planner's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunkplan.arrays import Int8Array, Int32Array, Int64Array, offsets_of, sum_runs
from chunkplan.errors import UsageError
from chunkplan.operations import KEPT_ATTENTION, OPS
from chunkplan.planfile.chunks import Chunks
from chunkplan.planfile.schema import CHUNKS, SCHEDULE, SLOTS, to_arrow, words_to_arrow
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.chunks import ChunkedBlock
from chunkplan.schedule.actions import Actions
from chunkplan.schedule.families import Scheduled

#: A sequence exceeds its rank's share from here on: what rounding makes of equal ranks is far less.
_OVER_SHARE = 1.001


def steps_table(
    schema: pa.Schema,
    block: StepBlock,
    chunked: ChunkedBlock,
    scheduled: Scheduled,
    num_tokens: Int32Array,
    num_target_tokens: Int32Array,
    chunk_ns: int,
    extra_ns: tuple[Int64Array, Int64Array],
) -> pa.Table:
    """Rows of `steps`; `num_tokens`, `num_target_tokens`: of each sequence of the dataset; `chunk_ns`: what a chunk
    costs beside its tokens; `extra_ns`: forwards that the loss adds to each step, and the least that they take.

    A rank takes what its chunks cost, and is done when its last stage is.
    """
    sequences, assignment, chunks = chunked.sequences, chunked.assignment, chunked.chunks
    num_steps, dp = assignment.num_standalone.shape
    starts, bound = chunked.step_starts[:-1], assignment.step_bound  # [num_steps] both
    step_chunks = chunks.rank_chunks[::dp]  # [num_steps + 1]
    num_chunks = np.diff(step_chunks)
    end_ns = scheduled.stage_end.reshape(num_steps, -1).max(axis=1)
    pp = scheduled.stage_end.size // (num_steps * dp)
    bound_ns = chunked.bound_ns
    if bound_ns is None:
        all_ns = np.add.reduceat(chunked.necessary_ns, starts) + bound * chunk_ns
        bound_ns = np.maximum(all_ns // dp, np.maximum.reduceat(chunked.necessary_ns + chunk_ns, starts))
    sequence_ns = np.where(np.diff(sequences.parts) == 0, sequences.work + chunk_ns, sequences.work)
    mean_rank_ns = sum_runs(chunked.cost_ns, step_chunks) / dp
    more = {"extra_forward_us": _microseconds(extra_ns[0])} if "extra_forward_us" in schema.names else {}
    return _table(
        schema,
        step=_int32(np.arange(block.first_step, block.first_step + num_steps)),
        epoch=np.full(num_steps, block.epoch, np.int32),
        num_sequences=_int32(block.sizes),
        num_tokens=sum_runs(num_tokens[block.sequence_ids].astype(np.int64), offsets_of(block.sizes)),
        num_target_tokens=sum_runs(num_target_tokens[block.sequence_ids].astype(np.int64), offsets_of(block.sizes)),
        num_chunks=_int32(num_chunks),
        chunks_lower_bound=_int32(bound),
        packing_lower_bound=_int32(np.maximum(assignment.rank_bound.sum(axis=1), bound)),
        optimal=num_chunks == bound,
        exceeds_share=np.maximum.reduceat(sequence_ns, starts) > _OVER_SHARE * mean_rank_ns,
        peak_retained_tokens=scheduled.peak_retained_tokens.reshape(num_steps, -1).max(axis=1),
        recompute_us=_microseconds(sum_runs(chunked.recompute_ns, step_chunks)),
        predicted_us=_microseconds(end_ns + extra_ns[0]),
        # Whole nanoseconds of a sequence are not the sum of those of its chunks: it might be a few above.
        lower_bound_us=_microseconds(np.minimum(bound_ns // pp, end_ns) + extra_ns[1]),
        **more,
    )


def chunks_table(schema: pa.Schema, first_step: int, dp: int, chunks: Chunks) -> pa.Table:
    """Rows of `chunks`, with the columns that the plan has of them."""
    sizes = np.diff(chunks.rank_chunks)
    rank = np.repeat(np.arange(sizes.size), sizes)
    kind = CHUNKS.field("segments").type
    groups = {"last_dependent": chunks.last_dependent} if "last_dependent" in schema.names else {}
    if "cp_size" in schema.names:
        is_shared = chunks.cp_size > 1
        groups = {
            "cp_first_rank": np.where(is_shared, chunks.cp_first_rank, _int32(rank % dp)),
            "cp_size": chunks.cp_size,
            "cp_heads": chunks.cp_heads,
            "cp_tokens": np.where(is_shared, chunks.cp_tokens, chunks.num_tokens),
        }
    return _table(
        schema,
        step=_int32(first_step + rank // dp),
        dp_rank=_int32(rank % dp),
        chunk_id=_int32(np.arange(rank.size) - chunks.rank_chunks[rank]),
        group_id=to_arrow(np.maximum(chunks.group_id, 0), valid=chunks.group_id >= 0),
        group_index=chunks.group_index,
        group_size=chunks.group_size,
        num_tokens=chunks.num_tokens,
        num_target_tokens=chunks.num_target_tokens,
        prefix_tokens=chunks.prefix_tokens,
        keeps_activations=chunks.keeps_activations,
        kept_attention=_words(chunks.kept_attention, KEPT_ATTENTION),
        cost=chunks.cost,
        segments=_lists(
            kind, chunks.segments, [to_arrow(chunks.sequence_id), to_arrow(chunks.start), to_arrow(chunks.end)]
        ),
        **groups,
    )


def schedule_table(
    first_step: int, dp: int, pp: int, actions: Actions, stage_end_ns: Int64Array, slots: Int64Array | None
) -> pa.Table:
    """Rows of `schedule`; `slots`: of each action, int64 [num_actions], None where there is one rank."""
    stage = np.arange(stage_end_ns.size)
    columns = {}
    if slots is not None:
        kind = SLOTS.field("slots").type
        columns["slots"] = pa.ListArray.from_arrays(
            to_arrow(_int32(actions.stages)), to_arrow(_int32(slots)), type=kind
        )
    return _table(
        SLOTS if columns else SCHEDULE,
        step=_int32(first_step + stage // (dp * pp)),
        dp_rank=_int32(stage // pp % dp),
        stage=_int32(stage % pp),
        actions=_lists(
            SCHEDULE.field("actions").type,
            actions.stages,
            [_words(actions.ops, OPS), to_arrow(actions.chunk_ids), to_arrow(actions.virtual_stages)],
        ),
        predicted_us=_microseconds(stage_end_ns),
        **columns,
    )


def _table(schema: pa.Schema, **columns: Any) -> pa.Table:
    arrays = [column if isinstance(column, pa.Array) else to_arrow(column) for column in columns.values()]
    return pa.Table.from_arrays(arrays, schema=schema)


def _lists(kind: pa.ListType, starts: Int64Array, fields: list[pa.Array]) -> pa.ListArray:
    """Lists of structs; the structs of list i are those from starts[i] to before starts[i + 1]."""
    if starts[-1] > np.iinfo(np.int32).max:
        raise UsageError(
            f"a few steps have {starts[-1]:,} segments or actions",
            hint="use a larger --chunk-size or a smaller --global-batch",
        )
    structs = pa.StructArray.from_arrays(fields, fields=list(kind.value_type))
    return pa.ListArray.from_arrays(to_arrow(_int32(starts)), structs, type=kind)


def _words(codes: Int8Array, words: Sequence[str]) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(to_arrow(codes), words_to_arrow(words))


def _int32(values: Int64Array) -> Int32Array:
    return values.astype(np.int32)


def _microseconds(nanoseconds: Int64Array) -> npt.NDArray[np.float32]:
    return (nanoseconds / 1e3).astype(np.float32)
