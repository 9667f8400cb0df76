"""How long the sequences are that a plan holds: not all of its analysis, or some of them several times."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from chunkplan.arrays import Int32Array, IntArray
from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.arrow import to_numpy
from chunkplan.planfile.plan import VALIDATE_HINT, Plan
from chunkplan.planfile.schema import CHUNKS
from chunkplan.planfile.tables import conform, open_parquet

_SEGMENTS = pa.schema([CHUNKS.field("segments")])


def holds_all_once(plan: Plan) -> bool:
    """Whether the plan holds every sequence of its analysis, and each one once."""
    config = plan.config
    is_part = config.holdout is not None or config.mix or plan.manifest["totals"]["num_dropped_sequences"]
    return not is_part and config.epochs == 1


def planned_lengths(plan: Plan, analysis: Analysis) -> Int32Array:
    """Return the tokens of each sequence of `plan` as often as it holds it, int32 [n]; `analysis` is the plan's.

    Raises:
        DataError: chunks.parquet is damaged, or does not hold as many sequences of the analysis as the manifest says.
    """
    if holds_all_once(plan):
        return analysis.num_tokens
    path = plan.path / "chunks.parquet"
    with open_parquet(path) as file:
        tables = (file.read_row_group(group, _SEGMENTS.names) for group in range(file.num_row_groups))
        begun = np.concatenate([_begun(conform(table, _SEGMENTS, path)) for table in tables])
    wrong = begun[(begun < 0) | (begun >= analysis.num_sequences)]
    num_sequences = plan.manifest["totals"]["num_sequences"]
    if wrong.size or not begun.size == num_sequences > 0:
        found = f"{begun.size:,} sequences begin in its chunks, expected {num_sequences:,}"
        raise DataError(
            f"the analysis has no sequence {wrong[0]}" if wrong.size else found,
            where=str(path),
            hint=VALIDATE_HINT,
        )
    lengths: Int32Array = analysis.num_tokens[begun]
    return lengths


def _begun(chunks: pa.Table) -> IntArray:
    """Return the ids of sequences whose first tokens are in `chunks`: each is there as often as the plan holds it."""
    segments = chunks.column("segments").combine_chunks().flatten()
    sequence_id, start = (to_numpy(segments.field(name)) for name in ("sequence_id", "start"))
    begun: IntArray = sequence_id[start == 0]
    return begun
