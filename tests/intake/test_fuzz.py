"""Whatever is in a file: every line that is not blank is one record or one rejection, and nothing else is raised."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chunkplan.intake.readers import cut, read
from chunkplan.intake.readers.streams import elements
from chunkplan.intake.records import REASONS, RecordError
from chunkplan.intake.schemas import RecordLayout, parse
from chunkplan.intake.sources import SourceFile
from tests.support.intake_checks import LENGTH, TEXT, TOKENS, rows_of

LIMIT = 300

_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**33) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
_ids = st.lists(st.integers(-1, 12), max_size=5)
_records = st.dictionaries(
    st.sampled_from(["text", "length", "input_ids", "labels", "attention_mask", "x", "images"]),
    _values | _ids | st.integers(0, 5),
    max_size=4,
) | st.fixed_dictionaries({"input_ids": _ids}, optional={"labels": _ids, "attention_mask": _ids})
_json = st.builds(
    lambda value, ascii: json.dumps(value, ensure_ascii=ascii).encode(), _records | _values, st.booleans()
)
_garbage = st.binary(max_size=12) | st.sampled_from(
    [
        b"",
        b"\n",
        b"\r",
        b" ",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b'":',
        b'" :',
        b"NaN",
        b"\xef\xbb\xbf",
        b"\xff",
    ]
)


@st.composite
def _files(draw: st.DrawFn) -> bytes:
    """JSON lines with some bytes changed, or nothing but bytes."""
    lines = draw(st.lists(_json | _json | _json | _garbage, max_size=8))
    data = bytearray(draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\n\n"])).join(lines))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 2))] = draw(_garbage)
    return bytes(data) + draw(st.sampled_from([b"", b"\n"]))


def _read(path: Path, layout: RecordLayout) -> tuple[dict[int, Any], dict[int, Any]]:
    file = SourceFile(str(path), "jsonl", None, path.stat().st_size)
    return rows_of([list(read(piece, layout, max_record_bytes=LIMIT)) for piece in cut(file, 0, path.parent)])


class _DuplicateError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise _DuplicateError
    return dict(pairs)


def _naive(data: bytes, layout: RecordLayout) -> tuple[dict[int, Any], set[int]]:
    """Every line by itself, with the parser of the standard library."""
    records: dict[int, Any] = {}
    rejected: set[int] = set()
    for row, line in enumerate(data.split(b"\n")):
        text = line.removeprefix(b"\xef\xbb\xbf") if row == 0 else line
        if not text.strip(b" \t\r"):
            continue
        try:
            decoded = json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_object)
            json.dumps(decoded, ensure_ascii=False).encode()  # no lone surrogates
            if len(text) > LIMIT or not isinstance(decoded, dict):
                raise _DuplicateError
            record = parse(layout, decoded)
        except (ValueError, TypeError, RecordError):
            rejected.add(row)
            continue
        records[row] = (
            record.num_tokens
            if layout is LENGTH
            else (record.input_ids.tolist(), record.target.tolist())
            if layout is TOKENS
            else record
        )
    return records, rejected


@settings(max_examples=300, derandomize=True)
@given(_files(), st.sampled_from([TEXT, LENGTH, TOKENS]), st.integers(1, 60), st.integers(1, 60))
def test_lines_are_those_of_a_naive_reader_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, layout: RecordLayout, piece_bytes: int, block_bytes: int
) -> None:
    if not data or data.startswith(b"version https://git-lfs"):
        return
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(data)
    records, rejected = _read(path, layout)
    assert (records, set(rejected)) == _naive(data, layout)
    assert all(one.reason in REASONS for one in rejected.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkplan.intake.pieces.PIECE_BYTES", piece_bytes)
        patch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", block_bytes)
        patch.setattr("chunkplan.intake.pieces.BATCH_RECORDS", 2)
        assert _read(path, layout) == (records, rejected)


def _blocks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


def _split(data: bytes, size: int) -> tuple[list[bytes], str | None]:
    """The whole lines that come of an array, and the error."""
    found, message = b"", None
    try:
        for part in elements(_blocks(data, size), "x.json"):
            found += part
    except RecordError as error:
        message = error.message
    return found.split(b"\n")[:-1], message


@settings(max_examples=300, derandomize=True)
@given(st.lists(_values | _records, min_size=1, max_size=6), st.sampled_from([None, 1]), st.integers(1, 20))
def test_the_elements_of_an_array_are_those_of_json(values: list[Any], indent: int | None, size: int) -> None:
    lines, message = _split(json.dumps(values, indent=indent).encode(), size)
    assert message is None
    assert [json.loads(line) for line in lines] == values


@settings(max_examples=300, derandomize=True)
@example(b"\\}", 1)
@example(b"1,\\]", 1)
@given(_files(), st.integers(1, 20))
def test_anything_behind_a_bracket_is_elements_or_unreadable(data: bytes, size: int) -> None:
    lines, message = _split(b"[" + data, size)
    assert (lines, message) == _split(b"[" + data, 1 << 20)
    try:
        values = json.loads(b"[" + data)
    except (ValueError, RecursionError):
        return
    assert [json.loads(line) for line in lines] == values
    assert message is None or not values
