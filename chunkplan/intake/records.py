"""The neutral forms of a record: what is left of it once its schema is understood."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class TextRecord:
    """Plain text: every token counts in the loss."""

    text: str

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to train on."""
        return not self.text


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and its completion: the tokens of the completion count in the loss."""

    prompt: str
    completion: str

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to train on."""
        return not (self.prompt or self.completion)


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    `content` is None only beside tool calls. `fields` holds everything else a chat template may use (`tool_calls`,
    `name`, ...).
    """

    role: str
    content: str | None
    counts_in_loss: bool
    fields: dict[str, Any] = field(default_factory=dict)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        return {"role": self.role, "content": self.content, **self.fields}


@dataclass(frozen=True)
class Conversation:
    """Messages, and the tools a chat template may describe to the model. `where` names its file and line."""

    messages: tuple[Message, ...]
    tools: list[Any] | None
    where: str

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to train on."""
        return not any(message.content or message.fields.get("tool_calls") for message in self.messages)


Record = TextRecord | PromptRecord | Conversation
