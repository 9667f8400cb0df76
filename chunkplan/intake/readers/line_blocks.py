"""Blocks of whole lines from a range of bytes of a file, in bounded memory: a block, or one line of a stated size."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.intake import pieces
from chunkplan.intake.files import reading

_LF = b"\n"


class LineBlock(NamedTuple):
    """Lines that were read together. `starts` and `stops` [n] are their bytes within `data`, without the LF.

    `data` begins at byte `offset` of the file and has `num_bytes` bytes, unless it is one line that is too large to be
    held: then `data` is empty, and only its size is known.
    """

    data: bytes
    starts: Int64Array
    stops: Int64Array
    offset: int
    num_bytes: int


def line_blocks(path: str, start: int, stop: int, *, max_line_bytes: int, max_lines: int) -> Iterator[LineBlock]:
    """The lines of a local file that begin in its bytes [start, stop), in blocks of at most `max_lines`.

    Only LF ends a line, and the end of the file. A line of more than `max_line_bytes` that is longer than a block is
    not held in memory.

    Raises:
        UsageError: the file cannot be read.
    """
    with reading(path), Path(path).open("rb") as file:
        at = _first_line(file, start, stop)
        while at < stop:
            file.seek(at)
            data = file.read(pieces.BLOCK_BYTES)
            if not data:
                return
            num_bytes = _whole_lines(data, stop - at, is_last=len(data) < pieces.BLOCK_BYTES)
            if num_bytes:
                yield from _split(data[:num_bytes], at, max_lines)
            else:
                num_bytes, ending = _long_line(file, at + len(data), len(data))
                if num_bytes - ending > max_line_bytes:
                    yield LineBlock(b"", np.zeros(1, np.int64), np.array([num_bytes - ending]), at, num_bytes)
                else:
                    del data
                    file.seek(at)
                    yield from _split(file.read(num_bytes), at, max_lines)
            at += num_bytes


def hash_lines(path: str, start: int, stop: int) -> str:
    """SHA-256 of the lines that begin in bytes [start, stop) of a local file.

    Raises:
        UsageError: the file cannot be read.
    """
    hasher = hashlib.sha256()
    with reading(path), Path(path).open("rb") as file:
        at, stop = _first_line(file, start, stop), _first_line(file, stop, sys.maxsize)
        file.seek(at)
        while at < stop and (data := file.read(min(pieces.BLOCK_BYTES, stop - at))):
            hasher.update(data)
            at += len(data)
    return hasher.hexdigest()


def _first_line(file: BinaryIO, start: int, stop: int) -> int:
    """Where the first line begins that begins at or after `start`; somewhere from `stop` on if there is none before."""
    if not start:
        return 0
    at = start - 1
    file.seek(at)
    while at < stop and (data := file.read(pieces.BLOCK_BYTES)):
        found = data.find(_LF)
        if found >= 0:
            return at + found + 1
        at += len(data)
    return at


def _whole_lines(data: bytes, num_left: int, *, is_last: bool) -> int:
    """The bytes of `data` that are whole lines beginning in its first `num_left` bytes; 0 if the first is not whole.

    The end of the file, which is that of `data` if `is_last`, ends a line.
    """
    num_bytes = data.find(_LF, num_left - 1) + 1
    return num_bytes or (len(data) if is_last else data.rfind(_LF) + 1)


def _long_line(file: BinaryIO, at: int, num_bytes: int) -> tuple[int, int]:
    """The bytes of a line of which `num_bytes` are read and end at `at`, and whether (0 or 1) an LF is among them."""
    file.seek(at)
    while data := file.read(pieces.BLOCK_BYTES):
        found = data.find(_LF)
        if found >= 0:
            return num_bytes + found + 1, 1
        num_bytes += len(data)
    return num_bytes, 0


def _split(data: bytes, offset: int, max_lines: int) -> Iterator[LineBlock]:
    stops = np.flatnonzero(np.frombuffer(data, np.uint8) == _LF[0])
    if not data.endswith(_LF):
        stops = np.append(stops, len(data))
    starts = np.concatenate([[0], stops[:-1] + 1])
    if len(starts) <= max_lines:
        yield LineBlock(data, starts, stops, offset, len(data))
        return
    for line in range(0, len(starts), max_lines):
        start, stop = starts[line], min(int(stops[min(line + max_lines, len(stops)) - 1]) + 1, len(data))
        yield LineBlock(
            data[start:stop],
            starts[line : line + max_lines] - start,
            stops[line : line + max_lines] - start,
            offset + int(start),
            int(stop - start),
        )
