"""The invariants of an analysis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.hashing import TokensHasher, combine_hashes, sequence_digests
from chunkplan.planfile.manifest import SourceEntry
from chunkplan.planfile.schema import to_numpy
from chunkplan.validation.chunk_columns import Violation

#: Names of what `check_analysis` finds, in the order it looks.
ANALYSIS_INVARIANTS = ("totals", "records", "lengths", "targets", "samples", "tokens", "content-hash")


def check_analysis(analysis: Analysis) -> Iterator[Violation]:
    """Yield what is wrong: totals, records in = sequences + rejected, lengths, targets, samples, tokens, hashes.

    All tokens are read for it.
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
    more = sum(source.get("more_sequences", 0) for source in manifest["sources"])
    if records + more != num_sequences + rejected + left_out:
        made = f"{records} records" + (f" that made {more} sequences more" if more else "")
        sampled = f", and {left_out} left out of the sample" if left_out else ""
        yield Violation("records", f"{made}, but {num_sequences} sequences and {rejected} rejected{sampled}")
    yield from _check_sources(analysis)
    yield from _check_reasons(manifest)
    wrong = np.flatnonzero(analysis.num_tokens < 1)
    if wrong.size:
        yield Violation("lengths", f"sequence {wrong[0]} has no tokens", count=wrong.size)
    limit = analysis.num_tokens - 1
    wrong = np.flatnonzero((analysis.num_target_tokens < 0) | (analysis.num_target_tokens > limit))
    if wrong.size:
        yield Violation("targets", f"sequence {wrong[0]} has an impossible number of targets", count=wrong.size)
    yield from _check_samples(analysis)
    if analysis.has_tokens:
        try:
            yield from check_tokens(analysis)
        except DataError as error:
            yield Violation("tokens", str(error))
    if combine_hashes(manifest["content_hashes"]) != analysis.content_hash:
        yield Violation("content-hash", "the analysis's hash is not that of its files' hashes")


def _check_sources(analysis: Analysis) -> Iterator[Violation]:
    """Yield where a source has other sequences than it says, or records that are not in, rejected or left out."""
    sources = analysis.manifest["sources"]
    if not sources:
        return
    counts = np.bincount(analysis.source, minlength=len(sources))
    tokens = np.bincount(analysis.source, weights=analysis.num_tokens, minlength=len(sources))
    starts = np.cumsum(counts) - counts
    for index, source in enumerate(sources):
        actual = {
            "num_sequences": int(counts[index]),
            "num_tokens": int(tokens[index]),
            "first_sequence_id": int(starts[index]),
            "rejected": source["records"]
            + source.get("more_sequences", 0)
            - int(counts[index])
            - source.get("not_sampled", 0),
        }
        for name, value in actual.items():
            if source.get(name, value) != value:
                yield Violation("records", f"{source['path']} says {name} = {source[name]}, counted {value}")


def _check_reasons(manifest: dict[str, Any]) -> Iterator[Violation]:
    """Yield where rejections by reason do not add up, or a key that was not read is in more records than were read."""
    reasons: Counter[str] = Counter()
    for source in manifest["sources"]:
        path, found, rejected = source["path"], source.get("reasons", {}), source.get("rejected", 0)
        reasons.update(found)
        if "reasons" in source and sum(found.values()) != rejected:
            yield Violation("records", f"{path} says {rejected} rejected, but {sum(found.values())} by reason")
        unread = source.get("unread_keys", {})
        num_read = source["records"] - source.get("not_sampled", 0)
        for key, count in unread.items():
            if count is not None and count > num_read:
                yield Violation(
                    "records", f"{path} says {count} records with the key `{key}`, but {num_read} were read"
                )
        if source.get("num_unread_keys", len(unread)) < len(unread):
            yield Violation("records", f"{path} lists {len(unread)} keys of {source['num_unread_keys']}")
        yield from _check_left_out(source)
    if any("reasons" in source for source in manifest["sources"]) and +reasons != +Counter(manifest["rejected"]):
        yield Violation("records", f"{dict(reasons)} were rejected of the sources, {manifest['rejected']} of all")


def _check_left_out(source: SourceEntry) -> Iterator[Violation]:
    """Yield where more sequences lack something than there are, or where it is not said which record is the first."""
    left_out, first = source.get("left_out", {}), source.get("first_left_out", {})
    num_sequences = source.get("num_sequences")
    for kind, count in left_out.items():
        if num_sequences is not None and count > num_sequences:
            yield Violation(
                "records", f"{source['path']} says that {count} sequences lack `{kind}`, but has {num_sequences}"
            )
    if left_out.keys() != first.keys():
        yield Violation("records", f"{source['path']} names the first record without {[*first]}, not {[*left_out]}")


def _check_samples(analysis: Analysis) -> Iterator[Violation]:
    """Yield where a group does not begin with its first sequence, is of several sources, or is no pair in its order."""
    group, label, ids = analysis.group, analysis.label, np.arange(analysis.num_sequences)
    if group is None:
        return
    wrong = np.flatnonzero((group < 0) | (group > ids))
    if wrong.size:
        yield Violation("samples", f"sequence {wrong[0]} is of group {group[wrong[0]]}, no sequence before it")
        return
    apart = np.flatnonzero((group[group] != group) | (analysis.source[group] != analysis.source))
    if apart.size:
        told = f"sequence {apart[0]} is of group {group[apart[0]]}, which is none of its source"
        yield Violation("samples", told, count=apart.size)
    if analysis.samples == "preference":
        chosen, record = ids - ids % 2, analysis.record
        wrong = np.flatnonzero((group != chosen) | (label != (ids % 2 == 0)) | (record != record[chosen]))
        if wrong.size or ids.size % 2:
            odd = wrong[0] if wrong.size else ids[-1]
            told = f"sequence {odd} is no part of a pair: chosen, then rejected, of one record"
            yield Violation("samples", told, count=max(1, wrong.size))
    if analysis.samples != "labelled" and not analysis.num_target_tokens.all():
        wrong = np.flatnonzero(analysis.num_target_tokens == 0)
        yield Violation("samples", f"sequence {wrong[0]} has no target", count=wrong.size)


def check_tokens(analysis: Analysis) -> Iterator[Violation]:
    """Yield what is wrong with the tokens: targets as counted, ids in range, numbers beside targets, the hash.

    Raises:
        DataError: a file of tokens is damaged.
    """
    hasher = TokensHasher()
    largest = analysis.manifest["max_token_id"]
    for first, batch in analysis.tokens().batches():
        ids, target = batch.column("input_ids"), batch.column("target")
        offsets = to_numpy(ids.offsets).astype(np.int64)
        starts = offsets - offsets[0]
        mask, values = to_numpy(target.flatten()), to_numpy(ids.flatten())
        counts = np.add.reduceat(mask, starts[:-1], dtype=np.int64)
        if mask[starts[:-1]].any() or not np.array_equal(
            counts, analysis.num_target_tokens[first : first + batch.num_rows]
        ):
            yield Violation("targets", f"target masks from sequence {first} on are not those counted")
        more = {name: to_numpy(batch.column(name).flatten()) for name in analysis.token_columns}
        for name in (name for name, numbers in more.items() if numbers[~mask].any()):
            yield Violation("tokens", f"`{name}` from sequence {first} on is not 0 at a token that is no target")
        hasher.update(sequence_digests(starts, values, mask, *more.values()))
        if values.min() < 0 or (largest is not None and values.max() > largest):
            yield Violation("tokens", f"a token id from sequence {first} on is outside 0..{largest}")
    if hasher.hexdigest() != analysis.manifest["content_hashes"]["tokens"]:
        yield Violation("content-hash", "the tokens are not those the manifest was written for")
