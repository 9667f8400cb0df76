"""Plans and analyses to break: one that is small enough to know by heart, and one that an earlier release wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from chunkplan import PlanConfig, build
from chunkplan.planfile.analysis_writer import AnalysisWriter
from tests.support.manifests import change_manifest
from tests.support.places import GOLDEN

LENGTHS = [5, 9, 3, 40, 7, 7, 2, 12, 50, 6, 4, 11, 13, 9, 10, 8, 12, 9, 14, 10]


@pytest.fixture
def analysis(tmp_path: Path) -> Path:
    """20 sequences, two of them split by a ChunkSize of 16: one of 40 tokens, one of 50."""
    folder = tmp_path / "analysis"
    folder.mkdir()
    writer = AnalysisWriter(folder)
    random = np.random.default_rng(0)
    for record, length in enumerate(LENGTHS):
        target = random.random(length) < 0.7
        target[0] = False
        writer.add(0, record, random.integers(0, 50, length, dtype=np.int32), target)
    writer.finish(
        exact=True,
        sources=[{"path": "d.jsonl", "schema": "text", "records": len(LENGTHS)}],
        rejected={},
        max_token_id=49,
    )
    return folder


@pytest.fixture
def plan(tmp_path: Path, analysis: Path) -> Path:
    """Two steps of ten sequences on two ranks of two stages; K = 2, so the split sequences recompute."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, dp=2, pp=2, tail_sharing=True)
    return build(analysis, tmp_path / "plan", config).path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A folder with a plan and its analysis, under the names `plan` and `analysis`."""
    folder = tmp_path / "golden"
    for kind in ("plan", "analysis"):
        shutil.copytree(GOLDEN / f"{kind}-4", folder / kind)
    change_manifest(folder / "plan", "analysis", "path", value="../analysis")
    return folder
