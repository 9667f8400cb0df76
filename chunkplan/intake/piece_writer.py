"""Writes the result of a piece into a folder of its own: lengths, tokens, their digests, and rejected records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.intake.rejection import Rejected
from chunkplan.intake.result import PieceResult
from chunkplan.planfile.analysis_writer import TokenFile
from chunkplan.planfile.arrow import to_arrow, to_numpy
from chunkplan.planfile.hashing import sequence_digests

LENGTHS, TOKENS, DIGESTS, REJECTED = "lengths.arrow", "tokens.arrow", "digests.bin", "rejected.jsonl"

_SCHEMA = pa.schema([("number", pa.int64()), ("num_tokens", pa.int32()), ("num_target_tokens", pa.int32())])


class PieceWriter:
    """Fills `folder`, and `result` with what it counts."""

    def __init__(self, folder: Path, result: PieceResult) -> None:
        self._folder = folder
        self._result = result
        self._lengths: list[tuple[Int64Array, Int32Array, Int32Array]] = []
        self._tokens: TokenFile | None = None
        self._digests: BinaryIO | None = None
        self._rejected: TextIO | None = None

    def add_lengths(self, numbers: Int64Array, num_tokens: Int32Array, num_targets: Int32Array) -> None:
        """Append n sequences; all arrays [n]."""
        self._lengths.append((numbers, num_tokens, num_targets))
        self._result.num_sequences += len(numbers)
        self._result.num_tokens += int(num_tokens.sum(dtype=np.int64))
        self._result.num_target_tokens += int(num_targets.sum(dtype=np.int64))

    def add_tokens(self, offsets: Int64Array, input_ids: Int32Array, target: BoolArray) -> None:
        """Append the tokens of sequences; [offsets[i], offsets[i + 1]) are those of the i-th."""
        if self._tokens is None:
            self._tokens = TokenFile(self._folder / TOKENS)
            self._digests = (self._folder / DIGESTS).open("wb")
        assert self._digests is not None
        self._tokens.add(np.diff(offsets), input_ids, target)
        self._digests.write(sequence_digests(offsets, input_ids, target))
        self._result.max_token_id = max(self._result.max_token_id or 0, int(input_ids.max()))

    def reject(self, rejected: Sequence[Rejected]) -> None:
        """Note records that were left out."""
        for record in rejected:
            if self._rejected is None:
                self._rejected = (self._folder / REJECTED).open("w", encoding="utf-8")
            self._rejected.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._result.rejected[record.reason] = self._result.rejected.get(record.reason, 0) + 1

    def close(self) -> None:
        """Write what is left into the files, and close them."""
        with pa.ipc.new_file(str(self._folder / LENGTHS), _SCHEMA) as file:
            if self._lengths:
                columns = [to_arrow(np.concatenate(arrays)) for arrays in zip(*self._lengths, strict=True)]
                file.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        if self._tokens is not None:
            self._tokens.close()
            self._result.has_tokens, self._result.rows = True, self._tokens.rows
        for file in (self._digests, self._rejected):
            if file is not None:
                file.close()


def read_lengths(folder: Path) -> tuple[Int64Array, Int32Array, Int32Array]:
    """Numbers, tokens and target tokens of the sequences of a piece, each [num_sequences]."""
    file = pa.ipc.open_file(pa.memory_map(str(folder / LENGTHS)))
    if not file.num_record_batches:
        return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
    numbers, num_tokens, num_targets = map(to_numpy, file.get_batch(0).columns)
    return numbers, num_tokens, num_targets


def read_rejected(folder: Path) -> Iterator[Rejected]:
    """The records of a piece that were left out."""
    path = folder / REJECTED
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            values: list[Any] = json.loads(line)
            yield Rejected(*values)
