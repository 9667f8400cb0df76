"""Sources of JSON, however they come: cut into ranges of lines where that can be, else read once and spooled."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from chunkplan.intake.files import is_url
from chunkplan.intake.pieces import Piece
from chunkplan.intake.readers import lines
from chunkplan.intake.readers.json_array import elements, objects
from chunkplan.intake.readers.stream import Taken, chunks, spool
from chunkplan.intake.sources import SourceFile

_BOM = b"\xef\xbb\xbf"
_SPACES = b" \t\r\n"

#: How far it is read to see what a file holds.
_START_BYTES = 1 << 20


def cut(file: SourceFile, source: int, folder: Path) -> Iterator[Piece]:
    """The pieces of a source of kind jsonl or json; what is spooled goes into `folder`.

    Raises:
        RecordError: unreadable.
        UsageError: the file cannot be read.
    """
    taken = Taken()
    data, reader = contents(file, taken)
    if reader == "elements" or is_spooled(file):
        yield from spool(data, taken, source, folder, reader)
    else:
        assert file.num_bytes is not None
        yield from lines.cut(file.path, source, file.num_bytes)


def contents(file: SourceFile, taken: Taken, *, is_look: bool = False) -> tuple[Iterator[bytes], str]:
    """The bytes of a source as lines, with one for each element or object of several lines, and the reader of these.

    `taken` and `is_look` are as in `chunks`.

    Raises:
        RecordError: unreadable; also while the bytes are taken, after all that can be read.
        UsageError: the file cannot be read.
    """
    data = chunks(file.path, file.compression, taken, is_look=is_look)
    start = b""
    if file.kind == "json":
        start = _start(data)
        text = start.removeprefix(_BOM).lstrip(_SPACES)
        if text.startswith(b"["):
            return elements(chain([text], data), file.path), "elements"
        if _is_spread(text):
            return objects(chain([text], data), file.path), "elements"
    elif not is_spooled(file):
        start = next(data)  # refuses what is no data at all
    return chain([start], data), "lines"


def is_spooled(file: SourceFile) -> bool:
    """Whether lines of a file cannot be cut by seeking."""
    return file.compression is not None or file.num_bytes is None or is_url(file.path)


def _start(data: Iterator[bytes]) -> bytes:
    """The begin of a file: so much that it says whether it is an array, and if not has a line, unless that is long."""
    start = b""
    for block in data:
        start += block
        text = start.removeprefix(_BOM).lstrip(_SPACES)
        if text.startswith(b"[") or text.count(b"\n") > 1 or len(start) > _START_BYTES:
            break
    return start


def _is_spread(text: bytes) -> bool:
    """Whether a file that begins with `text` has objects over several lines: the first line goes on in the next.

    Where the next one begins with `{`, these are lines of which the first is cut short.
    """
    first, _, rest = text.partition(b"\n")
    rest = rest.lstrip(_SPACES)
    if not rest or rest.startswith(b"{") or not first.startswith(b"{"):
        return False
    try:
        msgspec.json.decode(first)
    except (ValueError, RecursionError) as error:
        return "truncated" in str(error)
    return False
