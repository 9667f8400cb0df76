"""Plans and analyses to break: one that is small enough to know by heart, and one that a release wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from chunkplan import PlanConfig, build, validate
from chunkplan.planfile.analysis_writer import AnalysisWriter
from tests.support.manifests import change_manifest
from tests.support.places import GOLDEN
from tests.support.shared_plans import build_blocks

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
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, dp=2, pp=2, cp="off", tail_sharing=True)
    return build(analysis, tmp_path / "plan", config).path


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A folder with a plan and its analysis, under the names `plan` and `analysis`."""
    folder = tmp_path / "golden"
    for kind in ("plan", "analysis"):
        shutil.copytree(GOLDEN / f"{kind}-7", folder / kind)
    change_manifest(folder / "plan", "analysis", "path", value="../analysis")
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["one stage", "two stages"])
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of eight ranks: groups 0 and 1 of all of them, 2 of ranks 0 to 3, 3 of 4 and 5, 4 of 6 and 7.

    Groups 3 and 4 have two chunks each, 5 and 6; sequence 8 is in group 3, sequence 22 in group 4. Chunk 7 is the last
    one of each rank.
    """
    folder = tmp_path_factory.mktemp("written")
    blocks = {300: (0, 8), 200: (0, 8), 40: (0, 4), 50: (4, 2), 37: (6, 2)}
    plan = build_blocks(folder, blocks, dp=8, pp=request.param)
    found = {
        (row["group_id"], row["cp_first_rank"], row["cp_size"], row["group_size"])
        for row in plan.chunks().to_pylist()
        if row["cp_size"] > 1
    }
    assert found == {(0, 0, 8, 3), (1, 0, 8, 2), (2, 0, 4, 1), (3, 4, 2, 2), (4, 6, 2, 2)}
    assert validate(plan.path).ok
    return folder


@pytest.fixture
def shared_plan(shared_folder: Path, tmp_path: Path) -> Path:
    """A copy of that plan, to break."""
    return shutil.copytree(shared_folder, tmp_path / "shared") / "plan"
