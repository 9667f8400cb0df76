"""Log-probabilities of a data set by a model, as `chunkplan score` leaves them: read back as those of a reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted

#: Names of files: the first and the last step that are in one.
SCORES = re.compile(r"steps-(\d{8})-(\d{8})\.parquet")

#: In the metadata of a file: the plan, weights and precision, a line with its sums; and the hash of the analysis.
IDENTITY, ANALYSIS = b"chunkplan.scores", b"chunkplan.analysis"

_COLUMNS = ["sequence_id", "positions", "log_probs"]

#: The key of a token is that of its sequence times this, and its position.
_POSITIONS = 1 << 32


class Scores:
    """Log-probabilities of target tokens, from the files of a folder; 12 bytes of host memory a target token.

    `identity`: the plan, the weights and the precision they are of. Raises UsageError: there are none; DataError: a
    file is damaged, or is of another analysis than others.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        files = sorted(path for path in self.path.glob("*.parquet") if SCORES.fullmatch(path.name))
        if not files:
            hint = "`chunkplan score --model REFERENCE --plan PLAN --output scores` makes them"
            raise UsageError("there are no scores", where=str(self.path), hint=hint)
        keys, log_probs, named = [], [], set()
        for path in files:
            try:
                metadata = pq.read_schema(path).metadata or {}
                table = pq.read_table(path, columns=_COLUMNS)
            except (pa.ArrowException, OSError, KeyError) as error:
                hint = "remove it, and run `chunkplan score` again"
                raise DataError(f"not scores: {error}", where=str(path), hint=hint) from error
            named.add((metadata.get(IDENTITY, b"").decode().partition("\n")[0], metadata.get(ANALYSIS, b"").decode()))
            ids, positions, values = (table.column(name).combine_chunks() for name in _COLUMNS)
            counts = np.diff(positions.offsets.to_numpy())
            keys.append(np.repeat(ids.to_numpy(), counts) * _POSITIONS + positions.flatten().to_numpy())
            log_probs.append(values.flatten().to_numpy())
        if len(named) > 1:
            raise DataError("scores of several models or data sets", where=str(self.path), hint="score into one folder")
        [(self.identity, self._analysis)] = named
        self._keys, first = np.unique(np.concatenate(keys), return_index=True)
        self._log_probs = np.concatenate(log_probs)[first]

    def check(self, plan: Plan) -> None:
        """Raise UsageError where they are not of the data of `plan`."""
        if plan.manifest["analysis"]["content_hash"] != self._analysis:
            hint = f"`chunkplan score --model REFERENCE --plan {plan.path} --output OTHER` makes them of this one"
            raise UsageError("the scores are of another analysis", where=str(self.path), hint=hint)

    def check_covers(self, plans: Sequence[Plan | None], num_target_tokens: Int32Array) -> None:
        """Raise UsageError where a sequence of `plans` has no scores; `num_target_tokens`: of all of the analysis."""
        scored = np.unique(self._keys // _POSITIONS)
        for plan in filter(None, plans):
            table = pq.read_table(plan.path / "chunks.parquet", columns=["segments"])
            segments = table.column("segments").combine_chunks().flatten()
            ids = np.unique(segments.field("sequence_id").to_numpy())
            missing = np.setdiff1d(ids[num_target_tokens[ids] > 0], scored)
            if missing.size:
                config = plan.config
                raise UsageError(
                    f"{counted(missing.size, 'sequence')} of {plan.path} without scores, the first is {missing[0]}",
                    where=str(self.path),
                    hint="`score` takes a plan's first epoch: score a plan of all sequences, `chunkplan build "
                    f"--chunk-size {config.chunk_size} --k {config.k} --global-batch {config.global_batch} "
                    "--output plan-of-all`, then `chunkplan score --model REFERENCE --plan plan-of-all --output OTHER`",
                )

    def at_tokens(self, sequence_ids: Int64Array, positions: Int64Array) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The log-probabilities of tokens, each by its sequence and position, [n]; DataError: one has none."""
        keys = sequence_ids * _POSITIONS + positions
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        for wrong in np.flatnonzero(self._keys[places] != keys)[:1]:
            raise DataError(
                f"no score of token {positions[wrong]} of sequence {sequence_ids[wrong]}",
                where=str(self.path),
                hint="`chunkplan score` of the same plan goes on behind the last file; it is of the first epoch",
            )
        found: np.ndarray[Any, np.dtype[np.float32]] = self._log_probs[places]
        return found
