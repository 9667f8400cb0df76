"""A tokenizer: records -> token ids and target masks, token by token what the model will be trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict, TypeVar

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.errors import UsageError
from chunkplan.intake.pieces import SHARED
from chunkplan.intake.records import Conversation, Exchange, PromptRecord, Record, TextRecord
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.template_spans import Span

#: Token ids int32 [n] and target mask bool [n] of one sequence; n >= 1, target[0] is false.
Encoded = tuple[Int32Array, BoolArray]

#: As `Encoded`, but with any first target; and whether a token that is a target begins before what counts.
Masked = tuple[Int32Array, BoolArray, bool]

#: The most that is encoded in one call, in bytes: a tokenizer needs up to 130 bytes of memory for every byte of text,
#: and is a little faster where these stay in the caches of the processor.
CALL_BYTES = 1 << 16

T = TypeVar("T")


class TokenizerLibrary(Protocol):
    """What a library knows of a tokenizer: its tokens, as int32 [n], and masks of them, bool [n]."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""

    @property
    def num_added(self) -> tuple[int, int]:
        """How many tokens the tokenizer puts in front of a text and behind it."""

    def texts(self, texts: list[str]) -> list[Int32Array]:
        """The tokens of texts, with what the tokenizer adds to a text."""

    def prompts(self, texts: list[str], borders: list[int]) -> list[Masked]:
        """As `texts`, and which tokens hold a character behind the border, in characters.

        A token of half a character holds that character; one that is added behind goes with the last.
        """

    def rendered(self, texts: list[str], spans: list[list[Span]]) -> list[Masked]:
        """The tokens of rendered conversations, with nothing added, and which of them hold a character of a span.

        No span is empty.
        """

    def knows(self, input_id: int) -> bool:
        """Whether this is the id of a token."""

    def is_special(self, input_id: int) -> bool:
        """Whether this is the id of a token that was added to those of text, such as one that ends a turn."""

    def decode(self, input_ids: list[int]) -> str:
        """The text of tokens that it knows, with special ones as they are written; U+FFFD for bytes of no character."""


class TokenizerEntry(TypedDict):
    """A tokenizer as a manifest describes it; a shard has the hash of its chat template in it too."""

    path: str
    content_hash: str
    vocab_size: int
    eos_token: str | None
    template_hash: str | None


@dataclass(frozen=True)
class RecordTokenizer:
    """Encodes batches of records. Made by `load_tokenizer`.

    `path` is what it was loaded from. `content_hash` is of what it encodes, `earlier_hash` what analyses of earlier
    versions name it by. `eos`, `bos` and `pad` are the tokens that end, begin and pad a sequence, with their ids;
    `ends_text` and `begins_text` say that plain text gets the first two.
    """

    path: str
    content_hash: str
    earlier_hash: str
    bos: tuple[str, int] | None
    eos: tuple[str, int] | None
    begins_text: bool
    ends_text: bool
    template: ChatTemplate | None
    library: TokenizerLibrary = field(repr=False)
    pad: tuple[str, int] | None = None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self.library.vocab_size

    def describe(self) -> TokenizerEntry:
        """The entry of a manifest for this tokenizer."""
        return TokenizerEntry(
            path=self.path,
            content_hash=self.content_hash,
            vocab_size=self.vocab_size,
            eos_token=self.eos and self.eos[0],
            template_hash=None if self.template is None else self.template.content_hash,
        )

    @property
    def identity(self) -> str:
        """SHA-256 of everything that the tokens of a record depend on besides the record."""
        template = self.template
        dependencies = [
            self.content_hash,
            self.bos,
            self.eos,
            self.pad,
            self.begins_text,
            self.ends_text,
            template and template.identity,
        ]
        return hashlib.sha256(json.dumps(dependencies, sort_keys=True).encode()).hexdigest()

    def encode(
        self, records: Sequence[Record], left_out: dict[int, set[str]] | None = None
    ) -> list[Encoded | RecordError]:
        """Token ids and target masks of `records` in order, and the error of each that has none.

        To `left_out` is added, by place in `records`, what the chat template leaves out of each: see `LEFT_OUT`; and
        `SHARED`, where a token that counts begins in what does not.

        Raises:
            UsageError: some are conversations and the tokenizer has no chat template.
        """
        encoded: list[Encoded | RecordError] = [_empty()] * len(records)
        texts: list[tuple[int, TextRecord]] = []
        prompts: list[tuple[int, PromptRecord]] = []
        conversations: list[tuple[int, Conversation]] = []
        for index, record in enumerate(records):
            match record:
                case TextRecord():
                    texts.append((index, record))
                case PromptRecord():
                    prompts.append((index, record))
                case Conversation():
                    conversations.append((index, record))
                case Exchange() if self.template is None:
                    prompts.append((index, record.plain))
                case Exchange():
                    conversations.append((index, record.conversation))
                case _:
                    raise AssertionError("it has tokens, or a length, already")
        left_out = {} if left_out is None else left_out
        for index, one in (
            *self._texts(texts),
            *self._prompts(prompts, left_out),
            *self._conversations(conversations, left_out),
        ):
            if isinstance(one, RecordError):
                encoded[index] = one
            elif len(one[0]):
                one[1][0] = False  # nothing predicts the first token
                encoded[index] = one
        return encoded

    def _texts(self, records: list[tuple[int, TextRecord]]) -> Iterator[tuple[int, Encoded]]:
        """Every token but the first is a target."""
        for call in calls(records, lambda item: size_of(item[1].text)):
            found = self.library.texts([record.text for _, record in call])
            for (index, _), input_ids in zip(call, found, strict=True):
                yield index, self._framed(input_ids, np.ones(len(input_ids), np.bool_), ends=self.ends_text)

    def _prompts(
        self, records: list[tuple[int, PromptRecord]], left_out: dict[int, set[str]]
    ) -> Iterator[tuple[int, Encoded]]:
        """Prompt and completion are encoded as one string; targets hold a character of the completion."""
        for call in calls(records, lambda item: size_of(item[1].prompt) + size_of(item[1].completion)):
            texts = [record.prompt + record.completion for _, record in call]
            found = self.library.prompts(texts, [len(record.prompt) for _, record in call])
            for (index, _), (input_ids, target, shares) in zip(call, found, strict=True):
                if shares:
                    left_out.setdefault(index, set()).add(SHARED)
                input_ids, target = self._framed(input_ids, target, ends=True)
                if self.eos:
                    target[-1:] = True
                yield index, (input_ids, target)

    def _conversations(
        self, records: list[tuple[int, Conversation]], left_out: dict[int, set[str]]
    ) -> Iterator[tuple[int, Encoded | RecordError]]:
        """The rendered conversation is encoded as one string; targets hold a character of a span that counts."""
        if not records:
            return
        if self.template is None:
            raise UsageError(
                f"there are conversations and the tokenizer {self.path} has no chat template",
                hint="give one with --chat-template, or another tokenizer",
            )
        rendered: list[tuple[int, str, list[Span]]] = []
        for index, record in records:
            kinds: set[str] = set()
            try:
                rendered.append((index, *self.template.render(record, kinds)))
            except RecordError as error:
                yield index, error
            if kinds:
                left_out[index] = kinds
        for call in calls(rendered, lambda item: size_of(item[1])):
            spans = [[span for span in spans if span[0] < span[1]] for _, _, spans in call]
            found = self.library.rendered([text for _, text, _ in call], spans)
            for (index, _, _), (input_ids, target, shares) in zip(call, found, strict=True):
                if shares:
                    left_out.setdefault(index, set()).add(SHARED)
                yield index, (input_ids, target)

    def _framed(self, input_ids: Int32Array, target: BoolArray, *, ends: bool) -> Encoded:
        """A text with the tokens that begin and end it, once: as the tokenizer put them there, or else as it says.

        A text may say itself what the tokenizer has added; an end that is there already is not repeated.
        """
        num_front, num_behind = self.library.num_added
        if num_front and self.bos and input_ids[:2].tolist() == [self.bos[1]] * 2 and num_front == 1:
            input_ids, target = input_ids[1:], target[1:]
        if num_behind and self.eos and input_ids[-2:].tolist() == [self.eos[1]] * 2 and num_behind == 1:
            input_ids, target = input_ids[:-1], target[:-1]
        if self.begins_text and self.bos and (not len(input_ids) or input_ids[0] != self.bos[1]):
            input_ids, target = np.insert(input_ids, 0, self.bos[1]), np.insert(target, 0, False)
        if ends and self.eos and (not len(input_ids) or input_ids[-1] != self.eos[1]):
            input_ids, target = np.append(input_ids, np.int32(self.eos[1])), np.append(target, True)
        return input_ids, target


def _empty() -> RecordError:
    return RecordError("the tokenizer leaves nothing of it", reason="empty", hint="leave this record out")


def size_of(text: str) -> int:
    """About how many bytes `text` has in UTF-8, without encoding it."""
    return len(text) if text.isascii() else 3 * len(text)


def calls(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """`items` in runs of at most `CALL_BYTES` bytes, or of one."""
    call: list[T] = []
    total = 0
    for item in items:
        num_bytes = size(item)
        if call and total + num_bytes > CALL_BYTES:
            yield call
            call, total = [], 0
        call.append(item)
        total += num_bytes
    if call:
        yield call
