"""Long use: from records to trained weights over hundreds of steps, and many plans by one process; nothing piles up."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunkplan import IntakeOptions, PlanConfig, analyze, build, load_plan, validate
from chunkplan.planfile.plan import Action
from chunkplan_runtime.execution.executor import RankExecutor
from chunkplan_runtime.train import main
from chunkplan_runtime.training.screen import Screen
from tests.support.long_tail import write_long_tail
from tests.support.places import ROOT
from tests.support.training_checks import hidden_files, lines

pytestmark = pytest.mark.soak

SAMPLES = ROOT / "sample_data"
CHUNK_SIZE = 128

#: 12 MB of 600, twice of what comes and goes; over 140 steps 90 KB each.
MOST_GROWTH = 0.02

#: Empty records are counted and left out.
SKIP = IntakeOptions(on_error="skip")


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(memory: list[int]) -> float:
    """By how much of its mean `memory` rises from its first to its last value, if it does so in both halves alike.

    Of each half a straight line is taken: a leak goes on, while an arena of the allocator is taken once.
    """
    halves = np.array_split(memory, 2)
    slopes = [float(np.polyfit(np.arange(len(half)), half, 1)[0]) for half in halves]
    return min(slopes) * len(memory) / float(np.mean(memory))


class Watched:
    """Of every step of a run: this process's memory after it, and the most tokens retained at once in it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.memory: list[int] = []
        self.retained: dict[int, int] = {}
        run, show = RankExecutor.run, Screen.show_step

        def run_watched(executor: RankExecutor, work: Any, num_target_tokens: int, around: Any, *more: Any) -> Any:
            @contextmanager
            def around_and_look(action: Action) -> Iterator[None]:
                with around(action):
                    yield
                held = {chunk_id for _, chunk_id in executor.in_flight}
                held |= {action.chunk_id} if action.op in ("forward", "recompute") else set()
                tokens = sum(work.chunks[chunk_id].num_tokens for chunk_id in held)
                self.retained[work.step] = max(self.retained.get(work.step, 0), tokens)

            return run(executor, work, num_target_tokens, around_and_look, *more)

        def show_and_measure(screen: Screen, row: dict[str, Any]) -> None:
            show(screen, row)
            self.memory.append(resident_bytes())

        patch.setattr(RankExecutor, "run", run_watched)
        patch.setattr(Screen, "show_step", show_and_measure)


def test_two_hundred_steps_of_many_shapes_learn_in_flat_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Analyzed, built, validated, trained; the longest sequence has 20 chunks and comes in every epoch."""
    data = write_long_tail(tmp_path, records=70, longest=2400)
    analysis = analyze(data, tmp_path / "analysis", SKIP, tokenizer=SAMPLES / "tokenizer")
    assert analysis.num_tokens.max() >= 20 * CHUNK_SIZE
    fifty_steps_an_epoch = len(analysis.num_tokens) // 50
    config = PlanConfig(chunk_size=CHUNK_SIZE, k=2, global_batch=fifty_steps_an_epoch, epochs=4)
    plan = build(analysis, tmp_path / "plan", config)
    assert validate(plan.path).ok

    watched = Watched(monkeypatch)
    arguments = ["--plan", plan.path, "--model-config", SAMPLES / "model" / "config.json", "--output", tmp_path / "run"]
    assert main([str(word) for word in (*arguments, "--lr", "1e-3", "--max-steps", "200", "--device", "cpu")]) == 0

    rows = lines(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows]
    assert len(losses) == len(watched.memory) == 200 and np.isfinite(losses).all()
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])
    predicted = plan.steps().column("peak_retained_tokens").to_pylist()
    assert [watched.retained[row["step"]] for row in rows] == predicted[:200]
    assert growth(watched.memory[60:]) < MOST_GROWTH, "memory grows with the steps"
    assert hidden_files(tmp_path / "run") == []


def test_thirty_plans_by_one_process_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other data each time, read by one process or two: no memory, file, thread, process or open file is left."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    memory, held = [], []
    before = {*multiprocessing.active_children()}  # pools that tests share
    for turn in range(30):
        folder = tmp_path / str(turn)
        folder.mkdir()
        data = write_long_tail(folder, records=40 + 7 * (turn % 5), longest=500 + 900 * (turn % 3), seed=turn)
        workers = 1 + turn % 2
        analysis = analyze(data, folder / "analysis", SKIP, tokenizer=SAMPLES / "tokenizer", workers=workers)
        config = PlanConfig(chunk_size=(64, 128, 512)[turn % 3], k=1 + turn % 4, dp=1 + turn % 2, pp=1 + turn % 3)
        build(analysis, folder / "plan", config)
        assert validate(folder / "plan").ok and load_plan(folder / "plan").content_hash
        assert hidden_files(folder) == [] and list(temporary.iterdir()) == []
        assert {*multiprocessing.active_children()} == before
        del analysis
        memory.append(resident_bytes())
        held.append((len(list(Path("/proc/self/fd").iterdir())), threading.active_count()))
    assert held[10:] == [held[10]] * 20, "files or threads are left open"
    assert growth(memory[10:]) < MOST_GROWTH, "memory grows with the plans"
