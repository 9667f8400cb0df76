"""The neutral forms of a record, which no longer depend on its schema, and why a record has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from chunkplan.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from chunkplan.errors import DataError

#: An object of JSON that somebody else wrote: a record, a message, a tool, a configuration. Nothing is known of what is
#: in it before it has been looked at.
JsonObject = dict[str, Any]


def as_tools(functions: list[JsonObject]) -> list[JsonObject]:
    """Tools as chat templates document them, each with its `function`, of what may be functions alone."""
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in functions]


@dataclass(frozen=True)
class TextRecord:
    """Plain text: every token counts in the loss."""

    text: str


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and its completion: the tokens of the completion count in the loss."""

    prompt: str
    completion: str


#: The names under which templates and data have what a model thought before it answered.
REASONING = ("reasoning_content", "thinking", "reasoning")


class Message(NamedTuple):
    """One message of a conversation.

    `content` is None only beside tool calls. `fields` holds everything else a chat template may use (`tool_calls`,
    `name`, ...) unchanged. `loss` is the record's own flag, or None. `parts` are the texts that `content` was joined
    from, for templates that read lists of parts. `calls`: the text before the tool calls in `content`, and the calls,
    for templates that render calls themselves.
    """

    role: str
    content: str | None
    loss: bool | None = None
    fields: JsonObject = {}  # noqa: RUF012 - shared, and so never changed
    parts: tuple[str, ...] = ()
    calls: tuple[str, list[JsonObject]] | None = None

    @property
    def counts_in_loss(self) -> bool:
        """True if its tokens are targets: as the record says, else if the assistant wrote it."""
        return self.role == "assistant" if self.loss is None else self.loss

    def for_template(self) -> JsonObject:
        """The message as transformers gives it to chat templates.

        Keys that are null are left out, `content` too: templates print None as a word. Reasoning is there under every
        name that templates read it by, if there is any: some would put out an empty thought.
        """
        message = {"role": self.role} if self.content is None else {"role": self.role, "content": self.content}
        if not self.fields:
            return message
        message.update(self.fields)
        reasoning = next((message[key] for key in REASONING if message.get(key)), None)
        if reasoning is None:
            return message
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools a chat template may describe to the model, and further variables of the template."""

    messages: tuple[Message, ...]
    tools: list[JsonObject] | None = None
    variables: JsonObject | None = None


@dataclass(frozen=True)
class Exchange:
    """A question and its answer; the tokenizer decides whether they become a conversation or a text.

    With a chat template it is a conversation, without one a prompt, a line end and the completion.
    """

    system: str | None
    prompt: str
    completion: str
    variables: JsonObject | None = None

    @property
    def conversation(self) -> Conversation:
        """The exchange as messages."""
        system = () if self.system is None else (Message("system", self.system),)
        messages = (*system, Message("user", self.prompt), Message("assistant", self.completion))
        return Conversation(messages, variables=self.variables)

    @property
    def plain(self) -> PromptRecord:
        """The exchange as it is trained without a chat template."""
        system = "" if self.system is None else self.system + "\n"
        return PromptRecord(f"{system}{self.prompt}\n", self.completion)


@dataclass(frozen=True)
class Pair:
    """A better and a worse answer to one prompt: each becomes a sequence, and both come in one step."""

    chosen: PromptRecord | Exchange | Conversation
    rejected: PromptRecord | Exchange | Conversation


@dataclass(frozen=True)
class Labelled:
    """A record that says whether its answer is a good one."""

    record: PromptRecord | Exchange | Conversation
    label: bool


@dataclass(frozen=True)
class Rollout:
    """Numbers of a sequence that a policy sampled.

    `of_sequence` has its `group`, a hash of what the others of its group have too, and maybe `reward` and `advantage`;
    `of_tokens` lists of float32, as long as its tokens and 0 at those that are no targets.
    """

    of_sequence: Mapping[str, float]
    of_tokens: Mapping[str, Float32Array]


@dataclass(frozen=True)
class TokensRecord:
    """A record that is tokens already: ids int32 [n] and target mask bool [n], n >= 1, target[0] false.

    Its documents begin at `begins` int64, from 0: several are in a packed row, and each becomes a sequence.
    """

    input_ids: Int32Array
    target: BoolArray
    begins: Int64Array
    rollout: Rollout | None = None

    @property
    def documents(self) -> list[tuple[Int32Array, BoolArray]]:
        """The tokens and targets of each of its documents."""
        ends = pairwise([*self.begins.tolist(), len(self.input_ids)])
        return [(self.input_ids[begin:end], self.target[begin:end]) for begin, end in ends]


@dataclass(frozen=True)
class LengthRecord:
    """A record of which only the length in tokens is known, at least 1."""

    num_tokens: int


Record = TextRecord | PromptRecord | Conversation | Exchange | Pair | Labelled | TokensRecord | LengthRecord

#: Why a record is rejected: the names in reports and in rejected.jsonl, and what they mean.
REASONS = {
    "not-utf8": "bytes that are not UTF-8",
    "not-json": "not JSON: cut short, a lone surrogate, NaN, text behind the value, ...",
    "not-an-object": "JSON, but not an object",
    "too-deep": "nested deeper than the parser allows",
    "duplicate-keys": "the same key twice in one object",
    "schema": "keys or types that are not those of the source's schema",
    "unsupported": "what is not planned: images, weights other than 0 and 1, other layouts of preference pairs",
    "undesirable": "an answer labelled as a bad one (`label`: false)",
    "empty": "nothing to train on: no text, or nothing but whitespace",
    "untrained": "a flag says that nothing of it counts in the loss",
    "too-large": "more bytes than a record may have",
    "template": "the chat template cannot render it",
    "too-long": "more tokens than --max-length",
    "unreadable": "a whole source, or the rest of one, that cannot be read",
}


#: Hints if all records are left out for one reason.
HINTS_OF_ALL = {
    "empty": "give files with at least one record that is not blank",
    "untrained": "give files with at least one record that counts, or ignore the flag with --ignore-column",
    "undesirable": "give records with good answers too, or remove `label` if it means another thing",
    "too-long": "raise --max-length, or say --overlong truncate",
}


class RecordError(DataError):
    """A record that cannot become a sequence; the reader adds `where`, `number` is its row within its piece."""

    def __init__(
        self, message: str, *, reason: str, hint: str, where: str | None = None, number: int | None = None
    ) -> None:
        assert reason in REASONS
        super().__init__(message, where=where, hint=hint)
        self.reason = reason
        self.number = number

    def of_row(self, number: int) -> Rejected:
        """The entry of a line or row that is left out for this."""
        return Rejected(number, self.reason, self.message, self.hint)


class Rejected(NamedTuple):
    """A record that was left out. `number` is its line or row within its piece of the source, or -1: all the rest."""

    number: int
    reason: str
    message: str
    hint: str = "fix this record, or leave it out"
