"""Folders that are replaced whole or not at all, hashes of content, and tokens read one sequence at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import PlanConfig, build, load_plan
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import replace_folder
from chunkplan.planfile import analysis_writer
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.hashing import ContentHasher, content_hash
from chunkplan.planfile.load import load_analysis
from chunkplan.planfile.schema import CHUNKS, TOKENS
from tests.support.command_line import Run


def manifest(content: str) -> str:
    return json.dumps({"kind": "plan", "content": content})


def fill(folder: Path, content: str) -> None:
    with replace_folder(folder, "plan") as temporary:
        (temporary / "manifest.json").write_text(manifest(content))


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    fill(tmp_path / "plan", "old")
    (tmp_path / "plan" / "steps.parquet").write_text("")
    fill(tmp_path / "plan", "new")
    assert [path.name for path in (tmp_path / "plan").iterdir()] == ["manifest.json"]
    assert (tmp_path / "plan" / "manifest.json").read_text() == manifest("new")
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_run_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    fill(tmp_path / "plan", "old")
    with pytest.raises(error), replace_folder(tmp_path / "plan", "plan") as temporary:
        (temporary / "manifest.json").write_text("half of a")
        raise error
    assert (tmp_path / "plan" / "manifest.json").read_text() == manifest("old")
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize("name", ["run", "sequences.parquet", "notes.txt"])
def test_a_folder_with_anything_else_in_it_is_never_replaced(tmp_path: Path, name: str) -> None:
    """Weights trained into a plan's folder, the files of an analysis, a note: none of them is ours to delete."""
    fill(tmp_path / "plan", "old")
    (tmp_path / "plan" / name).write_text("precious")
    with pytest.raises(UsageError, match="is not just a plan"):
        fill(tmp_path / "plan", "new")
    assert (tmp_path / "plan" / name).read_text() == "precious"


ROWS = [
    {"input_ids": [1, 2, 3], "target": [False, True, True]},
    {"input_ids": [4], "target": [False]},
    {"input_ids": [5, 6], "target": [False, False]},
]


@given(st.lists(st.integers(0, 3), max_size=4))
def test_a_hash_does_not_depend_on_how_rows_were_cut_into_batches(cuts: list[int]) -> None:
    hasher = ContentHasher(TOKENS)
    table = pa.Table.from_pylist(ROWS, TOKENS)
    borders = [0, *sorted(cuts), 3]
    for low, high in pairwise(borders):
        hasher.update(table.slice(low, high - low))
    assert hasher.hexdigest() == content_hash(table, TOKENS)


def test_a_hash_sees_values_lengths_and_nulls() -> None:
    """Moving a token from one sequence to the next keeps the values but not the content; so does a null for a 0."""
    table = pa.Table.from_pylist(ROWS, TOKENS)
    moved = [{"input_ids": [1, 2], "target": [False, True]}, {"input_ids": [3, 4], "target": [True, False]}, ROWS[2]]
    assert content_hash(pa.Table.from_pylist(moved, TOKENS), TOKENS) != content_hash(table, TOKENS)
    chunk = dict.fromkeys(CHUNKS.names, 0) | {"keeps_activations": True, "kept_attention": "", "segments": []}
    null, zero = (pa.Table.from_pylist([{**chunk, "group_id": group}], CHUNKS) for group in (None, 0))
    assert content_hash(null, CHUNKS) != content_hash(zero, CHUNKS)


def test_a_hash_is_what_the_format_says() -> None:
    """Computed here by docs/plan-format.md alone, as another program would."""
    streams = {
        "input_ids.item": struct.pack("<6i", 1, 2, 3, 4, 5, 6),
        "input_ids:length": struct.pack("<3q", 3, 1, 2),
        "target.item": bytes([0, 1, 1, 0, 0, 0]),
        "target:length": struct.pack("<3q", 3, 1, 2),
    }
    lines = "".join(f"{name}\0{hashlib.sha256(values).hexdigest()}\0" for name, values in sorted(streams.items()))
    assert content_hash(pa.Table.from_pylist(ROWS, TOKENS), TOKENS) == hashlib.sha256(lines.encode()).hexdigest()


def test_tokens_are_found_over_batches_and_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of a few rows and parts of a few batches, every sequence still reads back as it was written."""
    monkeypatch.setattr(analysis_writer, "WAITING_SEQUENCES", 3)
    monkeypatch.setattr(analysis_writer, "BATCH_ROWS", 3)
    monkeypatch.setattr(analysis_writer, "TOKEN_FILE_TOKENS", 40)
    random = np.random.default_rng(0)
    written = []
    writer = AnalysisWriter(tmp_path)
    for record in range(20):
        length = int(random.integers(1, 12))
        target = random.random(length) < 0.5
        target[0] = False
        written.append((random.integers(0, 99, length, dtype=np.int32), target))
        writer.add(0, record, *written[-1])
    writer.finish(exact=True, sources=[])
    analysis = load_analysis(tmp_path)
    assert len(list((tmp_path / "tokens").iterdir())) > 1
    tokens = analysis.tokens()
    for sequence_id in random.permutation(20).tolist():
        input_ids, target = tokens(sequence_id)
        assert input_ids.tolist() == written[sequence_id][0].tolist()
        assert target.tolist() == written[sequence_id][1].tolist()
    assert analysis.num_target_tokens.tolist() == [int(target.sum()) for _, target in written]


def test_a_lengths_file_is_an_analysis_without_tokens(tmp_path: Path) -> None:
    """The same lengths are the same analysis, whatever the file type."""
    np.save(tmp_path / "lengths.npy", np.array([5, 1, 7], np.uint16))
    pq.write_table(pa.table({"n": [5, 1, 7]}), tmp_path / "lengths.parquet")
    one, other = load_analysis(tmp_path / "lengths.npy"), load_analysis(tmp_path / "lengths.parquet")
    assert one.content_hash == other.content_hash
    assert one.num_tokens.tolist() == [5, 1, 7]
    assert one.num_target_tokens.tolist() == [4, 0, 6]
    with pytest.raises(UsageError, match="lengths only, no tokens"):
        one.tokens()


@pytest.mark.parametrize(
    "table",
    [pa.table({"a": [1, 2], "b": [3, 4]}), pa.table({"a": [1.5, 2.0]}), pa.table({"a": ["x"]})],
    ids=["two columns", "floats", "strings"],
)
def test_a_parquet_file_that_is_not_one_column_of_lengths_is_refused(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "lengths.parquet")
    with pytest.raises(DataError, match="expected one of whole numbers"):
        load_analysis(tmp_path / "lengths.parquet")


def test_a_length_that_is_null_is_refused_by_its_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([1, None, 2])}), tmp_path / "lengths.parquet")
    with pytest.raises(DataError, match=r"lengths\.parquet, row 1: the length of sequence 1 is null"):
        load_analysis(tmp_path / "lengths.parquet")


def test_what_a_killed_run_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    """Of this machine and a process that is gone; what a running one or another machine is writing stays."""
    done = subprocess.Popen(["true"])
    done.wait()
    host = socket.gethostname()
    gone, mine, other = (
        tmp_path / f".plan.tmp-{owner}-abc" for owner in (f"{host}-{done.pid}", f"{host}-{os.getpid()}", "else-1")
    )
    for folder in (gone, mine, other):
        folder.mkdir()
    fill(tmp_path / "plan", "new")
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, tmp_path / "plan"])


def test_a_terminated_command_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGTERM in the middle of reading, as a cluster's scheduler sends it."""
    command = ["-m", "chunkplan_cli.main", "analyze", "pipe.jsonl", "--workspace", "out"]
    os.mkfifo(tmp_path / "pipe.jsonl")
    running = subprocess.Popen([sys.executable, *command], cwd=tmp_path, stderr=subprocess.PIPE)
    with (tmp_path / "pipe.jsonl").open("w") as pipe:  # opens when the command reads
        pipe.write('{"text": "a"}\n')
        pipe.flush()
        assert {path.name for path in (tmp_path / "out").iterdir()} == {"cache", ".analysis.lock"}
        running.terminate()
    assert running.wait(timeout=30) == 128 + 15  # the pipe is closed: a signal just before a read does not end it
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "cache"]
    left = {path.name for path in (tmp_path / "out" / "cache").rglob("*")}
    assert left == {"pieces", "files", "lock", "CACHEDIR.TAG"}


def test_a_plan_behind_a_symbolic_link_finds_its_analysis(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 4]))
    build(tmp_path / "lengths.npy", tmp_path / "deep" / "plan", PlanConfig(chunk_size=8, k=1))
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "plan")
    assert load_plan(tmp_path / "link").analysis_path == tmp_path / "lengths.npy"


@pytest.mark.parametrize("name", ["steps", "chunks", "schedule"])
@pytest.mark.parametrize("damage", ["column missing", "nulls", "other type", "empty"])
def test_a_table_that_is_not_the_contracts_is_refused_by_every_reader(tmp_path: Path, name: str, damage: str) -> None:
    np.save(tmp_path / "lengths.npy", np.array([30, 4]))
    plan = build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=8, k=1))
    path = tmp_path / "plan" / f"{name}.parquet"
    table = pq.read_table(path)
    last = table.num_columns - 1
    column = table.column_names[last]
    if damage == "column missing":
        table = table.drop_columns([column])
    elif damage == "nulls":
        table = table.set_column(last, column, pa.nulls(len(table), table.schema.field(last).type))
    elif damage == "other type":
        table = table.set_column(last, column, pa.array(["x"] * len(table)))
    else:
        table = table.slice(0, 0)
    pq.write_table(table, path)
    with pytest.raises(DataError):
        list(plan.iter_steps())
    with pytest.raises(DataError):
        getattr(plan, name)()


@pytest.mark.parametrize("name", ["work", "a work"])
def test_for_a_workspace_its_plan_is_offered(command: Run, tmp_path: Path, name: str) -> None:
    """As it is to be pasted."""
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    assert command("build", "lengths.npy", "--chunk-size", 128, "--k", 1, "--workspace", name).code == 0
    ran = command("validate", name)
    assert (ran.code, ran.out) == (2, "")
    offered = ran.err.partition("\nhint: give the plan in it, ")[2]
    [path] = shlex.split(offered)
    assert command("validate", path).code == 0
    (tmp_path / name / "plan" / "manifest.json").unlink()
    assert "`chunkplan build` writes one" in command("validate", name).err
