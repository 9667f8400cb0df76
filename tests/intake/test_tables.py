"""Tables and files of numbers: every row is one record or rejected, however the file is cut and laid out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chunkplan.intake.pieces import LengthColumn
from chunkplan.intake.readers import default_columns, digest, first_records
from chunkplan.intake.records import Conversation, RecordError
from chunkplan.intake.schemas import SCHEMAS, RecordLayout, detect, parse
from chunkplan.intake.sources import find_sources
from tests.support.intake_checks import LENGTH, TEXT, TOKENS, batches_of, pieces_of, rows_of, tokens_of
from tests.support.table_cases import KINDS, write_table


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_rows_in_pieces_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    texts = [f"{number} é" * 5 if number % 7 else None for number in range(1000)]
    path = write_table(
        tmp_path / "x", pa.table({"id": range(1000), "text": texts, "meta": ["m"] * 1000}), kind, rows=90
    )
    whole = rows_of(batches_of(path, TEXT, tmp_path))
    assert {row: record.text for row, record in whole[0].items()} == {r: t for r, t in enumerate(texts) if t}
    assert {one.reason for one in whole[1].values()} == {"schema"}
    assert set(whole[0]) | set(whole[1]) == set(range(1000))
    (piece,) = pieces_of(path, tmp_path)
    assert first_records(piece, 2) == [{"id": 0, "meta": "m"}, {"id": 1, "text": texts[1], "meta": "m"}]
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 10_000)
    monkeypatch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", 500)
    batches = batches_of(path, TEXT, tmp_path)
    assert 2 < len(batches) <= 12
    assert max(len(batch.numbers) for piece in batches for batch in piece) < 50
    assert rows_of(batches) == whole
    pieces = pieces_of(path, tmp_path)
    assert [piece.origin % 90 for piece in pieces] == [0] * len(pieces)
    read_bytes = [sum(batch.num_bytes for batch in piece) for piece in batches]
    assert read_bytes == [piece.num_bytes for piece in pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_only_other_rows_have_are_left_out(tmp_path: Path, kind: str) -> None:
    call = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": call}]},
        {
            "messages": [{"role": "user", "content": "b", "name": "n"}, {"role": "assistant", "content": ""}],
            "tools": None,
        },
    ]
    path = write_table(tmp_path / "x", pa.Table.from_pylist(records), kind)
    (piece,) = pieces_of(path, tmp_path)
    assert first_records(piece) == [records[0], {"messages": records[1]["messages"]}]
    found, rejected = rows_of(batches_of(path, detect(records), tmp_path))
    assert not rejected
    assert isinstance(found[0], Conversation)
    assert found[0].messages[1].fields == {"tool_calls": call}


def _same_as_lines(tmp_path: Path, table: pa.Table, kind: str, layout: RecordLayout, column: type) -> tuple[Any, Any]:
    """A table reads as its rows do as JSON lines; returns records and rejections of it."""
    path = write_table(tmp_path / "x", table, kind, rows=7)
    batches = batches_of(path, layout, tmp_path)
    assert all(isinstance(batch.records, column) for piece in batches for batch in piece)
    records, rejected = rows_of(batches)
    lines = tmp_path / "x.jsonl"
    rows = [{key: value for key, value in row.items() if value is not None} for row in table.to_pylist()]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reference = rows_of(batches_of(lines, layout, tmp_path))
    assert (records, rejected) == reference
    assert set(records) | set(rejected) == set(range(len(table)))
    return records, rejected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [pa.int64(), pa.int16(), pa.uint32()])
def test_lengths_are_columns(tmp_path: Path, kind: str, dtype: pa.DataType) -> None:
    lengths = [5, None, 0, 30_000, *range(1, 20)]
    lengths += [2**31 - 1, 2**31] if dtype != pa.int16() else []
    table = pa.table({"length": pa.array(lengths, dtype), "other": range(len(lengths))})
    records, rejected = _same_as_lines(tmp_path, table, kind, LENGTH, LengthColumn)
    assert records[3] == 30_000
    assert {1, 2} <= set(rejected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
def test_tokens_are_rows(tmp_path: Path, kind: str, dtype: pa.DataType) -> None:
    rows = [[1, 2, 3], [], None, [9], *([number] * number for number in range(1, 15))]
    mask = [[0, 1, 1], [], None, [0], *([1] * number for number in range(1, 15))]
    labels = [[-100, 2, 3], [], None, None, *([-100] * number for number in range(1, 14)), [1, 2]]
    table = pa.table({"input_ids": pa.array(rows, dtype)})
    records, rejected = _same_as_lines(tmp_path, table, kind, TOKENS, list)
    assert records[0] == ([1, 2, 3], [False, True, True])
    assert set(rejected) == {1, 2}
    table = table.append_column("attention_mask", pa.array(mask, pa.list_(pa.int8())))
    table = table.append_column("labels", pa.array(labels, pa.list_(pa.int64())))
    records, rejected = _same_as_lines(tmp_path, table, kind, TOKENS, list)
    assert records[0] == ([2, 3], [False, True])
    assert set(rejected) == {1, 2, 3, 17}


def test_numbers_that_are_no_token_ids_are_rejected_by_row(tmp_path: Path) -> None:
    for values in ([[1, 2], [3, None]], [[1, 2], [2**31, 1]], [[1, 2], [-1]]):
        path = write_table(tmp_path / "x", pa.table({"input_ids": values}), "parquet")
        records, rejected = rows_of(batches_of(path, TOKENS, tmp_path))
        assert list(rejected) == [1]
        assert rejected[1].reason == "schema"
        assert list(records) == [0]


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_is_not_utf8_is_rejected_by_row(tmp_path: Path, kind: str) -> None:
    good = pa.array([b"a", b"\xff\xfe", b"c"])
    as_text = pa.Array.from_buffers(pa.string(), 3, good.buffers())
    for column in (good, as_text):  # bytes are taken for text as well
        path = write_table(tmp_path / "x", pa.table({"text": column}), kind)
        records, rejected = rows_of(batches_of(path, TEXT, tmp_path))
        assert {row: record.text for row, record in records.items()} == {0: "a", 2: "c"}
        assert {row: one.reason for row, one in rejected.items()} == {1: "not-utf8"}
        assert "0xff" in rejected[1].message


def test_a_row_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x", pa.table({"text": ["a", "b" * 5000, "c"]}), "parquet")
    records, rejected = rows_of(batches_of(path, TEXT, tmp_path, limit=1000))
    assert list(records) == [0, 2]
    assert {row: one.reason for row, one in rejected.items()} == {1: "too-large"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_takes_the_same_rows_however_the_table_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    table = pa.table({"length": range(1, 3001), "text": [f"t{number}" for number in range(3000)]})
    path = write_table(tmp_path / "x", table, kind, rows=100)
    for layout in (LENGTH, TEXT):
        few, _ = rows_of(batches_of(path, layout, tmp_path, sample=0.2))
        assert 500 < len(few) < 700
        assert few.items() <= rows_of(batches_of(path, layout, tmp_path))[0].items()
        with monkeypatch.context() as patch:
            patch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 2000)
            batches = batches_of(path, layout, tmp_path, sample=0.2)
        assert rows_of(batches)[0] == few
        assert sum(batch.num_records for piece in batches for batch in piece) == 3000


@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_is_that_of_the_rows_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 1)
    texts = [f"{number:03}" for number in range(40)]

    def digests(name: str, texts: list[str]) -> list[str]:
        path = write_table(tmp_path / name, pa.table({"text": texts}), kind, rows=10)
        return [digest(piece) for piece in pieces_of(path, tmp_path)]

    before, again = digests("x", texts), digests("y", texts)
    texts[5] = "new"
    after = digests("x", texts)
    assert before == again
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True, True]
    assert len(set(before)) == 4


_MEDIA = [
    pa.array([["a.png"], None, [], ["b.png", "c.png"], None]),
    pa.array(["a.png", None, "", "b.png", None]).dictionary_encode(),
    pa.array([b"\x89PNG\xff", None, b"", b"\xff", None], pa.large_binary()),
    pa.array([{"bytes": b"\xff", "path": None}, None, {"bytes": None, "path": None}, {"bytes": b"", "path": ""}, None]),
    pa.array([[{"bytes": b"\xff", "path": "x"}], None, [], [None], None]),
    pa.array([[0.0, 1.0], None, None, [2.0, 3.0], None], pa.list_(pa.float32(), 2)),
    pa.array([7, None, 0, 8, None]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("media", _MEDIA, ids=lambda media: str(media.type)[:12])
def test_rows_with_media_are_refused_and_those_without_are_read(tmp_path: Path, kind: str, media: pa.Array) -> None:
    messages = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{row}"}] for row in range(5)]
    columns = {"messages": messages, "text": ["t"] * 5, "length": range(1, 6), "input_ids": [[1, 2]] * 5}
    path = write_table(tmp_path / "x", pa.table({**columns, "image": media}), kind)
    layouts = [RecordLayout("messages", {role: role for role in SCHEMAS["messages"].roles}, ""), TEXT, LENGTH, TOKENS]
    for layout in layouts:
        records, rejected = rows_of(batches_of(path, layout, tmp_path))
        assert {row: one.reason for row, one in rejected.items()} == {0: "unsupported", 3: "unsupported"}
        assert list(records) == [1, 2, 4]
    first = first_records(pieces_of(path, tmp_path)[0])
    assert [bool(record.get("image")) for record in first] == [True, False, False, True, False]


def test_rows_with_a_preference_pair_are_refused_as_lines_are(tmp_path: Path) -> None:
    columns = {"chosen": ["a", None, "", "a", None], "rejected": ["b", "b", "", None, None]}
    for layout, column in ((LENGTH, LengthColumn), (TEXT, list)):
        table = pa.table({**columns, "length": range(1, 6), "text": ["t"] * 5})
        _, rejected = _same_as_lines(tmp_path, table, "parquet", layout, column)
        assert {row: one.reason for row, one in rejected.items()} == {0: "unsupported", 2: "unsupported"}


def test_media_that_are_large_do_not_make_a_row_too_large(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x", pa.table({"text": ["a", "b"], "image": [b"\xff" * 5000, None]}), "parquet")
    records, rejected = rows_of(batches_of(path, TEXT, tmp_path, limit=1000))
    assert list(records) == [1]
    assert rejected[0].reason == "unsupported"


_ids = st.lists(st.integers(-1, 9) | st.integers(0, 9), max_size=4)


@st.composite
def _token_rows(draw: st.DrawFn) -> dict[str, list[int]]:
    """A row whose labels and mask fit its tokens, or do not."""
    row: dict[str, list[int]] = {"input_ids": draw(_ids)} if draw(st.integers(0, 9)) else {}
    ids = row.get("input_ids", [])
    fitting = st.tuples(*(st.sampled_from([one, -100]) for one in ids)).map(list)
    masks = st.tuples(*(st.just(1) for _ in ids)).map(list) | st.lists(st.integers(0, 2), max_size=4)
    for key, values in {"labels": fitting | fitting | _ids, "attention_mask": masks}.items():
        if draw(st.booleans()):
            row[key] = draw(values)
    few = st.lists(st.integers(0, 2), min_size=len(ids), max_size=len(ids))
    key = draw(st.sampled_from([None, None, "position_ids", "segment_ids", "loss_mask", "seq_lengths", "unknown"]))
    if key:
        row[key] = draw(few | st.just(list(range(len(ids)))) | st.just([len(ids)]))
    return row


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(_token_rows(), min_size=1, max_size=8))
@example([{"input_ids": [], "labels": [9, -100, -100, -100, 9, 9]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [5, 6]}])
def test_tokens_of_tables_are_what_parse_makes_of_every_record(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, list[int]]]
) -> None:
    records: dict[int, Any] = {}
    for number, row in enumerate(rows):
        try:
            record = parse(TOKENS, row)
        except RecordError:
            continue
        records[number] = tokens_of(record)
    folder = tmp_path_factory.getbasetemp()
    lines = folder / "tokens.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = dict.fromkeys(("input_ids", *(key for row in rows for key in row)))
    schema = pa.schema([(key, pa.list_(pa.int32())) for key in keys])
    for path in (lines, write_table(folder / "tokens", pa.Table.from_pylist(rows, schema), "parquet")):
        found, rejected = rows_of(batches_of(path, TOKENS, folder))
        assert found == records
        assert set(rejected) == set(range(len(rows))) - set(records)


def test_tables_behind_urls_are_read_as_files_are(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    table = pa.table({"length": range(1, 100)})
    try:
        for kind in KINDS:
            path = write_table(tmp_path / "x", table, kind, rows=10)
            url = f"memory://tables-test/{kind.replace(' ', '-')}{path.suffix}"
            system.pipe(url, path.read_bytes())
            assert rows_of(batches_of(url, LENGTH, tmp_path / "spool"))[0] == dict(enumerate(range(1, 100)))
            pieces = [pieces_of(place, tmp_path / "spool") for place in (url, path)]
            assert [digest(piece) for piece in pieces[0]] == [digest(piece) for piece in pieces[1]]
            system.pipe(url, b"nonsense" * 20)
            with pytest.raises(RecordError) as caught:
                pieces_of(url, tmp_path / "spool")
            assert "tables-test" in (caught.value.where or "")
        np.save(tmp_path / "x.npy", np.arange(1, 50))
        system.pipe("/tables-test/x.npy", (tmp_path / "x.npy").read_bytes())
        found, _ = rows_of(batches_of("memory://tables-test/x.npy", LENGTH, tmp_path / "spool"))
        assert found == dict(enumerate(range(1, 50)))
    finally:
        system.rm("/tables-test", recursive=True)


def test_one_column_of_integers_is_lengths_whatever_its_name(tmp_path: Path) -> None:
    def layout(path: Path) -> RecordLayout:
        (file,) = find_sources([path])
        return detect(first_records(pieces_of(path, tmp_path)[0]), columns=default_columns(file))

    for kind in KINDS:
        path = write_table(tmp_path / "x", pa.table({"how_many": [5, 6]}), kind)
        assert rows_of(batches_of(path, layout(path), tmp_path))[0] == {0: 5, 1: 6}
    np.save(tmp_path / "x.npy", np.array([7, 8], np.uint16))
    assert rows_of(batches_of(tmp_path / "x.npy", layout(tmp_path / "x.npy"), tmp_path))[0] == {0: 7, 1: 8}
    for table in (pa.table({"a": [1], "b": [2]}), pa.table({"a": ["x"]}), pa.table({"a": [[1]]})):
        (file,) = find_sources([write_table(tmp_path / "x", table, "parquet")])
        assert default_columns(file) == {}


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32, np.uint64])
def test_a_numpy_file_is_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    lengths = np.arange(200).astype(dtype)
    lengths[10] = np.iinfo(dtype).max
    np.save(tmp_path / "x.npy", lengths)
    whole = rows_of(batches_of(tmp_path / "x.npy", LENGTH, tmp_path))
    expected = {row: int(length) for row, length in enumerate(lengths) if 0 < length < 2**31}
    assert whole[0] == expected
    assert set(whole[1]) == set(range(200)) - set(expected)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 64)
    monkeypatch.setattr("chunkplan.intake.pieces.COLUMN_RECORDS", 3)
    assert rows_of(batches_of(tmp_path / "x.npy", LENGTH, tmp_path)) == whole
    few, _ = rows_of(batches_of(tmp_path / "x.npy", LENGTH, tmp_path, sample=0.5))
    assert 50 < len(few) < 150
    assert few.items() <= expected.items()


@pytest.mark.parametrize(
    "values", [np.zeros((2, 2), np.int64), np.array([1.5]), np.array([True]), np.zeros(0, np.int64), np.array({})]
)
def test_other_arrays_are_unreadable(tmp_path: Path, values: np.ndarray[Any, Any]) -> None:
    np.save(tmp_path / "x.npy", values, allow_pickle=True)
    with pytest.raises(RecordError) as caught:
        pieces_of(tmp_path / "x.npy", tmp_path)
    assert caught.value.reason == "unreadable"
    header = b"\x93NUMPY\x01\x00\x16\x00"
    for content in (
        b"",
        b"nonsense",
        b"PK\x03\x04xxxxxxxx",
        b"\x93NUMPY\x01\x00",
        header + b"{'descr': '<i8', ((((\n" + b"x" * 8,
    ):
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(RecordError) as caught:
            pieces_of(tmp_path / "x.npy", tmp_path)
        assert caught.value.where == str(tmp_path / "x.npy")
