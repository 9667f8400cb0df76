"""One chunk of a plan down to its segments: where each comes from and, where tokens are decoded, what it says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from chunkplan.errors import DataError
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis, TokenReader
from chunkplan.planfile.chunks import chunks_of_rows
from chunkplan.planfile.plan import VALIDATE_HINT, Chunk, Plan, PlanStep, Segment, check_rank, find_chunk, find_step
from chunkplan.reporting.shared_sequences import exchange_us
from chunkplan.reporting.token_text import NUM_CONTEXT, SequenceText, decode_sequence


@dataclass(frozen=True, kw_only=True)
class SegmentView:
    """Tokens [start, end) of a sequence of `sequence_tokens`, which is from `place`.

    `part`: (index from 0, number of parts); None for a whole sequence. `num_target_tokens`: the predictions made in the
    segment, `target[start+1 : end+1]`. Entries of the analysis are None without it, and `text` unless decoded.
    """

    sequence_id: int
    start: int
    end: int
    sequence_tokens: int | None
    part: tuple[int, int] | None
    num_target_tokens: int | None
    place: str | None
    text: SequenceText | None


@dataclass(frozen=True, kw_only=True)
class ChunkAction:
    """The `place`th (from 0) of the `num_actions` of a stage is one with the chunk."""

    stage: int
    place: int
    num_actions: int
    op: str
    virtual_stage: int


@dataclass(frozen=True, kw_only=True)
class ChunkView:
    """A chunk of a step and rank, the actions of stages with it, and its segments in order.

    If ranks share it, the segments are the slices of this rank. `exchange_us`: the part of its cost that is exchange
    between ranks, None if the plan does not describe its model and GPU.
    """

    step: int
    dp_rank: int
    chunk: Chunk
    actions: tuple[ChunkAction, ...]
    segments: tuple[SegmentView, ...]
    exchange_us: float | None

    def to_dict(self) -> dict[str, Any]:
        """All of it, for one JSON document: the chunk's columns beside the rest."""
        document = asdict(self)
        del document["chunk"]
        return {**self.chunk.to_dict(), **document}


def view_chunk(
    plan: Plan,
    step: int,
    chunk_id: int,
    *,
    dp_rank: int = 0,
    analysis: Analysis | None = None,
    tokenizer: RecordTokenizer | None = None,
    most_tokens: int | None = None,
) -> ChunkView:
    """Look at one chunk. `analysis` is the plan's, see `load_same_analysis`; with `tokenizer`, see `open_tokenizer`,
    the tokens are decoded: of segments with more than `most_tokens` those at the two ends.

    Example: `chunkplan.view_chunk(chunkplan.load_plan("plan"), step=0, chunk_id=0)`

    Raises:
        UsageError: the plan has no such step, rank or chunk; or tokens are to be decoded and the analysis has none.
        DataError: the plan or the analysis is damaged.
    """
    check_rank(plan, dp_rank)
    described = find_step(plan, step)
    chunk = find_chunk(described, dp_rank, chunk_id)
    tokens = analysis.tokens() if analysis is not None and (analysis.has_tokens or tokenizer is not None) else None
    segments = view_segments(chunk, analysis, tokens)
    if tokens is not None and tokenizer is not None:
        segments = tuple(replace(each, text=segment_text(each, tokens, tokenizer, most_tokens)) for each in segments)
    return ChunkView(
        step=step,
        dp_rank=dp_rank,
        chunk=chunk,
        actions=_actions(described, dp_rank, chunk_id),
        segments=segments,
        exchange_us=_exchange_us(plan, chunk),
    )


def view_segments(
    chunk: Chunk, analysis: Analysis | None, tokens: TokenReader | None, most: int | None = None
) -> tuple[SegmentView, ...]:
    """Look at the segments of a chunk, or at the first `most` of them, without their text; `tokens` are those of
    `analysis`.

    Raises:
        DataError: the analysis has no such sequences, or is damaged.
    """
    return tuple(
        _without_analysis(segment, chunk, place)
        if analysis is None
        else _with_analysis(segment, chunk, analysis, tokens)
        for place, segment in enumerate(chunk.segments[:most])
    )


def segment_text(
    segment: SegmentView, tokens: TokenReader, tokenizer: RecordTokenizer, most_tokens: int | None = None
) -> SequenceText:
    """Decode the tokens of a segment that the analysis has; of more than `most_tokens`, the first and the last.

    Raises:
        DataError: a token file is damaged.
    """
    first = max(0, segment.start - NUM_CONTEXT)
    input_ids, target = tokens.gather(np.array([segment.sequence_id]), np.array([first]), np.array([segment.end]))
    return decode_sequence(tokenizer.library, input_ids, target, most_tokens, num_context=segment.start - first)


def _exchange_us(plan: Plan, chunk: Chunk) -> float | None:
    try:
        return float(exchange_us(chunks_of_rows([chunk]), plan.cost)[0])
    except DataError:
        return None


def _actions(step: PlanStep, rank: int, chunk_id: int) -> tuple[ChunkAction, ...]:
    return tuple(
        ChunkAction(stage=stage, place=place, num_actions=len(done), op=action.op, virtual_stage=action.virtual_stage)
        for (of_rank, stage), done in step.actions.items()
        if of_rank == rank
        for place, action in enumerate(done)
        if action.chunk_id == chunk_id
    )


def _without_analysis(segment: Segment, chunk: Chunk, place: int) -> SegmentView:
    """The planner puts the part of a split sequence first; only the analysis can tell for plans of others."""
    is_part = chunk.group_id is not None and (place == 0 or chunk.cp_size > 1)
    return SegmentView(
        **asdict(segment),
        sequence_tokens=None,
        part=(chunk.group_index, chunk.group_size) if is_part else None,
        num_target_tokens=None,
        place=None,
        text=None,
    )


def _with_analysis(segment: Segment, chunk: Chunk, analysis: Analysis, tokens: TokenReader | None) -> SegmentView:
    sequence_id, start, end = segment.sequence_id, segment.start, segment.end
    length = int(analysis.num_tokens[sequence_id]) if 0 <= sequence_id < analysis.num_sequences else 0
    if not 0 <= start < end <= length:
        raise DataError(
            f"the analysis has no tokens [{start}, {end}) of sequence {sequence_id}",
            where=f"chunk {chunk.chunk_id}",
            hint=VALIDATE_HINT,
        )
    beyond = min(end + 1, length)
    num_target_tokens = beyond - (start + 1)  # without tokens every token but the first is a target
    if tokens is not None:
        _, target = tokens.gather(np.array([sequence_id]), np.array([start]), np.array([beyond]))
        num_target_tokens = int(target[1:].sum())
    return SegmentView(
        **asdict(segment),
        sequence_tokens=length,
        part=None if end - start == length else (chunk.group_index, chunk.group_size),
        num_target_tokens=num_target_tokens,
        place=analysis.place(sequence_id),
        text=None,
    )
