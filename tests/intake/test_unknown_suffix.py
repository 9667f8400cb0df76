"""Files whose suffix is not known: a format is named only where the bytes are of it, and what is pasted keeps all."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from chunkplan.planfile.load import load_analysis
from tests.support.command_line import Run
from tests.support.intake_checks import marked_texts
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

ROWS = [{"prompt": 'Say, "hi"\nand 007', "completion": "hi"}, {"prompt": "a", "completion": "007"}]
TABLE = pa.Table.from_pylist(ROWS)
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def _csv(separator: str = ",") -> bytes:
    return pl.DataFrame(ROWS).write_csv(separator=separator).encode()


def _arrow(new: Callable[..., pa.RecordBatchWriter]) -> bytes:
    sink = io.BytesIO()
    with new(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    return sink.getvalue()


def _written(write: Callable[[io.BytesIO], object]) -> bytes:
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def _tar(mode: str = "w", **files: bytes) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return sink.getvalue()


def _zip(**files: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return sink.getvalue()


PARQUET = _written(lambda sink: pq.write_table(TABLE, sink))

#: How these rows are trained, and what else is in the files below.
READ = ['Say, "hi"⏎and 007⟦hi<|im_end|>⟧', "a⟦007<|im_end|>⟧"]
LENGTHS = ["1", "2"]

#: Files, and what is trained of each after all that is said of them is pasted.
FILES: dict[str, tuple[bytes, list[str]]] = {
    "x.log": (LINES, READ),
    "x.data.gz": (gzip.compress(LINES), READ),
    "x.data": (bz2.compress(LINES), READ),
    "a b.part": (json.dumps(ROWS).encode(), READ),
    "x.dat": (b"\xef\xbb\xbf" + json.dumps(ROWS[0], indent=1).encode(), READ[:1]),
    "x.pq": (PARQUET, READ),
    "x.feather": (_arrow(pa.ipc.new_file), READ),
    "x.stream": (_arrow(pa.ipc.new_stream), READ),
    "x.bin": (_written(lambda sink: np.save(sink, np.arange(1, 3))), LENGTHS),
    "x.md": (b"# Words\n\nand more\n", ["#⟦ Words⏎⏎and more⏎⟧"]),
    "x.html": (b"<p>Words", ["<⟦p>Words⟧"]),
    "x.csv": (_csv(), READ),
    "it's $x.CSV": (_csv(), READ),
    "x.tsv": (_csv("\t"), READ),
    "x.csv.gz": (gzip.compress(_csv()), READ),
    "x.csv.bz2": (bz2.compress(_csv()), READ),
    "x.orc": (_written(lambda sink: pyarrow.orc.write_table(TABLE, sink)), READ),
    "x.avro": (_written(lambda sink: pl.DataFrame(ROWS).write_avro(sink)), READ),
    "x.parquet.gz": (gzip.compress(PARQUET), READ),
    "x.jsonl.xz": (lzma.compress(LINES), READ),
    "x.zip": (_zip(**{"in/a.jsonl": LINES}), READ),
    "x.tar": (_tar(**{"a.jsonl": LINES}), READ),
    "x.tar.gz": (_tar("w:gz", **{"a.jsonl": LINES}), READ),
    "x.tgz": (_tar("w:gz", **{"b/a.jsonl": LINES}), READ),
    "x.npz": (_written(lambda sink: np.savez(sink, lengths=np.arange(1, 3))), LENGTHS),
}

#: Files of which nothing works when it is pasted.
UNREAD = {
    "shard.tar": _tar(**{"0.txt": b"a", "0.json": b"{}", "1.txt": b"b", "1.json": b"{}"}),
    "x.xlsx": _zip(**{"[Content_Types].xml": b"", "a.xml": b""}),
    "x.yaml": b"- text: words\n",
    "x.toml": b"[a]\nb = 1\n",
    "x.ini": b"[a]\nb = 1\n",
    "x.psv": b"a|b\nc|d\n",
    "x.xml": b"<a/>",
    "x.pkl": pickle.dumps(ROWS),
    "x.pdf": b"%PDF-1.4\n\xe2\xe3",
    "utf16.psv": "a|b\n1|2\n".encode("utf-16"),
    "cut.x": b"\x1f\x8b\x08",
    "numbers.x": b"[1, 2]",
    "none.x": b"",
}

#: What is said of a file, behind what is known.
ADVICE = re.compile(r"(?s)also with \.gz, \.zst, \.bz2; (.*)\n")

#: A command to be run, and the file to name then.
COMMAND = re.compile(r"(?s)`(.*)` .*; then name (.*?)(?:, whose files are sources)?")


@pytest.fixture
def read(command: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What is trained of a file once all that is said of it is pasted; the sequences as docs/data.md shows them."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")

    def read_as_said(words: str) -> list[str]:
        ran = command("analyze", *shlex.split(words), "--tokenizer", TOKENIZER)
        if ran.code == 0:
            analysis = load_analysis(Path("chunkplan-out/analysis"))
            return marked_texts(analysis) if analysis.has_tokens else [str(n) for n in analysis.num_tokens]
        [advice] = ADVICE.findall(ran.err)
        if "--format" in advice:
            return read_as_said(f"{words} {advice[advice.index('--format') :]}")
        typed, new = re.fullmatch(COMMAND, advice).groups()  # type: ignore[union-attr]
        subprocess.run(["/bin/sh", "-c", typed], check=True)
        return read_as_said(new)

    return read_as_said


@pytest.mark.parametrize("name", FILES)
def test_what_is_said_of_a_file_keeps_all_that_is_in_it_when_it_is_pasted(
    name: str, read: Callable[[str], list[str]]
) -> None:
    content, is_read = FILES[name]
    Path(name).write_bytes(content)
    before = {path: path.read_bytes() for path in Path().iterdir()}
    assert read(shlex.quote(name)) == is_read
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", UNREAD)
def test_no_format_is_named_that_the_bytes_are_not(name: str, command: Run) -> None:
    Path(name).write_bytes(UNREAD[name])
    ran = command("analyze", name, "--tokenizer", TOKENIZER)
    [advice] = ADVICE.findall(ran.err)
    assert (ran.code, advice.endswith("or as Parquet, with all that is to be trained")) == (2, True)
    assert "--format" not in advice and "`" not in advice


def test_of_a_folder_without_data_it_is_said_how_the_first_file_is_read(command: Run) -> None:
    Path("in").mkdir()
    Path("in/.hidden.orc").write_bytes(FILES["x.orc"][0])
    Path("in/x.orc").write_bytes(FILES["x.orc"][0])
    for data, message in (("in", "in has no data in it or below"), ("in/*.orc", "no data matches in/*.orc")):
        ran = command("analyze", data)
        assert ran.err.startswith(f"error: {message}\nhint: suffixes that are read: ")
        assert "; of in/x.orc: `python -c 'import pyarrow.orc as o" in ran.err
