"""What is held out follows from the text alone."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.errors import DataError, UsageError
from chunkplan.planfile import analysis_writer
from chunkplan.planfile.load import load_analysis
from chunkplan.planning.selection import check_selection, describe_selection, expected_copies
from tests.support.selections import config, held_out, mix, numbered, numbers, shares, texts


def test_a_key_is_the_digest_of_the_token_ids_whatever_the_files_are_cut_into(make, monkeypatch):
    data = [[1, 2, 3], [70000], [1, 2], [1, 2, 3], [2**31 - 1, 0]]
    expected = [
        int.from_bytes(hashlib.blake2b(np.array(text, "<i4").tobytes(), digest_size=8).digest(), "little")
        for text in data
    ]
    assert make(a=data).content_keys.tolist() == expected
    monkeypatch.setattr(analysis_writer, "WAITING_SEQUENCES", 2)
    monkeypatch.setattr(analysis_writer, "BATCH_ROWS", 2)
    monkeypatch.setattr(analysis_writer, "TOKEN_FILE_TOKENS", 5)
    cut = make(a=data)
    assert len(cut.manifest["tokens"]) > 1
    keys = cut.content_keys
    assert keys.dtype == np.uint64
    assert keys.tolist() == expected


def test_tokens_are_read_once_an_analysis(make):
    analysis = make(a=numbered(9))
    keys = analysis.content_keys
    for part in (analysis.path / "tokens").iterdir():
        part.unlink()
    assert analysis.content_keys is keys
    with pytest.raises(DataError, match="missing"):
        _ = load_analysis(analysis.path).content_keys


def test_tokens_of_another_number_of_sequences_are_refused(make):
    analysis = make(a=numbered(9))
    path = analysis.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tokens"] *= 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="is said to begin with sequence 0, expected 9"):
        load_analysis(analysis.path)


def test_keys_without_tokens_are_those_of_split_mix_64(make_lengths):
    # The first outputs of the published generator with seed 0.
    assert make_lengths(3).content_keys.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@settings(max_examples=30, deadline=None)
@given(data=texts, holdout=st.one_of(shares, numbers))
def test_copies_of_a_text_are_on_the_same_side(make, data, holdout):
    analysis = make(a=data)
    sides = {}
    for text, out in zip(data, held_out(analysis, holdout), strict=True):
        assert sides.setdefault(tuple(text), out) == out


@settings(max_examples=30, deadline=None)
@given(data=texts, more=texts, share=shares)
def test_more_data_moves_nothing_across_a_share(make, data, more, share):
    before, after = make(a=data), make(a=data, b=more)
    assert np.array_equal(held_out(after, share)[: len(data)], held_out(before, share))
    moved = make(b=more, a=data)
    assert np.array_equal(held_out(moved, share)[len(more) :], held_out(before, share))


@settings(max_examples=30, deadline=None)
@given(data=texts, more=texts, number=numbers)
def test_more_data_holds_out_nothing_that_was_trained_on(make, data, more, number):
    before, after = make(a=data), make(a=data, b=more)
    assert not (held_out(after, number)[: len(data)] & ~held_out(before, number)).any()


@settings(max_examples=30, deadline=None)
@given(data=texts, number=numbers)
def test_a_number_holds_out_that_many_and_the_copies_of_the_last(make, data, number):
    analysis = make(a=data)
    keys, out = analysis.content_keys, held_out(analysis, number)
    assert out.sum() >= min(number, len(data))
    last = keys[out].max()
    assert (keys[out] < last).sum() < number
    assert out.all() or keys[~out].min() > last


def test_a_number_is_exact_where_texts_differ(make):
    analysis = make(a=numbered(300))
    for number in (1, 17, 299):
        assert held_out(analysis, number).sum() == number


def test_a_share_is_about_as_much(make, make_lengths):
    # Five standard deviations of 20,000 draws are less than 0.02.
    for analysis in (make(a=numbered(20_000)), make_lengths(20_000)):
        assert held_out(analysis, 0.3).mean() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("share", [5e-324, 1e-05, 0.1, 0.5, 1 - 2**-53])
def test_a_share_is_compared_exactly(make_lengths, share):
    analysis = make_lengths(50_000)
    keys = analysis.content_keys.tolist()
    bound = Fraction(str(share)) * 2**64
    assert held_out(analysis, share).tolist() == [key < bound for key in keys]


def test_shares_next_to_a_key_are_compared_exactly(make_lengths):
    """In floating point, keys within 2^10 of the bound would be on either side."""
    analysis = make_lengths(3000)
    for sequence, key in enumerate(analysis.content_keys.tolist()):
        assert held_out(analysis, key / 2**64)[sequence] == (key < Fraction(str(key / 2**64)) * 2**64)


@settings(max_examples=30, deadline=None)
@given(data=texts, holdout=st.one_of(shares, numbers), epoch=st.integers(0, 2**31))
def test_training_and_evaluation_are_disjoint_and_together_everything(make, data, holdout, epoch):
    analysis = make(a=data)
    sides = [expected_copies(analysis, config(holdout=holdout, part=part), epoch) for part in ("train", "eval")]
    assert all(side.dtype == np.int32 for side in sides)
    assert (sides[0] + sides[1]).tolist() == [1] * len(data)


def test_a_lengths_file_can_be_held_out_from_and_longer_ones_keep_their_sides(make_lengths):
    short, long = make_lengths(400), make_lengths(500)
    assert np.array_equal(held_out(long, 0.2)[:400], held_out(short, 0.2))
    assert held_out(short, 30).sum() == 30
    assert not (held_out(long, 30)[:400] & ~held_out(short, 30)).any()
    check_selection(short, config(holdout=0.2, part="eval"))


def test_nothing_asked_for_is_everything_once(make):
    analysis = make(a=numbered(5), b=numbered(3, 10))
    for nothing in (config(), config(holdout=None, part="train", mix=None, seed=0), config(mix={})):
        check_selection(analysis, nothing)
        assert expected_copies(analysis, nothing, 3).tolist() == [1] * 8


@pytest.mark.parametrize(
    "holdout", [0, -1, 0.0, 1.0, 1.5, -0.1, float("nan"), float("inf"), True, "0.1", 2**63 * 1.0, [1]]
)
def test_holdouts_that_cannot_be_are_refused(make, holdout):
    with pytest.raises(UsageError, match=r"holdout is .*, expected a share between 0 and 1") as raised:
        check_selection(make(a=numbered(9)), config(holdout=holdout))
    assert "0.01" in raised.value.hint


@pytest.mark.parametrize(
    ("holdout", "message", "hint"),
    [
        (9, "takes all of the 9 sequences: none is left for training", "lower"),
        (10**30, "takes all of the 9 sequences", "lower"),
        (0.9999999, "takes all of the 9 sequences", "lower"),
        (1e-9, "takes none of the 9 sequences: none is left for evaluation", "raise"),
    ],
)
@pytest.mark.parametrize("part", ["train", "eval"])
def test_a_holdout_that_leaves_one_side_empty_is_refused(make, holdout, message, hint, part):
    with pytest.raises(UsageError, match=message) as raised:
        check_selection(make(a=numbered(9)), config(holdout=holdout, part=part))
    assert raised.value.hint.startswith(hint)


def test_copies_of_one_text_cannot_be_divided(make):
    with pytest.raises(UsageError, match="a holdout of 1 takes all of the 5 sequences"):
        check_selection(make(a=[[1, 2]] * 5), config(holdout=1))


def test_a_part_has_to_be_one_that_there_is(make):
    with pytest.raises(UsageError, match="part is 'test', expected train or eval"):
        config(holdout=3, part="test")
    with pytest.raises(UsageError, match="nothing to evaluate on") as raised:
        check_selection(make(a=numbered(9)), config(part="eval"))
    assert "hold out" in raised.value.hint


def test_what_is_selected_is_described_in_numbers_that_json_has(make, make_lengths):
    analysis = make(a=numbered(10), b=numbered(20, 50), c=[])
    described = describe_selection(analysis, mix(2.5, holdout=6))
    assert json.loads(json.dumps(described)) == described
    out = held_out(analysis, 6)
    of_a, of_b = int(out[:10].sum()), int(out[10:].sum())
    occurrences = (5 * (10 - of_a) + 1) // 2
    assert described == {
        "num_sequences": 30,
        "num_held_out": 6,
        "num_occurrences": occurrences + 20 - of_b,
        "sources": [
            {"path": "data/a.jsonl", "num_sequences": 10, "num_held_out": of_a, "num_occurrences": occurrences},
            {"path": "data/b.jsonl", "num_sequences": 20, "num_held_out": of_b, "num_occurrences": 20 - of_b},
            {"path": "data/c.jsonl", "num_sequences": 0, "num_held_out": 0, "num_occurrences": 0},
        ],
    }
    assert describe_selection(make_lengths(50), config(holdout=5, part="eval")) == {
        "num_sequences": 50,
        "num_held_out": 5,
        "num_occurrences": 5,
        "sources": [],
    }
