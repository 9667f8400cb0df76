"""Files of a size that is easy to copy: data-00000-of-00003 and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Protocol

import pyarrow as pa

#: A file is ended after so many bytes, counted before any compression.
_SHARD_BYTES = 500_000_000


class ShardFile(Protocol):
    """What record batches are written to, such as a writer of pyarrow."""

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Append some rows."""

    def close(self) -> None:
        """Write what is waiting, and the end of the file."""


def write_shards(
    folder: Path,
    suffix: str,
    batches: Iterable[pa.RecordBatch],
    open_file: Callable[[Path, pa.Schema], ShardFile],
    shard_bytes: int = _SHARD_BYTES,
) -> list[str]:
    """Write `batches` to as many files in `folder` as it takes, and return their names, in order."""
    written: list[Path] = []
    waiting = iter(batches)
    for first in waiting:
        written.append(folder / f"{len(written)}.{suffix}")
        with closing(open_file(written[-1], first.schema)) as file:
            size = 0
            for batch in chain([first], waiting):
                file.write_batch(batch)
                size += batch.nbytes
                if size >= shard_bytes:
                    break
    names = [f"data-{index:05d}-of-{len(written):05d}.{suffix}" for index in range(len(written))]
    for path, name in zip(written, names, strict=True):
        path.rename(folder / name)
    return names
