"""Lines of a JSONL file become records, and every bad line is an error with its file and line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.jsonl import JsonLines


def _read(path: Path, content: bytes) -> list[tuple[int, dict[str, object]]]:
    path.write_bytes(content)
    return list(JsonLines(path))


def test_bom_crlf_and_blank_lines_are_no_records(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n   \n{"text": "b"}\n\n{"text": "c"}'
    assert _read(tmp_path / "x.jsonl", content) == [(1, {"text": "a"}), (4, {"text": "b"}), (6, {"text": "c"})]


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    assert _read(tmp_path / "x.jsonl", f'{{"text": "{text}"}}\n'.encode()) == [(1, {"text": text})]


def test_the_hash_and_the_size_are_those_of_the_raw_bytes(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n{"text": "b"}'
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    lines = JsonLines(path)
    assert len(list(lines)) == 2
    assert lines.content_hash == hashlib.sha256(content).hexdigest()
    assert lines.num_bytes == len(content)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', "not JSON: Input data was truncated"),
        (b'{"text": "a"} x', "trailing characters"),
        (b'{"text": NaN}', "not JSON"),
        (b'{"text": "\\ud800"}', "not JSON"),
        (b'{"text": "a\xff"}', "not UTF-8: byte 0xff at column 12"),
        (b"\xfe{}", "not UTF-8: byte 0xfe at column 1"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"[1]", "found a list, expected one JSON object a line"),
        (b"null", "found null"),
        (b'"text"', "found a string"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    with pytest.raises(DataError) as caught:
        _read(path, b'{"text": "fine"}\n\n' + line + b"\n")
    assert caught.value.where == f"{path}:3"
    assert message in caught.value.message


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        list(JsonLines(tmp_path / "missing.jsonl"))
