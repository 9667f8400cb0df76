"""A dataset with a long tail, and what is tuned for it once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from chunkplan.tuning.tune import Tuning, tune
from tests.support.tuning_cases import long_tail, options_with


@pytest.fixture(scope="session")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lengths.npy"
    np.save(path, long_tail(12_000))
    return path


@pytest.fixture(scope="session")
def tuning(lengths: Path) -> Tuning:
    return tune(lengths, options_with())
