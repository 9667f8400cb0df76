"""Lines of progress: a rate and the time left where there is something to tell them from, in a unit that fits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from chunkplan import TuneOptions, tune
from chunkplan.quantities import Pace, left_words
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


def test_a_tuning_reports_all_that_it_simulates_phase_by_phase(tmp_path: Path) -> None:
    """Each phase by itself up to its end, but that of fewest GPUs, which ends with the first number that is enough."""
    np.save(tmp_path / "lengths.npy", np.geomspace(100, 20_000, 60).astype(np.int32))
    calls: list[tuple[str, int, int]] = []
    options = TuneOptions(gpus=2, chunk_sizes=(4096, 8192), ks=(1, 4), global_batch=16)
    tune(tmp_path / "lengths.npy", options, progress=lambda *call: calls.append(call))
    phases = list(dict.fromkeys(doing for doing, _, _ in calls))
    assert phases[0].startswith("simulating dp ") or phases[0] == "comparing layouts"
    assert "baselines" in phases and phases[-1].startswith("fewest GPUs, ")
    assert len(phases) > 4
    for phase in phases:
        counts = [(done, total) for doing, done, total in calls if doing == phase]
        assert all(0 < done <= total for done, total in counts), phase
        assert counts[-1][0] == counts[-1][1], phase


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
