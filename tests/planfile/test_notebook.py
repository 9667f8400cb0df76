"""What a notebook shows of plans and analyses."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import chunkplan
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan

HOSTILE = "</td><script>alert(1)</script><img src=x onerror=\"alert('2')\">&amp;"


class Reader(HTMLParser):
    """The tags of a document, the attributes in them, and its text; fails where a tag is not closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(document)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


@pytest.fixture
def analysis(tmp_path: Path) -> Analysis:
    """Estimated, with a record rejected, from a file that is named to harm."""
    path = tmp_path / "<b onclick=x>&.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * number}) + "\n" for number in range(40)), encoding="utf-8")
    options = chunkplan.IntakeOptions(on_error="skip")
    return chunkplan.analyze([path], tmp_path / "analysis", options)


@pytest.fixture
def plan(tmp_path: Path, analysis: Analysis) -> Plan:
    return chunkplan.build(analysis, tmp_path / "plan", chunkplan.PlanConfig(chunk_size=32, k=1, dp=2))


def test_a_bare_file_of_lengths_is_shown(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.arange(1, 1001))
    text = Reader(chunkplan.load_analysis(tmp_path / "lengths.npy")._repr_html_()).text
    assert "1,000" in text and "500,500" in text and "median 500, 99% up to 990" in text
    assert "ESTIMATED" not in text


def test_nothing_of_a_file_becomes_markup(plan: Plan, analysis: Analysis) -> None:
    """Every string of a manifest is replaced by one that would run a script."""

    def spoil(value: object) -> object:
        if isinstance(value, dict):
            return {
                HOSTILE if isinstance(key, str) and "/" in key else key: spoil(inner) for key, inner in value.items()
            }
        if isinstance(value, list):
            return [spoil(inner) for inner in value]
        return HOSTILE if isinstance(value, str) else value

    harmless = Reader(plan._repr_html_())
    for one in (plan, analysis):
        spoilt = dataclasses.replace(one, path=Path(HOSTILE), manifest=spoil(one.manifest))
        shown = Reader(spoilt._repr_html_())
        assert shown.tags <= harmless.tags | {"div"} and not shown.tags & {"script", "img"}
        assert shown.attributes == {"style", "scope"}
        assert "<script>alert(1)</script>" in shown.text


def test_what_would_not_be_seen_is_a_symbol(analysis: Analysis) -> None:
    """The terminal shows it so too."""
    hidden = "a\x1b[31m\u202eb\x00.jsonl"
    sources = [{**analysis.manifest["sources"][0], "path": hidden}]
    one = dataclasses.replace(analysis, path=Path(hidden), manifest={**analysis.manifest, "sources": sources})
    shown = one._repr_html_()
    assert not {"\x1b", "\u202e", "\x00"} & {*shown}
    assert shown.count("a␛[31m\\u202eb␀.jsonl") == 2
