"""Lines of progress: a rate and the time left where there is something to tell them from, in a unit that fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chunkplan import TuneOptions, tune
from chunkplan.config.plan import PlanConfig
from chunkplan.planning.batches import step_blocks
from chunkplan.quantities import Pace, left_words, seconds
from chunkplan_cli import progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time, which stands still; lines are due every four seconds."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(progress, "LINE_EVERY", 4.0)
    return now


def test_rate_and_time_left_are_said_once_enough_is_done_to_tell(
    now: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not within the first seconds, nor of one run of hundreds, whatever came before the first of them."""
    with progress.progress("simulating", "runs") as report:
        for now.seconds, done in ((55.0, 1), (60.0, 100), (64.0, 120), (68.0, 154), (80.0, 252)):
            report(done, 540)
    assert capsys.readouterr().err.splitlines() == [
        "simulating: 1 of 540 runs (0%)",
        "simulating: 100 of 540 runs (18%)",
        "simulating: 120 of 540 runs (22%)",
        "simulating: 154 of 540 runs (28%), 6.8 runs/s, 57 s left",
        "simulating: 252 of 540 runs (46%), 8.2 runs/s, 35 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ((0.5, 5.0), "planning: 8 of 400 steps (2%), 0.9 steps/s, 7 min left"),
        ((6.0,), "planning: 4 of 400 steps (1%), 0.7 steps/s, 10 min left"),
        ((0.5, 0.6, 5.5), "planning: 12 of 400 steps (3%), 0.8 steps/s, 8 min left"),
    ],
)
def test_planning_says_from_the_fifth_second_on_how_long_it_will_take_whatever_is_done(
    now: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, ...],
    line: str,
) -> None:
    """By the pace so far, without a terminal in a line, on one beside the bar."""
    monkeypatch.setattr(progress, "LINE_EVERY", 10.0)
    monkeypatch.setattr("chunkplan.compiled.has_compiled", lambda: False)
    with progress.planning_progress() as report:
        for done, now.seconds in enumerate(seconds, 1):
            report(4 * done, 400)
    assert capsys.readouterr().err.splitlines() == [line]


def test_what_was_compiled_before_the_first_steps_does_not_count(
    now: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkplan.compiled.has_compiled", lambda: True)
    with progress.planning_progress() as report:
        for now.seconds, done in ((60.0, 10), (64.0, 20), (68.0, 28)):
            report(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "planning: 10 of 100 steps (10%)",
        "planning: 20 of 100 steps (20%)",
        "planning: 28 of 100 steps (28%), 2.0 steps/s, 36 s left",
    ]


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ({"dp": 8}, 1024),
        ({"dp": 8, "pp": 4}, 256),
        ({"dp": 64, "pp": 8}, 16),
        ({"dp": 256, "pp": 64}, 1),
        ({"dp": 8, "pp": 4, "schedule": "search", "cp": "off"}, 1),
        ({"balance": "search", "cp": "off", "dp": 8}, 4),
    ],
)
def test_steps_are_planned_and_reported_in_fewer_at_a_time_where_each_takes_long(
    layout: dict[str, Any], steps: int
) -> None:
    config = PlanConfig(chunk_size=8192, k=4, **layout)
    blocks = list(step_blocks(lambda _: np.ones(256 * 2000, np.int32), config))
    assert blocks[0].sizes.size == steps
    assert sum(block.sizes.size for block in blocks) == 2000


def test_phases_count_for_themselves_and_no_line_comes_twice(
    now: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress_of_phases("runs") as report:
        for now.seconds, doing, done in (
            *((5.0, "simulating", 70), (10.0, "simulating", 140), (15.0, "simulating", 140)),
            *((20.0, "baselines", 3), (22.0, "baselines", 4), (30.0, "baselines", 21)),
        ):
            report(doing, done, 140 if doing == "simulating" else 21)
    assert capsys.readouterr().err.splitlines() == [
        "simulating: 70 of 140 runs (50%)",
        "simulating: 140 of 140 runs (100%)",
        "baselines: 3 of 21 runs (14%)",
        "baselines: 21 of 21 runs (100%), 2.1 runs/s, 0 s left",
    ]


@pytest.mark.parametrize("thorough", [False, True])
def test_a_tuning_reports_one_progress_with_the_best_so_far(tmp_path: Path, thorough: bool) -> None:
    np.save(tmp_path / "lengths.npy", np.geomspace(100, 20_000, 60).astype(np.int32))
    calls: list[tuple[str, int, int]] = []
    options = TuneOptions(gpus=2, chunk_sizes=(4096, 8192), ks=(1, 4), global_batch=16, thorough=thorough)
    found = tune(tmp_path / "lengths.npy", options, progress=lambda *call: calls.append(call))
    counts = [done for _, done, _ in calls]
    assert counts == sorted(counts) and 0 <= counts[0] <= counts[-1] <= 100
    assert {total for _, _, total in calls} == {100}
    assert calls[-1][0] == f"best plan so far {seconds(found.best.step_ns / 1e3)}"


def test_reading_says_no_time_left_before_it_can_be_told(
    now: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first bytes come late, because workers start: they say nothing of how long all will take."""
    with progress.reading_progress() as report:
        for now.seconds, megabytes in ((10.0, 1), (15.0, 200), (30.0, 400)):
            report(megabytes * 1_000_000, 600_000_000, megabytes * 1000)
        for now.seconds, megabytes in ((35.0, 500), (70.0, 900)):
            report(megabytes * 1_000_000, None, megabytes * 1000)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1 of 600 MB (0%), 100 tokens/s",
        "reading: 200 of 600 MB (33%), 13.3K tokens/s",
        "reading: 400 of 600 MB (66%), 13.3K tokens/s, 15 s left",
        "reading: 500 MB, 14.3K tokens/s",
        "reading: 900 MB, 12.9K tokens/s",
    ]


def test_a_pace_follows_work_that_becomes_faster() -> None:
    """Half of it in a hundred seconds, the other half in ten: the estimate is never more than twice too long."""
    pace = Pace()
    rates = {now: pace.rate(min(now, 100) + max(0, now - 100) * 10, 200, float(now)) for now in range(110)}
    assert rates[5] is rates[9] is None
    assert rates[50] == pytest.approx(1, rel=0.1)
    assert rates[109] == pytest.approx(145 / 55, rel=0.1)


def test_a_pace_is_told_after_two_minutes_of_whatever_was_done() -> None:
    """Of ten thousand steps the first hundred are enough then; as long as nothing is done, nothing is told."""
    pace = Pace()
    assert pace.rate(0, 10_000, 0.0) is None
    assert pace.rate(0, 10_000, 200.0) is None
    assert pace.rate(100, 10_000, 300.0) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0 s left"), (89, "89 s left"), (95, "2 min left"), (5399, "90 min left"), (5939, "1.6 h left")],
)
def test_time_left_is_in_a_unit_that_fits(seconds: float, words: str) -> None:
    assert left_words(seconds) == words
