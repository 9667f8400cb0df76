"""A sequence of each source as it will be trained: the first of it, decoded from the tokens that the analysis has."""

from __future__ import annotations

from collections.abc import Iterator

from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.manifest_entries import SourceEntry
from chunkplan.quantities import counted
from chunkplan.reporting.page.parts import MarkedText
from chunkplan.reporting.token_text import SequenceText, TextPiece, decode_sequence
from chunkplan.visible import visible

#: Sources of which there is an example, and the tokens of one that are shown.
MOST_SOURCES = 6
_MOST_TOKENS = 600

#: The symbol of a line end, and one that more fonts have.
_LINE_END = "\u240a", "\u21b5"


def example_texts(analysis: Analysis, tokenizer: RecordTokenizer) -> list[MarkedText]:
    """The first sequence of each of the first sources that have any; of a long one, how it begins and ends.

    Raises:
        DataError: a token file is damaged.
    """
    tokens = analysis.tokens()
    texts = []
    for source in with_sequences(analysis)[:MOST_SOURCES]:
        sequence_id = source["first_sequence_id"]
        input_ids, target = tokens(sequence_id)
        size = f"{counted(len(input_ids), 'token')}, {counted(int(target.sum()), 'target')}"
        shown = decode_sequence(tokenizer.library, input_ids, target, _MOST_TOKENS)
        texts.append(MarkedText(f"{analysis.place(sequence_id)}: {size}", list(_runs(shown))))
    return texts


def with_sequences(analysis: Analysis) -> list[SourceEntry]:
    """The sources that sequences are of."""
    return [source for source in analysis.manifest["sources"] if source["num_sequences"]]


def _runs(text: SequenceText) -> Iterator[tuple[str, str]]:
    yield from map(_run, text.first)
    if text.num_left_out:
        targets = counted(text.num_targets_left_out, "target")
        yield f"\n... {counted(text.num_left_out, 'token')} left out here, {targets} among them ...\n", "note"
    yield from map(_run, text.last)


def _run(piece: TextPiece) -> tuple[str, str]:
    kinds = [*(["special"] if piece.is_special else []), *(["target"] if piece.is_target else [])]
    return visible(piece.text).replace(*_LINE_END), " ".join(kinds)
