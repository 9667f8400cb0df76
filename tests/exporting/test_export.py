"""Exports: what is read back from every format, as its own readers do it, is what the plan says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, get_args

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunkplan
from chunkplan.errors import DataError, UsageError
from chunkplan.exporting.batches import read_batches
from chunkplan.exporting.export import DOORS, FORMATS, open_rows
from chunkplan.exporting.formats import write_shards
from chunkplan.exporting.rows import ExportRows
from chunkplan.exporting.torch_pipelining import TORCH_PIPELINING
from chunkplan.planfile.analysis import Analysis
from chunkplan_cli.export import Target
from tests.support.analyses import LENGTHS, write_analysis
from tests.support.plan_rows import tamper

#: A row as a reader sees it: of each sequence in it the token ids, and which of them are targets; then its place.
Row = tuple[list[tuple[list[int], list[bool]]], dict[str, int]]


def read_hf(folder: Path) -> Iterator[Row]:
    return map(labelled_row, datasets.load_from_disk(str(folder)))


def read_jsonl(folder: Path) -> Iterator[Row]:
    for path in sorted(folder.glob("*.jsonl")):
        yield from map(labelled_row, map(json.loads, path.read_text().splitlines()))


def labelled_row(row: dict[str, Any]) -> Row:
    tokens, labels = row["input_ids"], row["labels"]
    assert all(label in (-100, token) for label, token in zip(labels, tokens, strict=True))
    edges = [0, *np.cumsum(row["seq_lengths"]).tolist()]
    assert edges[-1] == len(tokens)
    return [(tokens[i:j], [label != -100 for label in labels[i:j]]) for i, j in pairwise(edges)], place_of(row)


def read_megatron_bridge(folder: Path) -> Iterator[Row]:
    """As its GPTSFTPackedParquetDataset finds files, checks rows and collates them.

    What it takes of a sequence is tokens [start, stop - 1), labels [start + 1, stop), mask [start, stop - 1).
    """
    for path in sorted(folder.glob("*.parquet")):
        assert path.name.endswith(".idx.parquet")
        for row in pq.read_table(path).to_pylist():
            tokens, mask, starts = row["input_ids"], row["loss_mask"], row["seq_start_id"]
            assert len(mask) == len(tokens) and set(mask) <= {0, 1}
            assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < len(tokens)
            cut = []
            for start, stop in pairwise([*starts, len(tokens)]):
                inputs, labels = tokens[start : stop - 1], tokens[start + 1 : stop]
                assert not mask[stop - 1]
                cut.append(([*inputs[:1], *labels] or tokens[start:stop], [False, *map(bool, mask[start : stop - 1])]))
            yield cut, place_of(row)


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "hf": read_hf,
    "megatron-bridge": read_megatron_bridge,
    "jsonl": read_jsonl,
}


def place_of(row: dict[str, Any]) -> dict[str, int]:
    return {name: row[name] for name in ("step", "dp_rank") if name in row}


def rows_of_plan(folder: Path, *, whole_only: bool) -> list[Row]:
    """What the plan says, chunk after chunk: the first token of a segment is never a target."""
    plan = chunkplan.load_plan(folder / "plan")
    analysis = chunkplan.load_analysis(folder / "analysis")
    tokens = analysis.tokens()
    rows: list[Row] = []
    for step in plan.iter_steps():
        for dp_rank, chunks in step.chunks.items():
            for chunk in chunks:
                cut = []
                for segment in chunk.segments:
                    if whole_only and segment.end - segment.start < analysis.num_tokens[segment.sequence_id]:
                        continue
                    ids, target = (values[segment.start : segment.end] for values in tokens(segment.sequence_id))
                    cut.append((ids.tolist(), [False, *target[1:].tolist()]))
                if cut:
                    rows.append((cut, {"step": step.step, "dp_rank": dp_rank}))
    return rows


def test_every_format_has_a_reader_here_and_a_name_on_the_command_line() -> None:
    assert READERS.keys() == FORMATS.keys() == {*get_args(Target)} - {TORCH_PIPELINING} - DOORS.keys()


def test_help_leads_from_the_name_of_a_framework_to_the_line_that_it_needs(command) -> None:
    shown = " ".join(command("export", "--help", width=120).out.split())
    for name, lines in DOORS.items():
        assert name in shown
        told = command("export", "--to", name)
        assert told.code == 0 and told.out == f"{lines}\n" and "in every process" in " ".join(told.err.split())
        with pytest.raises(UsageError, match="reads no files"):
            chunkplan.export("plan", "out", name)


@pytest.mark.parametrize("to", READERS)
@pytest.mark.parametrize("whole_only", [False, True], ids=["parts", "whole"])
def test_the_rows_are_the_chunks_of_the_plan_in_order(workspace, tmp_path, to, whole_only) -> None:
    """Tokens, targets, boundaries, step and rank; and the counts are those of what is read back."""
    expected = rows_of_plan(workspace, whole_only=whole_only)
    plan = workspace / "plan"
    written = chunkplan.export(plan, tmp_path / "out", to, whole_only=whole_only, allow_split=not whole_only)
    assert list(READERS[to](tmp_path / "out")) == expected
    targets = [target for cut, _ in expected for _, target in cut]
    assert written.num_rows == len(expected)
    assert written.num_tokens == sum(map(len, targets))
    assert written.num_target_tokens == sum(map(sum, targets))
    assert written.num_sequences == (8 if whole_only else 12) * 2
    stated = json.loads((tmp_path / "out" / "export.json").read_text())
    assert stated == json.loads(json.dumps(written.to_dict()))


@pytest.mark.parametrize("to", READERS)
def test_a_packed_dataset_has_every_sequence_once(workspace, tmp_path, to, random_sequences) -> None:
    sequences = [(ids.tolist(), target.tolist()) for ids, target in random_sequences(LENGTHS)]
    written = chunkplan.export(workspace / "analysis", tmp_path / "out", to, chunk_size=40)
    rows = list(READERS[to](tmp_path / "out"))
    assert sorted(sequence for cut, _ in rows for sequence in cut) == sorted(sequences)
    assert max(sum(len(ids) for ids, _ in cut) for cut, _ in rows) <= 40
    assert written.num_rows == len(rows) == chunkplan.pack(workspace / "analysis", 40).num_rows
    assert not any(place for _, place in rows)
    assert written.left_out is written.cut is None


@pytest.mark.parametrize("source", ["plan", "analysis"])
def test_what_is_lost_is_counted(workspace, tmp_path, source) -> None:
    """By hand: what is kept and what is not are all there is; a refusal names the same numbers."""
    lengths = np.array(LENGTHS)
    epochs = 2 if source == "plan" else 1
    options = {} if source == "plan" else {"chunk_size": 16}
    analysis = chunkplan.load_analysis(workspace / "analysis")
    is_long = lengths > 16
    whole = chunkplan.export(workspace / source, tmp_path / "whole", "jsonl", whole_only=True, **options)
    assert asdict(whole.left_out) == {
        "num_sequences": epochs * is_long.sum(),
        "num_tokens": epochs * lengths[is_long].sum(),
        "num_target_tokens": epochs * analysis.num_target_tokens[is_long].sum(),
    }
    assert whole.num_tokens == epochs * lengths[~is_long].sum()
    cut = chunkplan.export(workspace / source, tmp_path / "cut", "jsonl", allow_split=True, **options)
    assert cut.cut.whole == whole.left_out
    rows = [segment for segments, _ in read_jsonl(tmp_path / "cut") for segment in segments]
    assert cut.cut.num_parts == len(rows) - whole.num_sequences
    assert cut.num_tokens == epochs * lengths.sum()
    assert cut.num_target_tokens == epochs * analysis.num_target_tokens.sum() - cut.cut.num_lost_targets
    assert cut.num_target_tokens == sum(sum(target) for _, target in rows)
    assert 0 < cut.cut.num_lost_targets <= cut.cut.num_parts - cut.cut.whole.num_sequences
    assert cut.cut.num_tokens_without_prefix < cut.cut.whole.num_tokens
    with pytest.raises(UsageError, match=f"{epochs * is_long.sum()} of {epochs * 12} sequences") as refused:
        chunkplan.export(workspace / source, tmp_path / "refused", "jsonl", **options)
    assert f"{cut.cut.num_tokens_without_prefix} tokens do not see" in refused.value.hint
    assert f"{cut.cut.num_lost_targets} targets are lost" in refused.value.hint
    assert f"{whole.left_out.num_tokens} tokens, {whole.left_out.num_target_tokens} targets" in refused.value.hint
    assert not (tmp_path / "refused").exists()


def test_mixed_chunks_keep_their_whole_sequences_and_zero_loss_chunks_have_no_row(handmade_plan, tmp_path) -> None:
    """Sequence 0 is cut at 4 and 8; only token 4 is a target there. Sequence 1 shares the last of its chunks."""
    sequences = [(np.arange(10), np.arange(10) == 4), (np.arange(20, 23), [False, True, True])]
    steps = [{0: [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10), (1, 0, 3)]], 1: [[]]}]
    plan, _ = handmade_plan(sequences, steps, dp=2)
    whole = chunkplan.export(plan, tmp_path / "whole", "jsonl", whole_only=True)
    assert list(read_jsonl(tmp_path / "whole")) == [([([20, 21, 22], [False, True, True])], {"step": 0, "dp_rank": 0})]
    assert (whole.left_out.num_sequences, whole.left_out.num_target_tokens) == (1, 1)
    cut = chunkplan.export(plan, tmp_path / "cut", "jsonl", allow_split=True)
    assert (cut.num_rows, cut.num_target_tokens, cut.cut.num_parts) == (3, 2, 3)
    assert (cut.cut.num_tokens_without_prefix, cut.cut.num_lost_targets) == (6, 1)


def test_the_columns_have_the_types_of_their_formats(workspace, tmp_path) -> None:
    chunkplan.export(workspace / "plan", tmp_path / "hf", "hf", whole_only=True)
    features = datasets.load_from_disk(str(tmp_path / "hf")).features
    number, numbers = datasets.Value("int32"), datasets.List(datasets.Value("int32"))
    assert features == {
        **dict.fromkeys(("input_ids", "labels", "seq_lengths"), numbers),
        **dict.fromkeys(("step", "dp_rank"), number),
    }
    written = chunkplan.export(workspace / "plan", tmp_path / "bridge", "megatron-bridge", whole_only=True)
    schema = pq.read_schema(tmp_path / "bridge" / written.files[0])
    assert {name: str(schema.field(name).type.value_type) for name in ("input_ids", "loss_mask", "seq_start_id")} == {
        "input_ids": "int32",
        "loss_mask": "int8",
        "seq_start_id": "int32",
    }


@pytest.mark.parametrize("to", READERS)
def test_the_same_plan_gives_the_same_bytes(workspace, tmp_path, to) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        chunkplan.export(workspace / "plan", folder, to, whole_only=True)
    one, two = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "export.json"} for folder in folders
    )
    assert one == two


@pytest.fixture(scope="module")
def counting(tmp_path_factory) -> Analysis:
    """One sequence 0, 1, 2, ..., all of it targets but its first token."""
    ids = np.arange(12 * 4 * 9)
    return chunkplan.load_analysis(write_analysis(tmp_path_factory.mktemp("counting") / "analysis", [(ids, ids > 0)]))


@given(
    packed=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=12),
    batch_tokens=st.integers(1, 30),
)
def test_batches_hold_all_rows_whatever_their_size(counting, packed, batch_tokens) -> None:
    """Rows of given segments of a sequence 0, 1, 2, ...: at most so many tokens at a time, or one row."""
    lengths = np.array([length for row in packed for length in row])
    stops = np.cumsum(lengths)
    rows = ExportRows(
        rows=np.cumsum([0, *map(len, packed)]),
        sequence_id=np.zeros(lengths.size, np.int64),
        start=stops - lengths,
        stop=stops,
        is_part=np.ones(lengths.size, bool),
    )
    batches = list(read_batches(rows, counting.tokens(), batch_tokens))
    assert np.concatenate([batch.input_ids for batch in batches]).tolist() == list(range(stops[-1]))
    row_tokens = [np.diff(batch.row_tokens).tolist() for batch in batches]
    assert list(chain.from_iterable(row_tokens)) == [sum(row) for row in packed]
    assert all(sum(tokens) <= batch_tokens or len(tokens) == 1 for tokens in row_tokens)
    firsts = [token for batch in batches for token in batch.input_ids[~batch.target].tolist()]
    assert firsts == rows.start.tolist()


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=30), multiple=st.sampled_from([1, 2, 8, 32]))
def test_padded_sequences_fit_into_the_rows_that_they_are_packed_into(tmp_path_factory, lengths, multiple) -> None:
    folder = tmp_path_factory.mktemp("padded")
    np.save(folder / "lengths.npy", np.array(lengths))
    packed = chunkplan.pack(folder / "lengths.npy", 64 + multiple // 2, multiple=multiple)
    padded = -(-(packed.end - packed.start) // multiple) * multiple
    assert sorted(packed.end - packed.start) == sorted(lengths)
    assert np.add.reduceat(padded, packed.rows[:-1]).max() <= 64
    assert packed.lower_bound <= packed.num_rows and packed.lower_bound >= -(-int(padded.sum()) // 64)


def test_rows_read_one_at_a_time_are_those_of_batches(workspace) -> None:
    rows = open_rows(workspace / "plan", 16, allow_split=True)
    [batch] = read_batches(rows.rows, rows.tokens)
    assert np.concatenate([row.input_ids for row in rows]).tolist() == batch.input_ids.tolist()
    assert np.concatenate([row.target for row in rows]).tolist() == batch.target.tolist()
    assert rows[-1].input_ids.tolist() == rows[len(rows) - 1].input_ids.tolist()
    with pytest.raises(IndexError):
        rows[len(rows)]


def test_reading_rows_holds_no_copy_of_the_tokens(tmp_path) -> None:
    """64 MB of tokens in rows of 4,096: what the process holds besides mapped files grows by less than a tenth."""
    ids = np.arange(1 << 12)
    write_analysis(tmp_path / "analysis", [(ids, ids > 0)] * (1 << 12))
    rows = open_rows(tmp_path / "analysis", 1 << 12)
    before = held()
    assert len(rows) == 1 << 12 and sum(int(row.input_ids[-1]) for row in rows) == (1 << 12) * ids[-1]
    assert held() - before < 6_400


def held() -> int:
    """Kilobytes of the process that no file backs."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon")]
    return int(line.split()[1])


def test_shards_are_ended_when_they_are_large_enough_and_know_how_many_they_are(tmp_path) -> None:
    batches = [pa.record_batch({"n": pa.array([index] * 10, pa.int64())}) for index in range(5)]
    names = write_shards(tmp_path, "arrow", batches, lambda path, schema: pa.ipc.new_stream(str(path), schema), 160)
    assert names == [f"data-0000{index}-of-00003.arrow" for index in range(3)]
    assert names == sorted(path.name for path in tmp_path.iterdir())
    read = [pa.ipc.open_stream(tmp_path / name).read_all().column("n").to_pylist() for name in names]
    assert list(chain.from_iterable(read)) == [index for index in range(5) for _ in range(10)]


@pytest.fixture
def changed(workspace, tmp_path) -> Path:
    """A copy of the workspace to be damaged."""
    return shutil.copytree(workspace, tmp_path / "changed")


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change the rows of a table, and nothing that is said of them."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def move_segments(rows: list[dict[str, Any]]) -> None:
    """All into the first chunk."""
    for row in rows[1:]:
        rows[0]["segments"] += row["segments"]
        row["segments"] = []


def repeat_sequence(rows: list[dict[str, Any]]) -> None:
    """The beginning of a longest one in place of the last segment."""
    segments = [segment for row in rows for segment in row["segments"]]
    longest = LENGTHS.index(max(LENGTHS))
    segments[-1].update(sequence_id=longest, start=0, end=segments[-1]["end"] - segments[-1]["start"])


@pytest.mark.parametrize("change", [list.reverse, move_segments, repeat_sequence, list.pop])
def test_chunks_that_the_plan_was_not_built_with_are_refused(changed, change) -> None:
    rewrite(changed / "plan" / "chunks.parquet", change)
    with pytest.raises(DataError, match="plan: content-hash: chunks is not what the manifest") as refused:
        chunkplan.export(changed / "plan", changed / "out", "jsonl", allow_split=True)
    assert "chunkplan validate" in refused.value.hint


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (list.reverse, r"plan, step \d+, rank \d+, chunk \d+: chunk-ids: "),
        (move_segments, r"plan, step 0, rank 0, chunk 0: chunk-size: segments hold \d+ tokens"),
        (repeat_sequence, r"plan: the rows have [0-9,]+ targets, its sequences [0-9,]+"),
    ],
)
def test_chunks_that_a_planner_never_makes_are_refused_by_the_name_of_the_plan(changed, change, says) -> None:
    """Though their hashes were written to fit."""
    tamper(changed / "plan", lambda rows: change(rows["chunks"]))
    with pytest.raises(DataError, match=says) as refused:
        chunkplan.export(changed / "plan", changed / "out", "jsonl", allow_split=True)
    assert "chunkplan validate" in refused.value.hint
    assert not (changed / "out").exists()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("plan", {"config": {"k": 3}}),
        ("plan", {"content_hash": "0" * 64}),
        ("analysis", {"content_hash": "0" * 64}),
        ("analysis", {"content_hashes": {"tokens": "0" * 64}}),
    ],
)
def test_a_manifest_that_was_changed_is_refused(changed, kind, changes) -> None:
    path = changed / kind / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, value in changes.items():
        manifest[name] = manifest[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(manifest))
    options = {"chunk_size": 64} if kind == "analysis" else {"allow_split": True}
    with pytest.raises(DataError, match=rf"{kind}: content-hash: .* is not what the manifest was written for"):
        chunkplan.export(changed / kind, changed / "out", "jsonl", **options)


@pytest.mark.parametrize("source", ["plan", "analysis"])
def test_a_token_that_was_changed_is_found(changed, source) -> None:
    """One bit of one token, which no count shows; nothing is written."""
    path = changed / "analysis" / "tokens" / "part-00000.arrow"
    ids = chunkplan.load_analysis(changed / "analysis").tokens()(3)[0].tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(ids) + 8] ^= 1
    path.write_bytes(content)
    options = {"chunk_size": 64} if source == "analysis" else {"allow_split": True}
    with pytest.raises(DataError, match="analysis: content-hash: the tokens are not those"):
        chunkplan.export(changed / source, changed / "out", "jsonl", **options)
    assert not (changed / "out").exists()
