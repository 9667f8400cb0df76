"""`tiktoken:NAME`: an encoding of tiktoken (the `tiktoken` extra), as its plugins register them.

Texts and prompts are ordinary text, whatever they contain; the names of special tokens are special tokens only in
what a chat template has rendered.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from chunkplan.arrays import Int32Array
from chunkplan.errors import UsageError
from chunkplan.extras import pip_install
from chunkplan.intake.backends.chat_templates import TemplateChoice
from chunkplan.intake.backends.fast import mask_in
from chunkplan.intake.template_render import Span
from chunkplan.intake.tokenizer import Masked, RecordTokenizer

if TYPE_CHECKING:
    from tiktoken import Encoding

PREFIX = "tiktoken:"


def is_encoding(name: str) -> bool:
    """Return whether a name says that it is one of tiktoken."""
    return name.startswith(PREFIX)


def load(name: str, choice: TemplateChoice) -> RecordTokenizer:
    """Load an encoding; its own end of text is the end-of-sequence token.

    Raises UsageError where tiktoken is missing or cannot load it, DataError where the chat template is not one.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise UsageError(f"{name} needs tiktoken", hint=pip_install("tiktoken")) from error
    try:
        encoding = tiktoken.get_encoding(name.removeprefix(PREFIX))
    except Exception as error:  # a name it does not know, or whatever came of the network
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        known = ", ".join(tiktoken.list_encoding_names())
        raise UsageError(f"tiktoken cannot load {name}: {reason}", hint=f"it knows {known}") from error
    return make(name, encoding, choice)


def make(name: str, encoding: Encoding, choice: TemplateChoice) -> RecordTokenizer:
    """A tokenizer of an encoding; raises DataError where the chat template is not one."""
    eos_id = encoding._special_tokens.get("<|endoftext|>")
    eos = None if eos_id is None else (encoding.decode([eos_id]), eos_id)
    return RecordTokenizer(
        path=name,
        content_hash=_content_hash(encoding),
        bos=None,
        eos=eos,
        begins_text=False,
        ends_text=False,
        template=choice.make(None, {"eos_token": eos[0]} if eos else {}, ()),
        library=TiktokenTokenizer(encoding),
    )


class TiktokenTokenizer:
    """An encoding of tiktoken, with the methods of `FastTokenizer`."""

    num_added = 0, 0

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.vocab_size = encoding.n_vocab
        self._num_bytes = np.zeros(encoding.n_vocab, np.int64)
        for token, rank in encoding._mergeable_ranks.items():
            self._num_bytes[rank] = len(token)
        for name, rank in encoding._special_tokens.items():
            self._num_bytes[rank] = len(name.encode())

    def texts(self, texts: list[str]) -> list[Int32Array]:
        """Implements `FastTokenizer.texts`."""
        return [np.array(self._encoding.encode_ordinary(text), np.int32) for text in texts]

    def prompts(self, texts: list[str], borders: list[int]) -> list[Masked]:
        """Implements `FastTokenizer.prompts`."""
        found = zip(texts, borders, self.texts(texts), strict=True)
        return [self._masked(text, ids, [(border, len(text))][: border < len(text)]) for text, border, ids in found]

    def rendered(self, texts: list[str], spans: list[list[Span]]) -> list[Masked]:
        """Implements `FastTokenizer.rendered`."""
        found = (np.array(self._encoding.encode(text, allowed_special="all"), np.int32) for text in texts)
        return [self._masked(*each) for each in zip(texts, found, spans, strict=True)]

    def _masked(self, text: str, input_ids: Int32Array, spans: list[Span]) -> Masked:
        masked = mask_in(input_ids, self._num_bytes, text, spans)
        assert masked is not None  # it encodes every byte
        return input_ids, *masked

    def knows(self, input_id: int) -> bool:
        """Implements `FastTokenizer.knows`."""
        return 0 <= input_id < len(self._num_bytes) and self._num_bytes[input_id] > 0

    def is_special(self, input_id: int) -> bool:
        """Implements `FastTokenizer.is_special`."""
        return input_id in self._encoding._special_tokens.values()

    def decode(self, input_ids: list[int]) -> str:
        """Implements `FastTokenizer.decode`."""
        return self._encoding.decode(input_ids)


def _content_hash(encoding: Encoding) -> str:
    hasher = hashlib.sha256(f"{encoding.name}\n{encoding._pat_str}\n".encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        hasher.update(b"%d %s\n" % (rank, token.hex().encode()))
    for name, rank in sorted(encoding._special_tokens.items()):
        hasher.update(f"{rank} {name}\n".encode())
    return hasher.hexdigest()
