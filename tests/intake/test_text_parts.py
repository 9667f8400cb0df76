"""A text that is cut has the tokens of the whole, and is cut only where that is proved."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chunkplan.intake.backends import fast
from chunkplan.intake.backends.fast import FastTokenizer, can_be_cut, parts
from tests.support.places import ROOT

SAMPLE = ROOT / "sample_data" / "tokenizer"
DESCRIPTION = json.loads((SAMPLE / "tokenizer.json").read_text())

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = (
    rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIXES}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIXES}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def described(*steps: dict[str, Any], normalizer: str | None = None, **token: Any) -> dict[str, Any]:
    """The sample's tokenizer with other steps before its model, and one more token if it is given."""
    description = copy.deepcopy(DESCRIPTION)
    if steps:
        description["pre_tokenizer"]["pretokenizers"] = list(steps)
    description["normalizer"] = normalizer and {"type": normalizer}
    if token:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        description["added_tokens"].append({"id": 4096, "special": True, **flags, **token})
    return description


def split(pattern: str, **others: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **others}


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


BYTES = byte_level(use_regex=False)
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [4094], "tokens": ["<|im_start|>"]}},
}

CUT = {
    "sample": described(),
    "GPT-2": described(byte_level(use_regex=True)),
    "Llama 3": described(split(LLAMA_3), BYTES),
    "o200k": described(split(O200K), BYTES),
    "digits": described({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)),
    "NFC": described(normalizer="NFC"),
    "NFKD": described(normalizer="NFKD"),
    "token of a letter": described(normalizer="NFC", content="e\u0301", normalized=True),
    "begins": {**described(normalizer="NFC"), "post_processor": TEMPLATE},
}

#: What borders, and what looks like one, is made of.
BITS = (
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\x0b", "\x85"),
    *("a", "word", "Word", "THE", "é", "e\u0301", "\u0301", "ß", "中", "龥", "語", "ﬁ", "각", "\u1100\u1161\u11a8"),
    *("7", "12", "2024", "½", "٣", "'", "'s", "'LL", "!", "...", "/", "-", "_", "😀", "\u200d"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\n", "<|im"),
)
TEXTS = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=40).map("".join)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("sample", "Llama 3", "NFKD") else pytest.mark.soak) for name in CUT],
)
@settings(max_examples=30, deadline=None)
@given(text=TEXTS, size=st.sampled_from([1, 2, 5]))
@example("a b\nc\n\nd  e \n f's G'LL! ! 12 \n3\n中\n語 文\r\n", 1)
def test_a_text_that_is_cut_has_the_tokens_of_the_whole(name: str, text: str, size: int) -> None:
    content = json.dumps(CUT[name])
    whole, tokenizer = _LOADED.setdefault(
        name, (Tokenizer.from_str(content), FastTokenizer(json.loads(content), content))
    )
    text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast, "PART_CHARS", size)
        assert "".join(parts(text)) == text
        assert tokenizer.texts([text, "", text])[2].tolist() == whole.encode(text).ids
        [(input_ids, _, _)] = tokenizer.rendered([text], [[]])
        assert input_ids.tolist() == whole.encode(text, add_special_tokens=False).ids


_LOADED: dict[str, tuple[Tokenizer, FastTokenizer]] = {}


@pytest.mark.parametrize("name", CUT)
def test_tokenizers_of_these_kinds_are_cut(name: str) -> None:
    assert can_be_cut(CUT[name])


@pytest.mark.parametrize(
    "description",
    [
        described(split(r"\w+ \w+|\s+"), BYTES),
        described(split(r"\p{L}+|\p{N}"), BYTES),  # spaces are in what is between its matches
        described(split(LLAMA_3, behavior="MergedWithNext"), BYTES),
        described(split(LLAMA_3, invert=True), BYTES),
        described({"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}, BYTES),
        described(BYTES),
        described(content="of the"),
        described(content="<mask>", lstrip=True),
        described(content="<mask>", rstrip=True),
        described(content="mask", single_word=True),
        {**described(), "model": {**DESCRIPTION["model"], "dropout": 0.1}},
    ],
)
def test_where_nothing_proves_it_no_text_is_cut(description: dict[str, Any]) -> None:
    assert not can_be_cut(description)


MEMORY = """
import resource, sys
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import TextRecord
loaded = load_tokenizer(sys.argv[1])
loaded.encode([TextRecord("It is. ")])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
[(input_ids, _)] = loaded.encode([TextRecord("What it is, is fine. " * 100_000)])
print(len(input_ids), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_long_text_takes_little_memory() -> None:
    """Two MB: whole they would take 260."""
    command = [sys.executable, "-c", MEMORY, str(SAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    num_tokens, num_kb = map(int, done.stdout.split())
    assert num_tokens > 500_000
    assert num_kb < 60 << 10
