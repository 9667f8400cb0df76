"""Files whose names say something else than their bytes."""

from __future__ import annotations

import bz2
import gzip
import json
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import IntakeOptions, analyze, load_analysis
from tests.support.places import ROOT

COMPRESS = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "zstd": lambda data: pa.compress(data, "zstd", asbytes=True),
    "pzstd": lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0size" + pa.compress(data, "zstd", asbytes=True),
    "nothing": bytes,
}


@pytest.mark.parametrize("how", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz", "a.jsonl.zst", "a.json.bz2", "bare"])
def test_a_file_is_compressed_as_its_bytes_say_whatever_its_name_says(tmp_path: Path, name: str, how: str) -> None:
    lines = [{"length": number} for number in range(1, 200)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (tmp_path / "plain").write_bytes(content)
    (tmp_path / name).write_bytes(COMPRESS[how](content))
    if name == "a.txt":
        tokenizer = ROOT / "sample_data" / "tokenizer"
        found, expected = (
            analyze(tmp_path / file, tmp_path / "out", IntakeOptions(formats=formats), tokenizer=tokenizer)
            for file, formats in ((name, {}), ("plain", {"plain": "txt"}))
        )
        assert found.num_tokens == expected.num_tokens
        return
    analysis = analyze(tmp_path / name, tmp_path / "out")
    assert load_analysis(tmp_path / "out").num_tokens.tolist() == [line["length"] for line in lines]
    [source] = analysis.manifest["sources"]
    assert source["compression"] == {"nothing": None, "pzstd": "zstd"}.get(how, how)


def test_a_table_is_read_as_one_whatever_its_name_says(tmp_path: Path) -> None:
    table = pa.table({"length": pa.array([3, 4, 5])})
    pq.write_table(table, tmp_path / "parquet.jsonl")
    with pa.OSFile(str(tmp_path / "arrow.json"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with (tmp_path / "npy.txt").open("wb") as file:
        np.save(file, np.array([3, 4, 5]))
    for path in list(tmp_path.iterdir()):
        analyze(path, tmp_path / "out")
        assert load_analysis(tmp_path / "out").num_tokens.tolist() == [3, 4, 5], path


def test_a_compressed_standard_input_is_refused_by_name(tmp_path: Path) -> None:
    """From a pipe: there is no way back to its first bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "chunkplan_cli.main", "analyze", "-"],
        cwd=tmp_path,
        input=gzip.compress(b'{"length": 3}\n'),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 3
    assert b"it is compressed (gzip), and can be read only once" in done.stderr
    assert b"hint: decompress it before, or name a file" in done.stderr


def test_compressed_bytes_behind_a_url_are_read_whatever_its_name_says(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe("/signatures/a.jsonl", gzip.compress(b'{"length": 3}\n'))
    analyze("memory://signatures/a.jsonl", tmp_path / "out")
    assert load_analysis(tmp_path / "out").num_tokens.tolist() == [3]
