"""Damaged tables as data: what cannot be read is refused or rejected, whatever byte it is, and no process is ended."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import analyze
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import ChunkplanError, DataError
from tests.support.corruption_cases import damages

NUM_ROWS = 60
TABLE = pa.table(
    {
        "text": [f"words {row} " * 5 for row in range(NUM_ROWS)],
        "kind": pa.array(["one", "other"] * (NUM_ROWS // 2)).dictionary_encode(),
        "turns": [[{"role": "user", "content": f"{row}"}] for row in range(NUM_ROWS)],
    }
)


def read(path: Path, folder: Path) -> int:
    """How many records are read; what is rejected counts too."""
    options = IntakeOptions(on_error="skip", schema="text")
    analysis = analyze(path, folder / "analysis", options, cache=folder / "cache", workers=1, use_cache=False)
    return int(analysis.num_sequences) + sum(analysis.manifest["rejected"].values())


@pytest.mark.parametrize("num_damages", [60, pytest.param(1500, marks=pytest.mark.soak)])
def test_a_damaged_arrow_file_ends_no_process(tmp_path: Path, num_damages: int) -> None:
    path = tmp_path / "data.arrow"
    with pa.ipc.new_file(str(path), TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=20)
    content = path.read_bytes()
    assert read(path, tmp_path) == NUM_ROWS
    for what, damaged in islice(damages(content, np.random.default_rng(0)), num_damages):
        path.unlink()  # what is mapped by the case before stays as it is
        path.write_bytes(damaged)
        try:
            with suppress(ChunkplanError):
                read(path, tmp_path)
        except Exception as error:
            raise AssertionError(what) from error


def test_offsets_beyond_an_arrow_file_are_refused(tmp_path: Path) -> None:
    """To read there would end the process."""
    path = tmp_path / "data.arrow"
    with pa.ipc.new_file(str(path), TABLE.select(["text"]).schema) as file:
        file.write_table(TABLE.select(["text"]))
    offsets = np.frombuffer(TABLE.column("text").chunk(0).buffers()[1], np.int32, NUM_ROWS + 1).copy()
    content = path.read_bytes()
    assert content.count(offsets.tobytes()) == 1
    beyond = offsets.copy()
    beyond[7] = 2**31 - 1
    path.write_bytes(content.replace(offsets.tobytes(), beyond.tobytes()))
    with pytest.raises(DataError, match=r"[Oo]ffset"):
        read(path, tmp_path)


def test_names_of_columns_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(TABLE.rename_columns(["text", "kindly", "turns"]), path)
    path.write_bytes(path.read_bytes().replace(b"kindly", b"kind\xff\xff"))
    with pytest.raises(DataError, match="not a parquet file, or it is torn"):
        read(path, tmp_path)
