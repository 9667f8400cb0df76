"""What cannot be cut by seeking: compressed files, the standard input, JSON arrays, URLs, and these cut short."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from chunkplan.errors import UsageError
from chunkplan.intake.pieces import Piece
from chunkplan.intake.readers import cut, first_records, is_stream, read
from chunkplan.intake.readers.streams import elements
from chunkplan.intake.records import RecordError
from chunkplan.intake.sources import find_sources
from tests.support.intake_checks import LARGE, TEXT, batches_of, rows_of

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: bytes(pa.Codec("zstd").compress(data, asbytes=True)),
}


def _texts(path: Path | str, spool: Path) -> list[str]:
    records, rejected = rows_of(batches_of(path, TEXT, spool))
    assert not rejected
    assert list(records) == list(range(len(records)))
    return [record.text for record in records.values()]


def _until_error(pieces: Iterator[Piece]) -> tuple[list[Piece], RecordError]:
    found: list[Piece] = []
    with pytest.raises(RecordError) as caught:
        for piece in pieces:
            found.append(piece)
    assert caught.value.reason == "unreadable"
    return found, caught.value


def _cut(path: Path | str, spool: Path) -> Iterator[Piece]:
    (file,) = find_sources([path])
    return cut(file, 0, spool)


def _texts_of(pieces: list[Piece]) -> list[str]:
    batches = [list(read(piece, TEXT, max_record_bytes=LARGE)) for piece in pieces]
    records, rejected = rows_of(batches)
    assert not rejected
    return [record.text for record in records.values()]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("piece_bytes", [1, 5000, 1 << 20])
def test_compressed_lines_are_those_of_the_content_members_and_frames_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, piece_bytes: int
) -> None:
    texts = [f"{number} " * 20 for number in range(300)]
    content = b"\xef\xbb\xbf" + "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](content[:10_001]) + COMPRESS[suffix](content[10_001:]))
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", 777)
    assert _texts(path, tmp_path / "spool") == texts
    pieces = list(_cut(path, tmp_path / "spool"))
    assert all(piece.is_temporary for piece in pieces)
    assert b"".join(Path(piece.path).read_bytes() for piece in pieces) == content
    ends = [piece.origin + piece.stop for piece in pieces]
    assert [piece.origin for piece in pieces] == [0, *ends[:-1]]
    assert ends[-1] == len(content)


def test_a_stream_is_spooled_only_as_far_as_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0))
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 1000)
    pieces = _cut(path, tmp_path / "spool")
    next(pieces)
    next(pieces)
    assert sorted(file.name for file in (tmp_path / "spool").iterdir()) == [
        "source-00000-piece-00000.jsonl",
        "source-00000-piece-00001.jsonl",
    ]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_of_a_stream_cut_short_the_records_before_the_cut_are_read(tmp_path: Path, suffix: str) -> None:
    texts = [f"{number} {number * 7919 % 10007}" for number in range(60_000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    half = COMPRESS[suffix](lines[: lines.index(b"\n", len(lines) // 2) + 1])
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(half + COMPRESS[suffix](lines)[:-1000])
    pieces, error = _until_error(_cut(path, tmp_path / "spool"))
    assert "cut short" in error.message
    assert error.where == str(path)
    found = _texts_of(pieces)
    num_half = lines[: lines.index(b"\n", len(lines) // 2) + 1].count(b"\n")
    assert found[:num_half] == texts[:num_half]
    assert found[num_half:] == texts[: len(found) - num_half]
    assert len(found) >= num_half


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS"),
        (b"\x07\0" * 100, "damaged, or not"),
    ],
)
def test_what_is_not_compressed_data_is_unreadable(tmp_path: Path, suffix: str, content: bytes, message: str) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(content)
    pieces, error = _until_error(_cut(path, tmp_path / "spool"))
    assert not pieces
    assert message in error.message
    path.write_bytes(COMPRESS[suffix](b""))
    assert "nothing in it" in _until_error(_cut(path, tmp_path / "spool"))[1].message


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
@pytest.mark.parametrize(
    ("content", "message"), [(b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS")]
)
def test_a_file_with_no_data_is_unreadable(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    pieces, error = _until_error(_cut(tmp_path / name, tmp_path / "spool"))
    assert not pieces
    assert message in error.message
    assert error.where == str(tmp_path / name)


def test_the_standard_input_and_pipes_are_read_as_lines(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from chunkplan.intake.readers import cut;"
        "from chunkplan.intake.sources import find_sources;"
        "[print(Path(p.path).read_text(), end='') for p in cut(find_sources(['-'])[0], 3, Path(sys.argv[1]))]"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, input=b'{"text": "a"}\n{"text": "b"}', capture_output=True, check=True)
    assert result.stdout == b'{"text": "a"}\n{"text": "b"}'
    result = subprocess.run(command, input=b"", capture_output=True, check=False)
    assert b"the standard input is empty" in result.stderr
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(f'echo \'{{"text": "a"}}\' > {tmp_path / "pipe"}', shell=True):
        assert _texts(tmp_path / "pipe", tmp_path / "spool") == ["a"]


def test_urls_are_read_as_files_are(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    content = b'{"text": "a"}\n{"text": "b"}\n'
    try:
        system.pipe("/streams-test/a.jsonl", content)
        system.pipe("/streams-test/a.jsonl.gz", gzip.compress(content, mtime=0))
        system.pipe("/streams-test/a.json", b'[{"text": "a"},{"text": "b"}]')
        system.pipe("/streams-test/a.txt", b"a")
        for name in ("a.jsonl", "a.jsonl.gz", "a.json"):
            assert _texts(f"memory://streams-test/{name}", tmp_path / "spool") == ["a", "b"]
        assert _texts("memory://streams-test/a.txt", tmp_path / "spool") == ["a"]
        pieces = _cut("memory://streams-test/a.jsonl", tmp_path / "spool")
        system.rm("/streams-test/a.jsonl")
        with pytest.raises(UsageError, match="cannot read memory://"):
            next(pieces)
    finally:
        system.rm("/streams-test", recursive=True)


RECORDS: list[dict[str, Any]] = [
    {"text": 'a, ]}{[ "quoted" \\', "x": [[], {}, {"y": ["\\\\", '\\"']}]},
    {"text": "é\u2028" * 50, "x": -1.5},
    {"text": "\n\t"},
    {"text": "z"},
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_array_is_read_as_its_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, suffix: str
) -> None:
    content = b"\xef\xbb\xbf\n " + json.dumps(RECORDS, indent=indent, ensure_ascii=False).encode() + b"\n\n"
    path = tmp_path / f"x.json{suffix}"
    path.write_bytes(COMPRESS[suffix](content) if suffix else content)
    for block in (1, 2, 3, 5, 64, 1 << 20):
        monkeypatch.setattr("chunkplan.intake.pieces.BLOCK_BYTES", block)
        pieces = list(_cut(path, tmp_path / "spool"))
        assert [record for piece in pieces for record in first_records(piece)] == RECORDS
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 10)
    pieces = list(_cut(path, tmp_path / "spool"))
    assert [first_records(piece) for piece in pieces] == [[record] for record in RECORDS]


def test_a_bad_element_is_rejected_by_its_index(tmp_path: Path) -> None:
    content = b'[{"text": "a"},\n{"text": "b\nc"}, 5, {"text": "d"} x, {"text": NaN}, {"text": "e"}]'
    (tmp_path / "x.json").write_bytes(content)
    records, rejected = rows_of(batches_of(tmp_path / "x.json", TEXT, tmp_path / "spool"))
    assert {row: record.text for row, record in records.items()} == {0: "a", 5: "e"}
    reasons = {1: "not-json", 2: "not-an-object", 3: "not-json", 4: "not-json"}
    assert {row: one.reason for row, one in rejected.items()} == reasons


@pytest.mark.parametrize(
    ("rest", "texts", "message"),
    [
        (b"", [], "found the end of the file"),
        (b',{"text": "b', ["a"], "found the end of the file"),
        (b',{"text": "b"},{"text": "c"}', ["a", "b"], "found the end of the file"),
        (b"] x", ["a"], "nothing behind the array, found `x`"),
        (b"][{}]", ["a"], "nothing behind the array, found `[`"),
        (b',{"text": "b"} {"text": "c"}]', ["a"], "expected `,` or `]` behind element 1, found `{`"),
        (b",]", ["a"], "expected element 1, found `]`"),
        (b", ,{}]", ["a"], "expected element 1, found `,`"),
        (b"}", ["a"], "expected `,` or `]`, found `}`"),
    ],
)
def test_an_array_that_is_none_is_unreadable_after_the_elements_before(
    tmp_path: Path, rest: bytes, texts: list[str], message: str
) -> None:
    (tmp_path / "x.json").write_bytes(b'[{"text": "a"}' + rest)
    pieces, error = _until_error(_cut(tmp_path / "x.json", tmp_path / "spool"))
    assert message in error.message
    assert _texts_of(pieces) == texts


def test_an_array_cut_short_in_a_stream_is_read_so_far(tmp_path: Path) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{"text": str(number)} for number in range(9000)]).encode())[:-20])
    pieces, error = _until_error(_cut(path, tmp_path / "spool"))
    assert "cut short" in error.message
    found = _texts_of(pieces)
    assert found == [str(number) for number in range(len(found))]
    assert len(found) > 5000


def test_an_array_without_elements_is_unreadable(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b" [ \n] ")
    assert "without elements" in _until_error(_cut(tmp_path / "x.json", tmp_path / "spool"))[1].message


def test_lines_under_a_json_name_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for content in (b'{"text": "a"}\n{"text": "b"}\n', b'\xef\xbb\xbf\r\n{"text": "a"}\r\n\r\n{"text": "b"}'):
        path.write_bytes(content)
        assert [piece.is_temporary for piece in _cut(path, tmp_path / "spool")] == [False]
        records, _ = rows_of(batches_of(path, TEXT, tmp_path / "spool"))
        assert [record.text for record in records.values()] == ["a", "b"]
    path.write_bytes(b'{"text": "a"\n{"text": "b"}\n')  # the first line is cut, and only that
    records, rejected = rows_of(batches_of(path, TEXT, tmp_path / "spool"))
    assert (list(records), list(rejected)) == ([1], [0])
    assert is_stream(find_sources([path])[0])


def test_an_element_larger_than_a_block_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = iter([b'[{"text": "', *[b"x" * 1000] * 100, b'"}, {}]'])
    sizes_seen = [len(part) for part in elements(parts, "x.json")]
    assert sum(sizes_seen) == 100_000 + len('{"text": ""}\n{}\n')
    assert max(sizes_seen) <= 1000


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    for name, content in (("x.txt", b"\xef\xbb\xbfa\r\nb\n"), ("x.txt.gz", gzip.compress(b"a\r\nb\n", mtime=0))):
        (tmp_path / name).write_bytes(content)
        assert _texts(tmp_path / name, tmp_path / "spool") == ["a\r\nb\n"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.txt", b"a\xff", "not-utf8"),
        ("x.txt", b" \n", "empty"),
        ("x.txt", b"", "empty"),
        ("x.txt.gz", b"", "unreadable"),
        ("x.txt", b"x" * 1001, "too-large"),
        ("x.txt.gz", gzip.compress(b"x" * 1001, mtime=0), "too-large"),
        ("x.txt.gz", gzip.compress(b"x" * 500, mtime=0)[:-3], "unreadable"),
        ("x.txt", b"version https://git-lfs.github.com/spec/v1\n", "unreadable"),
    ],
)
def test_a_bad_text_file_is_one_rejected_record(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    records, rejected = rows_of(batches_of(tmp_path / name, TEXT, tmp_path / "spool", limit=1000))
    assert not records
    assert [one.reason for one in rejected.values()] == [reason]
