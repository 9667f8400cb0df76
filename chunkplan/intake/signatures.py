"""Identifies files by their first bytes, and suggests what to do with one whose suffix is not known."""

from __future__ import annotations

import codecs
import json
import re
import shlex
import tarfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa

from chunkplan.intake.files import is_url, name_of, open_file, reading

#: Bytes of the beginning of a file that are looked at.
HEAD_BYTES = 16

#: How compressed files begin. No text begins so: bzip2 has a number behind its letters, zstd may begin with frames that
#: are skipped.
_COMPRESSED = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
}

#: First bytes of tables and arrays.
_TABLES = {"parquet": re.compile(rb"PAR1\x15"), "arrow": re.compile(rb"ARROW1\0\0"), "npy": re.compile(rb"\x93NUMPY")}

#: Bytes of a file to look at: as stored, of its content, and members of an archive.
_STORED_BYTES, _BYTES, _MEMBERS = 1 << 20, 1 << 18, 100

#: The suffix of what is compressed, by the name that Arrow has for it.
_PACKINGS = {"gzip": "gz", "zstd": "zst", "bz2": "bz2"}

#: First bytes of other files: the Python that writes Parquet, with the file and the new one in it.
_TO_PARQUET = {
    b"ORC": "import pyarrow.orc as o, pyarrow.parquet as p; p.write_table(o.read_table(%s), %s)",
    b"Obj\x01": "import polars; polars.read_avro(%s).write_parquet(%s)",
}

#: Code that unpacks a file of one other, and the first bytes of such files.
_UNPACK = "import {0}, shutil; shutil.copyfileobj({0}.open(%s), open(%s, 'xb'))"
_MODULES = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ": "lzma"}

#: Suffixes of text files whose whole is no text to train on.
_STRUCTURED = {".psv", ".tab", ".yaml", ".yml", ".toml", ".xml", ".ini", ".sql", ".ipynb", ".svg"}

#: Members of every office file, which is an archive by its bytes.
_OFFICE = {"[Content_Types].xml", "mimetype"}

_WRITE = "write its records as JSON lines (.jsonl, an object each) or as Parquet, with all that is to be trained"


def by_bytes(path: str, kind: str, compression: str | None) -> tuple[str, str | None]:
    """The kind and the compression of a file of this machine, which its name says as given."""
    with open_file(path) as file:
        head = file.read(HEAD_BYTES)
    return table_of(head) or kind, compression_of(head, compression)


def table_of(head: bytes) -> str | None:
    """The kind of table, or of array, that begins with `head`; None where it is none."""
    return next((name for name, begin in _TABLES.items() if begin.match(head)), None)


def compression_of(head: bytes, named: str | None) -> str | None:
    """Compression of a file that begins with `head`; `named` where the bytes are neither text nor known."""
    found = next((name for name, begin in _COMPRESSED.items() if begin.match(head)), None)
    return found if found or _text(head) else named


def what_to_do(path: str) -> str:
    """Hint for a file of unknown format: the conversion that makes the file at `path` readable."""
    is_here = Path(path).is_file()
    if not is_here and not is_url(path):
        return _WRITE  # what can be read only once
    with reading(path), open_file(path) as file:
        stored = file.read(_STORED_BYTES)
    name = name_of(path)
    codec = compression_of(stored, None)
    packing = codec and _PACKINGS[codec]
    head = _content(stored, codec)
    suffix = Path(name.removesuffix(f".{packing}")).suffix.lower()
    kind = kind_of(head, suffix)
    if kind and (packing is None or table_of(head) is None):
        words = "it is one text, the whole file a record" if kind == "txt" else f"its bytes are those of .{kind}"
        format_of_it = ".".join([kind, *([packing] if packing else [])])
        return f"{words}: --format {shlex.quote(f'{name}={format_of_it}')}"
    return (is_here and (_of_archive(path, stored, head) or _by_python(path, stored, head))) or _WRITE


def _content(stored: bytes, codec: str | None) -> bytes:
    if codec is None:
        return stored[:_BYTES]
    with suppress(OSError):
        return bytes(pa.CompressedInputStream(pa.BufferReader(stored), codec).read(_BYTES))
    return b""


def kind_of(head: bytes, suffix: str) -> str | None:
    """The suffix of what begins with these bytes, where it is one that is read."""
    if table := table_of(head):
        return table
    with suppress(pa.ArrowException):
        if head.startswith(b"\xff\xff\xff\xff") and pa.ipc.open_stream(head).schema:
            return "arrow"
    text = _text(head).lstrip("\ufeff \t\r\n")
    if text[:1] in ("{", "["):
        return _json_kind(text)
    return "txt" if text and suffix not in _STRUCTURED else None


def _text(head: bytes) -> str:
    """The text that begins with these bytes, "" where they are none."""
    with suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
        return "" if "\0" in text else text
    return ""


def _json_kind(text: str) -> str | None:
    """The suffix of JSON that begins with `text`, whose records are objects or lists of them."""
    decoder = json.JSONDecoder()
    with suppress(ValueError, RecursionError):
        if text.startswith("["):
            first, _ = decoder.raw_decode(text[1:].lstrip())  # of an array as large as it may be
            rest = text.partition("\n")[2].lstrip()
            return ("jsonl" if rest.startswith("[{") else "json") if isinstance(first, dict) else None
        _, end = decoder.raw_decode(text)
        return "json" if "\n" in text[:end] or text[end:].lstrip(" \t\r")[:1] not in ("", "\n") else "jsonl"
    return None


def _of_archive(path: str, stored: bytes, head: bytes) -> str | None:
    """Hint to unpack an archive, unless several of its files are one sample; None for other files."""
    module, names = "tarfile", list[str]()
    with suppress(OSError, tarfile.TarError, zipfile.BadZipFile):
        if stored.startswith(b"PK\3\4"):
            with zipfile.ZipFile(path) as archive:
                module, names = "zipfile", archive.namelist()[:_MEMBERS]
        elif head[257:262] == b"ustar":
            with tarfile.open(path) as tar:
                names = [member.name for member in islice(tar, _MEMBERS) if member.isfile()]
    if not names or not _OFFICE.isdisjoint(names):
        return None
    if samples := _of_one_sample(names):
        return f"files of one name are one sample, such as {samples[0]} and {samples[1]}: {_WRITE}"
    unpack = shlex.join(["python", "-m", module, "-e", path, f"{path}.d"])
    return f"`{unpack}` unpacks it; then name {shlex.quote(f'{path}.d')}, whose files are sources"


def _of_one_sample(names: Sequence[str]) -> list[str]:
    """The first files that differ in nothing but what stands behind the first dot of their names."""
    stems: dict[tuple[str, str], list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        stems.setdefault((folder, file.partition(".")[0]), []).append(name)
    return next((files for (_, stem), files in stems.items() if stem and len(files) > 1), [])


def _by_python(path: str, stored: bytes, head: bytes) -> str | None:
    """The command that writes what is read, from the file at `path`; None where there is none."""
    module = next((module for begin, module in _MODULES.items() if stored.startswith(begin)), None)
    to_parquet = next((code for begin, code in _TO_PARQUET.items() if head.startswith(begin)), None)
    if to_parquet and module in (None, "gzip"):
        new, code, what = f"{path}.parquet", to_parquet, "writes it as Parquet"
    elif module and path.endswith((".gz", ".bz2", ".xz")):
        new, code, what = path.rpartition(".")[0], _UNPACK.format(module), "unpacks it"
    else:
        return None
    files = tuple(json.dumps(file, ensure_ascii=False) for file in (path, new))
    return f"`python -c {shlex.quote(code % files)}` {what}; then name {shlex.quote(new)}"
