"""Where a text can be cut so that its parts, encoded one by one, have the tokens of the whole.

A tokenizer takes up to 130 bytes of memory for every byte of a text, and is fastest where these fit the caches of the
processor. So a text is cut before a space behind what is none, and before a line end behind a letter or digit, where
that is proved from the description of the tokenizer:

- Its regular expression is a choice of `_WHOLE` alternatives. In none of them does a space follow what is no space, or
  a line end a letter or digit, so no match goes across a cut, and the one before the cut ends there. Whatever follows
  is matched as at the begin of a text, as nothing looks back. What looks ahead does so behind spaces alone. `\\s+`
  matches the space behind the cut at least, so that a stretch without a match does not go across it either.
- All other steps look at one character at a time, or at one match.
- No added token has such a place in it, or takes the spaces beside it.
- Neither a space nor a line end is composed with what is before it, so each part is normalized by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from chunkplan.intake.records import JsonObject

_BORDER = re.compile("[!-~\u4e00-\u9fa5](?= )|[0-9A-Za-z\u4e00-\u9fa5](?=\n)")

#: What a part has at least, in characters, unless the text ends: the caches like it small, the calls large.
PART_CHARS = 1024

_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
#: Alternatives of the expressions of GPT-2, cl100k, Llama 3, Qwen and o200k.
_WHOLE = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _SUFFIXES, "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}+"),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}" for end in ("", f"{_SUFFIXES}?")),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}" for end in ("", f"{_SUFFIXES}?")),
    *(r" ?\p{N}+", r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+"),
    *(r" ?[^\s\p{L}\p{N}]+", *(rf" ?[^\s\p{{L}}\p{{N}}]{more}" for more in (r"+[\r\n]*", r"++[\r\n]*", r"+[\r\n/]*"))),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
}


def can_be_cut(description: JsonObject) -> bool:
    """Whether a byte-level tokenizer with this description, a tokenizer.json, gives a text the tokens of its parts."""
    pre_tokenizer = description.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    added = description.get("added_tokens") or []
    return (
        not description["model"].get("dropout")
        and all(_is_whole(step) or step.get("type") in ("Digits", "ByteLevel") for step in steps)
        and any(map(_is_whole, steps))
        and not any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip"))
        and not any(_BORDER.search(token["content"]) for token in added)
    )


def _is_whole(step: JsonObject) -> bool:
    """Whether a step of the pre-tokenizer cuts at every border."""
    if step.get("type") == "ByteLevel":
        return step.get("use_regex", True) is True  # that of GPT-2
    pattern = (step.get("pattern") or {}).get("Regex")
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert") or pattern is None:
        return False
    alternatives = set(_alternatives(pattern))
    return alternatives <= _WHOLE and r"\s+" in alternatives


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of a regular expression, without looking into groups."""
    depth = start = 0
    for place, letter in enumerate(pattern):
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and not depth:
            yield pattern[start:place]
            start = place + 1
    yield pattern[start:]


def parts(text: str) -> Iterator[str]:
    """`text` in parts, each with as many characters as it takes to a border; one without a border is whole."""
    start = 0
    while len(text) - start > PART_CHARS and (border := _BORDER.search(text, start + PART_CHARS - 1)):
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]
