"""Lists of messages, in the layouts that trainers take.

- `role` and `content`: OpenAI's, and that of chat templates;
- `from` and `value`: ShareGPT's;
- `role` and `value`: what axolotl calls pygmalion (axolotl-ai-cloud/axolotl, docs/dataset-formats/conversation.qmd);
- `role` and `parts`: Gemini's (cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare);
- a question and its answer in one object: `human` and `assistant` in swift's and Firefly's data (modelscope/ms-swift,
  docs/source_en/Customization/Custom-dataset.md), `input` and `output`, with a `system` in the first of them, in
  XTuner's (InternLM/xtuner, docs/en/user_guides/dataset_format.md).

Calls of tools are in `tool_calls`, in OpenAI's `function_call` before there were tools, or the text of a turn whose
role says so: JSON of one call or a list of them, perhaps behind a thought that ends with `</think>`, as LLaMA-Factory
(hiyouga/LLaMA-Factory, data/README.md) and swift (modelscope/ms-swift, docs/source_en/Instruction/Agent-support.md)
read it.

A role name is known if it has one meaning in all formats, and no chat template in use needs the name itself: `human`,
`gpt`, `chatgpt`, `bing` and `bard` are ShareGPT's, `model` is Gemini's and Gemma's (whose templates write it for the
assistant by themselves), `bot` and `chatbot` Cohere's, `ai` LangChain's and `prompter` OpenAssistant's. `function` is
OpenAI's old name for the result of a tool; `ipython` Llama's, whose templates take `tool` too; `observation` is
ShareGPT's and GLM's, `tool_response` swift's. `developer` is OpenAI's newer name for `system`; beside a system message,
or later in a conversation, it has another meaning and is kept. An unknown role may be an answer or not: it is refused,
unless the message has a flag for the loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from chunkplan.intake.records import REASONING, Conversation, Exchange, JsonObject, Message, Record, RecordError
from chunkplan.intake.schemas.fields import (
    column_flags,
    empty,
    field,
    ignoring,
    is_blank,
    json_type,
    objects,
    quoted,
    refuse_unread,
    shortened,
    typed,
    unsupported,
    wrong,
)
from chunkplan.intake.schemas.keys import COUNTS, FLAGS, READ_IN_MESSAGES, is_flag, kind_of

#: Roles as data name them -> as chat templates do.
ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "tool_response"), "tool"),
}

#: Roles whose text is calls of tools, and those of people, who say what is in their messages.
_CALL_ROLES = ("function_call", "tool_call")
_SPEAKERS = {name: role for name, role in ROLES.items() if name not in _CALL_ROLES}

#: Keys of a message that may say who speaks.
SPEAKER_KEYS = ("role", "from", "speaker", "sender")

_AS_MESSAGES = 'write each message as {"role": "user", "content": TEXT}, those of the assistant with its role'

#: The roles of a question and its answer in one object, besides those of `ROLES`.
_EXCHANGE_ROLES = {"input": "user", "output": "assistant"}
_OF_EXCHANGE = dict.fromkeys(("system", "user", "assistant")).keys()

_OWN_KEYS = {*FLAGS, "role", "content"}
_TURN_KEYS = {*FLAGS, "from", "value"}
_KNOWN = {*READ_IN_MESSAGES, *_OWN_KEYS, "parts", "value"}

#: The better and the worse answer of a pair: as most data have them, and as OpenAI does; and the worse one beside a
#: record of the better one, as swift has it.
_PREFERENCES = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
_WORSE = ("rejected_response", "rejected_messages")

#: A record in which one of these says something is refused.
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "pixel_values", "input_features")

#: A record without these keys is not refused.
SUSPECT = frozenset((*(key for pair in _PREFERENCES for key in pair), *_WORSE, *MEDIA))

#: A string that may be a flag, or a list of them, and no word.
_LIKE_NUMBERS = re.compile(r"\s*([\[0-9]|(true|false)\s*$)", re.IGNORECASE)


def refuse(record: JsonObject, *, is_pair: bool = False) -> None:
    """Raise RecordError for media, and for pairs but the `chosen` and `rejected` of what `is_pair`.

    Keys that are null or empty, as in tables, say nothing.
    """
    for better, worse in _PREFERENCES[is_pair:]:
        if record.get(better) is not None and record.get(worse) is not None:
            unsupported(
                f"a preference pair (`{better}` and `{worse}`), and this is read as one sequence",
                hint=f"--format preference reads `prompt`, `chosen` and `rejected`; to train the other keys: "
                f"{ignoring(worse)}",
            )
    for key in (*_WORSE, *(() if is_pair else ("rejected",))):
        value = record.get(key)
        is_answer = isinstance(value, list) or (isinstance(value, str) and len(value.split()) > 1)
        if value and (key in _WORSE or is_answer):
            unsupported(
                f"a preference pair (`{key}` beside the better one), and this is read as one sequence",
                hint="name the answers `chosen` and `rejected`; what is left without it is a record of its own: "
                + ignoring(key),
            )
    _refuse_media(record)


def _refuse_media(fields: JsonObject, path: str = "") -> None:
    for key in MEDIA:
        if fields.get(key):
            unsupported(f"`{path}{key}` beside the text: only text is planned", hint="leave records with media out")


def parse_messages(values: list[Any], path: str, *, is_sharegpt: bool = False) -> list[Message]:
    """Parse the list of messages found at `path`; turns that call tools get their `calls` beside the text.

    `is_sharegpt` selects the expected layout of a message that has neither. Raises RecordError for a message that is in
    no known layout, or is more than text.
    """
    messages = []
    for index, value in enumerate(values):
        if type(value) is dict and len(value) == 2:  # what most messages are
            content, role = value.get("content"), value.get("role")
            if type(content) is not str:
                content, role = value.get("value"), value.get("from")
            if type(content) is str and type(role) is str and role in _SPEAKERS:
                messages.append(Message(_SPEAKERS[role], content))
                continue
        inside = f"{path}[{index}]"
        if type(value) is str:
            wrong(
                f"`{inside}` is a string, expected an object that says who speaks",
                hint=f"{_AS_MESSAGES}; where both take turns, `jq -c '{{messages: [.{path} | to_entries[] | {{role: "
                '(["user", "assistant"][.key % 2]), content: .value}]}\' FILE > NEW.jsonl` does so',
            )
        value = typed(value, dict, inside, _AS_MESSAGES)
        if "role" not in value and "from" not in value and (exchange := exchange_of(value)):
            loss = _stated_loss(value, inside)
            roles = [role for role in _OF_EXCHANGE if role in exchange and (role != "system" or exchange[role].strip())]
            messages += [Message(role, exchange[role], loss if role == "assistant" else None) for role in roles]
            continue
        name = value.get("role", value.get("from"))
        is_call = type(name) is str and name.lower() in _CALL_ROLES
        value = _calls_as_text(value) if is_call else value
        read = _message if "role" in value or not ("from" in value or is_sharegpt) else _turn
        message = read(value, inside, values)
        messages.append(_with_calls(message, inside) if is_call else message)
    if messages and messages[0].role == "developer" and all(message.role != "system" for message in messages):
        messages[0] = messages[0]._replace(role="system")
    return messages


def exchange_of(value: JsonObject) -> dict[str, str] | None:
    """Return role -> text of a question and its answer in one object, perhaps with a system text; else None."""
    roles = {
        key: _EXCHANGE_ROLES.get(key) or ROLES.get(key, key)
        for key, text in value.items()
        if text is not None and key not in FLAGS
    }
    by_role = {role: value[key] for key, role in roles.items()}
    is_one = by_role.keys() | {"system"} == _OF_EXCHANGE and len(by_role) == len(roles)
    return by_role if is_one and all(type(text) is str for text in by_role.values()) else None


def with_usual_names(record: JsonObject, inside: Mapping[str, str]) -> JsonObject:
    """`record` whose lists of messages have the usual keys and roles, in place of those that `inside` names.

    Raises RecordError where a message has both a key that is named and the usual one.
    """
    keys = {inside[name]: name for name in ("role", "content") if name in inside}
    names = {said: name.removeprefix("role.") for name, said in inside.items() if name.startswith("role.")}
    usual = dict(record)
    for key in record.keys() - {"tools", "functions", "history"}:
        messages = objects_in(record[key])
        if messages and not {*keys, "role", "from"}.isdisjoint(messages[0]):
            usual[key] = [_with_usual_names(one, keys, names, f"{key}[{index}]") for index, one in enumerate(messages)]
    return usual


def _with_usual_names(message: JsonObject, keys: Mapping[str, str], names: Mapping[str, str], path: str) -> JsonObject:
    for key, name in keys.items():
        if key != name and name not in keys and message.get(key) is not None and message.get(name) is not None:
            wrong(f"`{path}` has both `{key}`, which is named as its `{name}`, and `{name}`")
    usual = {keys.get(key, key): value for key, value in message.items() if key in keys or key not in keys.values()}
    if "role" not in usual and "from" in usual:
        usual["role"] = usual.pop("from")
    speaker = usual.get("role")
    return {**usual, "role": names[speaker]} if type(speaker) is str and speaker in names else usual


def objects_in(value: Any) -> list[JsonObject]:
    """The objects of a list, which may be written as JSON; none where it is another."""
    if type(value) is str and value.lstrip()[:1] == "[":
        with suppress(ValueError, RecursionError):
            value = msgspec.json.decode(value)
    is_list = type(value) is list and all(type(one) is dict for one in value)
    return value if is_list else []


def make_conversation(messages: list[Message], tools: list[JsonObject] | None, path: str) -> Conversation:
    """A conversation of `messages`, found at `path`; raises RecordError where all of them are blank."""
    if any(not is_blank(message.content) or message.fields.get("tool_calls") for message in messages):
        return Conversation(tuple(messages), tools)
    return empty(f"`{path}` has no messages" if not messages else f"the messages of `{path}` are all blank")


def unread_of_turn(turn: JsonObject) -> list[str]:
    """The keys of a message that say something which chat templates do not know."""
    if exchange_of(turn):
        return []
    known = _KNOWN if "role" in turn else {*_TURN_KEYS, *REASONING}
    return [key for key, value in turn.items() if value is not None and key not in known]


def is_message(record: JsonObject) -> bool:
    """Return whether a whole record is one message of a conversation: a known speaker with `text` or `content`."""
    speaks = any(str(record.get(key)).lower() in ROLES for key in SPEAKER_KEYS)
    return speaks and ("text" in record or "content" in record)


def new_roles(names: Iterable[Any]) -> dict[str, str]:
    """The role of the first of those `names` that nobody knows, in the order in which they speak: who begins asks."""
    said = dict.fromkeys(name for name in names if type(name) is str)
    free = [f"role.{role}" for role in ("user", "assistant") if role not in {ROLES.get(name.lower()) for name in said}]
    return dict(zip(free, (shortened(name) for name in said if name.lower() not in ROLES), strict=False))


def _message(message: JsonObject, path: str, messages: list[Any]) -> Message:
    loss = _stated_loss(message, path)
    role = _role_of(field(message, "role", str, path), f"{path}.role", loss, messages)
    message = _with_content(message, path)
    # Rows of a table have every key of every row: null says nothing, and neither do no calls.
    fields = {key: value for key, value in message.items() if value is not None and key not in _OWN_KEYS}
    if calls := objects(fields.pop("tool_calls", None), f"{path}.tool_calls", or_one=True):
        fields["tool_calls"] = calls
    if fields:
        _refuse_unread_fields(fields, path)
        _refuse_media(fields, f"{path}.")
    call = fields.pop("function_call", None)
    if call is not None and call not in ({}, ""):
        if calls:
            wrong(f"`{path}` has both `function_call` and `tool_calls`", hint="leave one of the two out")
        fields["tool_calls"] = [_call(call, f"{path}.function_call")]
    content = message.get("content")
    if isinstance(content, list):
        parts = _text_parts(content, fields, f"{path}.content")
        return Message(role, "".join(parts), loss, fields, parts)
    if content is None and not fields.get("tool_calls"):
        state = "null" if "content" in message else "missing"
        found = quoted([key for key, value in message.items() if value is not None])
        wrong(f"`{path}.content` is {state} and there are no `tool_calls`, expected a string; found the keys {found}")
    if content is not None:
        content = field(message, "content", str, path)
    return Message(role, content, loss, fields)


def _turn(message: JsonObject, path: str, messages: list[Any]) -> Message:
    speaker = field(message, "from", str, path)
    loss = _stated_loss(message, path)
    role = _role_of(speaker, f"{path}.from", loss, messages)
    value = message.get("value")
    if isinstance(value, (list, dict)) and (role == "tool" or speaker.lower() in _CALL_ROLES):  # of a program
        value = json.dumps(value, ensure_ascii=False)
    else:
        value = field(message, "value", str, path)
    others = {key: inner for key, inner in message.items() if inner is not None and key not in _TURN_KEYS}
    _refuse_unread_fields(others, path)
    return Message(role, value, loss, {key: others[key] for key in REASONING if others.get(key)})


def _role_of(name: str, path: str, loss: bool | None, messages: list[Any]) -> str:
    """The role that a chat template knows for `name`; upper and lower case are the same."""
    role = ROLES.get(name) or ROLES.get(name.lower())
    if role is None and loss is None:
        names = (one.get("role", one.get("from")) for one in messages if type(one) is dict)
        said = new_roles(names) or {"role.user": shortened(name)}
        wrong(
            f'`{path}` is "{shortened(name)}", expected one of {", ".join(ROLES)}',
            hint=f"rename the role, or say whose it is, such as {column_flags(said)}; or say with `loss`, true or "
            "false, in each of its messages whether it counts: the chat template then gets it as it is",
        )
    return role or name


def _with_content(message: JsonObject, path: str) -> JsonObject:
    """`message` with its `content`, where that has another name: `value` as in pygmalion, or `parts` as in Gemini's."""
    if message.get("content") is not None:
        return message
    value, parts = message.get("value"), message.get("parts")
    if type(value) is str:
        return {**message, "content": value, "value": None}
    if type(parts) is list:
        content = [_part_of_gemini(part, f"{path}.parts[{index}]") for index, part in enumerate(parts)]
        return {**message, "content": content, "parts": None}
    return message


def _part_of_gemini(part: Any, path: str) -> JsonObject:
    """The part as OpenAI has parts; a `thought` is what was thought before the answer."""
    others = [key for key, value in typed(part, dict, path).items() if key not in ("text", "thought") and value]
    if others:
        unsupported(f"`{path}` has `{shortened(others[0])}`: only text is planned")
    return {"type": "reasoning" if part.get("thought") else "text", "text": field(part, "text", str, path)}


def _text_parts(parts: list[Any], fields: JsonObject, path: str) -> tuple[str, ...]:
    """The texts of a list of parts; what an assistant thought and which tools it called goes into `fields`."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[JsonObject] = []
    for index, part in enumerate(parts):
        inside = f"{path}[{index}]"
        kind = field(typed(part, dict, inside), "type", str, inside)
        if kind not in ("text", "reasoning", "tool_call"):
            unsupported(f'`{inside}` is a part of type "{kind}": only text, reasoning and tool calls are planned')
        if flags := [key for key, one in part.items() if key not in ("text", "value") and is_flag(key, one)]:
            unsupported(
                f"`{inside}.{flags[0]}` may say what counts in the loss, and a message counts as a whole or not",
                hint="say of the message whether it counts; remove the key if it means another thing",
            )
        if kind == "tool_call":
            calls.append(_call(part.get("value"), f"{inside}.value"))
        else:
            said = field(part, "text" if "text" in part else "value", str, inside)
            (texts if kind == "text" else reasoning).append(said)
    if reasoning:
        fields["reasoning_content"] = "".join(reasoning)
    if calls:
        fields["tool_calls"] = [*fields.get("tool_calls", ()), *calls]
    return tuple(texts)


def _refuse_unread_fields(fields: JsonObject, path: str) -> None:
    """Raise RecordError where `fields` of a message, its flags apart, may say what is learnt, or what is given."""
    flags = [key for key, value in fields.items() if is_flag(key, value)]
    if flags:
        names = [f"{path}.{key}" for key in flags]
        refuse_unread(*names, says=f"{json_type(fields[flags[0]])} that may say what counts in the loss")
    for key, value in fields.items():
        if key in READ_IN_MESSAGES or type(value) is not str or is_blank(value):
            continue
        name = f"{path}.{key}"
        if kind_of(key) == "thought":
            unsupported(
                f"`{name}` has what was thought before an answer, under a name that no chat template reads",
                hint=f"name it `reasoning_content`; to train without it: {ignoring(name)}",
            )
        if kind_of(key) == "given":
            refuse_unread(name, says="text that the model may be given: put it into the content of a message")


def _calls_as_text(turn: JsonObject) -> JsonObject:
    """A turn that calls tools with its calls as JSON, where they are values."""
    said = turn.get("content")
    is_parts = isinstance(said, list) and any(isinstance(part, dict) and "type" in part for part in said)
    return {**turn, "content": json.dumps(said)} if isinstance(said, (dict, list)) and not is_parts else turn


def _with_calls(message: Message, path: str) -> Message:
    """The message with the calls that its text is; raises RecordError where that is no JSON, or other JSON."""
    said = (message.content or "").strip()
    text = said if said[:1] in ("{", "[") else said.rpartition("</think>")[2]
    try:
        value = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        wrong(
            f"`{path}` calls a tool and is no JSON ({error}), expected `name` and `arguments`, or a list of them",
            hint="fix this record, or name its role `assistant` if the model is to write that text as it is",
        )
    values = value if isinstance(value, list) else [value]
    if not values:
        wrong(f"`{path}` calls a tool and is an empty list, expected objects with `name` and `arguments`")
    return message._replace(calls=(said.removesuffix(text), [_call(one, path) for one in values]))


def _call(value: Any, path: str) -> JsonObject:
    """Convert a call, JSON or an object, perhaps with `parameters` or in a `function`, to that of chat templates."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (ValueError, RecursionError) as error:
            wrong(f"`{path}` is a string that is not JSON ({error})")
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or type(function.get("name")) is not str:
        wrong(f"`{path}` is {json_type(value)}, expected an object with `name` and `arguments`")
    arguments = function.get("arguments", function.get("parameters", {}))
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _stated_loss(message: JsonObject, path: str) -> bool | None:
    """Return whether the flags of the message at `path` say that it counts; None where it has none."""
    if FLAGS.isdisjoint(message):
        return None
    if message.get("train_detail"):
        unsupported(f"`{path}.train_detail` has parts of a message, which counts in the loss as a whole or not")
    if message.get("mask") is not None:
        _refuse_mask(f"{path}.mask")
    stated = {
        key: _flag(message[key], f"{path}.{key}", f"{path}.{key}") == counts
        for key, counts in COUNTS.items()
        if message.get(key) is not None
    }
    if stated.get("step_loss_mask"):
        del stated["step_loss_mask"]
    if len(set(stated.values())) > 1:
        keys = " and ".join(f"`{key}`" for key in stated)
        wrong(f"`{path}` says with {keys} both that it counts and that it does not")
    return next(iter(stated.values()), None)


def with_flags_of_record(parsed: Record, record: JsonObject, read: Collection[str]) -> Record:
    """Apply the loss flags of a whole `record` to `parsed`; keys that are `read` otherwise are none.

    A list of flags has an entry for each message (LLaMA-Factory: `loss_mask`), and takes answers away. Raises
    RecordError where nothing counts, or a flag is ambiguous or does not fit.
    """
    for key, counts in COUNTS.items():
        value = record.get(key)
        if value is None or key in read or (type(value) is str and not _LIKE_NUMBERS.match(value)):
            continue
        if type(value) is list:
            flags = [_flag(one, f"{key}[{index}]", key) == counts for index, one in enumerate(value)]
            parsed = _by_message(parsed, flags, key)
        elif _flag(value, key, key) != counts:
            _untrained(f"`{key}` is {str(value).lower()}")
    speaker = record.get("mask")
    if speaker is not None and "mask" not in read and ROLES.get(str(speaker).lower()) != "user":
        _refuse_mask("mask")
    return parsed


def _by_message(parsed: Record, counts: list[bool], key: str) -> Record:
    """`parsed` without the answers that do not count; a system message at its beginning may have no entry."""
    if not isinstance(parsed, (Conversation, Exchange)):
        unsupported(f"`{key}` is a list, and the record has no messages", hint=_unless(key))
    messages = (parsed.conversation if isinstance(parsed, Exchange) else parsed).messages
    if len(counts) == len(messages) - 1 and messages[0].role == "system":
        counts = [True, *counts]
    if len(counts) != len(messages):
        wrong(f"`{key}` has {len(counts)} entries, and there are {len(messages)} messages", hint=_unless(key))
    if isinstance(parsed, Exchange):
        return parsed if counts[-1] else _untrained(f"`{key}` ends with 0")
    pairs = zip(messages, counts, strict=True)
    return replace(parsed, messages=tuple(one if is_in else one._replace(loss=False) for one, is_in in pairs))


def _untrained(flag: str) -> NoReturn:
    raise RecordError(
        f"{flag}: nothing of the record counts in the loss", reason="untrained", hint="leave this record out"
    )


def _flag(value: Any, path: str, key: str) -> bool:
    """Return whether a flag is 1 or true; raises RecordError where it is not 0 or false either."""
    if not isinstance(value, (bool, int, float)):
        wrong(f"`{path}` is {json_type(value)}, expected 0 or 1", hint=_unless(key))
    if value not in (0, 1):
        unsupported(f"`{path}` is {value}, expected 0 or 1", hint=f"a token counts in the loss or not; {_unless(key)}")
    return bool(value)


def _refuse_mask(path: str) -> NoReturn:
    unsupported(
        f"`{path}` says what counts in the loss, or what does not: programs differ",
        hint="name it `loss_mask` if 1 means that it counts, `masked` if 1 means that it does not; " + _unless(path),
    )


def _unless(key: str) -> str:
    return f"if it means another thing: {ignoring(key)}"
