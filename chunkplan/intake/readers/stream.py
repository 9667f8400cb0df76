"""What cannot be cut by seeking is read once, in order, and spooled: temporary files of whole lines, one a piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from chunkplan.errors import ChunkplanError
from chunkplan.intake import pieces
from chunkplan.intake.disk import check_room
from chunkplan.intake.files import STDIN, is_url, open_file, reading
from chunkplan.intake.pieces import Piece
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.signatures import HEAD_BYTES, compression_of

#: What git leaves in place of a file that Git LFS has not fetched.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"

_NOT_UTF8 = b"\xff"

_LF = b"\n"


@dataclass
class Taken:
    """How many bytes of a file, as it is stored, have been read so far."""

    num_bytes: int = 0


def chunks(path: str, compression: str | None, taken: Taken | None = None, *, is_look: bool = False) -> Iterator[bytes]:
    """The bytes of a file, URL or the standard input in order, decompressed. All that can be read comes before errors.

    Its bytes say how it is compressed; `compression` counts where they are neither text nor known.

    `taken` is kept up to date. `is_look` says that only the beginning is wanted, of which little is fetched at once.

    Raises:
        RecordError: unreadable: it is empty, a pointer of Git LFS, cut short, or not compressed that way.
        UsageError: it cannot be opened or read.
    """
    taken = taken or Taken()
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
            raise unreadable(
                f"it is compressed ({compression}), and can be read only once",
                path,
                hint="decompress it before, or name a file",
            )
        else:
            file.seek(0)
            for data in _decompressed(file, path, compression, block_bytes):
                taken.num_bytes = file.tell()
                yield data


def fetch(path: str, target: Path) -> str:
    """Copy what is at a URL to `target`, and return that.

    Raises:
        RecordError, UsageError: as `chunks`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for data in chunks(path, None):
            check_room(target.parent, len(data), f"a copy of {path}")
            file.write(data)
    return str(target)


def check_head(head: bytes, path: str) -> None:
    """Refuse a file that begins with `head` if there is nothing to read in it.

    Raises:
        RecordError: it is empty, or a pointer of Git LFS.
    """
    if not head:
        name = "the standard input" if path == STDIN else "the file"
        raise unreadable(f"{name} is empty (0 bytes)", path, hint="leave it out, or fetch it again")
    if head.startswith(_LFS_POINTER):
        raise unreadable("a pointer of Git LFS, not the data", path, hint="run `git lfs pull` where it was cloned")


def unreadable(message: str, path: str, *, hint: str) -> RecordError:
    """The error of a file, or the rest of one."""
    return RecordError(message, reason="unreadable", where=path, hint=hint)


def spool(data: Iterator[bytes], taken: Taken, source: int, folder: Path, reader: str) -> Iterator[Piece]:
    """Write lines into files of `folder`, and yield each as a piece once it is whole; the next when it is asked for.

    A piece ends with the first line that brings it to `PIECE_BYTES`. Where `data` ends in an error, that is raised
    after a piece with all whole lines before.

    Raises:
        RecordError, UsageError: as `data`; or there is no room on the disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index, origin, rest, before = 0, 0, b"", 0
    ending: ChunkplanError | None = None
    is_more = True
    while is_more and ending is None:
        check_room(folder, pieces.PIECE_BYTES, "the next piece of what is read as a stream")
        path = folder / f"source-{source:05}-piece-{index:05}.jsonl"
        with path.open("wb") as file:
            try:
                size, rest, is_more = _fill(file, rest, data)
            except ChunkplanError as error:
                size, ending = file.tell(), error
        if size:
            share, before = taken.num_bytes - before, taken.num_bytes
            yield Piece(source, index, str(path), reader, 0, size, origin, True, num_bytes=size, share=share)
        else:
            path.unlink()
        index, origin = index + 1, origin + size
    if ending is not None:
        raise ending


def _fill(file: BinaryIO, chunk: bytes, data: Iterator[bytes]) -> tuple[int, bytes, bool]:
    """Write `chunk` and more of `data` into `file` up to the end of a line at or behind `PIECE_BYTES`.

    Returns how much was written, what was read beyond, and whether `data` has not ended. At an error of `data`, the
    file is left with whole lines.
    """
    size, whole = 0, 0
    while True:
        stop = chunk.find(_LF, max(pieces.PIECE_BYTES - size - 1, 0)) + 1
        if stop:
            file.write(chunk[:stop])
            return size + stop, chunk[stop:], True
        file.write(chunk)
        whole = size + chunk.rfind(_LF) + 1 if _LF in chunk else whole
        size += len(chunk)
        try:
            chunk = next(data)
        except StopIteration:
            return size, b"", False
        except ChunkplanError:
            file.seek(whole)
            file.truncate()
            raise


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
            num_bytes += len(rest)
            what = "cut short" if "Truncated" in str(error) else f"damaged, or not {compression} ({error})"
            raise unreadable(
                f"{what} after {num_bytes:,} bytes of its content", path, hint="fetch or make the file again"
            ) from error
        if not size:
            break
        yield bytes(buffer[:size])
        num_bytes += size
    if not num_bytes:
        raise unreadable("there is nothing in it", path, hint="leave it out, or make the file again")
