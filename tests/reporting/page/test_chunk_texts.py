"""What chunks of drawn steps hold: on the page as `inspect --chunk --text` has it, bounded, and as text."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import chunkplan
from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.page import sections
from tests.reporting.page.test_numbers import change_value
from tests.support.page_cases import HOSTILE, PLOTLY, write_and_read
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    """Of a conversation that is markup, of short texts, and of a long one with a number in each word."""
    said = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"No: {HOSTILE}"}]
    long = " ".join(f"word{number}" for number in range(500))
    records: list[dict[str, Any]] = [{"messages": said}, *({"text": f"short {number}"} for number in range(30))]
    for name, rows in (("chat", records[:1]), ("text", [*records[1:], {"text": long}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    files = [tmp_path / "chat.jsonl", tmp_path / "text.jsonl"]
    return chunkplan.analyze(files, tmp_path / "analysis", tokenizer=tmp_path / "tokenizer", workers=1)


@pytest.fixture
def plan(analysis: Analysis) -> Plan:
    """Of two ranks in one step."""
    config = chunkplan.PlanConfig(chunk_size=512, k=2, dp=2, pp=2, global_batch=32, cp="off")
    return chunkplan.build(analysis.path, analysis.path.parent / "plan", config, workers=1)


def drawers(path: Path) -> dict[str, str]:
    """The HTML of what each chunk opens, by its id."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r'<details class="drawer" id="([^"]*)"[^>]*>(.*?)</details>', text, re.S)
    assert len(dict(found)) == len(found), "ids are there once"
    return dict(found)


def blocks(drawer: str) -> list[tuple[str, str, str]]:
    """Of each segment in a drawer: its caption, its text, and what of this is marked as targets."""
    found = re.findall(r"<figcaption>(.*?)</figcaption>\s*(?:<pre[^>]*>(.*?)</pre>)?", drawer, re.S)
    return [
        (
            html.unescape(caption),
            html.unescape(re.sub(r"<[^>]*>", "", text)),
            html.unescape("".join(re.findall(r"<mark[^>]*>(.*?)</mark>", text, re.S))),
        )
        for caption, text in found
    ]


def test_every_bar_has_a_drawer_with_what_inspect_shows_of_the_chunk(
    plan: Plan, analysis: Analysis, tmp_path: Path
) -> None:
    """The same segments at the same places; the same text and targets, of a long segment at its two ends."""
    page = write_and_read(tmp_path / "page.html", plan)
    found = drawers(tmp_path / "page.html")
    [(label, figure)] = page.charts["gantt-chart"].items()
    [step] = plan.iter_steps()
    assert set(found) == {f"chunk-0-{rank}-{chunk.chunk_id}" for rank in step.chunks for chunk in step.chunks[rank]}
    assert figure["layout"]["meta"]["step"] == 0
    assert figure["layout"]["meta"]["ranks"] == [0, 0, 1, 1], "of each row"
    assert [attributes["data-label"] for _, attributes in page.tags if attributes.get("class") == "drawers"] == [label]
    tokenizer = chunkplan.open_tokenizer(analysis)
    num_cut = 0
    for name, drawer in found.items():
        rank, chunk = map(int, name.split("-")[2:])
        view = chunkplan.view_chunk(plan, 0, chunk, dp_rank=rank, analysis=analysis, tokenizer=tokenizer)
        shown = blocks(drawer)
        assert len(shown) == min(len(view.segments), sections.MOST_SEGMENTS)
        for segment, (caption, text, marked) in zip(view.segments, shown, strict=False):
            assert f"sequence {segment.sequence_id:,}, [{segment.start:,}, {segment.end:,})" in caption
            assert segment.place is not None and caption.endswith(segment.place)
            assert segment.text is not None and segment.text.num_left_out == 0
            whole = "".join(piece.text for piece in segment.text.first).replace("\n", "↵\n")
            targets = "".join(piece.text for piece in segment.text.first if piece.is_target).replace("\n", "↵\n")
            head, cut, tail = text.partition("\n... ")
            if cut:
                num_cut += 1
                note, _, tail = tail.partition(" ...\n")
                left = segment.end - segment.start - sections.MOST_CHUNK_TOKENS
                assert note == f"{left} tokens left out here, {left} targets among them"
                assert whole.startswith(head) and whole.endswith(tail)
            else:
                assert segment.end - segment.start <= sections.MOST_CHUNK_TOKENS
                assert (text, marked) == (whole, targets)
    assert num_cut >= 2, "both parts of the long one"


def test_text_of_the_data_stays_text(plan: Plan, tmp_path: Path) -> None:
    """What is markup in a record makes no tag and no script, and can be read as it is."""
    page = write_and_read(tmp_path / "page.html", plan)
    html_text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert [tag for tag, _ in page.tags if tag in ("img", "b")] == []
    assert "<script>window" not in html_text
    assert any(HOSTILE in text for drawer in drawers(tmp_path / "page.html").values() for _, text, _ in blocks(drawer))
    assert [kind for kind, _ in page.scripts] == ["application/json", "", ""]
    assert page.scripts[1][1] == PLOTLY


def test_a_page_has_no_more_than_some_chunks_segments_and_tokens(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so, and what shows the rest; each rank has its first chunks."""
    page = write_and_read(tmp_path / "page.html", plan)
    [step] = plan.iter_steps()
    busy = next(chunk for chunks in step.chunks.values() for chunk in chunks if len(chunk.segments) > 6)
    assert f"The first 6 segments of {len(busy.segments)} are here." in page.text
    assert "chunkplan inspect --step 0 --rank R --chunk C --text" in page.text
    assert "of each rank alike" not in page.text
    monkeypatch.setattr(sections, "_MOST_CHUNKS", 2)
    page = write_and_read(tmp_path / "page.html", plan)
    assert list(drawers(tmp_path / "page.html")) == ["chunk-0-0-0", "chunk-0-1-0"]
    num_chunks = sum(map(len, step.chunks.values()))
    assert f"The first 2 of {num_chunks} chunks are here, of each rank alike." in page.text


@pytest.mark.parametrize("gone", ["tokenizer", "analysis"])
def test_without_text_the_positions_are_there_and_why(plan: Plan, tmp_path: Path, gone: str) -> None:
    shutil.rmtree(tmp_path / gone)
    page = write_and_read(tmp_path / "page.html", plan)
    assert page.text.count("Text is not shown: ") == 1
    shown = [segment for drawer in drawers(tmp_path / "page.html").values() for segment in blocks(drawer)]
    assert shown and all("sequence " in caption and text == "" for caption, text, _ in shown)
    assert all((".jsonl:" in caption) == (gone == "tokenizer") for caption, _, _ in shown)


def test_a_tokenizer_that_moved_can_be_given(plan: Plan, tmp_path: Path) -> None:
    whole = write_and_read(tmp_path / "page.html", plan).text
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    assert write_and_read(tmp_path / "page.html", plan, tokenizer=tmp_path / "moved").text == whole


def test_segments_that_the_analysis_has_not_are_an_error(plan: Plan, tmp_path: Path) -> None:
    [step] = plan.iter_steps()
    segments = [[segment.__dict__ for segment in chunk.segments] for chunks in step.chunks.values() for chunk in chunks]
    segments[0][0] = {**segments[0][0], "end": 10**6}
    change_value(plan.path, "chunks", "segments", 0, segments[0])
    with pytest.raises(DataError, match=r"the analysis has no tokens \[\d+, 1000000\)"):
        chunkplan.write_report(tmp_path / "page.html", plan)
