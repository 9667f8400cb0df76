"""Analyses of sequences that a test gives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def write_groups(folder: Path, sizes: Sequence[int], lengths: Sequence[int] = (5, 9, 40), num_sources: int = 1) -> Path:
    """Rollouts in groups of so many sequences, of `lengths` in turn, dealt to the sources d0.jsonl, d1.jsonl, ...

    Sequences of groups stand mixed up, those of one in one source, and begin alike for a third of their tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, writer = np.random.default_rng(0), AnalysisWriter(folder, "rollouts", ["group"])
    order = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    order = order[np.argsort(order % num_sources, kind="stable")]
    _, first = np.unique(order, return_index=True)
    records = np.zeros(num_sources, int)
    for place, group in enumerate(order.tolist()):
        source, num_tokens = group % num_sources, lengths[place % len(lengths)]
        ids = random.integers(0, 50, num_tokens, dtype=np.int32)
        ids[: num_tokens // 3] = np.arange(num_tokens // 3) + group  # the prompt
        is_target = np.arange(num_tokens) > num_tokens // 3
        writer.add(source, int(records[source]), ids, is_target, group=int(first[group]))
        records[source] += 1
    writer.finish(
        exact=True,
        sources=[{"path": f"d{n}.jsonl", "schema": "text", "records": int(count)} for n, count in enumerate(records)],
    )
    return folder
