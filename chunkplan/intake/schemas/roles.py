"""The roles of messages: as data name them -> as chat templates do.

A name is here if everybody who writes it means the same by it, and no chat template in use needs it as it is:

- `human`, `gpt`, `chatgpt`, `bing` and `bard` are ShareGPT's, `model` is Gemini's and Gemma's (whose templates write it
  for the assistant by themselves), `bot` and `chatbot` Cohere's, `ai` LangChain's and `prompter` OpenAssistant's.
- `function` is OpenAI's name, before there were tools, for what a function returned; `ipython` Llama's, whose templates
  take `tool` for the same; `observation` is ShareGPT's and GLM's, `tool_response` swift's.
- `function_call` and `tool_call` are calls that the assistant wrote, as JSON.
- `developer` is OpenAI's newer name for `system`. Beside a system message, or later in a conversation, it is something
  else, which some templates know, and stays as it is.

What is not here may be an answer or not, and so may count in the loss or not: it is refused, unless the message says
itself with `loss` or a weight whether it counts. The chat template then gets the role as it is.
"""

from __future__ import annotations

from chunkplan.intake.records import JsonObject, Message
from chunkplan.intake.schemas.fields import shortened, wrong

ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "tool_response"), "tool"),
}

#: Roles of programs: what they write may be a JSON value instead of a string.
PROGRAM_ROLES = ("function_call", "tool_call", "tool", "function", "ipython", "observation", "tool_response")

#: Keys of a message that may say who speaks.
SPEAKERS = ("role", "from", "speaker", "sender")


def role_of(name: str, path: str, *, says_if_it_counts: bool) -> str:
    """The role that a chat template knows for `name`, found at `path`; upper and lower case are the same.

    Raises:
        RecordError: it is not known, and the message does not say whether it counts in the loss.
    """
    role = ROLES.get(name) or ROLES.get(name.lower())
    if role is not None:
        return role
    if not says_if_it_counts:
        wrong(
            f'`{path}` is "{shortened(name)}", expected one of {", ".join(ROLES)}',
            hint="rename the role; or say with `loss`, true or false, in each of its messages whether it counts: "
            "the chat template then gets the role as it is",
        )
    return name


def is_message(record: JsonObject) -> bool:
    """Whether a whole record is one message of a conversation: somebody who is known says a `text` or `content`."""
    speaks = any(str(record.get(key)).lower() in ROLES for key in SPEAKERS)
    return speaks and ("text" in record or "content" in record)


def with_system(messages: list[Message]) -> list[Message]:
    """`messages` with a first one of the developer as the system's, unless there is one of the system."""
    if not messages or messages[0].role != "developer" or any(message.role == "system" for message in messages):
        return messages
    return [messages[0]._replace(role="system"), *messages[1:]]
