"""Analyses of sequences that a test gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.planfile.analysis_writer import AnalysisWriter

#: Of the sequences of exports.
LENGTHS = (25, 6, 14, 40, 5, 9, 17, 1, 8, 30, 2, 3)


def write_analysis(folder: Path, sequences: Iterable[tuple[Any, Any]]) -> Path:
    """Write an analysis of pairs of token ids and target mask, all of one source, into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = AnalysisWriter(folder)
    for record, (ids, target) in enumerate(sequences):
        writer.add(0, record, np.asarray(ids, np.int32), np.asarray(target, bool))
    writer.finish(exact=True, sources=[])
    return folder
