"""Pairs, labels and rollouts in an analysis: columns read as written, and what contradicts itself is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from chunkplan import load_analysis, validate
from chunkplan.errors import DataError
from chunkplan.planfile import analysis_writer
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.analysis_writer import AnalysisWriter
from tests.support.manifests import change_manifest

PAIRS = [{"group": 2 * (n // 2), "label": n % 2 == 0} for n in range(6)]
ROLLOUTS = [
    {"group": (0, 1, 0, 3, 1, 0)[n], "reward": n / 3, "advantages": None, "old_log_probs": None} for n in range(6)
]


def write(folder: Path, kind: str | None, rows: list[dict[str, Any]], columns: list[str] | None = None) -> Analysis:
    """Sequences of 5, 6, 7, ... tokens, whose numbers of tokens are 100 a sequence and 1 a token."""
    folder.mkdir(exist_ok=True)
    writer = AnalysisWriter(folder, kind, [*rows[0]] if columns is None else columns)
    for record, row in enumerate(rows):
        target = np.arange(record + 5) % 2 == 1
        numbers = np.where(target, 100 * record + np.arange(record + 5), 0)
        more = {name: numbers if value is None else value for name, value in row.items()}
        ids = np.arange(record + 5, dtype=np.int32)
        writer.add(0, record // 2 if kind == "preference" else record, ids, target, **more)
    source: dict[str, Any] = {"path": "d.jsonl", "schema": "text", "records": len(rows)}
    if kind == "preference":
        source |= {"records": len(rows) // 2, "more_sequences": len(rows) // 2}
    writer.finish(exact=True, sources=[source])
    return load_analysis(folder)


@pytest.mark.parametrize("rows_of_a_batch", [2, 4096])
def test_columns_of_samples_are_read_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_of_a_batch: int
) -> None:
    monkeypatch.setattr(analysis_writer, "BATCH_ROWS", rows_of_a_batch)
    analysis = write(tmp_path, "rollouts", ROLLOUTS)
    assert analysis.samples == "rollouts" and analysis.token_columns == ("advantages", "old_log_probs")
    assert analysis.group is not None and analysis.group.tolist() == [0, 1, 0, 3, 1, 0]
    assert analysis.reward is not None and analysis.reward.tolist() == [n / 3 for n in range(6)]
    assert analysis.label is None and analysis.advantage is None
    tokens = analysis.tokens()
    ids, starts, stops = np.array([4, 1, 4]), np.array([2, 0, 0]), np.array([6, 4, 2])
    input_ids, target = tokens.gather(ids, starts, stops)
    for name in analysis.token_columns:
        found = tokens.column(name, ids, starts, stops)
        assert found.dtype == np.float32
        assert np.array_equal(found, np.where(target, 100 * np.repeat(ids, stops - starts) + input_ids, 0))
    assert list(validate(tmp_path).violations) == []


def test_ordinary_analyses_say_nothing_of_samples_and_others_have_hashes_of_their_own(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", None, [{}] * 6)
    assert plain.samples is None and plain.group is None and plain.token_columns == ()
    assert not {"samples", "sample_columns"} & plain.manifest.keys()
    hashes = {plain.content_hash, write(tmp_path / "pairs", "preference", PAIRS).content_hash}
    changes: list[dict[str, Any]] = [{}, {"reward": 7.0}, {"advantages": np.zeros(5)}]
    for change in changes:
        folder = tmp_path / f"changed-{len(hashes)}"
        hashes.add(write(folder, "rollouts", [{**ROLLOUTS[0], **change}, *ROLLOUTS[1:]], [*ROLLOUTS[0]]).content_hash)
    assert len(hashes) == 5


@pytest.mark.parametrize(
    ("kind", "rows", "found"),
    [
        ("preference", PAIRS[:3], "sequence 2 is no part of a pair"),
        ("preference", [*PAIRS[:2], PAIRS[3], PAIRS[2]], "sequence 2 is no part of a pair"),
        ("rollouts", [{"group": 0}, {"group": 2}], "sequence 1 is of group 2, no sequence before it"),
        ("rollouts", [{"group": 0}, {"group": 0}, {"group": 1}], "sequence 2 is of group 1, which is none of its"),
    ],
)
def test_groups_that_are_none_are_found(tmp_path: Path, kind: str, rows: list[dict[str, Any]], found: str) -> None:
    write(tmp_path, kind, rows)
    assert any(found in each.message for each in validate(tmp_path).violations if each.invariant == "samples")


@pytest.mark.parametrize(
    ("entry", "value", "found"),
    [
        ("samples", None, "`sample_columns`"),
        ("samples", "labelled", "labelled answers have the columns group"),
        ("sample_columns", ["label"], "preference pairs lack the columns group"),
        ("sample_columns", [], "the other way round"),
        ("sample_columns", ["group", "label", "reward"], "preference pairs have the columns reward"),
    ],
)
def test_a_manifest_that_says_other_samples_is_refused(tmp_path: Path, entry: str, value: Any, found: str) -> None:
    write(tmp_path, "preference", PAIRS)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    if value is None:
        del manifest[entry]
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    else:
        change_manifest(tmp_path, entry, value=value)
    with pytest.raises(DataError, match=found):
        load_analysis(tmp_path)


def test_numbers_where_nothing_counts_are_found_and_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", "rollouts", [{"group": 0, "advantages": np.ones(5)}])
    assert any("`advantages`" in each.message for each in validate(tmp_path / "a").violations)
    rows: dict[str, dict[str, Any]] = {"b": {"reward": np.nan}, "c": {"advantages": np.full(5, np.inf)}}
    for name, row in rows.items():
        with pytest.raises(DataError, match="not finite"):
            write(tmp_path / name, "rollouts", [{"group": 0, **row}]).tokens()(0)
    assert pq.read_schema(tmp_path / "a" / "sequences.parquet").names[-1] == "group"
