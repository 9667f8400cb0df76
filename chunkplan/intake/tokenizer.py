"""A tokenizer: records -> token ids and target masks, token by token what the model will be trained on.

A *turn* of the assistant is what it writes between two messages of others, tools aside: its messages, the calls in
them, and the answers of tools that it went on from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, TypedDict, TypeVar

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array, Int64Array
from chunkplan.config.intake import IntakeOptions, Turns
from chunkplan.errors import UsageError
from chunkplan.intake.pieces import SHARED, TokenColumns
from chunkplan.intake.records import (
    Conversation,
    Exchange,
    Message,
    PromptRecord,
    Record,
    RecordError,
    Rejected,
    TextRecord,
)
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.template_render import Span

if TYPE_CHECKING:
    from chunkplan.intake.backends.fast import FastTokenizer
    from chunkplan.intake.backends.tiktoken_name import TiktokenTokenizer

    TokenizerLibrary: TypeAlias = FastTokenizer | TiktokenTokenizer

#: Token ids int32 [n] and target mask bool [n] of one sequence; n >= 1, target[0] is false.
Encoded = tuple[Int32Array, BoolArray]

#: As `Encoded`, but with any first target; and whether a token that is a target begins before what counts.
Masked = tuple[Int32Array, BoolArray, bool]

#: The most that is encoded in one call, in bytes: a tokenizer needs up to 130 bytes of memory for every byte of text,
#: and is a little faster where these stay in the caches of the processor.
CALL_BYTES = 1 << 16

#: Words in the name of a token that may end a text, of which only what comes behind the first is padding.
_END_WORDS = ("end", "eos", "eot", "/s")

_PADDING_HINT = "give `attention_mask` with 0 at padding, or `labels` with -100 there; or leave the padding out"


_NOTHING_LEFT = RecordError("the tokenizer leaves nothing of it", reason="empty", hint="leave this record out")

T = TypeVar("T")


class TokenizerEntry(TypedDict):
    """A tokenizer as a manifest describes it; a shard has the hash of its chat template in it too."""

    path: str
    content_hash: str
    vocab_size: int
    eos_token: str | None
    template_hash: str | None


@dataclass(frozen=True)
class RecordTokenizer:
    """Encodes batches of records; made by `load_tokenizer`.

    `content_hash` is of what it encodes; `eos`, `bos` and `pad` end, begin and pad a sequence, with their ids;
    `ends_text` and `begins_text` say that plain text gets the first two.
    """

    path: str
    content_hash: str
    bos: tuple[str, int] | None
    eos: tuple[str, int] | None
    begins_text: bool
    ends_text: bool
    template: ChatTemplate | None
    library: TokenizerLibrary = field(repr=False)
    pad: tuple[str, int] | None = None

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included."""
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

    def as_asked(self, options: IntakeOptions) -> RecordTokenizer:
        """The tokenizer as `options` have it: with variables for its template, and whether texts get its end token.

        Raises UsageError where it has no template, no such variable of it, or no end token.
        """
        variables, template = options.chat_template_kwargs, self.template
        if variables and template is None:
            raise UsageError(
                f"variables for a chat template, and the tokenizer {self.path} has none",
                hint="give one with --chat-template, or leave --template-kwargs out",
            )
        ends_text = self.ends_text or options.text_end == "eos"
        if ends_text > self.ends_text and self.eos is None:
            raise UsageError(
                f"the tokenizer {self.path} has no end token", hint="set `eos_token` in its tokenizer_config.json"
            )
        if variables and template is not None:
            template.check_variables(variables)
            template = template.with_variables(variables)
        return replace(self, template=template, ends_text=ends_text)

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
        """Encode `records` in order: token ids and target masks, or the error of each that has none.

        What the chat template leaves out of each, see `LEFT_OUT`, is added to `left_out`, by place in `records`, and
        `SHARED` where a token that counts begins in what does not. Raises UsageError for conversations without a chat
        template.
        """
        left_out = {} if left_out is None else left_out
        encoded: list[Encoded | RecordError] = [_NOTHING_LEFT] * len(records)
        by_kind: dict[str, list[tuple[int, str, list[Span]]]] = {"text": [], "prompt": [], "chat": []}
        for index, record in enumerate(records):
            if isinstance(record, Exchange):
                record = record.plain if self.template is None else record.conversation
            match record:
                case TextRecord(text):
                    by_kind["text"].append((index, text, []))
                case PromptRecord(prompt, completion):
                    text = prompt + completion
                    by_kind["prompt"].append((index, text, [(len(prompt), len(text))]))
                case Conversation():
                    try:
                        by_kind["chat"].append((index, *self._render(record, left_out, index)))
                    except RecordError as error:
                        encoded[index] = error
                case _:
                    raise AssertionError("it has tokens, or a length, already")
        for kind, texts in by_kind.items():
            for call in batches_by_bytes(texts, lambda item: size_of(item[1])):
                for (index, _, _), (input_ids, target, shares) in zip(call, self._masked(kind, call), strict=True):
                    if shares:
                        left_out.setdefault(index, set()).add(SHARED)
                    if len(input_ids):
                        target[0] = False  # nothing predicts the first token
                        encoded[index] = input_ids, target
        return encoded

    def _render(self, conversation: Conversation, left_out: dict[int, set[str]], index: int) -> tuple[str, list[Span]]:
        if self.template is None:
            raise UsageError(
                f"there are conversations and the tokenizer {self.path} has no chat template",
                hint="give one with --chat-template, or another tokenizer",
            )
        kinds: set[str] = set()
        try:
            text, spans = self.template.render(conversation, kinds)
        finally:
            if kinds:
                left_out[index] = kinds
        return text, [span for span in spans if span[0] < span[1]]

    def _masked(self, kind: str, call: list[tuple[int, str, list[Span]]]) -> Iterator[Masked]:
        """Encode texts, of which all tokens are targets, or prompts and conversations, of which those in spans are."""
        texts, spans = [text for _, text, _ in call], [spans for _, _, spans in call]
        if kind == "chat":
            yield from self.library.rendered(texts, spans)
        elif kind == "text":
            for input_ids in self.library.texts(texts):
                yield *self._framed(input_ids, np.ones(len(input_ids), np.bool_), ends=self.ends_text), False
        else:
            for input_ids, target, shares in self.library.prompts(texts, [start for [(start, _)] in spans]):
                input_ids, target = self._framed(input_ids, target, ends=True)
                if self.eos:
                    target[-1:] = True
                yield input_ids, target, shares

    def _framed(self, input_ids: Int32Array, target: BoolArray, *, ends: bool) -> Encoded:
        """Add the tokens that begin and end a text, once, whether the text or the tokenizer has them already."""
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


def from_divergence(chosen: Encoded, rejected: Encoded) -> tuple[Encoded, Encoded]:
    """Both texts of a pair with all tokens as targets from the first on that differs, or is one in either.

    So tokens that are merged over the end of the prompt in one of the two count in both.
    """
    length = min(len(chosen[0]), len(rejected[0]))
    firsts = [int(np.argmax(target)) for _, target in (chosen, rejected) if target.any()]
    differs = chosen[0][:length] != rejected[0][:length]
    begin = max(min([int(np.argmax(differs)) if differs.any() else length, *firsts]), 1)
    counted = [(ids, np.arange(len(ids)) >= begin) for ids, _ in (chosen, rejected)]
    return counted[0], counted[1]


def size_of(text: str) -> int:
    """Approximate bytes of `text` in UTF-8, without encoding it."""
    return len(text) if text.isascii() else 3 * len(text)


def batches_by_bytes(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Split `items` into batches of at most `CALL_BYTES` bytes, or of one item."""
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


def by_turns(conversation: Conversation, turns: Turns) -> list[Conversation]:
    """Return the conversations that become sequences, at least one; messages that are not trained have `loss` False.

    - "rendered": the conversation as it is, in which all counts that the assistant said.
    - "last": the same, in which only its last turn counts.
    - "each": of every turn the conversation up to its end, in which only that turn counts, as a model meets it when it
      answers: a template shows the thinking of this turn, and of earlier ones what it leaves of it.
    """
    if turns == "rendered":
        return [conversation]
    messages = conversation.messages
    silent = tuple(message._replace(loss=False) for message in messages)
    spans = [
        (start, stop)
        for start, stop in turns_of(messages)
        if any(message.counts_in_loss for message in messages[start:stop])
    ]
    if not spans:
        return [conversation]
    if turns == "last":
        start, stop = spans[-1]
        return [replace(conversation, messages=(*silent[:start], *messages[start:stop], *silent[stop:]))]
    return [replace(conversation, messages=(*silent[:start], *messages[start:stop])) for start, stop in spans]


def turns_of(messages: tuple[Message, ...]) -> Iterator[tuple[int, int]]:
    """Yield the messages [start, stop) of every turn, with those of others that it answers."""
    start = stop = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            stop = index + 1
        elif stop > start and message.role != "tool":
            yield start, stop
            start = stop
    if stop > start:
        yield start, stop


def without_padded(
    numbers: Int64Array, found: TokenColumns, tokenizer: RecordTokenizer | None
) -> tuple[Int64Array, TokenColumns, list[Rejected]]:
    """Reject the sequences, of the records `numbers` [m], that begin or end with padding that counts.

    Padding is a run of the tokenizer's padding token, or of its end token.
    """
    if tokenizer is None or not len(numbers):
        return numbers, found, []
    first, last = found.offsets[:-1], found.offsets[1:] - 1
    second, before = np.minimum(first + 1, last), np.maximum(last - 1, first)
    pads = dict(pad for pad in (tokenizer.pad, tokenizer.eos) if pad is not None)
    is_bad, names = np.zeros(len(first), np.bool_), list[str]()
    for name, pad_id in pads.items():
        is_pad = found.input_ids == pad_id
        ends_text = (name, pad_id) == tokenizer.eos or any(word in name.lower() for word in _END_WORDS)
        is_its = is_pad[last] & found.target[last] & (is_pad[before] | (not ends_text))
        is_its |= is_pad[first] & is_pad[second] & found.target[second]
        names += [f"`{name}`"] if is_its.any() else []
        is_bad |= is_its
    if not is_bad.any():
        return numbers, found, []
    message = (
        f"it begins or ends with padding ({' or '.join(names)}) that counts in the loss, as nothing marks it as padding"
    )
    rejected = [Rejected(number, "schema", message, _PADDING_HINT) for number in numbers[is_bad].tolist()]
    return numbers[~is_bad], found.kept(~is_bad, np.diff(found.offsets)), rejected
