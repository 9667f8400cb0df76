"""Processes that read begin before there is a task for them, and the last at work use what the others leave free."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from chunkplan import analyze
from chunkplan.errors import DataError
from chunkplan.intake import reading
from chunkplan.intake.runners import Workers
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How many processes are started before there is a task, and "loads" where this one loads the tokenizer."""
    seen: list[Any] = []
    start, load = Workers.start, reading.load_tokenizer

    def watched_start(workers: Workers, count: int) -> None:
        seen.append(count)
        start(workers, count)

    def watched_load(*arguments: Any, **options: Any) -> Any:
        seen.append("loads")
        return load(*arguments, **options)

    monkeypatch.setattr(Workers, "start", watched_start)
    monkeypatch.setattr(reading, "load_tokenizer", watched_load)
    return seen


def test_processes_load_the_tokenizer_while_the_program_does_where_there_is_something_to_read(
    many: Path, tmp_path: Path, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkplan.intake.store.time_ns", lambda: time.time_ns() + 10**10)  # long after it was written
    analysis = analyze(many, tmp_path / "out", tokenizer=TOKENIZER, workers=2)
    assert events == [2, "loads"]
    events.clear()
    again = analyze(many, tmp_path / "out", tokenizer=TOKENIZER, workers=2)
    assert events == ["loads"]
    assert again.content_hash == analysis.content_hash


def test_the_last_process_at_work_uses_the_threads_of_those_that_have_nothing_to_do(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = analyze(many, tmp_path / "alone", tokenizer=TOKENIZER, workers=1, use_cache=False)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 8 << 20)
    end = Workers.__exit__
    num_threads = []
    monkeypatch.setattr(Workers, "__exit__", lambda self, *_: [num_threads.append(self.num_threads.value), end(self)])
    analysis = analyze(many, tmp_path / "out", tokenizer=TOKENIZER, workers=3, use_cache=False)
    assert num_threads[0] == 3
    assert analysis.content_hash == alone.content_hash


def test_a_tokenizer_that_cannot_be_loaded_is_reported_once_and_leaves_no_process(
    many: Path, tmp_path: Path, events: list[Any]
) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    others = {*multiprocessing.active_children()}  # pools that tests share
    with pytest.raises(DataError, match="not a tokenizer"):
        analyze(many, tmp_path / "out", tokenizer=broken, workers=2)
    assert events == [2, "loads"]
    assert {*multiprocessing.active_children()} == others
