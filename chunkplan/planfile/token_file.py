"""Writes a file of tokens in bounded memory: record batches of a few million tokens, made to be memory-mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from chunkplan.arrays import BoolArray, Int32Array, Int64Array, offsets_of
from chunkplan.planfile.arrow import to_arrow
from chunkplan.planfile.schema import TOKENS

#: A record batch is cut before either is passed, so that only a single sequence can make it larger: never beyond the
#: 2^31 - 1 offsets of an Arrow list.
_BATCH_TOKENS = 4 << 20
BATCH_ROWS = 4096


class TokenFile:
    """A new file of tokens at `path`. `rows` has the sequences of each record batch, once it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[int] = []
        self.num_tokens = 0
        self._file = pa.ipc.new_file(str(path), TOKENS)
        self._waiting: list[tuple[Int64Array, Int32Array, BoolArray]] = []
        self._waiting_rows = self._waiting_tokens = 0

    def add(self, lengths: Int64Array, input_ids: Int32Array, target: BoolArray) -> None:
        """Append n sequences: their lengths [n], and their ids and target masks one after another."""
        start_token = start = 0
        stops = np.cumsum(lengths)
        while start < len(lengths):
            limit = start_token + _BATCH_TOKENS - self._waiting_tokens
            stop = int(np.searchsorted(stops, limit, side="right"))
            stop = min(stop, start + BATCH_ROWS - self._waiting_rows)
            if stop <= start and self._waiting_rows:
                self._flush()
                continue
            stop = max(stop, start + 1)
            tokens = slice(start_token, int(stops[stop - 1]))
            self._waiting.append((lengths[start:stop], input_ids[tokens], target[tokens]))
            self._waiting_rows += stop - start
            self._waiting_tokens += tokens.stop - tokens.start
            self.num_tokens += tokens.stop - tokens.start
            start, start_token = stop, tokens.stop

    def close(self) -> None:
        """Write what is waiting, and the end of the file."""
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        if not self._waiting_rows:
            return
        lengths, input_ids, target = (np.concatenate(arrays) for arrays in zip(*self._waiting, strict=True))
        offsets = to_arrow(offsets_of(lengths).astype(np.int32))
        columns = [
            pa.ListArray.from_arrays(offsets, to_arrow(values), type=TOKENS.field(name).type)
            for name, values in (("input_ids", input_ids), ("target", target))
        ]
        self._file.write_batch(pa.record_batch(columns, schema=TOKENS))
        self.rows.append(self._waiting_rows)
        self._waiting, self._waiting_rows, self._waiting_tokens = [], 0, 0
