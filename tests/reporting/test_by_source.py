"""What each source of the data has: no token is counted twice, and none is missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.by_source import sources_of
from chunkplan.reporting.per_step import plan_chunks
from tests.support.page_cases import HOSTILE, build_plan, write_and_read
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
MOST = 700


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    """Of short texts and a blank one, of chats, and of long texts, of which one is cut."""
    said = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "A few " * 30}]
    records: dict[str, list[dict[str, Any]]] = {
        "short": [*({"text": "one and two " * times} for times in range(1, 30)), {"text": " "}],
        "chat": [{"messages": said}] * 9,
        "long": [{"text": "one and two " * times} for times in (90, 150, 900)],
    }
    for name, rows in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = chunkplan.IntakeOptions(max_length=MOST, long="truncate")
    files = [tmp_path / f"{name}.jsonl" for name in records]
    return chunkplan.analyze(files, tmp_path / "analysis", options, tokenizer=TOKENIZER, workers=1)


def built(analysis: Analysis, folder: Path, **changes: Any) -> Plan:
    given: dict[str, Any] = {"chunk_size": 256, "k": 2, "global_batch": 8}
    config = chunkplan.PlanConfig(**(given | changes))
    return chunkplan.build(analysis.path, folder / "plan", config, workers=1)


def test_sources_of_an_analysis_have_all_of_it(analysis: Analysis) -> None:
    """What is rejected and cut stands with the source that it is of, and adds up to what the manifest says of all."""
    short, chat, long = rows = sources_of(analysis)
    totals = analysis.manifest["totals"]
    assert sum(row.num_sequences for row in rows) == totals["num_sequences"] == 41
    assert sum(row.num_tokens for row in rows) == totals["num_tokens"]
    assert sum(row.num_target_tokens for row in rows) == totals["num_target_tokens"]
    assert max(row.longest for row in rows) == long.longest == MOST
    assert chat.num_target_tokens < chat.num_tokens - chat.num_sequences, "questions are not trained"
    assert [row.num_rejected for row in rows] == [1, 0, 0]
    assert short.num_cut_tokens == chat.num_cut_tokens == 0
    assert long.num_cut_tokens == analysis.manifest["truncated"]["num_tokens"] > 0
    assert {(row.num_split_tokens, row.num_absent_tokens) for row in rows} == {(None, None)}


@pytest.mark.parametrize(
    "changes", [{}, {"holdout": 0.3}, {"holdout": 0.3, "part": "eval"}, {"epochs": 2}, {"dp": 2, "cp": "auto"}]
)
def test_sources_of_a_plan_have_all_that_it_holds_and_the_rest_is_left_out(
    analysis: Analysis, tmp_path: Path, changes: dict[str, Any]
) -> None:
    plan = built(analysis, tmp_path, **changes)
    rows = sources_of(analysis, plan_chunks(plan).table)
    totals, epochs = plan.manifest["totals"], changes.get("epochs", 1)
    assert sum(row.num_sequences for row in rows) == totals["num_sequences"]
    assert sum(row.num_tokens for row in rows) == totals["num_tokens"]
    assert sum(row.num_target_tokens for row in rows) == totals["num_target_tokens"]
    for whole, row in zip(sources_of(analysis), rows, strict=True):
        assert row.num_absent_tokens is not None
        assert row.num_tokens == epochs * (whole.num_tokens - row.num_absent_tokens)


def test_tokens_of_sequences_that_are_longer_than_a_chunk_are_split(analysis: Analysis, tmp_path: Path) -> None:
    rows = sources_of(analysis, plan_chunks(built(analysis, tmp_path)).table)
    for source, row in enumerate(rows):
        lengths = analysis.num_tokens[analysis.source == source]
        assert row.num_split_tokens == lengths[lengths > 256].sum()
    assert rows[2].num_split_tokens == rows[2].num_tokens > 0


def test_a_bare_file_of_lengths_has_no_sources(tmp_path: Path) -> None:
    plan = build_plan(tmp_path)
    analysis = chunkplan.load_analysis(plan.analysis_path)
    assert sources_of(analysis, plan_chunks(plan).table) == ()
    assert "Data sources" not in write_and_read(tmp_path / "page.html", plan).text


def test_chunks_of_other_data_are_refused(analysis: Analysis, tmp_path: Path) -> None:
    table = plan_chunks(built(analysis, tmp_path)).table
    for wrong in (-1, analysis.num_sequences):
        with pytest.raises(DataError, match=f"the analysis has no sequence {wrong}"):
            sources_of(analysis, table._replace(sequence_id=np.full_like(table.sequence_id, wrong)))
    fewer = replace(analysis, manifest={**analysis.manifest, "sources": analysis.manifest["sources"][:1]})
    with pytest.raises(DataError, match="of sources that it does not name"):
        sources_of(fewer)


def test_a_page_lists_the_sources_and_only_what_is_lost(analysis: Analysis, tmp_path: Path) -> None:
    """Names that are markup are text; what an old analysis does not say has a question mark."""
    made = write_and_read(tmp_path / "page.html", built(analysis, tmp_path, holdout=0.3))
    head, *rows = made.tables["Sources of the data"]
    assert head[-4:] == ["in split sequences", "left out", "records rejected", "tokens cut"]
    assert [row[0] for row in rows] == [Path(source["path"]).name for source in analysis.manifest["sources"]]
    short, chat, long = (dict(row) for row in analysis.manifest["sources"])
    del short["num_truncated_tokens"]
    hostile = replace(analysis, manifest={**analysis.manifest, "sources": [short, {**chat, "path": HOSTILE}, long]})
    made = write_and_read(tmp_path / "page.html", hostile)
    head, *rows = made.tables["Sources of the data"]
    assert "in split sequences" not in head and "left out" not in head
    assert rows[0][-2:] == ["1", "?"]
    assert rows[1][0] == HOSTILE
    assert "Nothing of them is lost" not in made.text


def test_of_very_many_sources_those_with_most_tokens_are_listed(analysis: Analysis, tmp_path: Path) -> None:
    empty = {"path": "empty.jsonl", "records": 0, "num_sequences": 0, "first_sequence_id": 0}
    many = [*analysis.manifest["sources"], *({**empty, "path": f"{number}.jsonl"} for number in range(200))]
    made = write_and_read(tmp_path / "page.html", replace(analysis, manifest={**analysis.manifest, "sources": many}))
    rows = made.tables["Sources of the data"][1:]
    assert len(rows) == 100
    assert [row[0] for row in rows[:3]] == [source["path"] for source in many[:3]]
    assert "The 100 with the most tokens, of 203." in made.text
