"""A tokenizer: records -> token ids and target masks, token by token what the model will be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.errors import UsageError
from chunkplan.intake.records import Conversation, PromptRecord, Record, TextRecord
from chunkplan.intake.template import ChatTemplate

#: Token ids int32 [n] and target mask bool [n] of one sequence; target[0] is false.
Encoded = tuple[Int32Array, BoolArray]


@dataclass(frozen=True)
class RecordTokenizer:
    """Encodes batches of records. Made by `load_tokenizer`.

    `eos` is the end-of-sequence token and its id; `ends_text` says that plain text gets one too.
    """

    path: Path
    content_hash: str
    eos: tuple[str, int] | None
    ends_text: bool
    template: ChatTemplate | None
    tokenizer: Tokenizer = field(repr=False)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, records: Sequence[Record]) -> list[Encoded]:
        """Token ids and target masks of `records`, which are of one kind, in order.

        Raises:
            UsageError: they are conversations and the tokenizer has no chat template.
            DataError: the chat template cannot render one of them.
        """
        texts = [record.text for record in records if isinstance(record, TextRecord)]
        prompts = [record for record in records if isinstance(record, PromptRecord)]
        conversations = [record for record in records if isinstance(record, Conversation)]
        assert len(records) in (len(texts), len(prompts), len(conversations))
        return [*self._texts(texts), *self._prompts(prompts), *self._conversations(conversations)]

    def _texts(self, texts: list[str]) -> list[Encoded]:
        """Every token but the first is a target."""
        encoded = []
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=True):
            input_ids = np.array(encoding.ids, dtype=np.int32)
            if self.ends_text:
                input_ids = self._ended(input_ids)
            encoded.append(_masked(input_ids, np.ones(len(input_ids), dtype=np.bool_)))
        return encoded

    def _prompts(self, records: list[PromptRecord]) -> list[Encoded]:
        """Prompt and completion are encoded as one string; targets begin at or after the end of the prompt."""
        texts = [record.prompt + record.completion for record in records]
        encoded = []
        for record, encoding in zip(records, self.tokenizer.encode_batch(texts, add_special_tokens=True), strict=True):
            starts = _offsets(encoding)[:, 0]
            # Tokens that the tokenizer adds have no place in the text. They are where the text before them ends.
            starts[np.array(encoding.special_tokens_mask, dtype=np.bool_)] = -1
            target = np.maximum.accumulate(starts) >= len(record.prompt) if len(starts) else starts > 0
            input_ids = self._ended(np.array(encoding.ids, dtype=np.int32))
            target = np.pad(target, (0, len(input_ids) - len(target)))
            if self.eos and len(target):
                target[-1] = True
            encoded.append(_masked(input_ids, target))
        return encoded

    def _conversations(self, records: list[Conversation]) -> list[Encoded]:
        """The rendered conversation is encoded as one string; targets begin in a span that counts."""
        if not records:
            return []
        if self.template is None:
            raise UsageError(
                f"{records[0].where} is a conversation and the tokenizer {self.path} has no chat template",
                hint="put a chat_template.jinja beside tokenizer.json, or give another tokenizer",
            )
        rendered = [self.template.render(record) for record in records]
        encodings = self.tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        encoded = []
        for (_, spans), encoding in zip(rendered, encodings, strict=True):
            starts, ends = _offsets(encoding).T
            borders = np.array(spans, dtype=np.int64).reshape(-1)  # start, end, start, end, ...: ascending
            inside = np.searchsorted(borders, starts, side="right") % 2 == 1
            encoded.append(_masked(np.array(encoding.ids, dtype=np.int32), inside & (ends > starts)))
        return encoded

    def _ended(self, input_ids: Int32Array) -> Int32Array:
        """`input_ids` with the end-of-sequence token, where there is one, at its end."""
        if self.eos is None or (len(input_ids) and input_ids[-1] == self.eos[1]):
            return input_ids
        return np.append(input_ids, np.int32(self.eos[1]))


def _masked(input_ids: Int32Array, target: BoolArray) -> Encoded:
    target[:1] = False  # nothing predicts the first token
    return input_ids, target


def _offsets(encoding: Encoding) -> npt.NDArray[np.int64]:
    """First and last+1 character of every token, int64 [n, 2]; a token of half a character covers all of it."""
    return np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding)).reshape(-1, 2)
