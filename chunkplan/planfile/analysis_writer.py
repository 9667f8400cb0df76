"""Writes an analysis in bounded memory, sequence by sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.planfile.hashing import ContentHasher, combine_hashes, content_hash
from chunkplan.planfile.manifest import write_manifest
from chunkplan.planfile.schema import SCHEMA_VERSION, SEQUENCES, TOKENS
from chunkplan.version import __version__

#: A record batch is cut before either is passed, so that only a single sequence can make it larger: never beyond the
#: 2^31 - 1 offsets of an Arrow list.
_BATCH_TOKENS = 4 << 20
_BATCH_ROWS = 4096
_PART_TOKENS = 64 << 20


class AnalysisWriter:
    """Writes the files of an analysis into `folder` (see `folder.replace_folder`) in bounded memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[tuple[Int32Array, BoolArray]] = []
        self._row_tokens = 0
        self._columns: dict[str, list[int]] = {name: [] for name in SEQUENCES.names[1:]}
        self._parts: list[dict[str, Any]] = []
        self._part_tokens = 0
        self._part: pa.ipc.RecordBatchFileWriter | None = None
        self._hasher = ContentHasher(TOKENS)
        self._flushed = 0
        self._max_token_id: int | None = None
        self.num_sequences = 0

    def add(self, source: int, record: int, input_ids: Int32Array, target: BoolArray) -> None:
        """Append a sequence with its tokens: int32 [n] and bool [n], target[0] false."""
        assert len(input_ids) == len(target) > 0 and not target[0]
        if self._row_tokens + len(input_ids) > _BATCH_TOKENS or len(self._rows) >= _BATCH_ROWS:
            self._flush()
        self.add_length(source, record, len(input_ids), int(target.sum()))
        self._max_token_id = max(self._max_token_id or 0, int(input_ids.max()))
        self._rows.append((input_ids, target))
        self._row_tokens += len(input_ids)

    def add_length(self, source: int, record: int, num_tokens: int, num_target_tokens: int) -> None:
        """Append a sequence of which only the length is known."""
        for name, value in zip(self._columns, (source, record, num_tokens, num_target_tokens), strict=True):
            self._columns[name].append(value)
        self.num_sequences += 1

    def finish(self, **described: Any) -> dict[str, Any]:
        """Write what is left and the manifest, with the entries `described`; returns the manifest."""
        self._flush()
        self._close_part()
        table = pa.table(
            {"sequence_id": np.arange(self.num_sequences), **self._columns},
            schema=SEQUENCES,
        )
        pq.write_table(table, self._folder / "sequences.parquet")
        hashes = {"sequences": content_hash(table, SEQUENCES)}
        if self._parts:
            hashes["tokens"] = self._hasher.hexdigest()
        manifest = {
            "kind": "analysis",
            "schema_version": SCHEMA_VERSION,
            "tool_version": __version__,
            "content_hash": combine_hashes(hashes),
            "content_hashes": hashes,
            "totals": {
                "num_sequences": self.num_sequences,
                "num_tokens": sum(self._columns["num_tokens"]),
                "num_target_tokens": sum(self._columns["num_target_tokens"]),
            },
            "sources": [],
            "rejected": {},
            "truncated": {"num_sequences": 0, "num_tokens": 0},
            "max_token_id": self._max_token_id,
            "tokens": self._parts,
            **described,
        }
        write_manifest(self._folder, manifest)
        return manifest

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._part is None:
            name = f"tokens/part-{len(self._parts):05d}.arrow"
            (self._folder / "tokens").mkdir(exist_ok=True)
            self._parts.append({"file": name, "first_sequence_id": self._flushed, "rows": []})
            self._part = pa.ipc.new_file(str(self._folder / name), TOKENS)
        lengths = np.array([len(ids) for ids, _ in self._rows])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        batch = pa.record_batch(
            [
                np.arange(self._flushed, self._flushed + len(lengths)),
                pa.ListArray.from_arrays(
                    offsets, np.concatenate([ids for ids, _ in self._rows]), type=TOKENS.field("input_ids").type
                ),
                pa.ListArray.from_arrays(
                    offsets, np.concatenate([target for _, target in self._rows]), type=TOKENS.field("target").type
                ),
            ],
            schema=TOKENS,
        )
        self._part.write_batch(batch)
        self._hasher.update(batch)
        self._parts[-1]["rows"].append(len(lengths))
        self._flushed += len(lengths)
        self._part_tokens += self._row_tokens
        self._rows, self._row_tokens = [], 0
        if self._part_tokens >= _PART_TOKENS:
            self._close_part()

    def _close_part(self) -> None:
        if self._part is not None:
            self._part.close()
        self._part, self._part_tokens = None, 0
