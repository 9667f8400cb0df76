"""What the chunks of drawn steps hold: where each segment is from, its positions and, where it is decoded, its text."""

from __future__ import annotations

from collections.abc import Sequence

from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import TokenReader
from chunkplan.planfile.plan import Chunk
from chunkplan.quantities import counted, kept_words
from chunkplan.reporting.chunk_view import SegmentView, segment_text, view_segments
from chunkplan.reporting.page.chosen_steps import DrawnStep
from chunkplan.reporting.page.marked_runs import HOW_MARKED, marked_runs
from chunkplan.reporting.page.parts import Drawer, Drawers, MarkedText
from chunkplan.reporting.page.text_source import TextSource

#: Chunks of all steps together, segments of a chunk, and tokens of a segment that a page has: it stays small.
_MOST_CHUNKS, MOST_SEGMENTS, MOST_TOKENS = 160, 6, 100


def chunk_drawers(drawn: Sequence[DrawnStep], chart: str, source: TextSource) -> list[Drawers]:
    """Show the first chunks of each rank of `drawn`, the figures of `chart`, and say how to see the others.

    Raises:
        DataError: the analysis has no such sequences, or is damaged.
    """
    analysis = source.analysis
    tokens = analysis.tokens() if analysis is not None and analysis.has_tokens else None
    most = max(_MOST_CHUNKS // max(len(drawn), 1), 1)
    return [_of_step(each, chart, source, tokens, most) for each in drawn]


def _of_step(drawn: DrawnStep, chart: str, source: TextSource, tokens: TokenReader | None, most: int) -> Drawers:
    step, has_ranks = drawn.step.step, len(drawn.step.chunks) > 1
    places = [(chunk.chunk_id, rank, chunk) for rank in drawn.ranks for chunk in drawn.step.chunks[rank]]
    shown = sorted(places, key=lambda place: place[:2])[:most]
    shown.sort(key=lambda place: (place[1], place[0]))
    command = f"chunkplan inspect --step {step}{' --rank R' if has_ranks else ''} --chunk C"
    notes = []
    if source.why_not is not None:
        notes.append(f"Text is not shown: {source.why_not}")
    elif source.tokenizer is not None:
        command += " --text"
        notes.append(f"{HOW_MARKED} Of a segment with more than {MOST_TOKENS} tokens the first and the last are here.")
    if len(shown) < len(places):
        notes.append(f"The first {len(shown):,} of {counted(len(places), 'chunk')} are here, of each rank alike.")
    notes.append(f"`{command}` shows all of a chunk.")
    drawers = [_of_chunk(chunk, step, rank, source, tokens, has_ranks=has_ranks) for _, rank, chunk in shown]
    return Drawers(chart, drawn.label, f"What the chunks of step {step:,} hold", notes, drawers)


def _of_chunk(
    chunk: Chunk, step: int, rank: int, source: TextSource, tokens: TokenReader | None, *, has_ranks: bool
) -> Drawer:
    name = f"{f'rank {rank}, ' if has_ranks else ''}chunk {chunk.chunk_id}"
    size = f"{counted(chunk.num_tokens, 'token')} in {counted(len(chunk.segments), 'segment')}"
    notes = [f"{counted(chunk.num_target_tokens, 'target')} predicted here."]
    if not chunk.segments:
        notes = ["It holds nothing and counts for nothing: ranks that have too few chunks get such ones."]
    if chunk.prefix_tokens:
        notes.append(f"Its part of a sequence attends to {counted(chunk.prefix_tokens, 'token')} before it.")
    if words := kept_words(chunk.kept_attention):
        notes.append(f"It is run again, with its attention kept {words}.")
    if len(chunk.segments) > MOST_SEGMENTS:
        notes.append(f"The first {MOST_SEGMENTS} segments of {len(chunk.segments):,} are here.")
    texts = [
        _of_segment(segment, source.tokenizer, tokens)
        for segment in view_segments(chunk, source.analysis, tokens, MOST_SEGMENTS)
    ]
    return Drawer(f"chunk-{step}-{rank}-{chunk.chunk_id}", f"{name}: {size}", [" ".join(notes)], texts)


def _of_segment(segment: SegmentView, tokenizer: RecordTokenizer | None, tokens: TokenReader | None) -> MarkedText:
    words = [f"sequence {segment.sequence_id:,}", f"[{segment.start:,}, {segment.end:,})"]
    if segment.sequence_tokens is not None:
        words[-1] += f" of {counted(segment.sequence_tokens, 'token')}"
    if segment.part is not None:
        words.append(f"part {segment.part[0] + 1} of {segment.part[1]}")
    words += [] if segment.num_target_tokens is None else [counted(segment.num_target_tokens, "target")]
    words += [] if segment.place is None else [segment.place]
    runs: list[tuple[str, str]] = []
    if tokenizer is not None and tokens is not None:
        runs = list(marked_runs(segment_text(segment, tokens, tokenizer, MOST_TOKENS)))
    return MarkedText(", ".join(words), runs)
