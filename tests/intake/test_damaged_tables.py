"""Damaged tables as data: what cannot be read is refused or rejected, whatever byte it is, and no process is ended."""

from __future__ import annotations

import base64
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

from chunkplan import analyze
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import ChunkplanError, DataError
from chunkplan.intake.readers import cut, first_records, read
from chunkplan.intake.records import RecordError
from chunkplan.intake.sources import find_sources
from tests.support.corruption_cases import damages
from tests.support.intake_checks import LARGE, TEXT, batches_of, pieces_of, rows_of
from tests.support.table_cases import KINDS, write_table

NUM_ROWS = 60
TABLE = pa.table(
    {
        "text": [f"words {row} " * 5 for row in range(NUM_ROWS)],
        "kind": pa.array(["one", "other"] * (NUM_ROWS // 2)).dictionary_encode(),
        "turns": [[{"role": "user", "content": f"{row}"}] for row in range(NUM_ROWS)],
    }
)


def count_read(path: Path, folder: Path) -> int:
    """How many records are read; what is rejected counts too."""
    options = IntakeOptions(on_error="skip", schema="text")
    analysis = analyze(path, folder / "analysis", options, cache=folder / "cache", workers=1, use_cache=False)
    return int(analysis.num_sequences) + sum(analysis.manifest["rejected"].values())


@pytest.mark.parametrize("num_damages", [60, pytest.param(1500, marks=pytest.mark.soak)])
def test_a_damaged_arrow_file_ends_no_process(tmp_path: Path, num_damages: int) -> None:
    path = tmp_path / "data.arrow"
    with pa.ipc.new_file(str(path), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=20)
    content = path.read_bytes()
    assert count_read(path, tmp_path) == NUM_ROWS
    for what, damaged in islice(damages(content, np.random.default_rng(0)), num_damages):
        path.unlink()  # what is mapped by the case before stays as it is
        path.write_bytes(damaged)
        try:
            with suppress(ChunkplanError):
                count_read(path, tmp_path)
        except Exception as error:
            raise AssertionError(what) from error


def test_offsets_beyond_an_arrow_file_are_refused(tmp_path: Path) -> None:
    """To read there would end the process."""
    path = tmp_path / "data.arrow"
    with pa.ipc.new_file(str(path), TABLE.select(["text"]).schema) as file:
        file.write_table(TABLE.select(["text"]))
    offsets = np.frombuffer(TABLE.column("text").chunk(0).buffers()[1], np.int32, NUM_ROWS + 1).copy()
    content = path.read_bytes()
    assert content.count(offsets.tobytes()) == 1
    beyond = offsets.copy()
    beyond[7] = 2**31 - 1
    path.write_bytes(content.replace(offsets.tobytes(), beyond.tobytes()))
    with pytest.raises(DataError, match=r"[Oo]ffset"):
        count_read(path, tmp_path)


def test_names_of_columns_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(TABLE.rename_columns(["text", "kindly", "turns"]), path)
    path.write_bytes(path.read_bytes().replace(b"kindly", b"kind\xff\xff"))
    with pytest.raises(DataError, match="not a parquet file, or it is torn"):
        count_read(path, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", ["empty", "pointer", "text", "torn", "no rows"])
def test_a_file_that_is_no_table_is_unreadable(tmp_path: Path, kind: str, content: str) -> None:
    path = write_table(tmp_path / "x", pa.table({"text": ["a" * 1000] * (0 if content == "no rows" else 1000)}), kind)
    data = path.read_bytes()
    wrong = {
        "empty": b"",
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "text": b'{"text": "a"}\n' * 20,
        "torn": data[: len(data) // 2],
        "no rows": data,
    }
    path.write_bytes(wrong[content])
    messages = {"empty": "0 bytes", "pointer": "Git LFS", "no rows": "without rows"}
    with pytest.raises(RecordError) as caught:
        pieces_of(path, tmp_path)
    assert caught.value.reason == "unreadable"
    assert caught.value.where == str(path)
    assert messages.get(content, "or it is torn") in caught.value.message


def test_of_an_arrow_stream_cut_short_the_rows_before_are_read(tmp_path: Path) -> None:
    path = write_table(
        tmp_path / "x", pa.table({"text": [str(number) for number in range(100)]}), "arrow stream", rows=10
    )
    path.write_bytes(path.read_bytes()[:-300])
    found = []
    (file,) = find_sources([path])
    with pytest.raises(RecordError, match="torn"):
        for piece in cut(file, 0, tmp_path):
            found.append(piece)
    records, _ = rows_of([list(read(piece, TEXT, max_record_bytes=LARGE)) for piece in found])
    assert len(records) >= 80
    assert [record.text for record in records.values()] == [str(number) for number in range(len(records))]


@pytest.mark.parametrize("sample", [None, 0.5])
def test_every_row_of_a_damaged_row_group_is_rejected_and_the_others_are_read(
    tmp_path: Path, sample: float | None
) -> None:
    texts = [f"{number} {number * 7919}" * 50 for number in range(2000)]
    path = write_table(tmp_path / "x", pa.table({"text": texts}), "parquet", rows=500)
    whole, _ = rows_of(batches_of(path, TEXT, tmp_path, sample=sample))
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    batches = batches_of(path, TEXT, tmp_path, sample=sample)
    records, rejected = rows_of(batches)
    assert records == {row: record for row, record in whole.items() if not 500 <= row < 1000}
    assert set(records) | set(rejected) == set(whole)
    assert {(one.reason, one.message[:21]) for one in rejected.values()} == {("unreadable", "row group 1 cannot be")}
    for count in ("num_records", "num_rows"):
        assert sum(getattr(batch, count) for piece in batches for batch in piece) == 2000
    assert sum(batch.num_bytes for piece in batches for batch in piece) == pieces_of(path, tmp_path)[0].num_bytes


def test_the_first_records_of_a_piece_that_is_lost_are_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"{number} {number * 7919}" for number in range(200)]
    path = write_table(tmp_path / "x", pa.table({"text": texts}), "parquet", rows=100)
    data = bytearray(path.read_bytes())
    at = pq.ParquetFile(path).metadata.row_group(0).column(0).dictionary_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 1)
    first, _ = pieces_of(path, tmp_path)
    assert first_records(first, 2) == [{"text": text} for text in texts[100:102]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [pa.int32(), pa.int64()])
def test_categories_that_are_not_utf8_are_rejected_for_that(tmp_path: Path, kind: str, index: pa.DataType) -> None:
    good = pa.array([b"a", b"\xff\xfe"])
    values = pa.Array.from_buffers(pa.string(), 2, good.buffers())
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], index), values)
    path = write_table(tmp_path / "x", pa.table({"text": column}), kind)
    records, rejected = rows_of(batches_of(path, TEXT, tmp_path))
    is_cast = kind == "parquet" and index == pa.int64()  # of which Arrow does not say what row it is in
    assert set(rejected) == ({0, 1, 2} if is_cast else {1})
    assert {one.reason for one in rejected.values()} == {"not-utf8"}
    assert len(records) == 3 - len(rejected)


class _Keys(encryption.KmsClient):  # type: ignore[misc]
    """Leaves keys as they are."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        return base64.b64encode(key_bytes).decode()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_an_encrypted_file_is_unreadable(tmp_path: Path, plaintext_footer: bool) -> None:
    table = pa.table({"text": ["a", "b"], "other": ["c", "d"]})
    properties = encryption.CryptoFactory(_Keys).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            footer_key="k1", column_keys={"k2": ["other"]}, plaintext_footer=plaintext_footer
        ),
    )
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(RecordError, match="encrypted") as caught:
        pieces_of(path, tmp_path)
    assert (caught.value.reason, caught.value.where) == ("unreadable", str(path))
