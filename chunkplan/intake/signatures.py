"""What a file is by its first bytes, which its name may not say: how it is compressed, and which table it is."""

from __future__ import annotations

import codecs
import re

from chunkplan.intake.files import open_file

#: How many bytes tell.
HEAD_BYTES = 16

#: How compressed files begin. No text begins so: bzip2 has a number behind its letters, zstd may begin with frames that
#: are skipped.
_COMPRESSED = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
}

#: How tables and arrays begin.
_TABLES = {
    "parquet": re.compile(rb"PAR1\x15"),
    "arrow": re.compile(rb"ARROW1\0\0"),
    "npy": re.compile(rb"\x93NUMPY"),
}


def by_bytes(path: str, kind: str, compression: str | None) -> tuple[str, str | None]:
    """The kind and the compression of a file of this machine, which its name says as given."""
    with open_file(path) as file:
        head = file.read(HEAD_BYTES)
    return table_of(head) or kind, compression_of(head, compression)


def table_of(head: bytes) -> str | None:
    """The kind of table, or of array, that begins with `head`; None where it is none."""
    return next((name for name, begin in _TABLES.items() if begin.match(head)), None)


def compression_of(head: bytes, named: str | None) -> str | None:
    """How a file that begins with `head` is compressed; `named` where it is neither text nor known."""
    found = next((name for name, begin in _COMPRESSED.items() if begin.match(head)), None)
    return found if found or _is_text(head) else named


def _is_text(head: bytes) -> bool:
    try:
        return bool(codecs.getincrementaldecoder("utf-8")().decode(head)) and b"\0" not in head
    except UnicodeDecodeError:
        return False
