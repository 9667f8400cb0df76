"""Columns of every file of an analysis and of a plan. Other programs read these: a change needs a new version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

#: Version of both contracts. A file of a newer one is refused by name.
SCHEMA_VERSION = 6


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(_fields(columns))


def _fields(columns: Mapping[str, pa.DataType]) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=False) for name, kind in columns.items()]


def _list(item: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("item", item, nullable=False))


def _structs(**columns: pa.DataType) -> pa.ListType:
    return _list(pa.struct(_fields(columns)))


SEQUENCES = _schema(
    sequence_id=pa.int64(),
    source=pa.int32(),
    record=pa.int64(),
    num_tokens=pa.int32(),
    num_target_tokens=pa.int32(),
)

#: Rows are in sequence_id order; the manifest says which is the first of each file.
TOKENS = _schema(input_ids=_list(pa.int32()), target=_list(pa.bool_()))

STEPS = _schema(
    step=pa.int32(),
    epoch=pa.int32(),
    num_sequences=pa.int32(),
    num_tokens=pa.int64(),
    num_target_tokens=pa.int64(),
    num_chunks=pa.int32(),
    chunks_lower_bound=pa.int32(),
    packing_lower_bound=pa.int32(),
    optimal=pa.bool_(),
    exceeds_share=pa.bool_(),
    peak_retained_tokens=pa.int64(),
    recompute_us=pa.float32(),
    predicted_us=pa.float32(),
    lower_bound_us=pa.float32(),
)

_WORD = pa.dictionary(pa.int8(), pa.string())

CHUNKS = _schema(
    step=pa.int32(),
    dp_rank=pa.int32(),
    chunk_id=pa.int32(),
    group_id=pa.int32(),
    group_index=pa.int32(),
    group_size=pa.int32(),
    num_tokens=pa.int32(),
    num_target_tokens=pa.int32(),
    prefix_tokens=pa.int32(),
    keeps_activations=pa.bool_(),
    kept_attention=_WORD,
    cost=pa.float32(),
    segments=_structs(sequence_id=pa.int64(), start=pa.int32(), end=pa.int32()),
)
CHUNKS = CHUNKS.set(CHUNKS.get_field_index("group_id"), pa.field("group_id", pa.int32(), nullable=True))

#: Columns of chunks.parquet in plans whose configuration has an entry `cp`.
CP_COLUMNS = ("cp_first_rank", "cp_size", "cp_heads", "cp_tokens")
SHARED_CHUNKS = pa.schema([*CHUNKS, *_schema(**{name: pa.int32() for name in CP_COLUMNS})])

SCHEDULE = _schema(
    step=pa.int32(),
    dp_rank=pa.int32(),
    stage=pa.int32(),
    actions=_structs(op=_WORD, chunk_id=pa.int32(), virtual_stage=pa.int32()),
    predicted_us=pa.float32(),
)

#: schedule.parquet of plans with several data-parallel ranks, whose actions are done in slots of their stage.
SLOTS = pa.schema([*SCHEDULE, *_schema(slots=_list(pa.int32()))])


def plan_schemas(config: Mapping[str, Any]) -> dict[str, pa.Schema]:
    """The columns of each file of a plan by its name; `config`: the entry of its manifest."""
    return {
        "steps": STEPS,
        "chunks": CHUNKS if config.get("cp", "off") == "off" else SHARED_CHUNKS,
        "schedule": SLOTS if config["dp"] > 1 else SCHEDULE,
    }
