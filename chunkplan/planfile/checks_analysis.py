"""The invariants of an analysis."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.hashing import TokensHasher, combine_hashes, sequence_digests
from chunkplan.planfile.violation import Violation

#: Names of what `check_analysis` finds, in the order it looks.
ANALYSIS_INVARIANTS = ("totals", "records", "lengths", "targets", "tokens", "content-hash")


def check_analysis(analysis: Analysis) -> Iterator[Violation]:
    """Yield what is wrong: totals, records in = sequences + rejected, lengths, targets, tokens, content hashes.

    Reads all tokens.
    """
    manifest, num_sequences = analysis.manifest, analysis.num_sequences
    totals = {
        "num_sequences": num_sequences,
        "num_tokens": int(analysis.num_tokens.sum(dtype=np.int64)),
        "num_target_tokens": int(analysis.num_target_tokens.sum(dtype=np.int64)),
    }
    if manifest.get("totals") != totals:
        yield Violation("totals", f"manifest says {manifest.get('totals')}, the sequences have {totals}")
    records = sum(source["records"] for source in manifest["sources"])
    rejected = sum(manifest["rejected"].values())
    left_out = sum(source.get("not_sampled", 0) for source in manifest["sources"])
    if records != num_sequences + rejected + left_out:
        sampled = f", and {left_out} left out of the sample" if left_out else ""
        yield Violation("records", f"{records} records, but {num_sequences} sequences and {rejected} rejected{sampled}")
    wrong = np.flatnonzero(analysis.num_tokens < 1)
    if wrong.size:
        yield Violation("lengths", f"sequence {wrong[0]} has no tokens", count=wrong.size)
    limit = analysis.num_tokens - 1
    wrong = np.flatnonzero((analysis.num_target_tokens < 0) | (analysis.num_target_tokens > limit))
    if wrong.size:
        yield Violation("targets", f"sequence {wrong[0]} has an impossible number of targets", count=wrong.size)
    hashes = dict(manifest["content_hashes"])
    if analysis.has_tokens:
        try:
            yield from _check_tokens(analysis)
        except DataError as error:
            yield Violation("tokens", str(error))
    if combine_hashes(hashes) != analysis.content_hash:
        yield Violation("content-hash", "the analysis's hash is not that of its files' hashes")


def _check_tokens(analysis: Analysis) -> Iterator[Violation]:
    hasher = TokensHasher()
    first = 0
    largest = analysis.manifest.get("max_token_id")
    for start, batch in analysis.tokens().batches():
        if start != first:
            yield Violation("tokens", f"the manifest has sequence {start} where {first} is")
            return
        rows = slice(first, first + batch.num_rows)
        ids, target = batch.column("input_ids"), batch.column("target")
        offsets = ids.offsets.to_numpy()
        lengths = np.diff(offsets)
        if not np.array_equal(lengths, analysis.num_tokens[rows]):
            yield Violation("tokens", f"token rows from sequence {first} on do not have the lengths stated")
            return
        if not np.array_equal(np.diff(target.offsets.to_numpy()), lengths):
            yield Violation("tokens", f"target masks from sequence {first} on are not as long as their tokens")
            return
        mask = target.flatten().to_numpy(zero_copy_only=False)
        starts = offsets[:-1] - offsets[0]
        counts = np.add.reduceat(mask, starts, dtype=np.int64)
        if mask[starts].any() or not np.array_equal(counts, analysis.num_target_tokens[rows]):
            yield Violation("targets", f"target masks from sequence {first} on are not those counted")
        values = ids.flatten().to_numpy()
        hasher.update(sequence_digests((offsets - offsets[0]).astype(np.int64), values, mask))
        if values.min() < 0 or (largest is not None and values.max() > largest):
            yield Violation("tokens", f"a token id from sequence {first} on is outside 0..{largest}")
        first += batch.num_rows
    if first != analysis.num_sequences:
        yield Violation("tokens", f"tokens of {first} sequences, expected {analysis.num_sequences}")
    if hasher.hexdigest() != analysis.manifest["content_hashes"].get("tokens"):
        yield Violation("content-hash", "the tokens are not those the manifest was written for")
