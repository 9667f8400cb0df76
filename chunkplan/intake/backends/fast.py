"""Tokenizers of the `tokenizers` library.

Target masks of byte-level tokenizers come from the number of bytes of each token, far cheaper than offsets: the tokens
in order are the bytes of the text, so a token holds a character of a span if it has a byte of it.

A tokenizer takes up to 130 bytes of memory for each byte of text, and is fastest if these fit the processor's caches.
So a text is cut before a space after a non-space, and before a line end after a letter or digit, if the tokenizer's
description proves that the parts, encoded one by one, have the tokens of the whole:

- Its regular expression is a choice of `_WHOLE` alternatives. In none of them does a space follow a non-space, or a
  line end a letter or digit, so no match crosses a cut, and the one before the cut ends there. The rest is matched as
  at the beginning of a text, as nothing looks back, and only matches of spaces look ahead. `\\s+` matches at least the
  space after the cut, so that a stretch without a match does not cross it either.
- All other steps look at one character at a time, or at one match.
- No added token contains such a cut, or strips the spaces beside it.
- Neither a space nor a line end is composed with the character before it, so each part is normalized by itself.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
from tokenizers import Encoding, Tokenizer

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.errors import DataError
from chunkplan.intake.records import JsonObject
from chunkplan.intake.template_render import Span
from chunkplan.intake.tokenizer import Masked, batches_by_bytes, size_of

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")

#: Steps that cut text and leave its bytes as they are.
_CUTS = ("Split", "Digits", "Punctuation", "ByteLevel")

#: Words whose tokens the tokenizer remembers; it keeps the first 10,000 by default. Long ones take some KB each.
_CACHED_WORDS = 1 << 15

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


class FastTokenizer:
    """A tokenizer as its JSON, `content`, describes it; raises ValueError where that is none.

    Stored truncation and padding are switched off, and the trimming of spaces from offsets, under which a token of
    spaces has no place in the text. `num_added` are the tokens put in front of a text and behind it.
    """

    def __init__(self, description: JsonObject, content: str) -> None:
        if _switch_off(description):
            content = json.dumps(description)
        try:
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(str(error)) from error
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        example = self._tokenizer.encode("a", add_special_tokens=True)
        self.num_added = _leading(example.special_tokens_mask), _leading(example.special_tokens_mask[::-1])
        front, behind = self.num_added
        self._front, self._behind = example.ids[:front], example.ids[len(example.ids) - behind :]
        added_tokens = description.get("added_tokens") or []
        self.special_tokens = frozenset(token["content"] for token in added_tokens if token.get("special"))
        self._added_ids = frozenset(token["id"] for token in added_tokens)
        self._form = (description.get("normalizer") or {}).get("type")
        self._num_bytes: Int64Array | None = None
        self._is_cut = False
        self._unchanging: Tokenizer | None = None
        if _is_byte_level(description):
            self._num_bytes = _byte_lengths(description)
            with_added, own = (self._tokenizer.encode("a b", add_special_tokens=added).ids for added in (True, False))
            self._is_cut = can_be_cut(description) and with_added == [*self._front, *own, *self._behind]
            self._unchanging = _without_normalizer(self._tokenizer, self._form)
        if hasattr(self._tokenizer.model, "_resize_cache"):
            self._tokenizer.model._resize_cache(_CACHED_WORDS)

    def find(self, token: str | None) -> tuple[str, int] | None:
        """A token with its id, if it is one."""
        found = self._tokenizer.token_to_id(token) if token else None
        return None if token is None or found is None else (token, found)

    def texts(self, texts: list[str]) -> list[Int32Array]:
        """The tokens of texts, int32 [n], with what the tokenizer adds to a text."""
        return self._ids_of(texts, added=True)

    def prompts(self, texts: list[str], borders: list[int]) -> list[Masked]:
        """Encode texts, with a mask of tokens behind the border, in characters, and a token of half a character."""
        spans = [[(border, len(text))][: border < len(text)] for text, border in zip(texts, borders, strict=True)]
        front, behind = self.num_added
        return [
            (input_ids, np.pad(mask, (front, behind), constant_values=(False, bool(mask[-1:].any()))), shares)
            for input_ids, mask, shares in self._masked(texts, spans, front, behind)
        ]

    def rendered(self, texts: list[str], spans: list[list[Span]]) -> list[Masked]:
        """Encode rendered conversations, with a mask of tokens that hold a character of a span; no span is empty."""
        return self._masked(texts, spans, 0, 0)

    def _masked(self, texts: list[str], spans: list[list[Span]], front: int, behind: int) -> list[Masked]:
        """Like `rendered`, for `front` and `behind` special tokens that are added and that the masks leave out."""
        added = bool(front or behind)
        if self._num_bytes is None:
            encodings = self._encode(texts, added=added, offsets=True)
            return [_mask_by_offsets(*each, front, behind) for each in zip(encodings, spans, strict=True)]
        encoded = []
        for text, inside, input_ids in zip(texts, spans, self._ids_of(texts, added=added), strict=True):
            own = input_ids[front : len(input_ids) - behind]
            masked = mask_in(own, self._num_bytes, text, inside) if self._keeps(text) else None
            if masked is None:
                [encoding] = self._encode([text], added=added, offsets=True)
                encoded.append(_mask_by_offsets(encoding, inside, front, behind))
            else:
                encoded.append((input_ids, *masked))
        return encoded

    def knows(self, input_id: int) -> bool:
        """Return whether this is the id of a token."""
        return input_id >= 0 and self._tokenizer.id_to_token(input_id) is not None

    def is_special(self, input_id: int) -> bool:
        """Return whether this is the id of a token added to those of text, such as one that ends a turn."""
        return input_id in self._added_ids

    def decode(self, input_ids: list[int]) -> str:
        """The text of tokens that it knows, with special ones as they are written; U+FFFD for bytes of no character."""
        return self._tokenizer.decode(input_ids, skip_special_tokens=False)

    def _ids_of(self, texts: list[str], *, added: bool) -> list[Int32Array]:
        """The tokens of texts; where these can be cut no more than a call is encoded at once."""
        if not self._is_cut:
            return [np.array(encoding.ids, np.int32) for encoding in self._encode(texts, added=added)]
        front, behind = (self._front, self._behind) if added else ([], [])
        found = [array("i", front) for _ in texts]
        pieces = ((index, part) for index, text in enumerate(texts) for part in parts(text))
        for call in batches_by_bytes(pieces, lambda piece: size_of(piece[1])):
            for (index, _), encoding in zip(call, self._encode([part for _, part in call]), strict=True):
                found[index].fromlist(encoding.ids)
        for ids in found:
            ids.fromlist(behind)
        return [np.array(ids, np.int32) for ids in found]

    def _encode(self, texts: list[str], *, added: bool = False, offsets: bool = False) -> list[Encoding]:
        tokenizer = self._tokenizer
        if self._unchanging is not None and not added and all(map(self._keeps, texts)):
            tokenizer = self._unchanging
        encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
        try:
            return encode(texts, add_special_tokens=added)
        except Exception as error:  # the library raises nothing more precise
            message = f"the tokenizer cannot encode a text: {error}"
            raise DataError(message, hint="give a tokenizer that has a token for what it does not know") from error

    def _keeps(self, text: str) -> bool:
        """Return whether the normalizer leaves `text` as it is."""
        if self._form is None or text.isascii():
            return True
        return unicodedata.is_normalized(cast(Literal["NFC"], self._form), text)


def _steps(description: JsonObject) -> list[JsonObject]:
    """The steps of the pre-tokenizer."""
    pre_tokenizer = description.get("pre_tokenizer") or {}
    steps: list[JsonObject] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps


def _is_byte_level(description: JsonObject) -> bool:
    """Return whether tokens are the bytes of the text in order, or leave some out."""
    model, steps = description["model"], _steps(description)
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"))
        and (description.get("normalizer") is None or description["normalizer"].get("type") in _FORMS)
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in _CUTS and not step.get("add_prefix_space") for step in steps)
    )


def _byte_lengths(description: JsonObject) -> Int64Array:
    """Return the bytes of each token, int64 [largest id + 1]; a byte-level token has one letter a byte."""
    vocabulary, added = description["model"]["vocab"], description.get("added_tokens") or []
    ids = list(vocabulary.values())
    lengths = np.zeros(max([*ids, *(token["id"] for token in added)]) + 1, np.int64)
    lengths[ids] = list(map(len, vocabulary))
    for token in added:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _without_normalizer(tokenizer: Tokenizer, form: Any) -> Tokenizer | None:
    """Return a faster tokenizer, without post-processor, for texts that the normalizer leaves as they are."""
    added = tokenizer.get_added_tokens_decoder()
    if form is None or not all(unicodedata.is_normalized(form, token.content) for token in added.values()):
        return None
    plain = Tokenizer(tokenizer.model)  # the same, not a copy
    plain.pre_tokenizer = tokenizer.pre_tokenizer
    plain.add_tokens([added[index] for index in sorted(added)])
    return plain if plain.get_added_tokens_decoder() == added else None


def _switch_off(description: JsonObject) -> bool:
    """Switch off what changes lengths and offsets; whether there was anything."""
    is_changed = bool(description.get("truncation") or description.get("padding"))
    description.update(truncation=None, padding=None)
    processors = [description.get("post_processor")]
    for processor in processors:
        if isinstance(processor, dict):
            is_changed |= bool(processor.get("trim_offsets"))
            processor |= {"trim_offsets": False} if processor.get("trim_offsets") else {}
            processors += processor.get("processors") or []
    return is_changed


def _leading(flags: list[int]) -> int:
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


def can_be_cut(description: JsonObject) -> bool:
    """Return whether a byte-level tokenizer of this description gives a text the tokens of its parts."""
    steps, added = _steps(description), description.get("added_tokens") or []
    return (
        not description["model"].get("dropout")
        and all(_cuts_at_borders(step) or step.get("type") in ("Digits", "ByteLevel") for step in steps)
        and any(map(_cuts_at_borders, steps))
        and not any(token.get(flag) for token in added for flag in ("single_word", "lstrip", "rstrip"))
        and not any(_BORDER.search(token["content"]) for token in added)
    )


def _cuts_at_borders(step: JsonObject) -> bool:
    """Return whether a step of the pre-tokenizer cuts at every border."""
    if step.get("type") == "ByteLevel":
        return step.get("use_regex", True) is True  # that of GPT-2
    pattern = (step.get("pattern") or {}).get("Regex")
    if step.get("type") != "Split" or step.get("behavior") != "Isolated" or step.get("invert") or pattern is None:
        return False
    alternatives = [""]
    depth = 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and not depth:
            alternatives.append("")
        else:
            alternatives[-1] += letter
    return _WHOLE.issuperset(alternatives) and r"\s+" in alternatives


def parts(text: str) -> Iterator[str]:
    """`text` in parts, each with as many characters as it takes to a border; one without a border is whole."""
    start = 0
    while len(text) - start > PART_CHARS and (border := _BORDER.search(text, start + PART_CHARS - 1)):
        yield text[start : border.end()]
        start = border.end()
    yield text[start:]


def mask_in(
    input_ids: Int32Array, num_bytes: Int64Array, text: str, spans: list[Span]
) -> tuple[BoolArray, bool] | None:
    """Return which tokens of `text` hold a character of `spans`, ordered and disjoint, and whether one is shared.

    `num_bytes` is the length of each token of the vocabulary; None where the tokens are not the bytes of the text.
    """
    places = [place for span in spans for place in span]
    borders, total = (places, len(text)) if text.isascii() else _in_bytes(text, places)
    lengths = num_bytes.take(input_ids)
    stops = lengths.cumsum()
    if (int(stops[-1]) if len(stops) else 0) != total:
        return None
    starts = stops - lengths
    mask = np.zeros(len(input_ids), np.bool_)
    found = starts.searchsorted(borders).tolist()
    shares = False
    for start, stop, border in zip(found[::2], found[1::2], borders[::2], strict=True):
        first = start
        if (starts[start] if start < len(starts) else total) > border:  # the token before it reaches into the span
            first -= 1
            shares = shares or not mask[first]
        mask[first:stop] = True
    return mask, shares


def _in_bytes(text: str, places: list[int]) -> tuple[list[int], int]:
    """The byte at which each character of `places` (ascending) begins in UTF-8, and the bytes of all of `text`."""
    found, counted, num_bytes = [], 0, 0
    for place in places:
        num_bytes += len(text[counted:place].encode())
        counted = place
        found.append(num_bytes)
    return found, num_bytes + len(text[counted:].encode())


def _mask_by_offsets(encoding: Encoding, spans: list[Span], front: int, behind: int) -> Masked:
    """Return the tokens, the mask of those between `front` and `behind` added ones, and whether one is shared."""
    offsets = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding)).reshape(-1, 2)
    starts, stops = offsets[front : len(encoding) - behind].T
    borders = np.array(spans, dtype=np.int64).reshape(-1, 2)
    first = np.searchsorted(borders[:, 1], starts, side="right")  # the span that a token may be in
    inside = (first < np.searchsorted(borders[:, 0], stops)) & (stops > starts)
    shares = bool((starts[inside] < borders[first[inside], 0]).any())
    return np.array(encoding.ids, dtype=np.int32), inside, shares
