"""A plan is joined with the tokens it was built for, and with no others."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from chunkplan import PlanConfig, build, load_analysis
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile import analysis_writer
from chunkplan_runtime.feed.stream import PlanStream, open_plan
from tests.support.plan_rows import changed_rows

IDS = np.arange(10)
TARGET = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1], bool)
CHUNKS = [[(0, 0, 4)], [(1, 0, 3), (0, 4, 8)], [(0, 8, 10)], []]


@pytest.fixture(scope="module")
def written(handmade_plan):
    return handmade_plan([(IDS, TARGET), (IDS[:3] + 20, TARGET[:3])], [{0: CHUNKS}])


def stream(written, vocab_size=97, max_positions=10):
    return PlanStream(*open_plan(*written), vocab_size=vocab_size, max_positions=max_positions)


def test_chunks_hold_the_tokens_positions_and_shifted_labels_of_their_segments(written):
    opened = stream(written)
    (work,) = list(opened)
    loaded = [work.ranks[0].tensors[chunk] for chunk in range(4)]
    assert [chunk.input_ids.tolist() for chunk in loaded] == [
        [[0, 1, 2, 3]],
        [[20, 21, 22, 4, 5, 6, 7]],
        [[8, 9]],
        [[0]],
    ]
    assert [chunk.position_ids.tolist() for chunk in loaded] == [
        [[0, 1, 2, 3]],
        [[0, 1, 2, 4, 5, 6, 7]],
        [[8, 9]],
        [[0]],
    ]
    assert [chunk.labels.tolist() for chunk in loaded] == [
        [-100, 2, 3, -100],
        [-100, 22, -100, 5, 6, 7, -100],
        [9, -100],
        [-100],
    ]
    assert [[(span.chunk_start, span.chunk_stop, span.is_split) for span in chunk.spans] for chunk in loaded] == [
        [(0, 4, True)],
        [(0, 3, False), (3, 7, True)],
        [(0, 2, True)],
        [(0, 1, False)],
    ]
    assert work.step.num_target_tokens == 7
    assert {tensor.dtype for chunk in loaded for tensor in (chunk.input_ids, chunk.position_ids, chunk.labels)} == {
        torch.int32
    }


def test_memory_is_page_locked_where_there_is_cuda_and_nowhere_else(written):
    plain, pinned = (
        next(iter(PlanStream(*open_plan(*written), vocab_size=97, max_positions=10, pin_memory=pin_memory)))
        for pin_memory in (False, True)
    )
    for chunk in (0, 1, 2):
        one, other = plain.ranks[0].tensors[chunk], pinned.ranks[0].tensors[chunk]
        for name in ("input_ids", "position_ids", "labels"):
            assert torch.equal(getattr(one, name), getattr(other, name))
            assert not getattr(one, name).is_pinned()
            assert getattr(other, name).is_pinned() == torch.cuda.is_available()


def test_the_analysis_is_found_where_the_plan_says(written):
    plan, analysis = written
    assert open_plan(plan)[1].path.resolve() == analysis.resolve()


def test_another_analysis_is_refused_with_both_hashes(written, handmade_plan):
    _, other = handmade_plan([(IDS + 1, TARGET), (IDS[:3], TARGET[:3])], [{0: CHUNKS}])
    plan, own = open_plan(*written)
    with pytest.raises(DataError, match=f"plan has {own.content_hash[:12]}") as raised:
        open_plan(plan.path, other)
    assert raised.value.hint


def test_an_analysis_that_is_gone_is_named(written, tmp_path):
    plan = shutil.copytree(written[0], tmp_path / "elsewhere" / "plan")
    with pytest.raises(UsageError, match=r"the analysis of the plan .* is not at"):
        open_plan(plan)
    assert open_plan(plan, written[1])[1].num_sequences == 2


def test_lengths_without_tokens_cannot_be_trained_on(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5, 9]))
    build(tmp_path / "lengths.npy", tmp_path / "plan", PlanConfig(chunk_size=4, k=1))
    with pytest.raises(UsageError, match="holds lengths only"):
        stream((tmp_path / "plan",))


def test_a_plan_of_several_stages_is_refused(handmade_plan):
    written = handmade_plan([(IDS, TARGET)], [{0: [[(0, 0, 10)]]}], pp=2)
    with pytest.raises(UsageError, match="2 pipeline stages") as raised:
        open_plan(*written)
    assert "--pp 1" in raised.value.hint


def test_a_sequence_longer_than_the_model_takes_is_refused_at_once(written):
    with pytest.raises(UsageError, match="sequence 0 has 10 tokens, the model takes 9 positions") as raised:
        stream(written, max_positions=9)
    assert raised.value.where == load_analysis(written[1]).place(0)
    assert "--max-length 9" in raised.value.hint
    assert next(iter(stream(written, max_positions=None))).step.num_tokens == 13


def test_a_vocabulary_too_small_for_the_data_is_refused_at_once(written):
    with pytest.raises(UsageError, match="the data has token id 22, the model's vocabulary has 22"):
        stream(written, vocab_size=22)


def test_a_token_outside_of_the_vocabulary_is_refused_whatever_the_manifest_says(written):
    plan, analysis = open_plan(*written)
    analysis.manifest["max_token_id"] = 3
    opened = PlanStream(plan, analysis, vocab_size=22, max_positions=10)
    with pytest.raises(UsageError, match="token 2 of sequence 1 is id 22, the model's vocabulary has 22"):
        next(iter(opened))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ((7, 0, 3), "no sequence 7"),
        ((-1, 0, 3), "no sequence -1"),
        ((1, 0, 4), "sequence 1 has 3 tokens; the plan asks for 0 to 4"),
        ((1, -1, 2), "the plan asks for -1 to 2"),
        ((1, 2, 2), "the plan asks for 2 to 2"),
        ((1, 1, 3), "chunk 1 has 6 tokens with 4 targets; the plan counted 7 with 4"),
        ((0, 5, 8), "chunk 1 has 7 tokens with 5 targets; the plan counted 7 with 4"),
    ],
)
def test_a_plan_that_asks_for_other_tokens_is_refused(written, tmp_path, segment, message):
    plan = shutil.copytree(written[0], tmp_path / "plan")
    with changed_rows(plan / "chunks.parquet") as rows:
        rows[1]["segments"][0] = dict(zip(("sequence_id", "start", "end"), segment, strict=True))
    with pytest.raises(DataError, match=message) as raised:
        next(iter(stream((plan, written[1]))))
    assert raised.value.hint == "build the plan again"


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({"kept": {1: "disk"}}, 'kept_attention is "disk", expected one of "", "gpu", "host"'),
        ({"kept": {1: "GPU"}}, 'kept_attention is "GPU"'),
        ({"kept": {1: "a\n\x1b[31m"}}, r'kept_attention is "a\?\?\[31m'),
        ({"actions": [("forward", 0), ("backwards", 1)]}, 'op is "backwards", expected one of "forward", "forward_kv"'),
        ({"actions": [("forward", 0), ("", 1)]}, 'op is "", expected'),
    ],
)
def test_words_that_nobody_knows_are_refused_as_they_are_read(handmade_plan, damaged, message):
    sequences = [(IDS, TARGET), (IDS[:3] + 20, TARGET[:3])]
    damaged_one = handmade_plan(
        sequences, [{0: [[(0, 0, 4)], [(0, 4, 10)]]}, {0: [[(1, 0, 3)], [(0, 0, 4)]]}], **damaged
    )
    with pytest.raises(DataError, match=message) as raised:
        next(iter(stream(damaged_one)))
    assert raised.value.where == "step 0, rank 0, chunk 1"
    assert "`chunkplan validate`" in raised.value.hint


def other_lengths(part):
    """The same number of tokens, cut into other sequences."""
    with pa.ipc.open_file(part) as file:
        table = file.read_all()
    lists = [[[0] * 9, [0] * 4], [[False] * 9, [False] * 4]]
    columns = [pa.array(values, table.schema.field(name).type) for name, values in zip(COLUMNS, lists, strict=True)]
    write_part(part, pa.table(columns, table.schema))


def other_type(part):
    with pa.ipc.open_file(part) as file:
        table = file.read_all()
    write_part(part, table.set_column(0, "input_ids", pa.array(["x", "y"])))


def nothing_but_its_start(part):
    part.write_bytes(part.read_bytes()[:200])


def a_hole(part):
    """Zeros where a batch begins, as a file has them whose pages were not all written when the machine went down."""
    content = bytearray(part.read_bytes())
    with pa.ipc.open_file(part) as file:
        schema = len(file.schema.serialize())
    content[schema + 8 : schema + 200] = bytes(192)
    part.unlink()  # another stream may have it mapped
    part.write_bytes(content)


def write_part(part, table):
    part.unlink()
    with pa.ipc.new_file(part, table.schema) as file:
        file.write_table(table)


COLUMNS = ("input_ids", "target")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "missing"),
        (lambda part: part.write_bytes(b""), "cannot read the tokens"),
        (nothing_but_its_start, "cannot read the tokens"),
        (a_hole, "cannot read the tokens"),
        (other_type, "columns are not of the contract's types"),
        (other_lengths, "sequences from 0 on do not have the lengths stated"),
    ],
    ids=["gone", "empty", "torn", "hole", "type", "lengths"],
)
def test_a_damaged_token_file_is_refused_by_name(written, tmp_path, damage, message):
    analysis = shutil.copytree(written[1], tmp_path / "analysis")
    damage(analysis / "tokens" / "part-00000.arrow")
    opened = stream((written[0], analysis))
    with pytest.raises(DataError, match=message) as raised:
        next(iter(opened))
    assert str(analysis) in str(raised.value)
    assert "again" in raised.value.hint


def test_chunks_of_a_plan_hold_what_their_segments_say(tmp_path, monkeypatch):
    """Over many small record batches and token files, with mixed and zero-loss chunks, on two ranks."""
    monkeypatch.setattr(analysis_writer, "WAITING_SEQUENCES", 3)
    monkeypatch.setattr(analysis_writer, "BATCH_ROWS", 3)
    monkeypatch.setattr(analysis_writer, "TOKEN_FILE_TOKENS", 60)
    random = np.random.default_rng(0)
    (tmp_path / "analysis").mkdir()
    writer, expected = analysis_writer.AnalysisWriter(tmp_path / "analysis"), []
    for record, length in enumerate([40, *random.integers(1, 14, 40).tolist(), 17]):
        ids, target = random.integers(0, 97, length).astype(np.int32), random.random(length) < 0.5
        target[0] = False
        writer.add(0, record, ids, target)
        expected.append((ids, np.append(np.where(target, ids, -100)[1:], -100)))
    writer.finish(exact=True, sources=[])
    config = PlanConfig(chunk_size=8, k=1, dp=2, cp="off", global_batch=7, equal_chunks=True)
    plan = build(tmp_path / "analysis", tmp_path / "plan", config)
    seen, kinds = [], set()  # whether a chunk has a part of a sequence, and more than one segment
    for work in stream((plan.path,), max_positions=40):
        for rank in work.ranks:
            assert rank.tensors.keys() == rank.chunks.keys()
            for chunk_id, chunk in rank.chunks.items():
                tensors = rank.tensors[chunk_id]
                if not chunk.segments:
                    kinds.add("zero-loss")
                    assert tensors.labels.tolist() == [-100]
                    continue
                pieces = [(*expected[piece.sequence_id], piece.start, piece.end) for piece in chunk.segments]
                assert tensors.input_ids[0].tolist() == [
                    token for ids, _, start, end in pieces for token in ids[start:end]
                ]
                assert tensors.labels.tolist() == [
                    label for _, labels, start, end in pieces for label in labels[start:end]
                ]
                assert tensors.position_ids[0].tolist() == [
                    position for *_, start, end in pieces for position in range(start, end)
                ]
                for piece, span in zip(chunk.segments, tensors.spans, strict=True):
                    assert (span.sequence_id, span.start, span.stop) == (piece.sequence_id, piece.start, piece.end)
                    assert span.length == len(expected[piece.sequence_id][0])
                    assert tensors.position_ids[0, span.chunk_start] == span.start
                kinds.add((chunk.group_size > 1, len(chunk.segments) > 1))
                seen += [piece.sequence_id for piece in chunk.segments if piece.start == 0]
    assert sorted(seen) == list(range(42))
    assert kinds == {(False, False), (False, True), (True, False), (True, True), "zero-loss"}
