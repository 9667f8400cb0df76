"""A record by its place: read alone it is what it is among all others, whatever kind of file it lies in."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chunkplan
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.one_record import find_record, read_place
from chunkplan.intake.records import JsonObject, LengthRecord, RecordError, TextRecord
from chunkplan.planfile.analysis import record_place
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

ROWS: list[JsonObject] = [
    {"text": f"The text of number {number}: " + "so much of it. " * (number % 7), "id": number} for number in range(60)
]
ROWS[7] = {"text": "  ", "id": 7}
ROWS[20] = {"id": 20}


def lines(rows: list[JsonObject]) -> bytes:
    """With a byte order mark, a blank line, one that is cut short and one of CRLF."""
    written = [json.dumps(row, ensure_ascii=False) for row in rows]
    written[11:11] = ["", '{"text": "cut', written[3] + "\r"]
    return b"\xef\xbb\xbf" + "\n".join(written).encode()


def write_table(path: Path, rows: list[JsonObject]) -> None:
    table = pa.Table.from_pylist(rows, pa.schema([("text", pa.string()), ("id", pa.int64())]))
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=9)
        return
    with pa.ipc.new_file(str(path), table.schema) as file:
        for batch in table.to_batches(max_chunksize=9):
            file.write_batch(batch)


WRITERS: dict[str, Callable[[Path], object]] = {
    "lines.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "lines.json": lambda path: path.write_bytes(lines(ROWS)),
    "lines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "array.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "array.json.bz2": lambda path: path.write_bytes(bz2.compress(json.dumps(ROWS).encode())),
    "spread.json": lambda path: path.write_text("\n".join(json.dumps(row, indent=1) for row in ROWS)),
    "rows.parquet": lambda path: write_table(path, ROWS),
    "rows.arrow": lambda path: write_table(path, ROWS),
    "one.txt": lambda path: path.write_text("one text\nof two lines\n"),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("piece_bytes", [300, 1 << 20])
def test_every_record_is_read_alone_as_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece_bytes: int
) -> None:
    """By the places of its analysis: the same tokens and targets; and of those rejected, the same words."""
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", 100)
    path = tmp_path / name
    WRITERS[name](path)
    options = IntakeOptions(on_error="skip")
    analysis = chunkplan.analyze(path, tmp_path / "analysis", options, tokenizer=TOKENIZER, workers=1)
    tokenizer = chunkplan.open_tokenizer(analysis)
    tokens = analysis.tokens()
    assert analysis.num_sequences == (1 if name == "one.txt" else 58 if "lines" not in name else 59)
    for sequence_id in range(0, analysis.num_sequences, 3):
        view = chunkplan.view_record(analysis.place(sequence_id), analysis=analysis, tokenizer=tokenizer)
        [sequence] = view.sequences["rendered"]
        input_ids, target = tokens(sequence_id)
        assert view.place == analysis.place(sequence_id)
        assert view.analyzed == ((len(input_ids), int(target.sum())),)
        assert (sequence.num_tokens, sequence.num_target_tokens) == view.analyzed[0]
        assert sequence.text is not None
        assert "".join(piece.text for piece in sequence.text.first) == tokenizer.library.decode(input_ids.tolist())
    listed = tmp_path / "analysis" / "rejected.jsonl"
    rejected = [json.loads(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    assert len(rejected) == (0 if name == "one.txt" else 3 if "lines" in name else 2)
    for entry in rejected:
        row = entry["line"] - 1 if "line" in entry else entry["record"]
        place = record_place(entry["file"], "jsonl" if "line" in entry else "json", row)
        view = chunkplan.view_record(place, analysis=analysis, tokenizer=tokenizer)
        assert view.rejected is not None
        assert (view.rejected.reason, view.rejected.message) == (entry["reason"], entry["message"])
        assert view.sequences == {}


def test_what_an_error_names_can_be_looked_at(tmp_path: Path) -> None:
    """Also with the colon that stands behind it there."""
    write_table(tmp_path / "rows.parquet", ROWS)
    (tmp_path / "lines.jsonl").write_bytes(lines(ROWS))
    for name, colon in (("rows.parquet", ""), ("lines.jsonl", ":")):
        with pytest.raises(RecordError) as error:
            chunkplan.analyze(tmp_path / name, tmp_path / "analysis", tokenizer=TOKENIZER)
        assert error.value.where is not None
        found = find_record(read_place(error.value.where + colon), IntakeOptions())
        assert isinstance(found.read, RecordError)
        assert (found.place, found.read.message) == (error.value.where, error.value.message)


def test_a_record_has_all_of_its_keys_also_those_of_columns_that_are_not_read(tmp_path: Path) -> None:
    write_table(tmp_path / "rows.parquet", ROWS)
    found = find_record(read_place(f"{tmp_path / 'rows.parquet'}, record 5"), IntakeOptions())
    assert found.keys == ROWS[5]
    assert found.read == TextRecord(ROWS[5]["text"])


def test_lengths_are_records_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 100)
    np.save(tmp_path / "lengths.npy", np.arange(1, 200))
    for number in (0, 12, 13, 198):
        found = find_record(read_place(f"{tmp_path / 'lengths.npy'}, record {number}"), IntakeOptions())
        assert found.read == LengthRecord(number + 1)


def test_a_row_that_is_lost_to_damage_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_table(path, ROWS)
    column = pq.read_metadata(path).row_group(3).column(0)  # rows 27 to 35
    with path.open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(bytes(30))
    assert find_record(read_place(f"{path}, record 2"), IntakeOptions()).keys == ROWS[2]
    found = find_record(read_place(f"{path}, record 30"), IntakeOptions())
    assert isinstance(found.read, RecordError)
    assert found.read.reason == "unreadable"


@pytest.mark.parametrize("name", ["colon:3", "a, record 4", "plain"])
def test_a_file_may_be_called_like_a_place(tmp_path: Path, name: str) -> None:
    """Where the name says no more, it is JSON lines."""
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    found = find_record(read_place(f"{tmp_path / name}:2"), IntakeOptions())
    assert found.read == TextRecord("two")


def test_a_column_of_another_source_is_none_of_this_one(tmp_path: Path) -> None:
    """A name that is neither is an error, as in `analyze`."""
    for name, key in (("a.jsonl", "body"), ("b.jsonl", "said")):
        (tmp_path / name).write_text(json.dumps({key: f"of {name}"}) + "\n")
    options = IntakeOptions(columns={"a.jsonl:text": "body", "b.jsonl:text": "said"})
    analysis = chunkplan.analyze(tmp_path, tmp_path / "out", options, tokenizer=TOKENIZER)
    for name in ("a.jsonl", "b.jsonl"):
        view = chunkplan.view_record(f"{tmp_path / name}:1", analysis=analysis, tokenizer=TOKENIZER)
        assert view.analyzed == tuple(
            (sequence.num_tokens, sequence.num_target_tokens) for sequence in view.sequences["rendered"]
        )
    with pytest.raises(UsageError, match="no source is b"):
        chunkplan.view_record(f"{tmp_path / 'a.jsonl'}:1", options, tokenizer=TOKENIZER)


def test_a_file_that_cannot_be_read_is_its_error(tmp_path: Path) -> None:
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / "empty.jsonl").write_bytes(b"")
    for place in ("torn.parquet, record 0", "empty.jsonl:1"):
        with pytest.raises(DataError) as error:
            find_record(read_place(str(tmp_path / place)), IntakeOptions())
        assert error.value.where is not None
