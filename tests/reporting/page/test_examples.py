"""Examples on a page: a few sequences as they are trained, those that say most, or why there are none."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import chunkplan
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis
from tests.support.command_line import Run
from tests.support.page_cases import HOSTILE, build_plan, write_and_read
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
CHAT = [{"role": "user", "content": f"Is <b>1</b> & 2 {HOSTILE}?"}, {"role": "assistant", "content": f"No: {HOSTILE}"}]


#: Of three sequences: two of conversations, of which the second has the roles changed, and a long text.
SHOWN = ["Shortest, first of its source", "Median", "Longest, first of its source"]


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    """Of a conversation that is markup, of a long text, and of a file of which nothing is kept."""
    records: dict[str, list[dict[str, Any]]] = {
        "chat": [{"messages": CHAT}, {"messages": CHAT[::-1]}],
        "empty": [{"text": " "}],
        "long": [{"text": " ".join(f"word{number}" for number in range(2000))}],
    }
    for name, rows in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    files = [tmp_path / f"{name}.jsonl" for name in records]
    return chunkplan.analyze(files, tmp_path / "analysis", tokenizer=tmp_path / "tokenizer")


def marked(html: str) -> list[str]:
    """What stands in each block of text, with brackets around what is marked; the rest of the page is left out."""
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", html, re.S)
    return [
        re.sub(r"<[^>]*>", "", re.sub(r'<mark class="[^"]*">(.*?)</mark>', r"⟦\1⟧", block, flags=re.S)).replace(
            "⟧⟦", ""
        )
        for block in blocks
    ]


def test_a_few_sequences_are_shown_with_their_targets(analysis: Analysis, tmp_path: Path) -> None:
    """The shortest, the median, the longest, and the first of each source, each of them once."""
    page = write_and_read(tmp_path / "page.html", analysis)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert [caption.split(":")[0] for caption in captions] == SHOWN
    blocks = marked(html)
    [chat] = (block for caption, block in zip(captions, blocks, strict=True) if "chat.jsonl:1:" in caption)
    long = blocks[captions.index(next(caption for caption in captions if caption.startswith("Longest")))]
    assert chat.count("⟦") == 1
    assert chat.endswith("&lt;/b&gt;&lt;|im_end|&gt;⟧↵\n")
    assert "assistant↵\n⟦No: " in chat
    assert '<span class="special">&lt;|im_start|&gt;</span>' in html
    assert '<mark class="special target">&lt;|im_end|&gt;</mark>' in html
    lengths = dict(zip(analysis.num_tokens.tolist(), analysis.num_target_tokens.tolist(), strict=True))
    longest = max(lengths)
    left = f"... {longest - 600:,} tokens left out here, {longest - 600:,} targets among them ..."
    assert left in long and "word1998" in long and "word1000" not in long
    assert f"long.jsonl:1: {longest:,} tokens, {lengths[longest]:,} targets" in page.text
    assert "empty.jsonl:1" not in page.text


def test_text_of_the_data_stays_text(analysis: Analysis, tmp_path: Path) -> None:
    page = write_and_read(tmp_path / "page.html", analysis)
    assert [tag for tag, _ in page.tags if tag in ("img", "b")] == []
    assert page.text.count("onerror=") == 4, "two in each of two conversations"
    before = write_and_read(tmp_path / "plan.html", build_plan(tmp_path))
    assert len(page.scripts) == len(before.scripts)


def test_the_same_analysis_gives_the_same_bytes(analysis: Analysis, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        chunkplan.write_report(tmp_path / name, analysis.path)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_tokenizer_that_moved_is_named_on_the_page_and_can_be_given(
    analysis: Analysis, tmp_path: Path, command: Run
) -> None:
    """The data themselves are not read again: they may be gone."""
    whole = write_and_read(tmp_path / "page.html", analysis).text
    (tmp_path / "tokenizer").rename(tmp_path / "moved")
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    page = write_and_read(tmp_path / "page.html", analysis)
    assert "Examples are not shown: the tokenizer that the analysis was made with" in page.text
    assert "Say with --tokenizer where it is" in page.text
    assert command("inspect", "analysis", "--html", "given.html", "--tokenizer", "moved").code == 0
    assert marked((tmp_path / "given.html").read_text(encoding="utf-8"))[0].count("⟦") == 1
    assert write_and_read(tmp_path / "page.html", analysis, tokenizer=tmp_path / "moved").text == whole
    with pytest.raises(UsageError, match="there is no tokenizer at"):
        chunkplan.write_report(tmp_path / "page.html", analysis, tokenizer=tmp_path / "nowhere")


def test_without_tokens_the_page_says_so(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one and two"}\n')
    options = chunkplan.IntakeOptions(tokens=False)
    analysis = chunkplan.analyze(tmp_path / "data.jsonl", tmp_path / "analysis", options, tokenizer=TOKENIZER)
    assert (
        "Examples are not shown: the analysis has no tokens." in write_and_read(tmp_path / "page.html", analysis).text
    )


def test_damaged_tokens_are_an_error(analysis: Analysis, tmp_path: Path) -> None:
    for file in (analysis.path / "tokens").rglob("*.arrow"):
        file.write_bytes(b"ARROW1")
    with pytest.raises(DataError, match="cannot read the tokens"):
        chunkplan.write_report(tmp_path / "page.html", analysis)


def test_examples_of_a_plan_are_of_what_it_holds(tmp_path: Path) -> None:
    """Those that are held out are not among them; of a source that is held out as a whole there is none."""
    lines = [json.dumps({"text": f"record{number} " + "word " * number}) for number in range(1, 41)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "the only one"}), encoding="utf-8")
    files = [tmp_path / "many.jsonl", tmp_path / "one.jsonl"]
    analysis = chunkplan.analyze(files, tmp_path / "analysis", tokenizer=TOKENIZER, workers=1)
    held_by = {}
    for part in ("train", "eval"):
        config = chunkplan.PlanConfig(chunk_size=64, k=1, global_batch=4, holdout=0.5, part=part)
        plan = chunkplan.build(analysis.path, tmp_path / part, config, workers=1)
        write_and_read(tmp_path / "page.html", plan)
        captions = re.findall(
            r"<figcaption>((?:Short|Med|Long|First).*?)</figcaption>", (tmp_path / "page.html").read_text()
        )
        held = {
            segment.sequence_id
            for step in plan.iter_steps()
            for chunks in step.chunks.values()
            for chunk in chunks
            for segment in chunk.segments
        }
        places = {analysis.place(sequence_id) for sequence_id in held}
        held_by[part] = {caption.split(": ")[1] for caption in captions}
        assert len(captions) >= 3
        assert held_by[part] <= places
        assert any("one.jsonl" in place for place in held_by[part]) == any("one.jsonl" in place for place in places)
    assert not held_by["train"] & held_by["eval"]


def test_a_tokenizer_for_a_plan_needs_its_analysis(tmp_path: Path) -> None:
    plan = build_plan(tmp_path)
    (tmp_path / "lengths.npy").unlink()
    with pytest.raises(UsageError, match="--tokenizer is of no use without the analysis of the plan"):
        chunkplan.write_report(tmp_path / "page.html", plan, tokenizer=TOKENIZER)
