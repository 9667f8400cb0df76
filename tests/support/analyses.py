"""Analyses of sequences that a test gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.planfile.analysis_writer import AnalysisWriter

#: Of the sequences of exports.
LENGTHS = (25, 6, 14, 40, 5, 9, 17, 1, 8, 30, 2, 3)

#: Of those that frameworks read in rows.
LENGTHS_IN_ROWS = (25, 6, 14, 40, 5, 9, 17, 2, 8, 30, 2, 3, 33, 11, 21, 7)


def sequences_in_rows() -> list[tuple[Any, Any]]:
    """Token ids and target masks of `LENGTHS_IN_ROWS`: a prompt of a third, then targets."""
    random = np.random.default_rng(0)
    return [(random.integers(0, 97, each), np.arange(each) >= max(each // 3, 1)) for each in LENGTHS_IN_ROWS]


def write_analysis(folder: Path, sequences: Iterable[tuple[Any, Any]]) -> Path:
    """Write an analysis of pairs of token ids and target mask, all of one source, into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = AnalysisWriter(folder)
    for record, (ids, target) in enumerate(sequences):
        writer.add(0, record, np.asarray(ids, np.int32), np.asarray(target, bool))
    writer.finish(exact=True, sources=[])
    return folder
