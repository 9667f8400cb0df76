"""Collects the rows of a plan, rank by rank and step by step, into the tables of the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.chunks import RankChunks
from chunkplan.errors import UsageError
from chunkplan.planfile.schema import CHUNKS, OPS, SCHEDULE, STEPS
from chunkplan.schedule.actions import StageActions

_OP_CODE = {op: code for code, op in enumerate(OPS)}


class PlanTables:
    """Rows so far. Add the ranks of a step in order, then the step, then the next."""

    def __init__(self) -> None:
        self._steps: dict[str, list[Any]] = {name: [] for name in STEPS.names}
        self._chunks: dict[str, list[np.ndarray]] = {name: [] for name in CHUNKS.names if name != "segments"}
        self._segments: dict[str, list[np.ndarray]] = {"sequence_id": [], "start": [], "end": [], "per_chunk": []}
        self._schedule: dict[str, list[Any]] = {name: [] for name in SCHEDULE.names if name != "actions"}
        self._actions: list[StageActions] = []

    def add_step(self, **row: Any) -> None:
        """One row of `steps`."""
        for name, value in row.items():
            self._steps[name].append(value)

    def add_rank(
        self,
        *,
        step: int,
        dp_rank: int,
        chunks: RankChunks,
        sequence_ids: Int64Array,
        segment_targets: Int32Array,
        cost_ns: Int64Array,
        schedule: list[StageActions],
        stage_end_ns: list[int],
    ) -> None:
        """The chunks of a rank and the actions of its stages; chunks count positions in `sequence_ids`."""
        num_chunks = chunks.num_chunks
        rows = {
            "step": np.full(num_chunks, step),
            "dp_rank": np.full(num_chunks, dp_rank),
            "chunk_id": np.arange(num_chunks),
            "group_id": chunks.group_id,
            "group_index": chunks.group_index,
            "group_size": chunks.group_size,
            "num_tokens": chunks.sum_segments(chunks.segment_end - chunks.segment_start),
            "num_target_tokens": chunks.sum_segments(segment_targets),
            "prefix_tokens": chunks.sum_segments(chunks.segment_start),  # whole sequences start at 0
            "keeps_activations": chunks.keeps_activations,
            "cost": cost_ns / 1e3,
        }
        for name, values in rows.items():
            self._chunks[name].append(values)
        self._segments["sequence_id"].append(sequence_ids[chunks.segment_sequence])
        self._segments["start"].append(chunks.segment_start)
        self._segments["end"].append(chunks.segment_end)
        self._segments["per_chunk"].append(np.bincount(chunks.segment_chunk, minlength=num_chunks))
        for stage, actions in enumerate(schedule):
            self._schedule["step"].append(step)
            self._schedule["dp_rank"].append(dp_rank)
            self._schedule["stage"].append(stage)
            self._schedule["predicted_us"].append(stage_end_ns[stage] / 1e3)
            self._actions.append(actions)

    def finish(self) -> dict[str, pa.Table]:
        """Tables `steps`, `chunks` and `schedule`."""
        return {
            "steps": pa.table(self._steps, schema=STEPS),
            "chunks": self._chunks_table(),
            "schedule": self._schedule_table(),
        }

    def _chunks_table(self) -> pa.Table:
        columns: dict[str, Any] = {
            name: np.concatenate([np.empty(0, CHUNKS.field(name).type.to_pandas_dtype()), *parts]).astype(
                CHUNKS.field(name).type.to_pandas_dtype()
            )
            for name, parts in self._chunks.items()
        }
        columns["group_id"] = pa.array(columns["group_id"], mask=columns["group_id"] < 0)
        kind = CHUNKS.field("segments").type
        segments = _structs(
            kind.value_type,
            [np.concatenate([np.empty(0, np.int64), *self._segments[field.name]]) for field in kind.value_type],
        )
        offsets = _offsets(np.concatenate([np.empty(0, np.int64), *self._segments["per_chunk"]]))
        columns["segments"] = pa.ListArray.from_arrays(offsets, segments, type=kind)
        return pa.table(columns, schema=CHUNKS)

    def _schedule_table(self) -> pa.Table:
        kind = SCHEDULE.field("actions").type
        codes = np.array([_OP_CODE[op] for actions in self._actions for op, _ in actions], np.int8)
        ids = np.array([chunk_id for actions in self._actions for _, chunk_id in actions], np.int32)
        actions = _structs(
            kind.value_type, [pa.DictionaryArray.from_arrays(codes, list(OPS)), ids, np.zeros(len(ids), np.int32)]
        )
        offsets = _offsets(np.array([len(actions) for actions in self._actions], np.int64))
        return pa.table(
            {**self._schedule, "actions": pa.ListArray.from_arrays(offsets, actions, type=kind)}, schema=SCHEDULE
        )


def _structs(kind: pa.StructType, columns: list[Any]) -> pa.StructArray:
    arrays = [
        column if isinstance(column, pa.Array) else pa.array(column, type=field.type)
        for column, field in zip(columns, kind, strict=True)
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _offsets(lengths: Int64Array) -> np.ndarray:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise UsageError(
            f"the plan has {offsets[-1]:,} segments or actions", hint="plan fewer epochs, or part of the data"
        )
    return offsets.astype(np.int32)
