"""The page of `inspect --html` in a real browser: drawn, readable wherever it is read, and silent."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.planfile.plan import Plan
from tests.support.page_cases import HOSTILE, hostile_plan, hostile_tuning
from tests.support.page_scripts import LOOK_AT_TEXT, OVERLAPS, TICKS, TRY_TO_LEAVE
from tests.support.places import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason="playwright, which drives a browser, is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here to open pages in")

Open = Callable[..., tuple[Any, list[str]]]
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
CHARTS = ["lengths-chart", "candidates-chart", "steps-chart", "gantt-chart"]

#: Of text in pixels, and its contrast with what is behind it (WCAG 2, level AA).
SMALLEST, CONTRAST = 11, 4.5


def write_page(plan: Plan, tuning: dict[str, Any], folder: Path) -> Path:
    (folder / "tune.json").write_text(json.dumps(tuning), encoding="utf-8")
    chunkplan.write_report(folder / "page.html", plan, tuning=folder / "tune.json")
    return folder / "page.html"


@pytest.fixture(scope="module")
def page_file(plan: Plan, tuning: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(plan, tuning, tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def open_page(browser: Any) -> Open:
    """`open(file, width, scheme)` -> the page, all its charts drawn, and what it complains of or asks of others."""

    def open_and_wait(file: Path, width: int = 1280, scheme: str = "light") -> tuple[Any, list[str]]:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(30_000)
        trouble: list[str] = []
        page.on("console", lambda message: trouble.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
        page.on("request", lambda request: None if request.url == file.as_uri() else trouble.append(request.url))
        page.goto(file.as_uri())
        drawn = "(chart) => chart.querySelector('.plot-container')"
        page.wait_for_function(f"[...document.querySelectorAll('.chart')].every({drawn})")
        return page, trouble

    return open_and_wait


@pytest.fixture(scope="module")
def page(open_page: Open, page_file: Path) -> Any:
    return open_page(page_file)[0]


def x_range(page: Any, chart: str = "gantt-chart") -> list[float]:
    return list(page.evaluate("name => document.getElementById(name).layout.xaxis.range", chart))


def wait_for_range(page: Any, old: list[float]) -> list[float]:
    page.wait_for_function(
        "old => document.getElementById('gantt-chart').layout.xaxis.range.some((end, place) => end !== old[place])",
        arg=old,
    )
    return x_range(page)


@pytest.mark.parametrize(
    "width, scheme",
    [
        *((1280, "light"), (390, "dark")),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((1280, "dark"), (390, "light"))),
    ],
)
def test_all_is_drawn_and_readable(open_page: Open, page_file: Path, width: int, scheme: str) -> None:
    """No complaint, no request, nothing wider than the window, all text large enough and in contrast."""
    page, trouble = open_page(page_file, width, scheme)
    for chart in CHARTS:
        box = page.locator(f"#{chart} svg.main-svg").first.bounding_box()
        marks = page.locator(f"#{chart} .trace path").evaluate_all(
            "all => all.filter((each) => each.getBoundingClientRect().height > 0).length"
        )
        assert 250 < box["width"] <= width
        assert box["height"] > 150
        assert marks > 3, chart
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    seen = page.evaluate(LOOK_AT_TEXT)
    assert len(seen) > 100
    assert {words: look for words, look in seen.items() if look[0] < SMALLEST or look[1] < CONTRAST} == {}
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    assert dark == (scheme == "dark")
    assert trouble == []
    page.close()


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.soak), "dark"])
def test_examples_of_an_analysis_are_readable(open_page: Open, tmp_path: Path, scheme: str) -> None:
    """On a phone, targets and special tokens as well; what is markup is text."""
    said = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": f"{'long' * 99} {HOSTILE}"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": said}) + "\n", encoding="utf-8")
    analysis = chunkplan.analyze(
        tmp_path / "chat.jsonl", tmp_path / "analysis", tokenizer=ROOT / "sample_data" / "tokenizer"
    )
    chunkplan.write_report(tmp_path / "page.html", analysis)
    page, trouble = open_page(tmp_path / "page.html", 390, scheme)
    seen = page.evaluate(LOOK_AT_TEXT)
    assert {words: look for words, look in seen.items() if look[0] < SMALLEST or look[1] < CONTRAST} == {}
    assert any(words.startswith("MARK long") for words in seen)
    assert page.locator("pre .special").count() == 4, "of one sequence, which is the shortest and the longest"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("[window.hacked, document.images.length]") == [None, 0]
    assert trouble == []
    page.close()


def test_another_step_can_be_chosen(page: Any) -> None:
    select = page.locator("#gantt select")
    labels = select.locator("option").all_text_contents()
    assert len(labels) > 1
    before = x_range(page)
    select.select_option(labels[1])
    after = wait_for_range(page, before)
    select.select_option(labels[0])
    assert wait_for_range(page, after) == before


def test_a_step_zooms_by_dragging_and_by_keys(page: Any) -> None:
    """A drag over a part of the time shows that part; the buttons work with the keyboard alone."""
    whole = x_range(page)
    page.locator("#gantt-chart").scroll_into_view_if_needed()
    box = page.locator("#gantt-chart .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40, steps=4)
    page.mouse.up()
    part = wait_for_range(page, whole)
    assert part == pytest.approx([whole[1] / 4, whole[1] / 2], rel=0.05)
    buttons = page.get_by_role("group", name="Zoom").last
    for name in ("Zoom in", "Later", "Zoom out", "Earlier"):
        buttons.get_by_role("button", name=name).press("Enter")
        part = wait_for_range(page, part)
    assert part[1] - part[0] == pytest.approx(whole[1] / 4, rel=0.05)
    buttons.get_by_role("button", name="Whole").press("Enter")
    assert wait_for_range(page, part) == whole


def test_nothing_beyond_the_data_can_be_gone_to(page: Any) -> None:
    """Neither earlier than the start, nor later than the end, nor further out than all of it."""
    buttons = page.get_by_role("group", name="Zoom").last
    whole = x_range(page)
    for name in ("Earlier", "Later", "Zoom out"):
        for _ in range(3):
            buttons.get_by_role("button", name=name).press("Enter")
        assert x_range(page) == whole
    for name, end in (("Earlier", 0), ("Later", 1)):
        part = x_range(page)
        buttons.get_by_role("button", name="Zoom in").press("Enter")
        wait_for_range(page, part)
        for _ in range(9):
            buttons.get_by_role("button", name=name).press("Enter")
        page.wait_for_function(
            "([end, most]) => Math.abs(document.getElementById('gantt-chart').layout.xaxis.range[end] - most) < 1e-9",
            arg=[end, whole[end]],
        )
    buttons.get_by_role("button", name="Whole").press("Enter")


@pytest.mark.parametrize(("chart", "place"), [("steps-chart", 0), ("gantt-chart", 1)])
def test_zooming_in_ends_where_there_is_still_something_to_see(page: Any, chart: str, place: int) -> None:
    whole = x_range(page, chart)
    least = page.evaluate("name => document.getElementById(name).layout.meta.narrowest", chart)
    buttons = page.get_by_role("group", name="Zoom").nth(place)
    for _ in range(28):
        buttons.get_by_role("button", name="Zoom in").press("Enter")
    low, high = x_range(page, chart)
    assert high - low == pytest.approx(least)
    assert (whole[1] - whole[0]) / 1000 <= least < whole[1] - whole[0]
    buttons.get_by_role("button", name="Whole").press("Enter")


def test_a_bar_says_what_it_is(page: Any) -> None:
    bar = page.locator("#gantt-chart .trace.bars .point").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = page.locator("#gantt-chart .hovertext").first
    hover.wait_for()
    assert "forward: chunk 0" in hover.text_content()
    assert "tokens" in hover.text_content()
    assert "rank 0 stage 0" in hover.text_content()


def test_a_click_on_a_bar_opens_what_its_chunk_holds(page: Any) -> None:
    """One chunk at a time; only those of the step that is drawn are listed; keys alone open them as well."""
    drawer = page.locator("#gantt .drawers:visible")
    assert drawer.count() == 1
    bar = page.locator("#gantt-chart .trace.bars .point").first
    bar.scroll_into_view_if_needed()
    box = bar.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_function("document.activeElement.parentElement.id === 'chunk-0-0-0'")
    assert page.locator(".drawer[open]").evaluate_all("all => all.map((each) => each.id)") == ["chunk-0-0-0"]
    assert page.locator("#chunk-0-0-0 figcaption").first.is_visible()
    page.locator("#chunk-0-0-1 > summary").press("Enter")
    assert page.locator(".drawer[open]").evaluate_all("all => all.map((each) => each.id)") == ["chunk-0-0-1"]
    select = page.locator("#gantt select")
    labels = select.locator("option").all_text_contents()
    select.select_option(labels[1])
    page.wait_for_function(
        "label => document.querySelector('.drawers:not([hidden])').dataset.label === label", arg=labels[1]
    )
    assert drawer.count() == 1
    before = x_range(page)
    select.select_option(labels[0])
    wait_for_range(page, before)
    drawer.locator("> summary").click()


def test_of_a_chunk_that_is_not_here_a_click_says_so(open_page: Open, page_file: Path) -> None:
    page, trouble = open_page(page_file)
    page.evaluate("document.getElementById('chunk-0-0-0').remove()")
    page.evaluate("openChunk('gantt-chart', { y: 0, customdata: [0] })")
    assert page.locator(".drawers:visible .missing").text_content() == "Chunk 0 of rank 0 is not here."
    assert page.locator(".drawers:visible > p", has_text="chunkplan inspect --step 0 --rank R --chunk C").is_visible()
    page.evaluate("openChunk('gantt-chart', { y: 0, customdata: undefined })")
    assert page.locator(".drawer[open]").count() == 0
    assert trouble == []
    page.close()


def test_nothing_leaves_the_page_even_if_something_tries(open_page: Open, page_file: Path) -> None:
    """An image, a script and a fetch that got in somehow: none runs, and who listens is not called."""
    page, _ = open_page(page_file)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tried = page.evaluate(TRY_TO_LEAVE, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert tried == ["blocked"] * 3
    page.close()


@pytest.mark.soak
def test_names_that_are_markup_do_nothing(open_page: Open, plan: Plan, tuning: dict[str, Any], tmp_path: Path) -> None:
    """Shown in the head, in tables, and by charts where the mouse is: as they are."""
    page, trouble = open_page(write_page(hostile_plan(plan), hostile_tuning(tuning), tmp_path))
    page.locator("#candidates-chart").scroll_into_view_if_needed()
    box = page.locator("#candidates-chart .trace.scatter .point").last.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = page.locator("#candidates-chart .hovertext").first
    hover.wait_for()
    assert "<img src=x onerror=" in hover.text_content()
    assert "<b>bold</b>" in page.locator("header dd").first.text_content()
    assert page.evaluate("[window.hacked, document.images.length]") == [None, 0]
    assert trouble == []
    page.close()


def test_tables_can_be_read_without_scripts(browser: Any, page_file: Path) -> None:
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(page_file.as_uri())
    page.locator("summary", has_text="Steps").first.click()
    table = page.locator("details", has_text="Steps").first.locator("table")
    assert table.is_visible()
    assert table.locator("thead th[scope=col]").count() == 6
    assert table.locator("tbody th[scope=row]").count() == 4
    page.close()


def test_numbers_of_a_plan_are_all_in_sight(page: Any) -> None:
    """No table that is open from the start is cut, nor is any other one at its right."""
    tables = page.locator("#numbers .scroll")
    assert tables.count() > 4
    for side in ("Height", "Width"):
        cut = f"all => all.filter((each) => each.scroll{side} > each.client{side}).map((each) => each.ariaLabel)"
        assert tables.evaluate_all(cut) == []
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.locator(".scroll").evaluate_all(cut) == []
    page.evaluate("document.querySelectorAll('.behind details').forEach((each) => { each.open = false; })")


def open_plan_page(open_page: Open, folder: Path, width: int, **config: Any) -> Any:
    """The page of a plan of `folder`/lengths.npy, without a tuning."""
    plan = chunkplan.build(folder / "lengths.npy", folder / "plan", chunkplan.PlanConfig(**config), workers=1)
    chunkplan.write_report(folder / "page.html", plan)
    return open_page(folder / "page.html", width)[0]


@pytest.mark.soak
@pytest.mark.parametrize("widths", [(390,), (1280, 390, 1280)])
def test_on_a_phone_nothing_of_a_chart_lies_on_anything_else(
    open_page: Open, tmp_path: Path, widths: tuple[int, ...]
) -> None:
    """Of a step of one row and all there is, opened there or in a window that becomes as narrow, then wide again."""
    np.save(tmp_path / "lengths.npy", np.array([5, 9, 3000, 12]))
    page = open_plan_page(open_page, tmp_path, widths[0], chunk_size=512, k=2)
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        height = "document.querySelector('#gantt-chart svg').clientHeight"
        page.wait_for_function(f"isHigh => ({height} > 170) === isHigh", arg=width < 600)
        assert page.locator("#gantt-chart .legendtext").count() == 5
        assert page.evaluate(OVERLAPS) == []
        page.wait_for_function("most => document.documentElement.scrollWidth <= most", arg=width)
    page.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_sequences", "changes"), [(1, {"dp": 1, "pp": 1}), (900, {"chunk_size": 8192, "pp": 1, "global_batch": 450})]
)
def test_no_two_ticks_of_an_axis_say_the_same(
    open_page: Open, tmp_path: Path, num_sequences: int, changes: dict[str, Any]
) -> None:
    """Of a plan of one tiny sequence, and of one that is almost perfectly balanced."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(5, 900, num_sequences))
    page = open_plan_page(open_page, tmp_path, 390, **{"chunk_size": 512, "k": 2, "dp": 2} | changes)
    ticks = page.evaluate(TICKS)
    assert len(ticks) >= 6
    assert {axis: words for axis, words in ticks.items() if len(set(words)) < len(words)} == {}
    assert page.evaluate(OVERLAPS) == []
    page.close()
