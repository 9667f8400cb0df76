"""Progress counts the bytes of the files as they are stored, never goes back and ends at the size of all of them."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import IntakeOptions, analyze
from chunkplan.intake import reading
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import write_shard

SKIP = IntakeOptions(on_error="skip")
RECORDS = [{"text": f"{number} " + "word " * (number % 50)} for number in range(300)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()

Calls = list[tuple[int, int | None, int]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 4_000)
    monkeypatch.setattr("chunkplan.intake.pieces.BATCH_RECORDS", 20)


def zstd(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(data)


def arrow(path: Path, compression: str | None = None) -> None:
    table = pa.Table.from_pylist(RECORDS)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), table.schema, options=options) as file:
        file.write_table(table, max_chunksize=60)


#: Name -> writes the file.
KINDS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "no-line-end.jsonl": lambda path: path.write_bytes(LINES[:-1]),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(LINES)),
    "a.jsonl.zst": lambda path: zstd(path, LINES),
    "cut-short.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES)[:-500] + b"\0" * 5000),
    "array.json": lambda path: path.write_text(json.dumps(RECORDS, indent=2) + "\n" * 100),
    "lines.json": lambda path: path.write_bytes(LINES),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(RECORDS), path, row_group_size=60),
    "torn.parquet": lambda path: path.write_bytes(b"PAR1 and no footer"),
    "a.arrow": arrow,
    "compressed.arrow": lambda path: arrow(path, "zstd"),
    "a.npy": lambda path: np.save(path, np.arange(1, 3000)),
    "a.txt": lambda path: path.write_text("text " * 100),
    "a.txt.gz": lambda path: path.write_bytes(gzip.compress(b"text " * 100)),
}


def watched(*arguments: object, **options: object) -> tuple[Calls, int]:
    """The calls of `progress`, and the tokens that were found."""
    calls: Calls = []
    analysis = analyze(*arguments, progress=lambda *done: calls.append(done), **options)
    assert calls == sorted(calls)
    return calls, int(analysis.num_tokens.sum(dtype=np.int64))


@pytest.mark.parametrize("name", KINDS)
def test_progress_ends_at_the_size_of_the_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    KINDS[name](path)
    size = path.stat().st_size
    beside = tmp_path / "beside.txt"  # some are no data
    beside.write_text("text")
    for use in ("new", "known"):
        calls, num_tokens = watched([path, beside], tmp_path / "out", SKIP, cache=tmp_path / "cache")
        assert calls[-1] == (size + 4, size + 4, num_tokens), use
        assert {total for _, total, _ in calls} == {size + 4}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "array.json", "a.parquet", "a.arrow", "a.npy"])
def test_progress_is_made_all_the_way(tmp_path: Path, name: str) -> None:
    """Between begin and end no step is larger than a few pieces."""
    path = tmp_path / name
    KINDS[name](path)
    calls, _ = watched(path, tmp_path / "out", workers=1)
    size = path.stat().st_size
    done = [0, *(num_bytes for num_bytes, _, _ in calls)]
    assert max(np.diff(done)) <= 0.75 * size


def test_progress_of_processes_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)
    for name in ("a.jsonl", "a.jsonl.gz"):
        KINDS[name](tmp_path / name)
    paths = sorted(tmp_path.iterdir())
    size = sum(path.stat().st_size for path in paths)
    calls, num_tokens = watched(paths, tmp_path / "out", workers=2)
    assert calls[-1] == (size, size, num_tokens)


def test_what_a_stream_will_be_in_all_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_bytes(LINES)
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        calls, num_tokens = watched("-", tmp_path / "out")
    assert calls[-1] == (len(LINES), None, num_tokens)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_what_other_shards_do_is_passed_over(tmp_path: Path, shard: int) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        KINDS[name](tmp_path / name)
    paths = sorted(tmp_path.iterdir())
    size = sum(path.stat().st_size for path in paths)
    calls: Calls = []
    request = IntakeRequest(
        paths=paths, options=SKIP, cache=tmp_path / "cache", progress=lambda *done: calls.append(done)
    )
    write_shard(request, tmp_path / "shard", (shard, 3))
    assert calls == sorted(calls)
    assert calls[-1][:2] == (size, size)
