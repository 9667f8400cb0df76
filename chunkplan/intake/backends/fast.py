"""Tokenizers of the `tokenizers` library."""

from __future__ import annotations

import json
import unicodedata
from itertools import chain
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.errors import DataError
from chunkplan.intake.byte_masks import mask_from, mask_in
from chunkplan.intake.records import JsonObject
from chunkplan.intake.template_spans import Span

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
#: Steps that cut text and leave its bytes as they are.
_CUTS = ("Split", "Digits", "Punctuation", "ByteLevel")


class FastTokenizer:
    """A tokenizer as its JSON describes it; raises ValueError where that is none.

    Lengths must be those of the data, so a truncation or padding stored with it is switched off, and so is the trimming
    of spaces from offsets, under which a token of nothing but spaces has no place in the text.
    """

    def __init__(self, description: JsonObject) -> None:
        description.update(truncation=None, padding=None)
        _keep_spaces(description.get("post_processor"))
        try:
            self._tokenizer = Tokenizer.from_str(json.dumps(description))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(str(error)) from error
        self.vocab_size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        added = self._tokenizer.encode("a", add_special_tokens=True).special_tokens_mask
        self.num_added = _leading(added), _leading(added[::-1])
        added_tokens = description.get("added_tokens") or []
        self.special_tokens = frozenset(token["content"] for token in added_tokens if token.get("special"))
        self._added_ids = frozenset(token["id"] for token in added_tokens)
        self._form = (description.get("normalizer") or {}).get("type")
        self._num_bytes = _byte_lengths(self._tokenizer, description) if _is_byte_level(description) else None

    def find(self, token: str | None) -> tuple[str, int] | None:
        """A token with its id, if it is one."""
        found = self._tokenizer.token_to_id(token) if token else None
        return None if token is None or found is None else (token, found)

    def texts(self, texts: list[str]) -> list[Int32Array]:
        """See `TokenizerLibrary`."""
        return [_ids(encoding) for encoding in self._encode(texts, added=True)]

    def prompts(self, texts: list[str], borders: list[int]) -> list[tuple[Int32Array, BoolArray]]:
        """See `TokenizerLibrary`."""
        if self._num_bytes is None:
            encodings = self._encode(texts, added=True, offsets=True)
            return [_mask_from(encoding, border) for encoding, border in zip(encodings, borders, strict=True)]
        encoded = []
        front, behind = self.num_added
        for text, border, input_ids in zip(texts, borders, self.texts(texts), strict=True):
            own = input_ids[front : len(input_ids) - behind]
            mask = mask_from(own, self._num_bytes, text, border) if self._keeps(text) else None
            if mask is None:
                encoded.append(_mask_from(self._encode([text], added=True, offsets=True)[0], border))
            else:
                encoded.append(
                    (input_ids, np.pad(mask, (front, behind), constant_values=(False, bool(mask[-1:].any()))))
                )
        return encoded

    def rendered(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[Int32Array, BoolArray]]:
        """See `TokenizerLibrary`."""
        if self._num_bytes is None:
            encodings = self._encode(texts, offsets=True)
            return [_mask_in(encoding, inside) for encoding, inside in zip(encodings, spans, strict=True)]
        encoded = []
        encodings = self._encode(texts)
        for text, inside, encoding in zip(texts, spans, encodings, strict=True):
            input_ids = _ids(encoding)
            mask = mask_in(input_ids, self._num_bytes, text, inside) if self._keeps(text) else None
            if mask is None:
                encoded.append(_mask_in(self._encode([text], offsets=True)[0], inside))
            else:
                encoded.append((input_ids, mask))
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

    def _encode(self, texts: list[str], *, added: bool = False, offsets: bool = False) -> list[Encoding]:
        encode = self._tokenizer.encode_batch if offsets else self._tokenizer.encode_batch_fast
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


def _byte_lengths(tokenizer: Tokenizer, description: JsonObject) -> Int64Array:
    """How many bytes each token stands for, int64 [largest id + 1]; a byte-level token has one letter a byte."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    lengths[list(vocabulary.values())] = list(map(len, vocabulary))
    for token in description.get("added_tokens") or []:
        lengths[token["id"]] = len(token["content"].encode())
    return lengths


def _keep_spaces(post_processor: Any) -> None:
    if isinstance(post_processor, dict):
        if "trim_offsets" in post_processor:
            post_processor["trim_offsets"] = False
        for processor in post_processor.get("processors") or []:
            _keep_spaces(processor)


def _leading(flags: list[int]) -> int:
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))


def _ids(encoding: Encoding) -> Int32Array:
    return np.array(encoding.ids, dtype=np.int32)


def _mask_from(encoding: Encoding, border: int) -> tuple[Int32Array, BoolArray]:
    """The tokens, and which of them begin at or after character `border`."""
    starts = character_ranges(encoding)[:, 0]
    # Tokens that the tokenizer adds have no place in the text. They are where the text before them ends.
    starts[np.array(encoding.special_tokens_mask, dtype=np.bool_)] = -1
    return _ids(encoding), np.maximum.accumulate(starts) >= border if len(starts) else np.zeros(0, np.bool_)


def _mask_in(encoding: Encoding, spans: list[Span]) -> tuple[Int32Array, BoolArray]:
    """The tokens, and which of them begin in a span and are not of no width."""
    starts, stops = character_ranges(encoding).T
    borders = np.array(spans, dtype=np.int64).reshape(-1)  # start, stop, start, stop, ...: ascending
    inside = np.searchsorted(borders, starts, side="right") % 2 == 1
    return _ids(encoding), inside & (stops > starts)


def character_ranges(encoding: Encoding) -> npt.NDArray[np.int64]:
    """The characters [start, stop) of every token, int64 [n, 2]; a token of half a character covers all of it."""
    return np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding)).reshape(-1, 2)
