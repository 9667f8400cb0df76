"""Columns of every file of an analysis and of a plan. Other programs read these: a change needs a new version.

And numpy arrays as Arrow arrays and back, without a copy: pyarrow's own `pa.array` and `to_numpy` first import pandas
where that is installed, as it is wherever OR-Tools is, and that takes longer than all the rest of reading a small plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: Version of both contracts. A file of a newer one is refused by name.
SCHEMA_VERSION = 7


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

#: Columns of sequences.parquet, and of the token files, that only samples have. Those of tokens are as long as
#: `input_ids`, and 0 where a token is no target.
SAMPLE_COLUMNS = _schema(group=pa.int64(), label=pa.bool_(), reward=pa.float64(), advantage=pa.float64())
TOKEN_COLUMNS = _schema(
    advantages=_list(pa.float32()), old_log_probs=_list(pa.float32()), reference_log_probs=_list(pa.float32())
)

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

#: steps.parquet of plans whose configuration has an entry `loss`.
LOSS_STEPS = pa.schema([*STEPS, *_schema(extra_forward_us=pa.float32())])

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

#: chunks.parquet and prefixes.parquet of plans in which sequences share prefixes.
TREE_CHUNKS = pa.schema([*CHUNKS, *_schema(last_dependent=pa.int32())])
PREFIXES = _schema(step=pa.int32(), sequence_id=pa.int64(), prefix_of=pa.int64(), prefix_tokens=pa.int32())

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
    steps, schedule = LOSS_STEPS if "loss" in config else STEPS, SLOTS if config["dp"] > 1 else SCHEDULE
    if config.get("share_prefixes", False):
        return {"steps": steps, "chunks": TREE_CHUNKS, "schedule": schedule, "prefixes": PREFIXES}
    return {
        "steps": steps,
        "chunks": CHUNKS if config.get("cp", "off") == "off" else SHARED_CHUNKS,
        "schedule": schedule,
    }


def analysis_schemas(columns: Collection[str] = ()) -> tuple[pa.Schema, pa.Schema]:
    """The columns of sequences.parquet and of the token files, with those named `columns` that only samples have."""
    more = [[field for field in schema if field.name in columns] for schema in (SAMPLE_COLUMNS, TOKEN_COLUMNS)]
    return pa.schema([*SEQUENCES, *more[0]]), pa.schema([*TOKENS, *more[1]])


def to_arrow(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """The Arrow array of numbers or booleans; null where not `valid`."""
    validity = None if valid is None else _bits(valid)
    data = _bits(values) if values.dtype == np.bool_ else pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), values.size, [validity, data])


def words_to_arrow(words: Sequence[str]) -> pa.StringArray:
    """A few strings as an Arrow array."""
    encoded = [word.encode() for word in words]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def codes_of(column: pa.ChunkedArray, words: Sequence[str]) -> npt.NDArray[np.int8]:
    """The place of each word of a dictionary-encoded column in `words`, -1 where it is none of them."""
    place = {word: code for code, word in enumerate(words)}
    codes = [np.empty(0, np.int8)]
    for array in column.chunks:
        known = np.array([place.get(word, -1) for word in array.dictionary.to_pylist()], np.int8)
        codes.append(known[to_numpy(array.indices)])
    return np.concatenate(codes)


def to_numpy(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers or booleans (these are copied) of an Arrow array; what is null is anything."""
    data = array.buffers()[1] or b""
    if pa.types.is_boolean(array.type):
        bits = np.frombuffer(data, np.uint8)
        return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)].astype(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def _bits(values: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))
