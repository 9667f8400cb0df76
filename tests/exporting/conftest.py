"""Data that these tests export."""

from __future__ import annotations

from pathlib import Path

import pytest

import chunkplan
from chunkplan.validation.validate import validate
from tests.support.analyses import LENGTHS, write_analysis


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, random_sequences) -> Path:
    """`analysis`, and a `plan` of two epochs on two ranks in which the four longest sequences are split."""
    folder = tmp_path_factory.mktemp("workspace")
    write_analysis(folder / "analysis", random_sequences(LENGTHS))
    config = chunkplan.PlanConfig(chunk_size=16, k=2, global_batch=5, epochs=2, dp=2, equal_chunks=True, cp="off")
    chunkplan.build(folder / "analysis", folder / "plan", config)
    assert validate(folder / "plan").ok
    return folder
