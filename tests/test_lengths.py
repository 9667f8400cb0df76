"""The length report says what numpy says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chunkplan.lengths import LengthReport, length_report
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import load_analysis


def _analysis(tmp_path: Path, lengths: list[int] | np.ndarray) -> Analysis:
    np.save(tmp_path / "lengths.npy", np.asarray(lengths))
    return load_analysis(tmp_path / "lengths.npy")


def _report(tmp_path: Path, lengths: list[int] | np.ndarray) -> LengthReport:
    return length_report(_analysis(tmp_path, lengths))


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(7).lognormal(6, 2, 2000).astype(np.int64) + 1


def test_totals_and_quantiles(tmp_path: Path, lengths: np.ndarray) -> None:
    report = _report(tmp_path, lengths)
    assert (report.num_sequences, report.num_tokens) == (2000, lengths.sum())
    assert report.num_target_tokens == lengths.sum() - 2000
    assert report.num_without_target == (lengths == 1).sum()
    assert report.mean_tokens == pytest.approx(lengths.mean())
    assert report.longest == lengths.max()
    assert report.padding_share == pytest.approx(1 - lengths.mean() / lengths.max())
    for quantile in report.quantiles:
        assert quantile.num_tokens == np.quantile(lengths, quantile.share, method="inverted_cdf")


def test_bands_count_sequences_and_tokens_below_their_bounds(tmp_path: Path, lengths: np.ndarray) -> None:
    report = _report(tmp_path, lengths)
    assert [band.high for band in report.cumulative] == [1024, 4096, 8192, 32768, 131072]
    for band in (*report.cumulative, *report.histogram):
        inside = lengths[(lengths >= band.low) & (lengths < band.high)]
        assert (band.num_sequences, band.num_tokens) == (len(inside), inside.sum())
    assert sum(band.num_sequences for band in report.histogram) == 2000
    assert sum(band.num_tokens for band in report.histogram) == lengths.sum()
    assert all(band.high == 2 * band.low for band in report.histogram)


def test_the_tail_has_its_shares_of_sequences_tokens_and_attention(tmp_path: Path, lengths: np.ndarray) -> None:
    report = _report(tmp_path, lengths)
    for tail, inside in ((report.over_8k, lengths[lengths > 8192]), (report.longest_1_percent, np.sort(lengths)[-20:])):
        assert (tail.num_sequences, tail.num_tokens) == (len(inside), inside.sum())
        assert tail.sequence_share == len(inside) / 2000
        assert tail.token_share == pytest.approx(inside.sum() / lengths.sum())
        assert tail.attention_share == pytest.approx((inside**2).sum() / (lengths**2).sum())
        assert tail.low <= inside.min()


def test_one_sequence_is_its_own_median_and_tail(tmp_path: Path) -> None:
    report = _report(tmp_path, [1])
    assert {quantile.num_tokens for quantile in report.quantiles} == {1}
    assert [(band.low, band.high, band.num_sequences) for band in report.histogram] == [(1, 2, 1)]
    assert report.over_8k.num_sequences == 0
    assert report.longest_1_percent.num_sequences == 1
    assert (report.padding_share, report.num_without_target) == (0, 1)


def test_a_bound_belongs_to_the_band_above_it_and_8k_is_not_over_8k(tmp_path: Path) -> None:
    report = _report(tmp_path, [8191, 8192, 8193])
    assert report.cumulative[2].num_sequences == 1
    assert [band.num_sequences for band in report.histogram] == [1, 2]
    assert report.over_8k.num_sequences == 1


def test_squares_beyond_64_bits_do_not_wrap(tmp_path: Path) -> None:
    report = _report(tmp_path, [2**31 - 1] * 8 + [1])
    assert report.over_8k.attention_share == pytest.approx(1)
    assert report.longest_1_percent.attention_share == pytest.approx(1 / 8)


def test_the_report_is_json(tmp_path: Path, lengths: np.ndarray) -> None:
    document = json.loads(json.dumps(_report(tmp_path, lengths).to_dict(), allow_nan=False))
    assert document["num_tokens"] == lengths.sum()
    assert document["quantiles"][-1] == {"share": 1.0, "num_tokens": lengths.max(), "low": None, "high": None}


def test_a_sample_says_between_which_lengths_a_quantile_lies(tmp_path: Path) -> None:
    """Of 400 samples of the same data, the intervals of about 95 in 100 hold what they are about.

    Those of the tokens a little fewer: these lengths are far from a normal distribution.
    """
    random = np.random.default_rng(3)
    everything = np.sort(random.lognormal(6, 1.5, 20_000).astype(np.int64) + 1)
    median, total = everything[10_000 - 1], everything.sum()
    held = {"median": 0, "sequences": 0, "tokens": 0}
    for _ in range(400):
        sample = everything[random.random(everything.size) < 0.05]
        analysis = _analysis(tmp_path, sample)
        report = length_report(replace(analysis, manifest={**analysis.manifest, "sample": 0.05}))
        quantile = report.quantiles[0]
        assert report.all_sequences is not None
        assert report.all_tokens is not None
        held["median"] += (quantile.low or 0) <= median <= (quantile.high or 0)
        held["sequences"] += report.all_sequences.low <= everything.size <= report.all_sequences.high
        held["tokens"] += report.all_tokens.low <= total <= report.all_tokens.high
        assert report.quantiles[-1].low is report.quantiles[-1].high is None
    assert all(350 <= count <= 396 for count in held.values()), held


def test_a_small_sample_does_not_pretend_to_know_the_tail(tmp_path: Path) -> None:
    analysis = _analysis(tmp_path, np.arange(1, 101))
    report = length_report(replace(analysis, manifest={**analysis.manifest, "sample": 0.1}))
    by_share = {quantile.share: quantile for quantile in report.quantiles}
    assert (by_share[0.5].low, by_share[0.5].high) == (40, 60)
    assert by_share[0.99].high is None
    assert by_share[0.999].high is None
