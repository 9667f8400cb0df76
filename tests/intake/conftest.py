"""Data that several files of these tests analyze."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.intake_checks import CHATS, PROMPTS, SHAREGPT, TEXTS, write_lines


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file of each layout."""
    for name, records in (("a", TEXTS), ("b", PROMPTS), ("c", CHATS), ("d", SHAREGPT)):
        write_lines(tmp_path / "data" / f"{name}.jsonl", records)
    return tmp_path / "data"


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One file of some thousand texts that is cut into about ten pieces."""
    random = np.random.default_rng(0)
    records = [{"text": f"text {i} " + "word " * int(random.integers(0, 40))} for i in range(2000)]
    file = write_lines(tmp_path / "many.jsonl", records)
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 20_000)
    return file
