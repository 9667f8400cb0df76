"""The page of `inspect --html`: whole in itself, the same each time, with the numbers of the plan."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

import chunkplan
from chunkplan.errors import DataError
from chunkplan.extras import pip_install
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import layout_words, seconds
from chunkplan.reporting import page
from chunkplan.reporting.per_step import per_step
from tests.support.page_cases import HOSTILE, PLOTLY, Page, hostile_plan, hostile_tuning, write_and_read
from tests.support.places import ROOT

Command = Callable[..., Any]

#: Pages stay small enough to send.
MOST_BYTES = 8 << 20

TOKENIZER = ROOT / "sample_data" / "tokenizer"


@pytest.fixture
def tuning_file(tuning: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "tune.json"
    path.write_text(json.dumps(tuning), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(plan: Plan) -> Page:
    """The page of the plan."""
    return write_and_read(plan.path.parent / "page.html", plan)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Page]:
    """Write a page and read it."""
    return partial(write_and_read, tmp_path / "page.html")


def test_a_page_fetches_nothing_and_runs_only_its_own_scripts(made: Page) -> None:
    """No tag names anything elsewhere, and the policy allows nothing but what is in the page, scripts by their hash."""
    fetching = [tag for tag, _ in made.tags if tag in ("img", "iframe", "object", "embed", "base", "form")]
    addresses = [value for _, attributes in made.tags for name, value in attributes.items() if name in ("src", "href")]
    assert not fetching
    assert [address for address in addresses if not address.startswith("#")] == ["data:,"]
    [policy] = [attributes["content"] for tag, attributes in made.tags if tag == "meta" and "http-equiv" in attributes]
    allowed = dict(entry.split(" ", 1) for entry in policy.split("; "))
    run = [text.replace(PLOTLY, get_plotlyjs()) for kind, text in made.scripts if kind != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run]
    assert allowed.pop("script-src").split() == [f"'sha256-{digest}'" for digest in hashes]
    assert allowed == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_names_that_are_markup_stay_text(
    made: Page, write: Callable[..., Page], plan: Plan, tuning: dict[str, Any], tmp_path: Path
) -> None:
    """Of the model, the GPUs, a path, a baseline: none becomes a tag, or ends the block of numbers."""
    (tmp_path / "tune.json").write_text(json.dumps(hostile_tuning(tuning)), encoding="utf-8")
    hostile = write(hostile_plan(plan), tuning=tmp_path / "tune.json")
    assert [tag for tag, _ in hostile.tags if tag == "img"] == []
    assert [kind for kind, _ in hostile.scripts] == [kind for kind, _ in made.scripts]
    assert hostile.text.count("onerror=") > 5
    assert HOSTILE.replace("`", "") in hostile.text
    assert HOSTILE in "".join(row[0] for row in hostile.tables["Ways to train"])
    [first] = [
        trace
        for trace in hostile.charts["candidates-chart"][""]["data"]
        if trace["marker"].get("symbol") == "diamond-open"
    ]
    assert "<" not in first["name"] + "".join(first["hovertext"])
    assert "<" not in next(text for kind, text in hostile.scripts if kind == "application/json")


def test_the_same_plan_gives_the_same_bytes_however_it_is_asked_for(
    plan: Plan, tuning_file: Path, tmp_path: Path, command: Command
) -> None:
    for name in ("a.html", "b.html"):
        chunkplan.write_report(tmp_path / name, plan.path, tuning=tuning_file)
    ran = command("inspect", plan.path, "--html", tmp_path / "c.html", "--tuning", tuning_file)
    assert (ran.code, ran.out) == (0, "")
    assert f"page in {tmp_path / 'c.html'}" in ran.err
    first = (tmp_path / "a.html").read_bytes()
    assert first == (tmp_path / "b.html").read_bytes() == (tmp_path / "c.html").read_bytes()
    assert len(first) < MOST_BYTES


def test_tables_say_what_the_plan_holds(write: Callable[..., Page], plan: Plan, tuning_file: Path) -> None:
    """Sequences and chunks by length, each step, each stage that is drawn, and what tune tried, without any script."""
    tables = write(plan, tuning=tuning_file).tables
    steps, totals = per_step(plan), plan.manifest["totals"]

    def total(caption: str, column: int) -> int:
        return sum(int(row[column].replace(",", "")) for row in tables[caption][1:])

    assert total("Sequences by their number of tokens", 1) == totals["num_sequences"]
    assert total("Sequences by their number of tokens", 3) == totals["num_tokens"]
    assert total("Chunks by their number of tokens", 1) == steps["num_chunks"].sum() - steps["num_zero_loss"].sum()
    assert total("Chunks by their number of tokens", 3) == totals["num_tokens"]
    assert [row[0] for row in tables["Steps"][1:]] == [str(step) for step in range(totals["num_steps"])]
    assert dict(map(tuple, tables["The plan in numbers"][1:]))["chunks"].startswith(f"{totals['num_chunks']:,}, ")
    drawn = tables["Stages of the steps that are drawn"][1:]
    assert sum(int(row[1]) for row in drawn if row[0].startswith("step 0,")) == sum(
        len(actions) for actions in next(plan.iter_steps(0)).actions.values()
    )
    assert any("chosen" in row[-1] for caption, table in tables.items() if "Choices" in caption for row in table)


def test_the_top_says_the_gain_the_gpus_the_sources_and_how_to_train(tmp_path: Path, command: Command) -> None:
    """The tuning is that of the workspace where none is given, for plans elsewhere if it is for the same."""
    texts = ["one and two " * times for times in (*range(2, 60), 9000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "one.jsonl").write_text(lines, encoding="utf-8")
    tried = ("--chunk-sizes", "512,2048", "--ks", "1,4", "--gpus", 8, "--global-batch", 16)
    for words in (
        ("analyze", "one.jsonl", "--tokenizer", TOKENIZER),
        ("tune", "--hardware", "h200", *tried),
        ("build", "--auto"),
        ("inspect", "--html", "page.html"),
    ):
        assert command(*words).code == 0
    made = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "none: keep " in made.text
    tuned = tmp_path / "chunkplan-out" / "tuning.json"
    found = json.loads(tuned.read_text(encoding="utf-8"))
    slower = [{**row, "step_seconds": 10 * row["step_seconds"]} for row in found["baselines"]]
    tuned.write_text(json.dumps({**found, "baselines": slower}), encoding="utf-8")
    assert command("inspect", "--html", "page.html").code == 0
    made = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    layout = [found["chosen"][name] for name in ("dp", "tp", "pp")]
    assert f"{10 * found['speedup_over_best']:.2f}x as fast as " in made.text
    assert "measure both" not in made.text
    close = [{**row, "step_seconds": 1.05 * found["chosen"]["step_seconds"]} for row in found["baselines"]]
    (tmp_path / "close.json").write_text(json.dumps({**found, "baselines": close}), encoding="utf-8")
    assert command("inspect", "chunkplan-out/analysis", "--html", "a.html", "--tuning", "close.json").code == 0
    top = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "1.05x as fast as " in top and "predictions may be off by 10%: measure both" in top
    assert "<h1>Qwen2.5-7B, all weights trained, on 8 x H200</h1>" in top
    assert f"8: {layout_words(*layout)}" in made.text
    assert "1 data source" in made.text and "one.jsonl" in made.text
    assert "chunkplan train --plan chunkplan-out/plan --model NAME" in made.text
    assert "candidates-chart" in made.charts
    shutil.copytree(tmp_path / "chunkplan-out" / "plan", tmp_path / "elsewhere")
    assert command("inspect", "elsewhere", "--html", "other.html").code == 0
    other = Page((tmp_path / "other.html").read_text(encoding="utf-8"))
    assert "candidates-chart" not in other.charts, "its analysis is not found, so nobody knows"
    assert "not known: chunkplan gain DATA --model Qwen2.5-7B --gpus 8xh200 --global-batch 16 finds it" in other.text
    analysis = ("--analysis", "chunkplan-out/analysis")
    assert command("inspect", "elsewhere", *analysis, "--html", "other.html").code == 0
    other = Page((tmp_path / "other.html").read_text(encoding="utf-8"))
    assert "candidates-chart" in other.charts and "the setting that tune chose" not in other.text


def test_the_gain_of_a_plan_with_other_settings_is_its_own(tmp_path: Path, command: Command) -> None:
    """And not that of the choice of the tuning, which is named beside it."""
    np.save(tmp_path / "lengths.npy", np.array([400, 300, 9000, 20, 70, 900] * 8))
    machine = ("--hardware", "h200", "--global-batch", 16)
    tried = ("--chunk-sizes", "2048,4096", "--ks", 1, "--gpus", 2)
    (tmp_path / "work").mkdir()
    assert command("tune", "lengths.npy", *machine, *tried, "--output", "work/tuning.json").code == 0
    tuned = json.loads((tmp_path / "work" / "tuning.json").read_text(encoding="utf-8"))
    layout = [word for name in ("dp", "pp") for word in (f"--{name}", tuned["chosen"][name])]
    build = ("build", "lengths.npy", *machine, *layout, "--chunk-size", 256, "--k", 2)
    assert command(*build, "--output", "work/other").code == 0
    assert command("inspect", "work/other", "--html", "page.html").code == 0
    made = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "candidates-chart" in made.charts
    assert f"the setting that tune chose takes {seconds(1e6 * tuned['chosen']['step_seconds'])}" in made.text
    assert command(*build[:-1], 3, "--dp", 4, "--output", "work/larger").code == 0
    assert command("inspect", "work/larger", "--html", "page.html").code == 0
    made = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "candidates-chart" not in made.charts and "not known: " in made.text


@pytest.mark.parametrize("change", ["gone", "another"])
def test_without_its_analysis_a_plan_is_shown_all_the_same(
    plan: Plan, tmp_path: Path, change: str, write: Callable[..., Page]
) -> None:
    shutil.copytree(plan.path, tmp_path / "plan")
    if change == "another":
        np.save(tmp_path / "lengths.npy", np.array([5, 6]))
    made = write(tmp_path / "plan")
    assert "Lengths before are not shown:" in made.text
    assert "Sequences by their number of tokens" not in made.tables
    assert "Chunks by their number of tokens" in made.tables
    assert [
        words for words in ("Lengths before, chunks after", "in sequences and in chunks") if words in made.text
    ] == []
    moved = write(tmp_path / "plan", analysis=plan.analysis_path)
    assert "Sequences by their number of tokens" in moved.tables


def test_an_analysis_that_is_given_has_to_be_the_plans(plan: Plan, tmp_path: Path) -> None:
    np.save(tmp_path / "other.npy", np.array([5, 6]))
    with pytest.raises(DataError, match="not the analysis of the plan"):
        chunkplan.write_report(tmp_path / "page.html", plan, analysis=tmp_path / "other.npy")


def test_an_analysis_shows_its_lengths_and_nothing_of_a_plan(
    plan: Plan, tmp_path: Path, command: Command, tuning_file: Path
) -> None:
    assert command("inspect", plan.analysis_path, "--html", "page.html").code == 0
    made = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert list(made.charts) == ["lengths-chart"]
    assert list(made.tables) == ["Sequences by their number of tokens"]
    assert command("inspect", plan.analysis_path, "--html", "page.html", "--tuning", tuning_file).code == 0
    assert "candidates-chart" in Page((tmp_path / "page.html").read_text(encoding="utf-8")).charts


@pytest.mark.parametrize(
    ("entries", "words"), [({"exact": False}, "ESTIMATED lengths"), ({"sample": 0.25}, "A SAMPLE of 25%")]
)
def test_lengths_that_are_not_all_or_not_exact_are_said_first(
    made: Page, write: Callable[..., Page], plan: Plan, entries: dict[str, Any], words: str
) -> None:
    manifest = {**plan.manifest, "analysis": {**plan.manifest["analysis"], **entries}}
    text = write(replace(plan, manifest=manifest)).text
    assert words in text
    assert text.index(words) < text.index("ChunkSize")
    assert words not in made.text


@pytest.mark.parametrize(
    "arguments",
    [
        ("--html", "page.html", "--json"),
        ("--html", "page.html", "--step", "0", "--rank", "0"),
        ("--html", "page.html", "--step", "4"),
        ("--html", "nowhere/page.html"),
        ("--html", "page.html", "--tuning", "nowhere.json"),
        ("--tuning", "tune.json"),
    ],
)
def test_what_does_not_go_together_or_is_not_there_leaves_the_old_page(
    plan: Plan, tmp_path: Path, command: Command, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "page.html").write_text("old", encoding="utf-8")
    ran = command("inspect", plan.path, *arguments)
    assert ran.code == 2
    assert "hint: " in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.pop("choices"),
        lambda document: document["choices"][0].pop("memory"),
        lambda document: document["baselines"][0].update(name=7),
        lambda document: document.update(pareto=[10**6]),
        lambda document: document["cost_model"].update(shape=3),
        lambda document: document["choices"][0].update(step_seconds=0),
        lambda document: document["baselines"][0].update(step_seconds=1e300),
        lambda document: document["chosen"]["memory"].update(total=0),
    ],
)
def test_a_damaged_tuning_is_refused_by_name(
    plan: Plan, tuning: dict[str, Any], tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    document = json.loads(json.dumps(tuning))
    change(document)
    (tmp_path / "tune.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DataError) as error:
        chunkplan.write_report(tmp_path / "page.html", plan, tuning=tmp_path / "tune.json")
    assert str(tmp_path / "tune.json") in str(error.value)
    assert not (tmp_path / "page.html").exists()


def test_without_plotly_the_extra_is_named(
    plan: Plan, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name for name in sys.modules if name.split(".")[0] == "plotly" or name.startswith(f"{page.__name__}.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name, value in vars(page).items() if type(value) is type(sys)]:
        monkeypatch.delattr(page, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    ran = command("inspect", plan.path, "--html", "page.html")
    assert (ran.code, ran.out) == (2, "")
    assert pip_install("report") in ran.err
    assert not list(tmp_path.iterdir())


def test_the_gain_on_a_page_is_against_the_way_that_was_named(
    plan: Plan, tuning: dict[str, Any], tmp_path: Path
) -> None:
    """As on the screen: not the fastest of today, which others are said to be; none where it does not fit."""
    rows = [{**row, "fits": True, "lost_tokens": 0.0, "step_seconds": 100.0} for row in tuning["baselines"]]
    rows[0] |= {"step_seconds": 2 * tuning["chosen"]["step_seconds"]}
    analysis = plan.path.parent / "lengths.npy"
    for named, said in ((rows[0]["name"], ", the fastest of today)"), (rows[1]["name"], " a step)"), (None, "")):
        (tmp_path / "tune.json").write_text(json.dumps({**tuning, "baselines": rows, "speedup_over": named}))
        made = write_and_read(tmp_path / "page.html", chunkplan.load_analysis(analysis), tuning=tmp_path / "tune.json")
        if named is None:
            assert "nothing to compare with" in made.text
        else:
            [found] = re.findall(rf"x as fast as {re.escape(named)} \((.*?\))", made.text)
            assert found.endswith(said.strip() if named == rows[1]["name"] else said)
