"""A plan and a tuning to make pages of, and a page as a reader of its HTML sees it."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from plotly.offline import get_plotlyjs

import chunkplan
from chunkplan.cost.shape import QWEN2_5_7B
from chunkplan.planfile.plan import Plan
from chunkplan.tuning.document import tuning_document

#: What must stay text wherever it is shown.
HOSTILE = '</script><img src=x onerror="window.hacked=1"><script>window.hacked=2</script>\'"&`<b>bold</b>'


def build_plan(folder: Path, **changes: Any) -> Plan:
    """A plan of 60 sequences, one of them long, in 4 steps on two ranks of two stages, with its analysis beside it."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 60).astype(np.int32).clip(2, 4000)
    lengths[7] = 20_000
    np.save(folder / "lengths.npy", lengths)
    given: dict[str, Any] = {"chunk_size": 2048, "k": 2, "dp": 2, "pp": 2, "global_batch": 16, "cp": "off"}
    config = chunkplan.PlanConfig(**(given | changes))
    return chunkplan.build(folder / "lengths.npy", folder / "plan", config, workers=1)


def tuning_of(folder: Path) -> dict[str, Any]:
    """The document of a small tuning for the lengths of `build_plan`, in which some choices do not fit."""
    hardware = chunkplan.load_hardware("h100")
    options = chunkplan.TuneOptions(
        shape=QWEN2_5_7B,
        hardware=hardware,
        gpu_memory=66 << 30,
        tp=1,
        pp=4,
        global_batch=16,
        chunk_sizes=(1024, 4096, 16384),
        ks=(1, 4),
        schedules=("1f1b", "zero-bubble"),
        cp="off",
    )
    document = json.loads(json.dumps(tuning_document(chunkplan.tune(folder / "lengths.npy", options))))
    assert isinstance(document, dict)
    return document


def write_and_read(path: Path, shown: Any, **options: Any) -> Page:
    """Write a page to `path` and read it."""
    chunkplan.write_report(path, shown, **options)
    return Page(path.read_text(encoding="utf-8"))


def hostile_plan(plan: Plan) -> Plan:
    """`plan` with names of everything that are markup, estimated, and without its analysis."""
    manifest = json.loads(json.dumps(plan.manifest))
    cost_model = manifest["predictions"]["cost_model"]
    cost_model["shape"]["name"] = cost_model["hardware"]["name"] = manifest["config"]["schedule"] = HOSTILE
    manifest["analysis"] |= {"exact": False, "path": f"../{HOSTILE}"}
    return replace(plan, manifest=manifest)


def hostile_tuning(document: dict[str, Any]) -> dict[str, Any]:
    """`document` with names of everything that are markup."""
    document = json.loads(json.dumps(document))
    for row in document["baselines"]:
        row["name"] = HOSTILE
    for choice in document["choices"]:
        choice["schedule"] = choice["plan_only"] = HOSTILE
    for name in ("shape", "hardware"):
        document["cost_model"][name]["name"] = HOSTILE
    return document | {"speedup_over": HOSTILE}


#: What stands for plotly.js, which takes long to parse and has nothing of ours.
PLOTLY = "plotly.js"


class Page(HTMLParser):
    """The tags of a page with their attributes, its scripts (type, text), the cells of its tables, all other text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[str, str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._open = ""
        self._caption = ""
        self.feed(html.replace(get_plotlyjs(), PLOTLY))

    @property
    def charts(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Figures by chart and label."""
        [block] = [text for kind, text in self.scripts if kind == "application/json"]
        charts: dict[str, dict[str, dict[str, Any]]] = json.loads(block)
        return charts

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "wbr":
            return
        self._open = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type") or "", ""))
        elif tag == "caption":
            self._caption = ""
        elif tag == "tr":
            self.tables[self._caption].append([])
        elif tag in ("td", "th"):
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "caption":
            self.tables[self._caption] = []
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
            return
        if self._open == "caption":
            self._caption += data
        elif self._open in ("td", "th"):
            self.tables[self._caption][-1][-1] += data
        if self._open != "style":
            self.text += data
