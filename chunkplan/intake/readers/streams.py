"""Reads sequential sources: compressed files, standard input, URLs, JSON arrays, objects over several lines, CSV.

Sources that cannot be cut by seeking are read once and spooled to temporary files of whole lines, one for each piece.
Elements of an array of any size are split in bounded memory; their content is left to the reader of lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int64Array
from chunkplan.errors import ChunkplanError
from chunkplan.intake import pieces
from chunkplan.intake.files import STDIN, is_url, open_file, reading
from chunkplan.intake.pieces import Piece
from chunkplan.intake.readers import lines
from chunkplan.intake.readers.delimited import rows_of_csv, split_texts
from chunkplan.intake.readers.rows import BOM, unreadable
from chunkplan.intake.records import RecordError
from chunkplan.intake.signatures import HEAD_BYTES, compression_of
from chunkplan.intake.sources import SourceFile
from chunkplan.intake.store import check_room

#: First bytes of the pointer that git leaves in place of a file that Git LFS has not fetched.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"

_NOT_UTF8 = b"\xff"
_LF = b"\n"
_SPACES = b" \t\r\n"

#: A raw line end within a string is an error, and as CR it stays one; anywhere else both are spaces.
_LINE_END = bytes.maketrans(b"\n", b"\r")

#: Bytes of a .json that are read to see its content.
_START_BYTES = 1 << 20

_QUOTE, _COMMA = ord('"'), ord(",")
_OPENING = b"[{"

#: Change of depth by each byte, and bytes that end elements.
_STEP = np.zeros(256, np.int64)
_STEP[list(_OPENING)], _STEP[list(b"]}")] = 1, -1
_IS_MARK = _STEP != 0
_IS_MARK[_COMMA] = True


@dataclass
class ByteCounter:
    """Counts the bytes read so far of a file as it is stored, before decompression."""

    num_bytes: int = 0


def chunks(
    path: str, compression: str | None, taken: ByteCounter | None = None, *, is_look: bool = False
) -> Iterator[bytes]:
    """The bytes of a file, URL or the standard input in order, decompressed. All that can be read comes before errors.

    Its first bytes decide the compression; `compression` is used if they are neither text nor known. `taken` is kept up
    to date. With `is_look` little is fetched at once, as only the beginning is read.
    Raises RecordError: unreadable: it is empty, a pointer of Git LFS, cut short, or not compressed that way;
    UsageError: it cannot be opened or read.
    """
    taken = taken or ByteCounter()
    block_bytes = pieces.LOOK_BYTES if is_look and is_url(path) else pieces.BLOCK_BYTES
    with reading(path), open_file(path, block_bytes if is_look else None) as file:
        head = file.read(len(_LFS_POINTER))
        check_head(head, path)
        compression = compression_of(head[:HEAD_BYTES], compression)
        if compression is None:
            taken.num_bytes = len(head)
            yield head
            while data := file.read(block_bytes):
                taken.num_bytes += len(data)
                yield data
        elif not file.seekable():
            message = f"it is compressed ({compression}), and can be read only once"
            raise unreadable(message, path, hint="decompress it before, or name a file")
        else:
            file.seek(0)
            for data in _decompressed(file, path, compression, block_bytes):
                taken.num_bytes = file.tell()
                yield data


def _decompressed(file: BinaryIO, path: str, compression: str, block_bytes: int) -> Iterator[bytes]:
    """Members and frames that follow one another are one stream, as they are for gzip, zstd and bzip2."""
    stream = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)
    buffer = bytearray(block_bytes)
    num_bytes = 0
    while True:
        buffer[:] = _NOT_UTF8 * len(buffer)
        try:
            size = stream.readinto(buffer)
        except OSError as error:
            if error.errno is not None:
                raise
            # What came before the damage is in the buffer, though nothing says how much; the fill is no text.
            rest = bytes(buffer.rstrip(_NOT_UTF8))
            if rest:
                yield rest
            what = "cut short" if "Truncated" in str(error) else f"damaged, or not {compression} ({error})"
            message = f"{what} after {num_bytes + len(rest):,} bytes of its content"
            raise unreadable(message, path, hint="fetch or make the file again") from error
        if not size:
            break
        yield bytes(buffer[:size])
        num_bytes += size
    if not num_bytes:
        raise unreadable("there is nothing in it", path, hint="leave it out, or make the file again")


def fetch(path: str, target: Path) -> str:
    """Copy what is at a URL to `target`, and return that; raises as `chunks`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for data in chunks(path, None):
            check_room(target.parent, len(data), f"a copy of {path}")
            file.write(data)
    return str(target)


def check_head(head: bytes, path: str) -> None:
    """Refuse a file that begins with `head` if there is nothing to read in it.

    Raises RecordError: it is empty, or a pointer of Git LFS.
    """
    if not head:
        name = "the standard input" if path == STDIN else "the file"
        raise unreadable(f"{name} is empty (0 bytes)", path, hint="leave it out, or fetch it again")
    if head.startswith(_LFS_POINTER):
        raise unreadable("a pointer of Git LFS, not the data", path, hint="run `git lfs pull` where it was cloned")


def is_spooled(file: SourceFile) -> bool:
    """True if a file of lines cannot be cut by seeking."""
    return file.compression is not None or file.num_bytes is None or is_url(file.path)


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The pieces of a source of kind jsonl or json: ranges of lines where that can be, else spooled into `folder`."""
    taken = ByteCounter()
    data, reader = contents(file, taken)
    if reader == "elements" or is_spooled(file):
        yield from _spool(data, taken, source, folder, reader)
    else:
        yield from lines.cut(file.path, source, file.num_bytes or 0)


def contents(file: SourceFile, taken: ByteCounter, *, is_look: bool = False) -> tuple[Iterator[bytes], str]:
    """The bytes of a source as lines, with one for each element or object of several lines, and the reader of these.

    `taken` and `is_look` are as in `chunks`. Raises RecordError: unreadable; also while the bytes are taken, after all
    that can be read; UsageError: the file cannot be read.
    """
    data = chunks(file.path, file.compression, taken, is_look=is_look)
    start = b""
    if file.text_split is not None:
        return split_texts(data, file.text_split), "elements"
    if file.kind in ("csv", "tsv"):
        return rows_of_csv(data, file), "elements"
    if file.kind == "json":
        for block in data:  # so much that it says whether it is an array, and if not has a line, unless that is long
            start += block
            text = start.removeprefix(BOM).lstrip(_SPACES)
            if text.startswith(b"[") or text.count(_LF) > 1 or len(start) > _START_BYTES:
                break
        if text.startswith(b"["):
            return elements(chain([text], data), file.path), "elements"
        if _is_spread(text):
            return objects(chain([text], data), file.path), "elements"
    elif not is_spooled(file):
        start = next(data)  # refuses what is no data at all
    return chain([start], data), "lines"


def _is_spread(text: bytes) -> bool:
    """True if a file that begins with `text` has objects over several lines: the first line goes on in the next.

    If the next line begins with `{`, they are lines of which the first is truncated.
    """
    first, _, rest = text.partition(_LF)
    rest = rest.lstrip(_SPACES)
    if not rest or rest.startswith(b"{") or not first.startswith(b"{"):
        return False
    try:
        msgspec.json.decode(first)
    except (ValueError, RecursionError) as error:
        return "truncated" in str(error)
    return False


def _spool(data: Iterator[bytes], taken: ByteCounter, source: int, folder: Path, reader: str) -> Iterator[Piece]:
    """Write lines into files of `folder`, and yield each as a piece once it is whole; the next when it is asked for.

    A piece ends with the first line that brings it to `PIECE_BYTES`. Where `data` ends in an error, that is raised
    after a piece with all whole lines before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index, origin, rest, before = 0, 0, b"", 0
    ending: Exception | None = None
    while ending is None:
        check_room(folder, pieces.PIECE_BYTES, "the next piece of what is read as a stream")
        path = folder / f"source-{source:05}-piece-{index:05}.jsonl"
        size = whole = 0
        with path.open("wb") as file:
            while not (stop := rest.find(_LF, max(pieces.PIECE_BYTES - size - 1, 0)) + 1):
                file.write(rest)
                whole = size + rest.rfind(_LF) + 1 if _LF in rest else whole
                size += len(rest)
                try:
                    rest = next(data)
                except (StopIteration, ChunkplanError) as error:
                    ending, rest = error, b""
                    break
            file.write(rest[:stop])
            size, rest = size + stop, rest[stop:]
            if isinstance(ending, ChunkplanError):
                size = file.truncate(whole)
        if size:
            share, before = taken.num_bytes - before, taken.num_bytes
            yield Piece(source, index, str(path), reader, 0, size, origin, True, num_bytes=size, share=share)
        else:
            path.unlink()
        index, origin = index + 1, origin + size
    if isinstance(ending, ChunkplanError):
        raise ending


def elements(data: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The elements of the array in `data`, which begins with its `[`: each on a line that ends with LF, in parts.

    Raises RecordError: unreadable: no `]`, something behind it, an element that is missing, or a comma; or as `data`.
    """
    marks = _Marks(1)
    depth = num_done = 0
    has_ended = has_begun = False
    is_whole = is_due = False  # the brackets of the element are closed again; a comma was before it

    def wrong(message: str, mark: int | None) -> RecordError:
        return _misplaced(message, mark, path, "elements")

    def add(text: bytes) -> None:
        nonlocal has_begun
        text = text if has_begun else text.lstrip(_SPACES)
        has_begun = has_begun or bool(text)
        found.append(text.translate(_LINE_END))

    for block in data:
        found: list[bytes] = []
        at = 0
        try:
            for position in marks.find(block).tolist():
                mark = block[position]
                if has_ended:
                    break
                if mark in _OPENING:
                    if is_whole:
                        raise wrong(f"expected `,` or `]` behind element {num_done}", mark)
                    depth += 1
                    at = position + 1 if depth == 1 else at
                elif mark != _COMMA and depth > 1:
                    depth -= 1
                    is_whole = True
                else:  # an element ends, and maybe the array
                    add(block[at:position])
                    at = position + 1
                    if has_begun:
                        found.append(_LF)
                        num_done += 1
                    elif mark == _COMMA or is_due:
                        raise wrong(f"expected element {num_done}", mark)
                    has_begun = is_whole = False
                    is_due, has_ended = mark == _COMMA, mark != _COMMA
                    if mark == ord("}"):
                        raise wrong("expected `,` or `]`", mark)
            if not has_ended:
                add(block[at:])
            elif behind := block[at:].strip(_SPACES):
                raise wrong("expected nothing behind the array", behind[0])
        finally:
            yield b"".join(found)
    if not has_ended:
        raise wrong("expected `,` or `]`", None)
    if not num_done:
        raise unreadable("an array without elements", path, hint="leave the file out")


def objects(data: Iterator[bytes], path: str) -> Iterator[bytes]:
    """The objects in `data`, each over as many lines as it likes: each on a line that ends with LF, in parts.

    Raises RecordError: unreadable: something is between them, or the last has no end; or as `data`.
    """
    marks = _Marks(0)
    num_done, is_open = 0, False
    for block in data:
        found: list[bytes] = []
        at = 0
        for position in [*marks.find(block).tolist(), len(block)]:
            mark = block[position : position + 1]
            if is_open:
                found.append(block[at : position + len(mark)].translate(_LINE_END))
                if mark and mark != b"}":
                    yield b"".join(found)
                    raise _misplaced(f"expected `}}` at the end of object {num_done}", mark[0], path, "objects")
                is_open = not mark
                if mark:
                    found.append(_LF)
                    num_done += 1
                    at = position + 1
            else:
                wrong = block[at:position].strip(_SPACES) or (b"" if mark == b"{" else mark)
                if wrong:
                    yield b"".join(found)
                    raise _misplaced(f"expected `{{` of object {num_done}", wrong[0], path, "objects")
                is_open, at = bool(mark), position
        yield b"".join(found)
    if is_open:
        raise _misplaced(f"expected `}}` at the end of object {num_done}", None, path, "objects")


def _misplaced(message: str, found: int | None, path: str, counted: str) -> RecordError:
    what = "the end of the file" if found is None else f"`{chr(found)}`" if found < 0x80 else f"byte {found:#04x}"
    return unreadable(
        f"{message}, found {what}; {counted} are counted from 0",
        path,
        hint="fix the file, or write it as JSONL: one object a line",
    )


class _Marks:
    """Finds brackets, and commas between them, that are not in strings and down to some depth."""

    def __init__(self, deepest: int) -> None:
        self._deepest = deepest
        self._depth = 0
        self._in_string = 0
        self._is_escaped = False  # the first byte of the next block

    def find(self, block: bytes) -> Int64Array:
        """Positions in the next `block` of brackets up to the tracked depth, and of commas, int64 [n].

        Elements of an array are at depth 1, objects one after another at depth 0.
        """
        if self._is_escaped and block[:1] in (b'"', b"\\"):  # a bracket behind a backslash is one all the same
            block = b"_" + block[1:]
        if b"\\" in block:  # blank out what is escaped: of a run of backslashes, pairs from its begin
            block = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        self._is_escaped = block.endswith(b"\\")
        text = np.frombuffer(block, np.uint8)
        quotes = np.flatnonzero(text == _QUOTE)
        marks = np.flatnonzero(_IS_MARK[text])
        marks = marks[(np.searchsorted(quotes, marks) + self._in_string) % 2 == 0]
        steps = _STEP[text[marks]]
        after = self._depth + np.cumsum(steps)
        self._depth += int(steps.sum())
        self._in_string = (self._in_string + len(quotes)) % 2
        found: Int64Array = marks[np.minimum(after, after - steps) <= self._deepest]
        return found
