"""A few sequences as they will be trained, decoded from the tokens that the analysis has: those that say most."""

from __future__ import annotations

import numpy as np

from chunkplan.arrays import Int64Array
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.manifest_entries import SourceEntry
from chunkplan.quantities import counted
from chunkplan.reporting.page.marked_runs import marked_runs
from chunkplan.reporting.page.parts import MarkedText
from chunkplan.reporting.token_text import decode_sequence

#: Sources of which there is an example, and the tokens of one that are shown.
MOST_SOURCES, MOST_TOKENS = 6, 600


def example_texts(analysis: Analysis, tokenizer: RecordTokenizer, held: Int64Array | None) -> list[MarkedText]:
    """The shortest, the median and the longest sequence, and the first of each of the first sources that have any; of a
    long one, how it begins and ends.

    `held`: the ids of those that a plan holds, ascending, int64 [n]; by default all of them are chosen from.

    Raises:
        DataError: a token file is damaged.
    """
    tokens = analysis.tokens()
    texts = []
    for sequence_id, reasons in _chosen(analysis, held).items():
        input_ids, target = tokens(sequence_id)
        size = f"{counted(len(input_ids), 'token')}, {counted(int(target.sum()), 'target')}"
        shown = decode_sequence(tokenizer.library, input_ids, target, MOST_TOKENS)
        caption = f"{', '.join(reasons).capitalize()}: {analysis.place(sequence_id)}: {size}"
        texts.append(MarkedText(caption, list(marked_runs(shown))))
    return texts


def with_sequences(analysis: Analysis) -> list[SourceEntry]:
    """The sources that sequences are of."""
    return [source for source in analysis.manifest["sources"] if source["num_sequences"]]


def _chosen(analysis: Analysis, held: Int64Array | None) -> dict[int, list[str]]:
    """Return ids of sequences in the order in which they are shown, and why each is."""
    ids = np.arange(analysis.num_sequences) if held is None else held
    by_length = ids[np.argsort(analysis.num_tokens[ids], kind="stable")]
    reasons: dict[int, list[str]] = {}
    for why, place in (("shortest", 0), ("median", (ids.size - 1) // 2), ("longest", -1)):
        reasons.setdefault(int(by_length[place]), []).append(why)
    for source in with_sequences(analysis)[:MOST_SOURCES]:
        first = source["first_sequence_id"]
        place = int(np.searchsorted(ids, first))
        if place < ids.size and ids[place] < first + source["num_sequences"]:
            reasons.setdefault(int(ids[place]), []).append("first of its source")
    return reasons
