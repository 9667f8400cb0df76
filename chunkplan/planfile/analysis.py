"""The analysis: what the sequences of a dataset are, how long, and (unless only lengths are known) their tokens.

Tokens lie in uncompressed Arrow IPC files that are memory-mapped: reading one sequence touches its pages and no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.errors import DataError, UsageError


@dataclass(frozen=True)
class Analysis:
    """An analysis folder, or a bare file of lengths. Arrays have one entry a sequence, in sequence_id order."""

    path: Path
    num_tokens: Int32Array
    num_target_tokens: Int32Array
    source: Int32Array
    record: Int64Array
    content_hash: str
    manifest: dict[str, Any] = field(repr=False)

    @property
    def num_sequences(self) -> int:
        """How many sequences there are."""
        return len(self.num_tokens)

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens are stored; without them a plan can be built, not trained."""
        return bool(self.manifest.get("tokens"))

    @property
    def is_exact(self) -> bool:
        """False where lengths were estimated rather than counted by a tokenizer."""
        return bool(self.manifest["exact"])

    def place(self, sequence_id: int) -> str:
        """Where a sequence comes from: file:line, or the row of a file of lengths."""
        record = int(self.record[sequence_id])
        if not self.manifest.get("sources"):
            return f"{self.path}, row {record}"
        return f"{self.manifest['sources'][int(self.source[sequence_id])]['path']}:{record + 1}"

    def tokens(self) -> TokenReader:
        """Random access to the tokens.

        Raises:
            UsageError: the analysis holds lengths only.
        """
        if not self.has_tokens:
            raise UsageError(
                f"the analysis {self.path} holds lengths only, no tokens",
                hint="run `chunkplan analyze DATA --tokenizer FILE` and build the plan again",
            )
        return TokenReader(self.path, self.manifest["tokens"])


class TokenReader:
    """Reads the tokens of single sequences from memory-mapped part files."""

    def __init__(self, folder: Path, parts: Sequence[dict[str, Any]]) -> None:
        self._folder = folder
        self._parts = parts
        self._files: dict[int, pa.ipc.RecordBatchFileReader] = {}
        self._first_row: list[int] = []  # sequence_id of the first row of every record batch, over all parts
        self._place: list[tuple[int, int]] = []  # (part, batch within it)
        for part, description in enumerate(parts):
            first = description["first_sequence_id"]
            for batch, rows in enumerate(description["rows"]):
                self._first_row.append(first)
                self._place.append((part, batch))
                first += rows
        self._recent: tuple[int, pa.RecordBatch] | None = None

    def __call__(self, sequence_id: int) -> tuple[Int32Array, BoolArray]:
        """Token ids int32 [num_tokens] and target mask bool [num_tokens] of one sequence.

        Raises:
            DataError: a part file is missing, torn, or does not hold what the manifest says.
        """
        index = bisect_right(self._first_row, sequence_id) - 1
        batch = self._batch(index)
        row = sequence_id - self._first_row[index]
        if row >= batch.num_rows or batch.column("sequence_id")[row].as_py() != sequence_id:
            raise DataError(
                f"sequence {sequence_id} is not where the manifest says", where=str(self._folder), hint="analyze again"
            )
        input_ids = batch.column("input_ids")[row].values.to_numpy()
        target = batch.column("target")[row].values.to_numpy(zero_copy_only=False)
        return input_ids, target

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All record batches in order, for checks that read everything."""
        return (self._batch(index) for index in range(len(self._place)))

    def _batch(self, index: int) -> pa.RecordBatch:
        if self._recent is None or self._recent[0] != index:
            part, batch = self._place[index]
            path = self._folder / self._parts[part]["file"]
            try:
                if part not in self._files:
                    self._files[part] = pa.ipc.open_file(pa.memory_map(str(path)))
                self._recent = index, self._files[part].get_batch(batch)
            except (OSError, pa.ArrowInvalid) as error:
                raise DataError(f"cannot read the tokens: {error}", where=str(path), hint="analyze again") from error
        return self._recent[1]
