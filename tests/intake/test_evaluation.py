"""Files to evaluate on are read like others, marked in the analysis, and never trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chunkplan import analyze, load_analysis, validate
from chunkplan.building import build
from chunkplan.config.plan import PlanConfig
from chunkplan.errors import DataError, UsageError
from chunkplan.files.folder import MANIFEST
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.shard import merge, write_shard
from chunkplan.intake.sources import find_sources
from chunkplan.planfile.load import load_held_out
from chunkplan.planning.selection import check_selection
from tests.support.intake_checks import write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
CONFIG = PlanConfig(chunk_size=64, k=1, global_batch=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts to train on, of which one is also in the file beside them to evaluate on."""
    write_lines(tmp_path / "data" / "train.jsonl", [{"text": f"text {number}"} for number in range(9)])
    write_lines(tmp_path / "data" / "dev.jsonl", [{"text": "text 3"}, {"text": "other 1"}, {"text": "other 2"}])
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("names", "evaluated"),
    [
        (("train.jsonl", "validation.jsonl", "test-00000-of-00001.jsonl"), [1, 2]),
        (("train/a.jsonl", "test/a.jsonl", "dev_2/b.jsonl"), [1, 2]),
        (("deep/gsm8k_train.jsonl", "deep/gsm8k_test.jsonl", "deep/other_test.jsonl"), [1]),
        (("TRAIN.jsonl", "Val.jsonl"), [1]),
        (("training-1.jsonl", "testimonials.jsonl", "devices.jsonl", "contest.jsonl", "evaluations.jsonl"), []),
        (("a/train.jsonl", "b/test.jsonl"), []),
        (("test.jsonl", "dev.jsonl"), []),
    ],
)
def test_names_say_it_of_what_stands_beside_data_to_train_on(
    tmp_path: Path, names: tuple[str, ...], evaluated: list[int]
) -> None:
    for name in names:
        write_lines(tmp_path / "test" / name, [{"text": "a"}])
    found = find_sources([tmp_path / "test"])
    assert {one.path for one in found if one.is_evaluation} == {f"{tmp_path}/test/{names[each]}" for each in evaluated}
    named = find_sources([tmp_path / "test" / name for name in names])
    assert not any(one.is_evaluation for one in named)


def test_what_is_named_to_evaluate_on_is_not_trained_wherever_else_it_is_found(folder: Path) -> None:
    write_lines(folder / "more.jsonl", [{"text": "a"}])
    found = find_sources([folder], evaluation=[folder / "more.jsonl"])
    assert [(Path(one.path).name, one.is_evaluation) for one in found] == [
        ("train.jsonl", False),
        ("dev.jsonl", True),
        ("more.jsonl", True),
    ]
    with pytest.raises(UsageError, match="none is left to train on"):
        find_sources([folder / "more.jsonl"], evaluation=[folder / ".." / "data" / "more.jsonl"])


def test_the_plan_trains_none_of_it_nor_its_copies_and_evaluates_each_once(folder: Path, tmp_path: Path) -> None:
    analysis = analyze(folder, tmp_path / "analysis", tokenizer=TOKENIZER)
    assert [source.get("part") for source in analysis.manifest["sources"]] == [None, "eval"]
    plan = build(analysis, tmp_path / "plan", CONFIG)
    held_out = load_held_out(plan)
    assert held_out is not None

    def sequences(of) -> list[int]:
        return sorted(segment["sequence_id"] for row in of.chunks().column("segments").to_pylist() for segment in row)

    assert sequences(held_out) == [9, 10, 11]
    assert sequences(plan) == [0, 1, 2, 4, 5, 6, 7, 8]
    for each in (plan, held_out):
        assert validate(each.path, analysis=analysis.path).ok
    with pytest.raises(UsageError, match="the analysis has files to evaluate on"):
        build(analysis, tmp_path / "plan", PlanConfig(chunk_size=64, k=1, holdout=2))


def test_it_is_part_of_the_content_hash_and_nothing_else_changes(folder: Path, tmp_path: Path) -> None:
    files = [folder / "train.jsonl", folder / "dev.jsonl"]
    trained = analyze(files, tmp_path / "trained", tokenizer=TOKENIZER)
    marked = analyze({"train": files[0], "eval": [files[1]]}, tmp_path / "marked", tokenizer=TOKENIZER)
    assert analyze(folder, tmp_path / "found", tokenizer=TOKENIZER).content_hash == marked.content_hash
    assert marked.content_hash != trained.content_hash
    hashes = dict(marked.manifest["content_hashes"])
    assert hashes.pop("evaluation")
    assert hashes == trained.manifest["content_hashes"]
    assert validate(marked.path).ok
    manifest = json.loads((marked.path / MANIFEST).read_text())
    del manifest["sources"][1]["part"]
    (marked.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="sources to evaluate on are not those it was written for"):
        load_analysis(marked.path)


def test_shards_are_merged_into_the_same(folder: Path, tmp_path: Path) -> None:
    request = IntakeRequest(paths=folder, cache=tmp_path / "cache", tokenizer=TOKENIZER)
    for index in (1, 2):
        write_shard(request, tmp_path / f"shard-{index}", (index, 2))
    merged = merge([tmp_path / "shard-1", tmp_path / "shard-2"], tmp_path / "merged")
    assert merged.content_hash == analyze(folder, tmp_path / "whole", tokenizer=TOKENIZER).content_hash


def test_lengths_alone_are_marked_too(folder: Path, tmp_path: Path) -> None:
    analysis = analyze(folder, tmp_path / "analysis")
    assert np.flatnonzero(analysis.is_evaluation).tolist() == [9, 10, 11]
    assert not analysis.is_evaluated_elsewhere.any()
    check_selection(analysis, PlanConfig(chunk_size=64, k=1, part="eval"))
