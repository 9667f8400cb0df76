"""Numbers that samples have beside their tokens: labels, rewards and advantages of sequences, and some of tokens.

The reader of steps takes it from the analysis; of a step with other tokens it can be made from arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkplan.arrays import Int64Array, offsets_of
from chunkplan.planfile.analysis import Analysis, TokenReader
from chunkplan.planfile.plan import Chunk, PlanStep

#: Numbers that a sequence has, where its samples are of a kind that has them.
OF_SEQUENCES = ("group", "label", "reward", "advantage")

#: Columns of an analysis that `TargetTokens` has by another name.
_NAMES = {"reference_log_probs": "reference"}

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class StepSamples:
    """Numbers of the sequences of a step, and of the tokens of those sequences that this process has parts of.

    `kind`: that of the samples, see `Analysis.samples`. `sequence_ids` int64 [num_sequences], ascending, and by name
    `of_sequences` [num_sequences]: of all ranks. `own` int64 [n], ascending: the sequences of this process, and by name
    `of_tokens`: the numbers of all their tokens, one sequence after another, which begin at `starts` [n]. `cut`: a
    group of which the step has a part, in words.
    """

    kind: str
    sequence_ids: Int64Array
    of_sequences: Mapping[str, Numbers]
    own: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    starts: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    of_tokens: Mapping[str, Numbers] = field(default_factory=dict)
    cut: str | None = None

    def at_sequences(self, name: str, sequence_ids: Int64Array) -> Numbers | None:
        """The numbers of sequences of the step; None where samples have none of this name."""
        values = self.of_sequences.get(name)
        return None if values is None else values[np.searchsorted(self.sequence_ids, sequence_ids)]

    def at_tokens(self, name: str, sequence_ids: Int64Array, positions: Int64Array) -> Numbers:
        """The numbers of tokens of this process, each by its sequence and its position there."""
        found: Numbers = self.of_tokens[name][self.starts[np.searchsorted(self.own, sequence_ids)] + positions]
        return found


class SampleReader:
    """Reads `StepSamples` of the steps of an analysis; `sizes`: of every group, at its number."""

    def __init__(self, analysis: Analysis, tokens: TokenReader) -> None:
        self._analysis, self._tokens = analysis, tokens
        columns = {name: getattr(analysis, name) for name in OF_SEQUENCES} if analysis.samples else {}
        self._columns = {name: values for name, values in columns.items() if values is not None}
        self._sizes = np.bincount(self._columns["group"]) if "group" in self._columns else None

    def __call__(self, step: PlanStep, dp_ranks: Sequence[int]) -> StepSamples | None:
        """The samples of a step for the process of these ranks; None where they are ordinary.

        Raises:
            DataError: the analysis was damaged since it was opened.
        """
        if self._analysis.samples is None:
            return None
        of_ranks = {rank: _sequences(chunks) for rank, chunks in step.chunks.items()}
        present = np.unique(np.concatenate([*of_ranks.values(), _sequences([])]))
        own = np.unique(np.concatenate([of_ranks.get(rank, _sequences([])) for rank in dp_ranks]))
        lengths = self._analysis.num_tokens[own].astype(np.int64)
        names = {_NAMES.get(name, name): name for name in self._analysis.token_columns}
        return StepSamples(
            self._analysis.samples,
            present,
            {name: values[present] for name, values in self._columns.items()},
            own,
            offsets_of(lengths)[:-1],
            {name: self._read(column, own, lengths) for name, column in names.items()},
            self._cut_group(present),
        )

    def _read(self, column: str, own: Int64Array, lengths: Int64Array) -> Numbers:
        return self._tokens.column(column, own, np.zeros_like(own), lengths) if len(own) else np.zeros(0, np.float32)

    def _cut_group(self, present: Int64Array) -> str | None:
        """The first group that is there in part, in words."""
        if self._sizes is None:
            return None
        groups, counts = np.unique(self._columns["group"][present], return_counts=True)
        for place in np.flatnonzero(counts != self._sizes[groups])[:1]:
            where = self._analysis.place(int(groups[place]))
            return f"{counts[place]} of the {self._sizes[groups[place]]} sequences of the group of {where}"
        return None


def _sequences(chunks: Sequence[Chunk]) -> Int64Array:
    return np.array([segment.sequence_id for chunk in chunks for segment in chunk.segments], np.int64)
