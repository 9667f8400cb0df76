"""Statistics of sequence lengths: quantiles, the tail, and the cost of treating all lengths alike. Numbers only.

And the lengths of the rows of a dataset in memory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from chunkplan.arrays import Int32Array, Int64Array, offsets_of
from chunkplan.errors import UsageError
from chunkplan.planfile.analysis import Analysis
from chunkplan.quantities import short_repr

K = 1024

#: Bounds of the cumulative table, those of ChunkFlow's Table 1 (https://arxiv.org/abs/2503.02356).
_BOUNDS = (1 * K, 4 * K, 8 * K, 32 * K, 128 * K)
_QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
_TAIL_TOKENS = 8 * K
_TAIL_SHARE = 0.01


#: Standard deviations on either side that hold 95 % of a normal distribution.
_TWO_SIDED_95 = 1.959964


@dataclass(frozen=True)
class Quantile:
    """`share` of the sequences are no longer than `num_tokens`, the least length in the data that is so.

    Of a sample, the quantile of all data lies between `low` and `high` in 95 of 100 samples, whatever the distribution
    of lengths (ranks of order statistics, by the normal approximation of the binomial); None where the sample does not
    reach far enough to say.
    """

    share: float
    num_tokens: int
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True)
class Estimate:
    """A number of all data, estimated from a sample; between `low` and `high` in 95 of 100 samples.

    By the normal approximation: in fewer where a small sample has few of the sequences with most of the tokens.
    """

    value: int
    low: int
    high: int


@dataclass(frozen=True)
class Band:
    """The sequences with `low` <= num_tokens < `high`, and the tokens in them."""

    low: int
    high: int
    num_sequences: int
    num_tokens: int


@dataclass(frozen=True)
class Tail:
    """The longest sequences, of `low` tokens or more: how many they are, and their shares.

    Attention is the sum of squared lengths.
    """

    low: int
    num_sequences: int
    num_tokens: int
    sequence_share: float
    token_share: float
    attention_share: float


@dataclass(frozen=True)
class LengthReport:
    """Lengths of the sequences of an analysis.

    `cumulative` has the sequences shorter than 1K, 4K, 8K, 32K and 128K tokens (K = 1024); `histogram` one band a power
    of two from the shortest to the longest. `padding_share` is the share of padding among all tokens computed where
    every sequence is padded to the longest one. `exact` is false where lengths are estimated.

    Of a sample (the share `sample` of the records), all numbers are those of the sample; `all_sequences` and
    `all_tokens` estimate those of all data (Horvitz and Thompson, 1952).
    """

    exact: bool
    sample: float | None
    all_sequences: Estimate | None
    all_tokens: Estimate | None
    num_sequences: int
    num_tokens: int
    num_target_tokens: int
    num_without_target: int
    mean_tokens: float
    quantiles: tuple[Quantile, ...]
    cumulative: tuple[Band, ...]
    histogram: tuple[Band, ...]
    over_8k: Tail
    longest_1_percent: Tail
    padding_share: float

    __repr__ = short_repr

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return self.quantiles[-1].num_tokens

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Sequences against a model that takes `max_positions` tokens: `num_over` of `num_sequences` have more.

    `longest`: the most tokens that one has.
    """

    max_positions: int
    num_sequences: int
    num_over: int
    longest: int

    @classmethod
    def of(cls, num_tokens: Int32Array, max_positions: int | None) -> Positions | None:
        """Count sequences of `num_tokens` int32 [n] beyond the model's positions; None if its limit is unknown."""
        if max_positions is None:
            return None
        return cls(
            max_positions=max_positions,
            num_sequences=num_tokens.size,
            num_over=int((num_tokens > max_positions).sum()),
            longest=int(num_tokens.max()),
        )


def length_report(analysis: Analysis) -> LengthReport:
    """Measure the lengths of an analysis, or of a bare file of lengths.

    Example: `chunkplan.length_report(chunkplan.load_analysis("lengths.npy"))`
    """
    lengths = np.sort(analysis.num_tokens).astype(np.int64)
    count = len(lengths)
    sums = offsets_of(lengths)
    ranks = [max(1, int(np.ceil(round(share * count, 6)))) for share in _QUANTILES]
    powers = [1 << power for power in range(int(lengths[0]).bit_length() - 1, int(lengths[-1]).bit_length() + 1)]
    num_over = count - int(np.searchsorted(lengths, _TAIL_TOKENS, side="right"))
    num_longest = max(1, round(_TAIL_SHARE * count))
    sample = analysis.sample
    return LengthReport(
        exact=analysis.is_exact,
        sample=sample,
        all_sequences=None if sample is None else _total(np.ones(count), sample),
        all_tokens=None if sample is None else _total(lengths, sample),
        num_sequences=count,
        num_tokens=int(sums[-1]),
        num_target_tokens=int(analysis.num_target_tokens.sum(dtype=np.int64)),
        num_without_target=int((analysis.num_target_tokens == 0).sum()),
        mean_tokens=float(sums[-1] / count),
        quantiles=tuple(
            Quantile(share, int(lengths[rank - 1]), *_bounds(lengths, share, sample))
            for share, rank in zip(_QUANTILES, ranks, strict=True)
        ),
        cumulative=tuple(_band(lengths, sums, 0, bound) for bound in _BOUNDS),
        histogram=tuple(_band(lengths, sums, low, 2 * low) for low in powers[:-1]),
        over_8k=_tail(lengths, num_over, _TAIL_TOKENS + 1),
        longest_1_percent=_tail(lengths, num_longest, int(lengths[count - num_longest])),
        padding_share=float(1 - sums[-1] / (count * int(lengths[-1]))),
    )


def row_lengths(dataset: Any) -> Int64Array:
    """The tokens of each row of a dataset, [n], for `np.save` to make a file of them to plan.

    Raises:
        UsageError: rows have no `input_ids`, or nobody knows how many there are.
    """
    try:
        if hasattr(dataset, "select_columns"):  # of datasets: the tokens stay where they are
            parts = dataset.select_columns("input_ids").with_format("arrow").iter(10_000)
            counts = [pc.fill_null(pc.list_value_length(part["input_ids"]), 0).to_numpy() for part in parts]
            return np.concatenate(counts).astype(np.int64)
        return np.array([len(dataset[row]["input_ids"]) for row in range(len(dataset))], np.int64)
    except (KeyError, TypeError, ValueError) as error:
        told = f"the rows of a {type(dataset).__name__} cannot be measured ({error})"
        raise UsageError(told, hint="give a train_dataset that has a length, and input_ids in every row") from error


def _bounds(lengths: npt.NDArray[np.int64], share: float, sample: float | None) -> tuple[int | None, int | None]:
    """The lengths (sorted) between which a quantile of all data lies, if these are a sample of it."""
    if sample is None or share == 1:
        return None, None
    count = len(lengths)
    margin = _TWO_SIDED_95 * np.sqrt(count * share * (1 - share))
    low, high = int(np.floor(count * share - margin)), int(np.ceil(count * share + margin))
    return int(lengths[low - 1]) if low >= 1 else None, int(lengths[high - 1]) if high <= count else None


def _total(values: npt.NDArray[Any], sample: float) -> Estimate:
    """The sum over all data of what has these values in a sample that took each record with the same chance."""
    value = float(values.sum()) / sample
    margin = _TWO_SIDED_95 * float(np.sqrt((1 - sample) * np.square(values, dtype=np.float64).sum())) / sample
    return Estimate(round(value), max(0, round(value - margin)), round(value + margin))


def _band(lengths: npt.NDArray[np.int64], sums: npt.NDArray[np.int64], low: int, high: int) -> Band:
    start, stop = (int(place) for place in np.searchsorted(lengths, [low, high]))
    return Band(low, high, stop - start, int(sums[stop] - sums[start]))


def _tail(lengths: npt.NDArray[np.int64], num_sequences: int, low: int) -> Tail:
    """The `num_sequences` longest, of `low` tokens or more. Squares are summed as floats: 64 bits may not hold them."""
    tail = lengths[len(lengths) - num_sequences :]
    num_tokens = int(tail.sum())
    return Tail(
        low=low,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        sequence_share=num_sequences / len(lengths),
        token_share=num_tokens / int(lengths.sum()),
        attention_share=float(np.square(tail, dtype=np.float64).sum() / np.square(lengths, dtype=np.float64).sum()),
    )
