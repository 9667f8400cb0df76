"""Lines become records: every line that is not blank is one record or rejected with its reason, wherever it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan.errors import UsageError
from chunkplan.intake.pieces import Batch, LengthColumn
from chunkplan.intake.readers import digest, first_records, read
from chunkplan.intake.readers.lines import decode_lines
from chunkplan.intake.records import LengthRecord, RecordError, Rejected, TextRecord, TokensRecord
from chunkplan.intake.schemas import RecordLayout, parse
from tests.support.intake_checks import LARGE, LENGTH, TEXT, TOKENS, batches_of, pieces_of, rows_of, tokens_of


def _batches(path: Path, layout: RecordLayout, **options: Any) -> list[list[Batch]]:
    return batches_of(path, layout, path.parent / "spool", **options)


def _texts(path: Path, content: bytes, **options: Any) -> tuple[dict[int, str], dict[int, Rejected]]:
    path.write_bytes(content)
    records, rejected = rows_of(_batches(path, TEXT, **options))
    assert all(isinstance(record, TextRecord) for record in records.values())
    return {row: record.text for row, record in records.items()}, rejected


def test_bom_crlf_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}\n\n\t{"text": "c"}'
    texts, rejected = _texts(tmp_path / "x.jsonl", content)
    assert texts == {0: "a", 3: "b", 5: "c"}
    assert not rejected
    ((batch,),) = _batches(tmp_path / "x.jsonl", TEXT)
    assert (batch.num_records, batch.num_rows, batch.num_bytes) == (3, 6, len(content))


def test_a_line_that_is_cut_short_has_a_hint_of_its_own(tmp_path: Path) -> None:
    hints = {}
    for line in (b'{"text": "cut sho', b'{"text": "a"} x'):
        [row] = decode_lines([line])
        assert isinstance(row, RecordError)
        hints[line] = row.hint
    cut, other = hints.values()
    assert cut.startswith("the line ends within a value: write it again, or leave it out")
    assert other.startswith("JSONL has one JSON object a line")


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    texts, _ = _texts(tmp_path / "x.jsonl", f'{{"text": "{text}"}}\n'.encode())
    assert texts == {0: text}


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"text": "a"', "not-json", "not JSON: Input data was truncated"),
        (b'{"text": "a"} x', "not-json", "trailing characters"),
        (b'{"text": "a"} {"text": "b"}', "not-json", "trailing characters"),
        (b'{"text": NaN}', "not-json", "not JSON"),
        (b'{"text": 1, "b": -Infinity}', "not-json", "not JSON"),
        (b'{"text": "a \\ud800 b"}', "not-json", "a lone surrogate, \\ud800, in a string"),
        (b'{"text": "a", "b": [{"\\udc00": 1}]}', "not-json", "a lone surrogate, \\udc00, in a string"),
        (b'{"text": "a", "b": 1e999}', "not-json", "a number beyond 64 bits"),
        (b'{"text": "a\xff"}', "not-utf8", "not UTF-8: byte 0xff at column 12"),
        (b"\xfe{}", "not-utf8", "not UTF-8: byte 0xfe at column 1"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too-deep", "nested too deeply"),
        (b'\xef\xbb\xbf{"text": "a"}', "not-json", "a byte order mark, which only the first line may have"),
        ('{"text": "a"}'.encode("utf-16-le"), "not-utf8", "a zero byte at column 2, as UTF-16"),
        ('{"text": "a"}'.encode("utf-32-be"), "not-utf8", "a zero byte at column 1, as UTF-16"),
        (b"[1]", "not-an-object", "found a list, expected one JSON object a line"),
        (b"null", "not-an-object", "found null"),
        (b'"text"', "not-an-object", "found a string"),
        (b'{"text": "a", "text": "b"}', "duplicate-keys", 'the key "text" is there twice'),
        (b'{"text": "a", "te\\u0078t": "b"}', "duplicate-keys", 'the key "text" is there twice'),
        (b'{"text": "a", "text" \t : "b"}', "duplicate-keys", 'the key "text" is there twice'),
        (b'{"text": "a", "b": [{"c\\\\": 1, "c\\\\": 2}]}', "duplicate-keys", "is there twice"),
        (b'{"text": ": a", "c\\\\": 1, "c\\\\": 2}', "duplicate-keys", "is there twice"),
        (b'{"text": 5}', "schema", "`text` is a number"),
        (b'{"text": " "}', "empty", "blank"),
    ],
)
def test_a_bad_line_is_rejected_with_its_line_and_its_reason_and_those_around_it_are_read(
    tmp_path: Path, line: bytes, reason: str, message: str
) -> None:
    texts, rejected = _texts(tmp_path / "x.jsonl", b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    assert texts == {0: "a", 3: "b"}
    assert list(rejected) == [2]
    assert rejected[2].reason == reason
    assert message in rejected[2].message
    assert rejected[2].hint


def test_lines_that_are_json_only_together_are_rejected_each(tmp_path: Path) -> None:
    content = b'{"text": "a"} {"text": "b"}\n{"text":\n"c"}\n{"text": {}\n}\n{"text": "d"\n,"b": {}}\n'
    texts, rejected = _texts(tmp_path / "x.jsonl", content)
    assert not texts
    assert {row: one.reason for row, one in rejected.items()} == dict.fromkeys(range(7), "not-json")


@pytest.mark.parametrize(
    "text", ['": a', 'he said "x": y', '{"text": "a", "text": "b"}', 'a "b" : c\\', '\\": ', '\\\\": "k" :', "\t: \r:"]
)
def test_text_that_looks_like_keys_is_no_duplicate_key(tmp_path: Path, text: str) -> None:
    lines = [json.dumps({"a": {"b": text, "c" + text: 1}, "text": text}) for _ in range(3)]
    texts, rejected = _texts(tmp_path / "x.jsonl", "\n".join(lines).encode())
    assert texts == dict.fromkeys(range(3), text)
    assert not rejected


def test_a_line_that_is_too_large_is_passed_over_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", 256)
    for length in (150, 5000):  # within a block, and beyond
        large = json.dumps({"text": "x" * length}).encode()
        texts, rejected = _texts(
            tmp_path / "x.jsonl", b'{"text": "a"}\n' + large + b'\n\n{"text": "b"}\n' + large, limit=len(large) - 1
        )
        assert texts == {0: "a", 3: "b"}
        assert {row: one.reason for row, one in rejected.items()} == {1: "too-large", 4: "too-large"}
        assert f"{len(large):,} bytes" in rejected[1].message
        texts, rejected = _texts(tmp_path / "x.jsonl", large + b"\n" + large, limit=len(large))
        assert texts == dict.fromkeys(range(2), "x" * length)
        assert not rejected


@pytest.mark.parametrize("piece_bytes", [1, 7, 13, 14, 15, 50, 1000])
@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_pieces_have_every_line_once_wherever_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, ending: bytes
) -> None:
    lines = [json.dumps({"text": "x" * size}).encode() for size in (1, 2, 60, 1, 0, 1, 3)]
    content = b"\n".join([*lines[:3], b"", *lines[3:]]) + ending
    (tmp_path / "x.jsonl").write_bytes(content)
    whole = rows_of(_batches(tmp_path / "x.jsonl", TEXT))
    assert set(whole[0]) | set(whole[1]) == {0, 1, 2, 4, 5, 6, 7}
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", piece_bytes)
    batches = _batches(tmp_path / "x.jsonl", TEXT)
    assert len(batches) == -(-len(content) // piece_bytes)
    assert rows_of(batches) == whole
    assert sum(batch.num_bytes for piece in batches for batch in piece) == len(content)


def test_the_digest_is_that_of_the_lines_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "bcd"}\n{"text": "e"}\n')
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 20)
    before = [digest(piece) for piece in pieces_of(path, tmp_path)]
    path.write_bytes(b'{"text": "a"}\n{"text": "bcd"}\n{"text": "f"}\n')
    after = [digest(piece) for piece in pieces_of(path, tmp_path)]
    assert len(set(before)) == 3  # the last has no line
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_first_records_are_the_first_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"nonsense\n[]\n" + b"".join(b'{"text": "%d"}\n' % number for number in range(500)))
    (piece,) = pieces_of(path, tmp_path)
    assert first_records(piece) == [{"text": str(number)} for number in range(100)]


def test_a_file_that_goes_away_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    (piece,) = pieces_of(path, tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match="cannot read"):
        list(read(piece, TEXT, max_record_bytes=LARGE))


def _by_parse(lines: list[str], layout: RecordLayout) -> tuple[dict[int, Any], dict[int, str]]:
    """What `schemas.parse` makes of every line: the reference of what is read."""
    records: dict[int, Any] = {}
    rejected: dict[int, str] = {}
    for row, line in enumerate(lines):
        try:
            record = parse(layout, json.loads(line))
        except RecordError as error:
            rejected[row] = error.message
            continue
        match record:
            case LengthRecord(num_tokens):
                records[row] = num_tokens
            case TokensRecord():
                records[row] = tokens_of(record)
    return records, rejected


def _check_read(path: Path, lines: list[str], layout: RecordLayout) -> tuple[dict[int, Any], dict[int, str]]:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    batches = _batches(path, layout)
    is_column = layout is LENGTH
    assert all(isinstance(batch.records, LengthColumn) == is_column for piece in batches for batch in piece)
    records, rejected = rows_of(batches)
    reference = _by_parse(lines, layout)
    assert (records, {row: one.message for row, one in rejected.items()}) == reference
    assert set(records) | set(rejected) == set(range(len(lines)))
    return reference


def test_lengths_as_columns_are_those_that_parse_gives(tmp_path: Path) -> None:
    numbers = ["1", "20", "1234567890", "2147483647", "2147483648", "999999999", "0", "-1", "-0", "1.0", "1e3"]
    values = [*numbers, "true", "null", "[3]", "{}", '"5"']
    lines = [f'{{"length": {value}}}' for value in values]
    lines += [f'{{"id": {value}, "length": 7}}' for value in ["-5", "0", "2.5", '"é"', '"a\\"b"', "null", "[1]", '""']]
    lines += ['{"length" \t: 8 , "id":"x" }', ' {"length":9}\r', '{"len\\u0067th": 10}', "{}", '{"": 5}', '{"x": 1}']
    lines += ['{"chosen": "a", "rejected": "b", "length": 5}', '{"images": 1, "length": 5}']
    lines += [json.dumps({**{f"k{key}": key for key in range(20)}, "length": 11})]
    records, rejected = _check_read(tmp_path / "x.jsonl", lines, LENGTH)
    assert len(records) > 10
    assert len(rejected) > 10


def test_duplicate_keys_of_lengths_are_found(tmp_path: Path) -> None:
    lines = ['{"length": 1, "length": 1}', '{"a": 1, "length": 2, "a": 1}', '{"length": 3, "a": {"b": 1, "b": 1}}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    records, rejected = rows_of(_batches(tmp_path / "x.jsonl", LENGTH))
    assert not records
    assert [one.reason for one in rejected.values()] == ["duplicate-keys"] * 3


def test_tokens_are_those_that_parse_gives(tmp_path: Path) -> None:
    lines = [
        '{"input_ids": [5]}',
        '{"input_ids": [1, 2,3 ,4], "other": "x"}',
        '{"input_ids": []}',
        '{"input_ids": [1, -2]}',
        '{"input_ids": [1, 2.0]}',
        '{"input_ids": [1, true]}',
        '{"input_ids": [1, [2]]}',
        '{"input_ids": [1, 2147483647, 2147483648]}',
        '{"input_ids": [1, 2147483647]}',
        '{"input_ids": 5}',
        '{"labels": [5]}',
        '{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}',
        '{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}',
        '{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}',
        '{"input_ids": [1, 2, 3], "labels": [2, 3]}',
        '{"input_ids": [1, 2, 3], "labels": null}',
        '{"input_ids": [0, 1, 2, 0], "attention_mask": [0, 1, 1, 0]}',
        '{"input_ids": [1, 2, 0, 0], "labels": [-100, 2, -100, -100], "attention_mask": [1, 1, 0, 0]}',
        '{"input_ids": [1, 2, 0], "labels": [-100, 2, 7], "attention_mask": [1, 1, 0]}',
        '{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}',
        '{"input_ids": [1, 2, 3], "attention_mask": [0, 0, 0]}',
        '{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 3]}',
        '{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 2]}',
        '{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}',
        '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}',
        '{"input_ids": [1, 2, 3], "loss_mask": 1}',
        '{"input_ids": [1, 2, 3], "prompt_length": 1}',
        '{"input_ids": [1, 2, 3], "unknown": [1, 2, 3]}',
        '{"input_ids": [1, 2, 3], "document_id": 17}',
        '{"input_ids": [1, 2, 3], "attention_mask": [1, 1]}',
        '{"input_ids": [9, 8], "labels": [9, 8], "meta": {"a": 1}}',
    ]
    records, rejected = _check_read(tmp_path / "x.jsonl", lines, TOKENS)
    assert records[16] == ([1, 2], [False, True])
    assert len(rejected) > 10
    plain = [line for row, line in enumerate(lines) if row in records and "meta" not in line and "null" not in line]
    _check_read(tmp_path / "x.jsonl", plain, TOKENS)
    _check_read(tmp_path / "x.jsonl", [line for line in plain if "labels" not in line], TOKENS)
    _check_read(tmp_path / "x.jsonl", [line for line in plain if "mask" not in line], TOKENS)
    _check_read(tmp_path / "x.jsonl", [lines[11], lines[12]], TOKENS)


@pytest.mark.parametrize("layout", [TEXT, LENGTH])
def test_a_sample_takes_the_same_records_however_the_source_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: RecordLayout
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"text": "t{number}", "length": {number + 1}}}\n' for number in range(3000)) + "broken")
    everything, _ = rows_of(_batches(path, layout))
    batches = _batches(path, layout, sample=0.2)
    few, _ = rows_of(batches)
    assert 500 < len(few) < 700
    assert few.items() <= everything.items()
    assert sum(batch.num_records for piece in batches for batch in piece) == 3001
    more, _ = rows_of(_batches(path, layout, sample=0.5))
    assert few.items() < more.items()
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 1000)
    monkeypatch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", 300)
    assert rows_of(_batches(path, layout, sample=0.2))[0] == few


def test_a_batch_holds_no_more_than_its_share(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a", "length": 3}\n' * 5000)
    ((*batches,),) = _batches(path, TEXT)
    assert [len(batch.numbers) for batch in batches] == [1024] * 4 + [904]
    assert np.concatenate([batch.numbers for batch in batches]).tolist() == list(range(5000))
    ((batch,),) = _batches(path, LENGTH)
    assert len(batch.numbers) == 5000
