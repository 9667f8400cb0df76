"""Fetches the tokens of chunks: numpy passes over all tokens of a rank, and next to nothing done for each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, repeat

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis import Analysis, join_runs
from chunkplan.planfile.plan import Chunk, Plan
from chunkplan_runtime.feed.labels import NO_TARGET, shifted_labels
from chunkplan_runtime.sharing import Span


@dataclass(frozen=True)
class GatheredTokens:
    """The tokens of chunks, one after another: int32 [num_tokens of all].

    `sizes` and `spans` have an entry a chunk: how many of the tokens are its own, and where its segments lie in it.
    """

    input_ids: Int32Array
    position_ids: Int32Array
    labels: Int32Array
    sizes: list[int]
    spans: list[tuple[Span, ...]]


class TokenGather:
    """Reads the tokens of an analysis as the chunks of a plan ask for them."""

    def __init__(self, plan: Plan, analysis: Analysis, vocab_size: int) -> None:
        self._plan = plan
        self._analysis = analysis
        self._vocab_size = vocab_size
        self._reader = analysis.tokens()
        self._positions = np.arange(analysis.num_tokens.max(), dtype=np.int32).data.cast("B")

    def __call__(self, chunks: Sequence[Chunk]) -> GatheredTokens:
        """The tokens of chunks, at least one of which has segments; a zero-loss chunk has none.

        Raises:
            DataError: the analysis has no such tokens, or not as many targets as the plan counted.
            UsageError: a token is not in the model's vocabulary.
        """
        segments = [segment for chunk in chunks for segment in chunk.segments]
        sequence_ids = np.array([segment.sequence_id for segment in segments])  # [num_segments], as all below
        starts = np.array([segment.start for segment in segments])
        stops = np.array([segment.end for segment in segments])
        lengths = self._lengths(sequence_ids, starts, stops)
        sizes = stops - starts
        gathered_stops = np.cumsum(sizes)  # [num_segments]: where each lies in what is gathered
        gathered_starts = gathered_stops - sizes
        input_ids, target = self._reader.gather(sequence_ids, starts, stops)
        wrong = _outside(input_ids, self._vocab_size)
        if wrong is not None:
            segment = int(np.searchsorted(gathered_stops, wrong, side="right"))
            raise UsageError(
                f"token {starts[segment] + wrong - gathered_starts[segment]} of sequence {sequence_ids[segment]} is id "
                f"{input_ids[wrong]}, the model's vocabulary has {self._vocab_size:,}",
                hint="analyze with the tokenizer that belongs to the model",
            )
        labels = shifted_labels(input_ids, target)
        # A segment's last token predicts what its own sequence goes on with, in this chunk or not.
        labels[gathered_stops - 1] = NO_TARGET
        cut = np.flatnonzero(stops < lengths)
        next_ids, next_target = self._reader.gather(sequence_ids[cut], stops[cut], stops[cut] + 1)
        labels[gathered_stops[cut] - 1] = np.where(next_target, next_ids, NO_TARGET)
        edges = np.concatenate([[0], gathered_stops])[np.cumsum([0, *(len(chunk.segments) for chunk in chunks)])]
        self._check_counts(chunks, edges.tolist(), labels)
        chunk_of = np.repeat(np.arange(len(chunks)), [len(chunk.segments) for chunk in chunks])
        groups = [chunk.group_id for chunk in chunks for _ in chunk.segments]
        columns = (sequence_ids, starts, stops, lengths, gathered_starts - edges[chunk_of])
        spans = map(Span, *(column.tolist() for column in columns), groups)
        return GatheredTokens(
            input_ids=input_ids,
            position_ids=np.frombuffer(join_runs(repeat(self._positions), 4 * starts, 4 * stops), np.int32),
            labels=labels,
            sizes=np.diff(edges).tolist(),
            spans=[tuple(islice(spans, len(chunk.segments))) for chunk in chunks],
        )

    def _lengths(self, sequence_ids: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """How many tokens the sequences have, after a check that they are there and have what is asked for."""
        wrong = np.flatnonzero((sequence_ids < 0) | (sequence_ids >= self._analysis.num_sequences))
        if wrong.size:
            raise DataError(
                f"there is no sequence {sequence_ids[wrong[0]]}",
                where=str(self._analysis.path),
                hint="build the plan again",
            )
        lengths = self._analysis.num_tokens[sequence_ids].astype(np.int64)
        wrong = np.flatnonzero((starts < 0) | (starts >= stops) | (stops > lengths))
        if wrong.size:
            first = wrong[0]
            raise DataError(
                f"sequence {sequence_ids[first]} has {lengths[first]} tokens; "
                f"the plan asks for {starts[first]} to {stops[first]}",
                where=str(self._analysis.path),
                hint="build the plan again",
            )
        return lengths

    def _check_counts(self, chunks: Sequence[Chunk], edges: list[int], labels: Int32Array) -> None:
        is_target = labels != NO_TARGET
        for chunk, (start, stop) in zip(chunks, pairwise(edges), strict=True):
            found = np.count_nonzero(is_target[start:stop])
            if found != chunk.num_target_tokens or stop - start != chunk.num_tokens:
                raise DataError(
                    f"chunk {chunk.chunk_id} has {stop - start} tokens with {found} targets; "
                    f"the plan counted {chunk.num_tokens} with {chunk.num_target_tokens}",
                    where=str(self._plan.path),
                    hint="build the plan again",
                )


def _outside(input_ids: Int32Array, vocab_size: int) -> int | None:
    """The index of the first token that is not in the vocabulary; None where all are."""
    if input_ids.min() >= 0 and input_ids.max() < vocab_size:
        return None
    return int(np.flatnonzero((input_ids < 0) | (input_ids >= vocab_size))[0])
