"""Tokenizers of the `tokenizers` library."""

from __future__ import annotations

import json
import unicodedata
from array import array
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.errors import DataError
from chunkplan.intake.backends.text_parts import can_be_cut, parts
from chunkplan.intake.byte_masks import mask_in
from chunkplan.intake.records import JsonObject
from chunkplan.intake.template_render import Span
from chunkplan.intake.tokenizer import Masked, calls, size_of

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
#: Steps that cut text and leave its bytes as they are.
_CUTS = ("Split", "Digits", "Punctuation", "ByteLevel")

#: Words whose tokens the tokenizer remembers; it keeps the first 10,000 by default. Long ones take some KB each.
_CACHED_WORDS = 1 << 15


class FastTokenizer:
    """A tokenizer as its JSON describes it; raises ValueError where that is none. `content` is the same as text.

    Lengths must be those of the data, so a truncation or padding stored with it is switched off, and so is the trimming
    of spaces from offsets, under which a token of nothing but spaces has no place in the text.
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
            self._is_cut = can_be_cut(description) and self._adds_at_ends_only()
            self._unchanging = _without_normalizer(self._tokenizer, description)
        if hasattr(self._tokenizer.model, "_resize_cache"):
            self._tokenizer.model._resize_cache(_CACHED_WORDS)

    def _adds_at_ends_only(self) -> bool:
        """Whether the tokenizer adds to every text what it adds to an example, and nothing else."""
        with_added, own = (self._tokenizer.encode("a b", add_special_tokens=added).ids for added in (True, False))
        return with_added == [*self._front, *own, *self._behind]

    def find(self, token: str | None) -> tuple[str, int] | None:
        """A token with its id, if it is one."""
        found = self._tokenizer.token_to_id(token) if token else None
        return None if token is None or found is None else (token, found)

    def texts(self, texts: list[str]) -> list[Int32Array]:
        """See `TokenizerLibrary`."""
        if self._is_cut:
            return self._of_parts(texts, added=True)
        return [_ids(encoding) for encoding in self._encode(texts, added=True)]

    def prompts(self, texts: list[str], borders: list[int]) -> list[Masked]:
        """See `TokenizerLibrary`."""
        spans = [
            [(border, len(text))] if border < len(text) else [] for text, border in zip(texts, borders, strict=True)
        ]
        front, behind = self.num_added
        return [
            (input_ids, np.pad(mask, (front, behind), constant_values=(False, bool(mask[-1:].any()))), shares)
            for input_ids, mask, shares in self._masked(texts, spans, front, behind)
        ]

    def rendered(self, texts: list[str], spans: list[list[Span]]) -> list[Masked]:
        """See `TokenizerLibrary`."""
        return self._masked(texts, spans, 0, 0)

    def _masked(self, texts: list[str], spans: list[list[Span]], front: int, behind: int) -> list[Masked]:
        """As `rendered`; with `front` and `behind` tokens that are added, and that the masks leave out."""
        added = bool(front or behind)
        if self._num_bytes is None:
            encodings = self._encode(texts, added=added, offsets=True)
            return [_mask_in(*each, front, behind) for each in zip(encodings, spans, strict=True)]
        encoded = []
        found = self._of_parts(texts, added=added) if self._is_cut else map(_ids, self._encode(texts, added=added))
        for text, inside, input_ids in zip(texts, spans, found, strict=True):
            own = input_ids[front : len(input_ids) - behind]
            masked = mask_in(own, self._num_bytes, text, inside) if self._keeps(text) else None
            if masked is None:
                [encoding] = self._encode([text], added=added, offsets=True)
                encoded.append(_mask_in(encoding, inside, front, behind))
            else:
                encoded.append((input_ids, *masked))
        return encoded

    def knows(self, input_id: int) -> bool:
        """See `TokenizerLibrary`."""
        return input_id >= 0 and self._tokenizer.id_to_token(input_id) is not None

    def is_special(self, input_id: int) -> bool:
        """See `TokenizerLibrary`."""
        return input_id in self._added_ids

    def decode(self, input_ids: list[int]) -> str:
        """See `TokenizerLibrary`."""
        return self._tokenizer.decode(input_ids, skip_special_tokens=False)

    def _of_parts(self, texts: list[str], *, added: bool = False) -> list[Int32Array]:
        """The tokens of texts that are cut, of which no more than a call is encoded at once."""
        front, behind = (self._front, self._behind) if added else ([], [])
        found = [array("i", front) for _ in texts]
        pieces = ((index, part) for index, text in enumerate(texts) for part in parts(text))
        for call in calls(pieces, lambda piece: size_of(piece[1])):
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
        """Whether the normalizer leaves `text` as it is."""
        if self._form is None or text.isascii():
            return True
        return unicodedata.is_normalized(cast(Literal["NFC"], self._form), text)


def _is_byte_level(description: JsonObject) -> bool:
    """Whether tokens are the bytes of the text, one after another, wherever they are as many bytes as it.

    All that such a tokenizer can do besides is leave bytes out.
    """
    model, pre_tokenizer = description["model"], description.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        model.get("type") == "BPE"
        and not any(model.get(key) for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"))
        and (description.get("normalizer") is None or description["normalizer"].get("type") in _FORMS)
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in _CUTS and not step.get("add_prefix_space") for step in steps)
    )


def _byte_lengths(description: JsonObject) -> Int64Array:
    """How many bytes each token stands for, int64 [largest id + 1]; a byte-level token has one letter a byte."""
    vocabulary, added = description["model"]["vocab"], description.get("added_tokens") or []
    ids = list(vocabulary.values())
    lengths = np.zeros(max([*ids, *(token["id"] for token in added)]) + 1, np.int64)
    lengths[ids] = list(map(len, vocabulary))
    for token in added:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _without_normalizer(tokenizer: Tokenizer, description: JsonObject) -> Tokenizer | None:
    """A tokenizer that gives the same tokens, sooner, for texts that the normalizer leaves as they are; None: none.

    It has no post-processor.
    """
    added = tokenizer.get_added_tokens_decoder()
    form = (description.get("normalizer") or {}).get("type")
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
    return _keep_spaces(description.get("post_processor")) or is_changed


def _keep_spaces(post_processor: Any) -> bool:
    is_changed = False
    if isinstance(post_processor, dict):
        if post_processor.get("trim_offsets"):
            post_processor["trim_offsets"] = False
            is_changed = True
        for processor in post_processor.get("processors") or []:
            is_changed |= _keep_spaces(processor)
    return is_changed


def _leading(flags: list[int]) -> int:
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


def _ids(encoding: Encoding) -> Int32Array:
    return np.array(encoding.ids, dtype=np.int32)


def _mask_in(encoding: Encoding, spans: list[Span], front: int, behind: int) -> Masked:
    """The tokens, with a mask of those between `front` and `behind` that are added, and whether one is shared."""
    starts, stops = character_ranges(encoding)[front : len(encoding) - behind].T
    borders = np.array(spans, dtype=np.int64).reshape(-1, 2)
    first = np.searchsorted(borders[:, 1], starts, side="right")  # the span that a token may be in
    inside = (first < np.searchsorted(borders[:, 0], stops)) & (stops > starts)
    return _ids(encoding), inside, bool((starts[inside] < borders[first[inside], 0]).any())


def character_ranges(encoding: Encoding) -> npt.NDArray[np.int64]:
    """The characters [start, stop) of every token, int64 [n, 2]; a token of half a character covers all of it."""
    return np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding)).reshape(-1, 2)
