"""Lists beside token ids: packed rows become their documents, masks are honoured, what is not known stops the run."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import IntakeOptions, analyze, validate
from chunkplan.errors import DataError
from chunkplan.intake.records import RecordError, TokensRecord
from chunkplan.planfile.analysis import Analysis
from tests.support.command_line import Run
from tests.support.intake_checks import parse_as
from tests.support.places import ROOT
from tests.support.table_cases import write_records

TOKENIZER = ROOT / "sample_data" / "tokenizer"
_write = partial(write_records, rows=2)

#: Three documents, of 4, 3 and 2 tokens, and which of their tokens count.
_IDS = [11, 12, 13, 14, 21, 22, 23, 31, 32]
_COUNTS = [0, 0, 1, 1, 0, 1, 1, 0, 1]
_LABELS = [token if counts else -100 for token, counts in zip(_IDS, _COUNTS, strict=True)]
_APART = [([11, 12, 13, 14], [0, 0, 1, 1]), ([21, 22, 23], [0, 1, 1]), ([31, 32], [0, 1])]

#: How packers write where documents begin.
_BEGINS: dict[str, list[int]] = {
    "position_ids": [0, 1, 2, 3, 0, 1, 2, 0, 1],
    "input_pos": [0, 1, 2, 3, 0, 1, 2, 0, 1],
    "attention_mask": [1, 1, 1, 1, 2, 2, 2, 3, 3],
    "segment_ids": [1, 1, 1, 1, 2, 2, 2, 3, 3],
    "seq_idx": [0, 0, 0, 0, 1, 1, 1, 2, 2],
    "document_ids": [70, 70, 70, 70, 5, 5, 5, 6, 6],
    "seq_lengths": [4, 3, 2],
    "seq_lens": [4, 0, 3, 2, 0],
    "cu_seqlens": [0, 4, 7, 9],
    "cu_seq_lens_q": [0, 4, 7, 9, 9],
    "seq_start_id": [0, 4, 7],
}

#: How masks say what counts.
_MASKS: dict[str, list[Any]] = {
    "labels": _LABELS,
    "completion_mask": _COUNTS,
    "assistant_masks": [bool(counts) for counts in _COUNTS],
    "loss_mask": [float(counts) for counts in _COUNTS],
    "response_mask": _COUNTS,
    "label_mask": _COUNTS,
    "loss_scale": [float(counts) for counts in _COUNTS],
    "prompt_mask": [1 - counts for counts in _COUNTS],
}


def _parts(record: dict[str, Any], **columns: str) -> list[tuple[list[int], list[int]]]:
    found = parse_as("input_ids", record, **columns)
    assert isinstance(found, TokensRecord)
    return [(ids.tolist(), target.astype(int).tolist()) for ids, target in found.documents]


def _sequences(analysis: Analysis) -> list[tuple[list[int], list[int]]]:
    tokens, found = analysis.tokens(), []
    for index in range(len(analysis.num_tokens)):
        ids, target = tokens(index)
        found.append((np.asarray(ids).tolist(), np.asarray(target).astype(int).tolist()))
    return found


@pytest.mark.parametrize("begins", _BEGINS)
@pytest.mark.parametrize("counts", _MASKS)
def test_a_packed_row_becomes_its_documents_with_what_counts(begins: str, counts: str) -> None:
    mask = _MASKS[counts]
    if (begins, counts) == ("seq_start_id", "loss_mask"):
        mask = [*mask[1:], 1]  # as NeMo has it: at the token before, and of no account at the last one
    assert _parts({"input_ids": _IDS, begins: _BEGINS[begins], counts: mask}) == _APART


@pytest.mark.parametrize("begins", _BEGINS)
def test_padding_of_a_packed_row_is_left_out(begins: str) -> None:
    value = _BEGINS[begins]
    if begins in ("seq_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens_q", "seq_start_id"):
        padded = {begins: value, "attention_mask": [1] * 9 + [0, 0]}
    else:
        behind = {"seq_idx": -1, "document_ids": -1}.get(begins, 0)
        padded = {begins: [*value, behind, behind]}
    record = {"input_ids": [*_IDS, 0, 0], "labels": [*_LABELS, -100, -100], **padded}
    assert _parts(record) == _APART
    if begins != "attention_mask" and len(value) == 9:
        before = {"attention_mask": [0, *[1] * 9], begins: [1 if begins == "segment_ids" else 0, *value]}
        if begins in ("position_ids", "input_pos"):
            assert _parts({"input_ids": [0, *_IDS], "labels": [-100, *_LABELS], **before}) == _APART


def test_lists_of_the_padding_as_a_document_and_masks_of_all_ones_are_fine() -> None:
    record = {"input_ids": [*_IDS, 0, 0], "attention_mask": [1] * 9 + [0, 0], "labels": [*_LABELS, -100, -100]}
    assert _parts({**record, "seq_lens": [4, 3, 2, 2]}) == _APART
    assert _parts({"input_ids": _IDS, "attention_mask": [1] * 9, "seq_lengths": [4, 3, 2], "labels": _LABELS}) == _APART
    plain = {"input_ids": _IDS, "position_ids": list(range(9)), "attention_mask": [1] * 9}
    assert _parts(plain) == [(_IDS, [0, *[1] * 8])]


def test_masks_that_trl_has_together_are_taken_together() -> None:
    record = {"input_ids": [1, 2, 3, 4, 5], "completion_mask": [0, 1, 1, 1, 1], "assistant_masks": [0, 1, 0, 1, 1]}
    assert _parts(record) == [([1, 2, 3, 4, 5], [0, 1, 0, 1, 1])]


def test_a_mask_of_any_name_is_read_where_the_user_says_what_it_is() -> None:
    record = {"input_ids": [1, 2, 3, 4], "mask": [0, 0, 1, 1]}
    assert _parts(record, loss_mask="mask") == [([1, 2, 3, 4], [0, 0, 1, 1])]
    assert _parts(record, prompt_mask="mask") == [([1, 2, 3, 4], [0, 1, 0, 0])]
    assert _parts({"input_ids": [1, 2, 3], "parts": [1, 2]}, seq_lengths="parts") == [([1], [0]), ([2, 3], [0, 1])]


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"labels": _LABELS, "loss_mask": [1] * 9}, "`labels` and `loss_mask` contradict each other"),
        ({"completion_mask": _COUNTS, "prompt_mask": _COUNTS}, "`completion_mask` and `prompt_mask` contradict"),
        (
            {"seq_lengths": [4, 5], "position_ids": _BEGINS["position_ids"]},
            "contradict each other: where documents begin",
        ),
        ({"seq_lengths": [4, 3, 2], "position_ids": list(range(9))}, "contradict each other: where documents begin"),
        ({"cu_seq_lens_q": [0, 4, 9], "cu_seq_lens_k": [0, 5, 9]}, "contradict each other"),
        ({"loss_mask": [0, 0, 2, 1, 1, 1, 1, 1, 1]}, r"`loss_mask\[2\]` is 2, expected 0 or 1"),
        ({"loss_mask": [0.5] * 9}, r"`loss_mask\[0\]` is a number"),
        ({"loss_mask": [1] * 8}, "`loss_mask` has 8 entries and `input_ids` has 9"),
        ({"loss_mask": 0}, "`loss_mask` is a number"),
        ({"position_ids": [0, 1, 2, 4, 0, 1, 2, 0, 1]}, r"`position_ids\[3\]` is 4"),
        ({"position_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}, r"`position_ids\[0\]` is 5"),
        ({"position_ids": [[0] * 9] * 3}, "`position_ids` has 3 entries|is a list"),
        ({"seq_lengths": [4, 4]}, "`seq_lengths` does not divide the 9 tokens"),
        ({"seq_lengths": [10, -1]}, "`seq_lengths` does not divide"),
        ({"cu_seqlens": [4, 9]}, "`cu_seqlens` does not divide"),
        ({"cu_seqlens": [0, 7, 4, 9]}, "`cu_seqlens` does not divide"),
        ({"seq_start_id": [0, 12]}, "`seq_start_id` does not divide"),
        ({"document_ids": [1, 1, 2, 2, 1, 1, 3, 3, 3]}, "the same number in several places"),
        ({"attention_mask": [1, 1, 3, 3, 3, 3, 3, 3, 3]}, r"`attention_mask\[2\]` is 3, expected 0 or 1"),
        ({"attention_mask": [2] * 9}, r"`attention_mask\[0\]` is 2"),
        ({"mask": [0, 1] * 4 + [0]}, "`mask` is not read, and has a number for each token"),
        ({"returns": [0.25] * 9}, "`returns` is not read"),
        ({"is_answer": [True] * 9}, "`is_answer` is not read"),
        ({"pack_sizes": [4, 3, 2]}, "`pack_sizes` is not read, and has numbers that may say where documents begin"),
        ({"borders": [0, 4, 7]}, "`borders` is not read"),
        ({"prompt_length": 4}, "`prompt_length` is not read"),
        ({"weight": 0.5}, "`weight` is not read"),
        ({"loss_weight": 0}, "`loss_weight` is not read"),
        ({"trainable": False}, "`trainable` is not read"),
    ],
)
def test_what_contradicts_itself_or_is_not_known_is_refused(beside: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        parse_as("input_ids", {"input_ids": _IDS, **beside})


@pytest.mark.parametrize(
    "beside",
    [
        {"special_tokens_mask": [0, 1] * 4 + [0]},
        {"token_type_ids": [0] * 9},
        {"length": 9, "doc_id": 17, "document_ids": "a", "source": "x", "score": 0.5},
        {"tokens": ["a"] * 9},
        {"embedding": [0.5, 0.25]},
        {"weight": 1, "trainable": True},
        {"prompt_length": 2, "labels": [-100, -100, *_IDS[2:]]},
        {"mask": None},
        {"mask": []},
    ],
)
def test_what_says_nothing_of_what_is_learnt_is_only_listed(tmp_path: Path, beside: dict[str, Any]) -> None:
    path = _write(tmp_path / "a.jsonl", [{"input_ids": _IDS, **beside}])
    analysis = analyze(path, tmp_path / "out")
    listed = {key for key, value in beside.items() if value is not None and key != "labels"}
    assert analysis.num_sequences == 1
    assert {*analysis.manifest["sources"][0]["unread_keys"]} == listed


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("begins", ["position_ids", "attention_mask", "seq_lengths", "cu_seqlens"])
def test_every_kind_of_file_gives_the_tokens_of_the_documents_apart(tmp_path: Path, kind: str, begins: str) -> None:
    packed = [{"input_ids": _IDS, "labels": _LABELS, begins: _BEGINS[begins]}] * 5
    apart = [
        {"input_ids": ids, "labels": [i if c else -100 for i, c in zip(ids, counts, strict=True)]}
        for ids, counts in _APART
    ]
    found = analyze(_write(tmp_path / f"packed.{kind}", packed), tmp_path / "packed")
    expected = analyze(_write(tmp_path / "apart.jsonl", apart * 5), tmp_path / "apart")
    assert _sequences(found) == _sequences(expected) == _APART * 5
    assert validate(tmp_path / "packed").ok
    hashes = [analysis.manifest["content_hashes"]["tokens"] for analysis in (found, expected)]
    assert hashes[0] == hashes[1]
    [source] = found.manifest["sources"]
    assert (source["records"], source["more_sequences"], source["unread_keys"]) == (5, 10, {})


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("mask", [*_MASKS])
def test_every_kind_of_file_has_its_masks_read(tmp_path: Path, kind: str, mask: str) -> None:
    rows = [{"input_ids": _IDS, "attention_mask": [1] * 9, mask: _MASKS[mask]}] * 3
    found = analyze(_write(tmp_path / f"a.{kind}", rows), tmp_path / "out")
    assert _sequences(found) == [(_IDS, _COUNTS)] * 3


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
@pytest.mark.parametrize("key", ["labels", "completion_mask", "position_ids", "attention_mask"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_mark_that_only_some_records_have_is_refused(tmp_path: Path, kind: str, key: str, *, is_late: bool) -> None:
    value = {"position_ids": list(range(9)), "attention_mask": [1] * 9, **_MASKS}[key]
    rows = [{"input_ids": _IDS, key: value}] * 150 + [{"input_ids": _IDS, key: None}]
    path = _write(tmp_path / f"a.{kind}", rows if is_late else rows[::-1])
    with pytest.raises(DataError, match=f"`{key}` is missing or null, and other records have it") as caught:
        analyze(path, tmp_path / "out")
    assert caught.value.where is not None
    where = 150 if is_late else 0
    assert caught.value.where.endswith(f":{where + 1}" if kind == "jsonl" else f"record {where}")
    left_out = analyze(path, tmp_path / "out", IntakeOptions(on_error="skip"))
    assert (left_out.num_sequences, left_out.manifest["rejected"]) == (150, {"schema": 1})
    whole = analyze(path, tmp_path / "out", IntakeOptions(ignore_columns=(key,)))
    assert set(whole.num_target_tokens.tolist()) == {8}


def test_a_mark_that_comes_late_is_refused_and_one_that_is_always_null_is_none(tmp_path: Path) -> None:
    rows = [{"input_ids": _IDS}] * 120
    path = _write(tmp_path / "late.jsonl", [*rows, {"input_ids": _IDS, "labels": _LABELS}])
    with pytest.raises(DataError, match="`labels` is not in the first records") as caught:
        analyze(path, tmp_path / "out")
    assert caught.value.where == f"{path}:121"
    table = pa.table({"input_ids": [_IDS] * 3, "labels": pa.array([None] * 3, pa.list_(pa.int32()))})
    pq.write_table(table, tmp_path / "null.parquet")
    assert analyze(tmp_path / "null.parquet", tmp_path / "out").num_target_tokens.tolist() == [8] * 3


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "arrow"])
def test_an_unknown_column_of_numbers_stops_the_run_with_flags_to_paste(
    tmp_path: Path, kind: str, command: Run
) -> None:
    for name in ("a", "b"):
        _write(tmp_path / f"{name}.{kind}", [{"input_ids": _IDS, "mask": _COUNTS}] * 3)
    found = command("analyze", f"a.{kind}", f"b.{kind}", "--json")
    assert found.code == 3
    assert "`mask` is not read, and has a number for each token, which may say what counts" in found.err
    found = command("analyze", f"a.{kind}", "--json")
    assert found.code == 3
    for flag, targets in (("loss_mask=mask", 5), ("prompt_mask=mask", 3), ("mask", 8)):
        option = "--ignore-column" if flag == "mask" else "--column"
        assert f"{option} {flag}" in found.err.replace("\n", " ")
        again = command("analyze", f"a.{kind}", "--json", *shlex.split(f"{option} {flag}"))
        assert json.loads(again.out)["report"]["num_target_tokens"] == 3 * targets


def test_of_several_sources_the_hint_names_the_one_that_it_is_of(tmp_path: Path, command: Run) -> None:
    _write(tmp_path / "a.jsonl", [{"input_ids": _IDS}] * 3)
    _write(tmp_path / "b.jsonl", [{"input_ids": _IDS}] * 150 + [{"input_ids": _IDS, "mask": [2] * 9}])
    found = command("analyze", "a.jsonl", "b.jsonl")
    assert "b.jsonl:151: `mask` is not read" in found.err
    assert "--ignore-column b.jsonl:mask" in found.err
    assert command("analyze", "a.jsonl", "b.jsonl", "--ignore-column", "b.jsonl:mask").code == 0


def test_padding_that_nothing_marks_is_refused_where_the_tokenizer_names_it(tmp_path: Path) -> None:
    pad, end = 4093, 4095  # of the sample tokenizer: <|endoftext|>, which may end a text once, and <|im_end|>
    for row, is_good in (
        ([5, 6, end], True),
        ([5, 6, end, pad], True),
        ([5, 6, end, pad, pad], False),
        ([pad, pad, 5, 6], False),
        ([pad, 5, 6], True),
        ([pad], True),
    ):
        path = _write(tmp_path / "a.jsonl", [{"input_ids": row}, {"input_ids": [7, 8, 9]}])
        if is_good:
            found = analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
            assert found.num_tokens.tolist() == [len(row), 3]
            continue
        with pytest.raises(DataError, match="padding") as caught:
            analyze(path, tmp_path / "out", tokenizer=TOKENIZER)
        assert caught.value.where == f"{path}:1"
        found = analyze(path, tmp_path / "out", IntakeOptions(on_error="skip"), tokenizer=TOKENIZER)
        assert (found.num_tokens.tolist(), found.manifest["rejected"]) == ([3], {"schema": 1})
        mask = [int(token != pad) for token in row]
        for key, value in (("attention_mask", mask), ("loss_mask", mask)):
            path = _write(tmp_path / "a.jsonl", [{"input_ids": row, key: value}])
            assert analyze(path, tmp_path / "out", tokenizer=TOKENIZER).num_target_tokens.sum() > 0


def test_padding_is_refused_where_a_record_is_shown_too(tmp_path: Path, command: Run) -> None:
    _write(tmp_path / "a.jsonl", [{"input_ids": [5, 6, 4095, 4093, 4093]}])
    shown = command("inspect", "--record", "a.jsonl:1", "--tokenizer", str(TOKENIZER))
    assert shown.code == 3
    assert "padding (`<|endoftext|>`) that counts in the loss" in shown.err


def test_a_packed_row_is_shown_as_its_documents(tmp_path: Path, command: Run) -> None:
    _write(tmp_path / "a.jsonl", [{"input_ids": _IDS, "labels": _LABELS, "seq_lengths": [4, 3, 2]}])
    shown = json.loads(command("inspect", "--record", "a.jsonl:1", "--json").out)
    assert [one["num_tokens"] for one in shown["sequences"]["rendered"]] == [4, 3, 2]
    assert [one["num_target_tokens"] for one in shown["sequences"]["rendered"]] == [2, 2, 1]
    assert shown["unread"] == []
    said = command("analyze", "a.jsonl").err
    assert "1 record + 2 more documents of packed rows = 3 sequences" in said
