"""A tokenizer is the same if it gives every text the same tokens, however its file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from chunkplan.planfile.tokenizer_hash import tokenizer_hash
from tests.support.places import ROOT
from tests.support.tokenizer_cases import byte_level

SAMPLE = ROOT / "sample_data" / "tokenizer"
Description = dict[str, Any]


def _framed() -> Description:
    """A tokenizer that puts tokens around a text."""
    description: Description = json.loads(byte_level().to_str())
    ids = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    framed = {"type": "TemplateProcessing", "single": single, "pair": [*single], "special_tokens": ids}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    description["post_processor"] = {"type": "Sequence", "processors": [level, framed]}
    return description


def _marked() -> Description:
    """A tokenizer that writes spaces as marks, in the names that its library had for that at first."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁a", -1.5), ("b", -2.25)], unk_id=0))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    description: Description = json.loads(tokenizer.to_str())
    description["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    return description


def _hash(description: Description) -> str:
    return tokenizer_hash(description)


def _merges_as_texts(description: Description) -> None:
    description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]


def _in_another_order(description: Description) -> None:
    model = description["model"]
    model["vocab"] = dict(reversed(model["vocab"].items())) if isinstance(model["vocab"], dict) else model["vocab"]
    description["added_tokens"].reverse()


def _truncated(description: Description) -> None:
    description["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    description["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "<|im_start|>",
    }


def _as_a_newer_library_writes(description: Description) -> None:
    written = json.loads(Tokenizer.from_str(json.dumps(description)).to_str())
    description |= written
    description["model"]["a_later_setting"] = None


def _decoded_otherwise(description: Description) -> None:
    description["decoder"] = {"type": "Fuse"}


def _without_what_says_nothing(description: Description) -> None:
    for key in ("fuse_unk", "byte_fallback", "ignore_merges", "dropout", "unk_token"):
        description["model"].pop(key, None)


BOTH = [_in_another_order, _as_a_newer_library_writes, _decoded_otherwise, _without_what_says_nothing]


@pytest.mark.parametrize(
    ("make", "change"),
    [(_framed, _merges_as_texts), (_framed, _truncated), *((make, one) for make in (_framed, _marked) for one in BOTH)],
)
def test_a_file_that_encodes_the_same_has_the_same_hash(
    make: Callable[[], Description], change: Callable[[Description], None]
) -> None:
    description = make()
    change(description)
    assert _hash(description) == _hash(make())


def test_what_transformers_saves_has_the_hash_of_what_it_loaded(tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(SAMPLE).save_pretrained(tmp_path)
    files = [folder / "tokenizer.json" for folder in (SAMPLE, tmp_path)]
    assert files[0].read_bytes() != files[1].read_bytes()
    assert _hash(json.loads(files[0].read_bytes())) == _hash(json.loads(files[1].read_bytes()))


def _two_ids_swapped(description: Description) -> None:
    vocabulary = description["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _two_merges_swapped(description: Description) -> None:
    merges = description["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _without_a_merge(description: Description) -> None:
    description["model"]["merges"].pop()


def _ignoring_merges(description: Description) -> None:
    description["model"]["ignore_merges"] = True


def _with_another_token(description: Description) -> None:
    description["added_tokens"].append({**description["added_tokens"][0], "id": 4000, "content": "<new>"})


def _with_a_token_that_takes_spaces(description: Description) -> None:
    description["added_tokens"][0]["lstrip"] = True


def _normalized(description: Description) -> None:
    description["normalizer"] = {"type": "NFKC"}


def _with_a_space_before(description: Description) -> None:
    description["pre_tokenizer"]["add_prefix_space"] = True


def _with_nothing_around(description: Description) -> None:
    description["post_processor"] = None


def _with_its_token_behind(description: Description) -> None:
    for name in ("single", "pair"):
        description["post_processor"]["processors"][1][name].reverse()


@pytest.mark.parametrize(
    "change",
    [
        *(_two_ids_swapped, _two_merges_swapped, _without_a_merge, _ignoring_merges, _with_another_token),
        *(_with_a_token_that_takes_spaces, _normalized, _with_a_space_before, _with_nothing_around),
        _with_its_token_behind,
    ],
)
def test_a_file_that_encodes_otherwise_has_another_hash(change: Callable[[Description], None]) -> None:
    description = _framed()
    change(description)
    assert _hash(description) != _hash(_framed())


def test_an_unknown_token_with_the_id_0_is_not_none() -> None:
    description = _marked()
    description["model"]["unk_id"] = None
    assert _hash(description) != _hash(_marked())


@pytest.mark.parametrize("description", [{}, {"model": 1}, {"model": {"vocab": {}}, "normalizer": {"type": "what"}}])
def test_what_is_no_tokenizer_has_no_hash(description: Description) -> None:
    with pytest.raises(ValueError):
        tokenizer_hash(description)
