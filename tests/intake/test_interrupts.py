"""A run that is ended from outside leaves the old analysis, no process and no half of anything, and is gone on with."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from chunkplan import analyze, load_analysis
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.intake import reading
from tests.support.process_checks import PIECE_BYTES, ROOT, TOKENIZER, begin_analyze, in_group, left_behind, wait_until


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 0.7 MB of text, which is 12 pieces."""
    random = np.random.default_rng(0)
    words = (ROOT / "README.md").read_text().split()
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    with path.open("w") as file:
        while file.tell() < 12 * PIECE_BYTES:
            file.write(json.dumps({"text": " ".join(random.choice(words, 400))}) + "\n")
    return path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace with an analysis of something else."""
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "old"}\n')
    analyze(other, tmp_path / "space" / "analysis")
    return tmp_path / "space"


def finished(workspace: Path) -> set[str]:
    """The pieces in the cache that are whole."""
    return {path.parent.name for path in (workspace / "cache" / "pieces").glob("*/piece.json")}


@pytest.mark.parametrize(("number", "code", "line"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")])
@pytest.mark.parametrize("moment", ["starting", "at work"])
def test_an_interrupt_ends_all_processes_without_a_word_more_and_the_next_run_goes_on(
    data: Path, workspace: Path, number: signal.Signals, code: int, line: str, moment: str
) -> None:
    old = load_analysis(workspace / "analysis").content_hash
    before = finished(workspace)
    process = begin_analyze(data, workspace=workspace)
    wait_until(
        lambda: len(in_group(process.pid)) > 3 if moment == "starting" else len(finished(workspace) - before) > 2
    )
    os.killpg(process.pid, number)  # to the workers too, as a terminal does
    _, screen = process.communicate(timeout=10)
    assert process.returncode == code
    assert screen == line
    wait_until(lambda: not in_group(process.pid))
    assert load_analysis(workspace / "analysis").content_hash == old
    assert left_behind(workspace) == []
    if moment == "at work" and number == signal.SIGINT:
        kept = {key: (workspace / "cache" / "pieces" / key).stat().st_ino for key in finished(workspace) - before}
        assert 1 < len(kept) < 12
        again = begin_analyze(data, workspace=workspace)
        assert again.wait(timeout=100) == 0
        assert {key: (workspace / "cache" / "pieces" / key).stat().st_ino for key in kept} == kept
        assert load_analysis(workspace / "analysis").num_sequences == len(data.read_text().splitlines())


def test_a_run_that_is_killed_takes_its_workers_with_it_and_the_next_clears_up(data: Path, workspace: Path) -> None:
    old = load_analysis(workspace / "analysis").content_hash
    before = finished(workspace)
    process = begin_analyze(data, workspace=workspace)
    wait_until(lambda: finished(workspace) - before)
    process.kill()
    _, screen = process.communicate(timeout=10)
    wait_until(lambda: not in_group(process.pid))
    assert "Traceback" not in screen
    assert load_analysis(workspace / "analysis").content_hash == old
    analyze(workspace.parent / "other.jsonl", workspace / "analysis")
    assert left_behind(workspace) == []


def test_two_runs_at_once_in_one_cache_both_succeed(data: Path, tmp_path: Path) -> None:
    """One ends while the other is at work, and removes nothing of what that has found in the cache."""
    lines = data.read_text().splitlines(keepends=True)
    for name, count in (("much", 100), ("little", 50)):
        (tmp_path / f"{name}.jsonl").write_text("".join(lines[:count]))
    much, little = tmp_path / "much.jsonl", tmp_path / "little.jsonl"
    runs = [
        begin_analyze(file, "--output", tmp_path / file.stem, workspace=tmp_path / "space") for file in (much, little)
    ]
    for run in runs:
        _, screen = run.communicate(timeout=200)
        assert run.returncode == 0, screen
    assert left_behind(tmp_path) == []
    alone = analyze(little, tmp_path / "alone", tokenizer=TOKENIZER, workers=1, cache=tmp_path / "own")
    assert load_analysis(tmp_path / "little").content_hash == alone.content_hash
    assert load_analysis(tmp_path / "much").num_sequences == 100


def test_what_a_run_found_in_the_cache_stays_there_until_it_ends(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for path in (first, second):
        path.write_text(json.dumps({"text": path.stem}) + "\n")
    analyze(first, tmp_path / "out", tokenizer=TOKENIZER)

    def other(*done: int | None) -> None:
        analyze(second, tmp_path / "other", tokenizer=TOKENIZER)

    again = analyze([first, second], tmp_path / "out", tokenizer=TOKENIZER, progress=other)
    assert again.num_sequences == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fills_up_is_a_clear_error_and_leaves_nothing_half_written(
    data: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", PIECE_BYTES)
    old = load_analysis(workspace / "analysis").content_hash
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # of the workers too
    try:
        with pytest.raises(UsageError, match="no room is left to write") as caught:
            analyze(data, workspace / "analysis", tokenizer=TOKENIZER, workers=workers)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "make room" in caught.value.hint
    assert load_analysis(workspace / "analysis").content_hash == old
    assert left_behind(workspace) == []


def test_a_cache_that_cannot_be_written_is_a_usage_error(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(UsageError, match=f"cannot write {cache}"):
            analyze(data, tmp_path / "out", cache=cache)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", ["starting", "at work"])
def test_workers_that_are_killed_never_make_a_run_wait(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(reading, "ONE_PROCESS_BYTES", 0)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", PIECE_BYTES)

    others = {*multiprocessing.active_children()}  # pools that tests share

    def kill() -> None:
        wait_until(lambda: len(multiprocessing.active_children()) == len(others) + 2)
        if when == "at work":
            wait_until(lambda: finished(tmp_path))
        workers = [process for process in multiprocessing.active_children() if process not in others]
        for worker in workers[: 2 if when == "starting" else 1]:
            worker.kill()

    threading.Thread(target=kill).start()
    with pytest.raises(ChunkplanError, match="was killed or not started"):
        analyze(data, tmp_path / "out", tokenizer=TOKENIZER, workers=2)
    assert {*multiprocessing.active_children()} == others
    assert left_behind(tmp_path) == []


SCRIPT = """
from chunkplan import analyze
from chunkplan.intake import reading
reading.ONE_PROCESS_BYTES = 0
print(analyze({data!r}, {out!r}, workers=2).num_sequences)
"""


@pytest.mark.parametrize(
    "how", ["file", *(pytest.param(how, marks=pytest.mark.soak) for how in ("command", "standard input"))]
)
def test_a_script_that_does_all_its_work_as_it_is_imported_can_use_processes(
    data: Path, tmp_path: Path, how: str
) -> None:
    script = SCRIPT.format(data=str(data), out=str(tmp_path / "out"))
    (tmp_path / "script.py").write_text(script)
    arguments = {"file": [str(tmp_path / "script.py")], "command": ["-c", script], "standard input": []}[how]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=script if how == "standard input" else None,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{len(data.read_text().splitlines())}\n", "")


def test_a_process_that_must_not_start_others_does_the_work_itself(data: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_analyze_with_processes, (data, tmp_path / "out")) == len(data.read_text().splitlines())


def _analyze_with_processes(data: Path, output: Path) -> int:
    reading.ONE_PROCESS_BYTES = 0
    return analyze(data, output, workers=2).num_sequences
