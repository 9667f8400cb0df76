"""What tests of chat templates share: those of real models, conversations, and what counts of them."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import trl
from transformers.utils.chat_template_utils import render_jinja_template

from chunkplan.intake.records import Conversation, Message
from chunkplan.intake.template import ChatTemplate

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


#: The tokens that end a turn, of all these models; of GLM those that begin the turn of somebody else.
ENDS = {
    *("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>", "<|eot|>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<|user|>", "<|observation|>", "<|system|>"),
}


@cache
def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), SPECIAL, name, ends=ENDS)


def conversation(*said: str, system: bool = False) -> Conversation:
    """Texts of the user and of the assistant by turns."""
    first = (Message("system", "Be kind."),) if system else ()
    return Conversation((*first, *(Message(("user", "assistant")[at % 2], text) for at, text in enumerate(said))))


def counting(name: str, asked: Conversation) -> list[str]:
    text, spans = template(name).render(asked)
    assert text == in_transformers(source_of(name), asked)[0]
    return [text[start:stop] for start, stop in spans]


def in_transformers(source: str, asked: Conversation) -> tuple[str, list[str]]:
    """The rendering, and what stands in generation blocks."""
    [text], [spans] = render_jinja_template(
        [[message.for_template() for message in asked.messages]],
        tools=asked.tools,
        chat_template=source,
        return_assistant_tokens_mask=True,
        **SPECIAL,
    )
    return str(text), [text[start:stop] for start, stop in spans]


def with_arguments(messages: list[dict[str, Any]], *, is_json: bool) -> list[dict[str, Any]]:
    """Messages whose calls have their arguments as values that were JSON, or as JSON that were values."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str) and not is_json:
                call["function"]["arguments"] = json.loads(arguments)
            elif isinstance(arguments, dict) and is_json:
                call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return messages


PLAIN = conversation("Hi?", "Hello.", "And?", "Well.")


THOUGHT = conversation("Hi?", "<think>\nhm\n</think>\n\nHello.", "And?", "<think>\nso\n</think>\n\nWell.")
