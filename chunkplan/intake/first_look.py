"""Lengths for a first look at much data: of all records from their bytes, as tokens of a sample of them are counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.cost.durations import Float64Array
from chunkplan.intake.files import STDIN
from chunkplan.intake.reading import IntakeRequest, write_analysis
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis

#: Tokens, about, that are counted one by one; data with no more than twice as many are read whole.
COUNTED = 1_500_000

#: Records of a source from which a line is drawn through what they have; fewer are estimated as all sources are.
_FEWEST = 32

#: The share of the sampled records, the longest of them, by which the estimate is judged.
_JUDGED = 0.1


@dataclass(frozen=True)
class LengthEstimate:
    """The way lengths were estimated: tokens of `num_counted` records were counted, of `num_records` in all.

    `error`: the median share that the estimate is off by, of the longest tenth of those that were counted.
    """

    num_counted: int
    num_records: int
    error: float


def first_look(request: IntakeRequest, output: Path, scratch: Path) -> tuple[Analysis, LengthEstimate | None]:
    """The lengths of the requested data, and how they were estimated.

    Few records, records without text, and those that say what comes in one step are analyzed into `output` by
    `write_analysis`, and nothing is estimated. Else the lengths go to a file in the folder `scratch`, estimated from
    the bytes of every record by a line fitted to a random sample of each source. So the longest record is never missed.

    Raises:
        UsageError, DataError: as `write_analysis`.
    """
    if request.tokenizer is None or request.options.sample is not None or request.paths == [STDIN]:
        return write_analysis(request, output), None
    options = replace(request.options, tokens=False, max_length=None)
    by_bytes = replace(request, tokenizer=None, chat_template=None, options=options, cache=scratch / "bytes-cache")
    everything = write_analysis(by_bytes, scratch / "bytes")
    total, request = int(everything.num_tokens.sum(dtype=np.int64)), replace(request, notes=None)
    if everything.samples or everything.is_exact or total <= 2 * COUNTED:
        return write_analysis(request, output), None
    sampled = replace(request, options=replace(options, sample=COUNTED / total), cache=scratch / "sample-cache")
    sample = write_analysis(sampled, scratch / "sample")
    num_tokens, estimate = _estimated(everything, sample)
    limit = request.options.max_length
    if limit is not None:
        num_tokens = num_tokens[num_tokens <= limit] if request.options.long == "drop" else num_tokens.clip(max=limit)
    target = scratch / "lengths.npy"
    np.save(target, num_tokens)
    return load_analysis(target), estimate


#: Bits of a key that number the record, below its source.
_RECORD_BITS = 40


def _estimated(everything: Analysis, sample: Analysis) -> tuple[Int32Array, LengthEstimate]:
    """The tokens of all sequences, int32 [n], by what they have in `everything`, where bytes stand for tokens."""
    all_keys, all_bytes, all_parts = _by_record(everything)
    keys, tokens, _ = _by_record(sample)
    at = np.searchsorted(all_keys, keys)
    num_bytes, parts, source = all_bytes[at], all_parts[at], keys >> _RECORD_BITS
    lines = np.tile(_line(num_bytes, parts, tokens), (int(everything.source.max()) + 1, 1))
    for one in np.unique(source):
        if (own := source == one).sum() >= _FEWEST:
            lines[one] = _line(num_bytes[own], parts[own], tokens[own])
    begins, rates = lines[everything.source].T
    num_tokens = np.maximum(np.rint(begins + rates * everything.num_tokens), 1).astype(np.int32)
    longest = np.argsort(-tokens, kind="stable")[: max(1, round(_JUDGED * tokens.size))]
    predicted = lines[source, 0] * parts + lines[source, 1] * num_bytes
    error = float(np.median(np.abs(predicted / tokens - 1)[longest]))
    return num_tokens, LengthEstimate(keys.size, all_keys.size, error)


def _by_record(analysis: Analysis) -> tuple[Int64Array, Float64Array, Int64Array]:
    """A key of each record that has sequences, ascending, with its tokens and the number of its sequences."""
    of_sequence = (analysis.source.astype(np.int64) << _RECORD_BITS) + analysis.record
    keys, place, parts = np.unique(of_sequence, return_inverse=True, return_counts=True)
    return keys, np.bincount(place, weights=analysis.num_tokens).astype(np.float64), parts


def _line(num_bytes: Float64Array, parts: Int64Array, tokens: Float64Array) -> Float64Array:
    """Tokens of a sequence beside its text, and tokens for each that its bytes stand for: by least squares, each record
    weighted as if its tokens varied by the root of their number."""
    weights = 1 / np.sqrt(num_bytes)
    found, *_ = np.linalg.lstsq(np.stack([parts, num_bytes], axis=1) * weights[:, None], tokens * weights, rcond=None)
    return found.astype(np.float64)
