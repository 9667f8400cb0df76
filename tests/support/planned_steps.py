"""Plans of a few lengths, for tests of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from chunkplan import PlanConfig, build, validate
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.plan import PlanStep
from tests.support.plain import plain_cost


def write_analysis(folder: Path, lengths: list[int], seed: int = 0) -> Path:
    """An analysis of random tokens with random target masks."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    writer = AnalysisWriter(folder)
    for record, length in enumerate(lengths):
        target = random.random(length) < 0.6
        target[0] = False
        writer.add(0, record, random.integers(0, 50, length, dtype=np.int32), target)
    writer.finish(exact=True, sources=[{"path": "d.jsonl", "schema": "text", "records": len(lengths)}])
    return folder


def save(path: Path, lengths: list[int]) -> Path:
    """A file of lengths."""
    np.save(path / "lengths.npy", np.array(lengths))
    return path / "lengths.npy"


def first_step(folder: Path, lengths: list[int], **config: Any) -> PlanStep:
    """The first step of a plan of some lengths, which has to keep every invariant."""
    settings = PlanConfig(**{"chunk_size": 8, "k": 1, "cp": "off", **config})
    plan = build(save(folder, lengths), folder / "plan", settings, cost=plain_cost())
    assert validate(plan.path).ok
    return next(plan.iter_steps())
