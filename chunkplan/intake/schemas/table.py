"""The schemas: the roles that a record is made of, the keys that usually have them, and how it is parsed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from functools import cached_property
from itertools import product
from typing import NoReturn

from chunkplan.intake.records import (
    Conversation,
    Exchange,
    JsonObject,
    LengthRecord,
    Message,
    Pair,
    PromptRecord,
    Record,
    RecordError,
    TextRecord,
    as_tools,
)
from chunkplan.intake.schemas.fields import (
    column_flags,
    empty,
    field,
    is_blank,
    json_type,
    messages_in,
    objects,
    optional_text,
    typed,
    unsupported,
    without_ignored,
    wrong,
)
from chunkplan.intake.schemas.keys import keys_of_content
from chunkplan.intake.schemas.messages import make_conversation, parse_messages, with_usual_names
from chunkplan.intake.schemas.pairs import split_pair
from chunkplan.intake.schemas.rollouts import ROLLOUT_ROLES
from chunkplan.intake.schemas.tokens import TOKEN_MARKS, marks_of, parse_response, parse_tokens

#: Optional roles of schemas that train an answer, and of those that are conversations as well.
_SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction", "systemInstruction")
_BESIDE = {"system": _SYSTEMS, "history": ("history",), "label": ("label", "kto_tag")}
_BESIDE_CHAT = {"tools": ("tools",), "functions": ("functions",), **_BESIDE}
_BESIDE_TOKENS = {**TOKEN_MARKS, **ROLLOUT_ROLES}

#: The most tokens of a record that is a length.
_LONGEST = 2**31 - 1


@dataclass(frozen=True)
class RecordLayout:
    """The layout of a source's records: a schema, and for each of its roles the key that has it.

    `evidence` explains the choice in a line, `ignored` are keys treated as absent, `marks` the keys that mark tokens in
    all records of the source, None if not known. `inside` has the user's columns of messages. With `labels` every
    answer is kept with its label. `numbers` are the columns that the rollouts of the source have.
    """

    schema: str
    columns: dict[str, str]
    evidence: str
    ignored: tuple[str, ...] = ()
    marks: tuple[str, ...] | None = None
    inside: dict[str, str] = default(default_factory=dict)
    labels: bool = False
    numbers: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[str | None, tuple[str, ...]]:
        """The kind of samples that records become, None for ordinary ones, and the columns that only these have."""
        if self.schema == "preference":
            return "preference", ("group", "label")
        return ("labelled", ("label",)) if self.labels else ("rollouts" if self.numbers else None, tuple(self.numbers))

    def as_read(self, record: JsonObject) -> JsonObject:
        """`record` without what is ignored, and with the usual names in messages; raises as `with_usual_names`."""
        record = without_ignored(record, self.ignored)
        return with_usual_names(record, self.inside) if self.inside else record

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys that have a role."""
        return frozenset(self.columns.values())


@dataclass(frozen=True)
class Schema:
    """The roles that a record is made of, and how it is parsed.

    `required` and `optional` are roles, each with the keys that usually have it, its own name first; `parse` converts a
    record or raises RecordError. `reads` gives the keys that are read beside the required ones; without it, one of each
    role is. Where `is_paired`, the usual keys belong together: a `problem` has a `solution`, and no `answer`.
    """

    required: Mapping[str, tuple[str, ...]]
    parse: Callable[[JsonObject, dict[str, str]], Record]
    optional: Mapping[str, tuple[str, ...]] = default(default_factory=dict)
    is_paired: bool = False
    reads: Callable[[JsonObject, dict[str, str]], Collection[str]] | None = None

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """The required and the optional roles, with their usual keys."""
        return {**self.required, **self.optional}

    def keys_of(self, record: JsonObject, columns: dict[str, str]) -> dict[str, str]:
        """The keys that `record` itself has for the roles: those of `columns`, or others that are usual as well."""
        keys = {
            role: key
            if record.get(key) is not None
            else next((usual for usual in self._usual(role, key) if record.get(usual) is not None), key)
            for role, key in columns.items()
        }
        if self.is_paired:
            own = {role: columns[role] for role in self.required}
            pairs = [] if has_all(record, own) else self.choices({})
            others = pairs if own in pairs else []  # the user has not named another
            keys |= next((pair for pair in others if has_all(record, pair)), own)
        return keys

    def choices(self, named: Mapping[str, str]) -> list[dict[str, str]]:
        """The keys that the required roles may have together: role -> key, where the user has `named` some."""
        usual = [(named[role],) if role in named else keys for role, keys in self.required.items()]
        is_paired = self.is_paired and named.keys().isdisjoint(self.required)
        chosen = list(zip(*usual, strict=True)) if is_paired else list(product(*usual))
        return [dict(zip(self.required, keys, strict=True)) for keys in dict.fromkeys(chosen)]

    def all_keys(self, columns: dict[str, str]) -> set[str]:
        """The keys that records of this layout may have for their roles."""
        others = {key for keys in self.optional.values() for key in keys} if self.reads else set[str]()
        return others | {other for role, key in columns.items() for other in (key, *self._usual(role, key))}

    def _usual(self, role: str, key: str) -> tuple[str, ...]:
        """The keys that a role usually has; none where the user has named another."""
        return self.roles[role] if key in self.roles[role] else ()


def has_all(record: JsonObject, keys: Mapping[str, str]) -> bool:
    """Return whether `record` has a value for every role of `keys`, role -> key."""
    return all(record.get(key) is not None for key in keys.values())


def refuse_label(record: JsonObject, columns: dict[str, str]) -> None:
    """Raise RecordError where the answer of `record` is labelled as a bad one."""
    named = columns["label"]
    for key in _BESIDE["label"] if named in _BESIDE["label"] else (named,):
        label = record.get(key)
        if label is False or (key == "kto_tag" and label == 0):
            raise RecordError(
                f"`{key}` is false: a bad answer, as data for KTO have them, and every answer is trained",
                reason="undesirable",
                hint="--kto-negatives keep keeps all labels for a loss such as kto, --kto-negatives drop leaves such "
                f"records out, counted; remove `{key}` if it means another thing",
            )
        if label is not None and key not in _BESIDE["label"]:  # a key that the user has named
            typed(label, bool, key)


def label_of(record: JsonObject, columns: dict[str, str]) -> bool:
    """The label of the answer of `record`; raises RecordError where it has none."""
    named = columns["label"]
    keys = _BESIDE["label"] if named in _BESIDE["label"] else (named,)
    key = next((key for key in keys if record.get(key) is not None), named)
    value = record.get(key)
    if type(value) is not bool and (key != "kto_tag" or value not in (0, 1)):
        found = json_type(value) if key in record else "missing"
        wrong(
            f"`{key}` is {found}, expected true for a good answer or false for a bad one",
            "--kto-negatives keep is for data that label every answer; give one to each, or leave it out",
        )
    return bool(value)


def is_label(value: object, key: str) -> bool:
    """Return whether `value` under `key` labels an answer; nobody uses `kto_tag` for anything else."""
    return isinstance(value, bool) or key not in _BESIDE["label"] or (key == "kto_tag" and value in (0, 1))


def system_key(record: JsonObject, columns: dict[str, str]) -> str:
    """The key under which `record` has a system text: that of `columns`, or another usual one if that says nothing."""
    named = columns["system"]
    if named in _SYSTEMS:
        for key in (named, *_SYSTEMS):
            value = record.get(key)
            if value is not None and not (type(value) is str and is_blank(value)):
                return key
    return named


def _parse_text(record: JsonObject, columns: dict[str, str]) -> TextRecord:
    """Read the text; raises RecordError where it is not a string, or blank."""
    key = columns["text"]
    if key not in record:
        key = SCHEMAS["text"].keys_of(record, columns)["text"]
    text = field(record, key, str)
    return TextRecord(text) if not is_blank(text) else empty(f"`{key}` is blank")


def _parse_length(record: JsonObject, columns: dict[str, str]) -> LengthRecord:
    """Read the length; raises RecordError where it is not a whole number of tokens, or 0."""
    key = SCHEMAS["length"].keys_of(record, columns)["length"]
    length = record.get(key)
    if type(length) is not int:
        found = json_type(length) if key in record else "missing"
        wrong(f"`{key}` is {length if type(length) is float else found}, expected a whole number of tokens")
    if not length:
        empty(f"`{key}` is 0")
    if not 0 < length <= _LONGEST:
        wrong(f"`{key}` is {length}, expected 1 to {_LONGEST} tokens")
    return LengthRecord(length)


def _conversation_in(role: str) -> Callable[[JsonObject, dict[str, str]], Conversation]:
    """Return the parser of conversations under the key of `role`; a `system` beside them comes first."""

    def parse(record: JsonObject, columns: dict[str, str]) -> Conversation:
        _refuse_history(record, columns)
        key = columns[role]
        if record.get(key) is None:
            key = SCHEMAS[role].keys_of(record, columns)[role]
        messages = parse_messages(messages_in(record, key), key, is_sharegpt=role == "conversations")
        return _with_system(make_conversation(messages, _tools(record, columns), key), record, columns, key)

    return parse


def _parse_prompt(record: JsonObject, columns: dict[str, str]) -> PromptRecord | Conversation:
    """The prompt and its completion, or the messages of both; a `system` beside messages comes first."""
    _refuse_history(record, columns)
    prompt_key, completion_key = columns["prompt"], columns["completion"]
    given, answer = record.get(prompt_key), record.get(completion_key)
    if type(given) is list and type(answer) is list:
        asked = [message._replace(loss=False) for message in parse_messages(given, prompt_key)]
        messages = [*asked, *parse_messages(answer, completion_key)]
        conversation = make_conversation(messages, _tools(record, columns), completion_key)
        return _with_system(conversation, record, columns, prompt_key)
    if type(given) is list or type(answer) is list:
        found = f"`{prompt_key}` is {json_type(given)} and `{completion_key}` is {json_type(answer)}"
        wrong(f"{found}, expected two strings or two lists of messages")
    prompt, completion = field(record, prompt_key, str), field(record, completion_key, str)
    if is_blank(prompt) and is_blank(completion):
        empty(f"`{prompt_key}` and `{completion_key}` are blank")
    system = system_key(record, columns)
    if optional_text(record, system) is not None:
        flags = column_flags({"question": prompt_key, "answer": completion_key})
        reads_all = {*columns.values(), system}.issuperset(keys_of_content([record]))
        hint = f"{flags} reads all three as a conversation" if reads_all else "write the record as `messages`"
        _refuse_beside_prompt(system, hint)
    _refuse_tools(record, columns)
    return PromptRecord(prompt, completion)


def _refuse_tools(record: JsonObject, columns: dict[str, str]) -> None:
    """Raise RecordError where `record` has tools beside a prompt that is a text."""
    if _tools(record, columns):
        key = next(columns[role] for role in ("tools", "functions") if record.get(columns[role]))
        _refuse_beside_prompt(key, "write the record as `messages`")


def _parse_preference(record: JsonObject, columns: dict[str, str]) -> Pair:
    """The pair of `chosen` and `rejected`, each behind the prompt, which may be what both begin with.

    Texts and lists of messages are read as in a prompt with its completion, and texts behind a text under another key
    than `prompt` as a question with its answer.
    """
    keys = SCHEMAS["preference"].keys_of(record, columns)
    names = keys["chosen"], keys["rejected"]
    prompt, answers = split_pair(record, keys["prompt"], names)
    addition = optional_text(record, keys["input"])
    is_asked = keys["prompt"] != "prompt" and record.get(keys["prompt"]) is not None
    if is_asked and isinstance(prompt, str) and isinstance(answers[0], str):
        _refuse_tools(record, keys)
        asked = "\n".join(filter(None, (prompt, addition)))
        system = optional_text(record, system_key(record, keys))
        _refuse_history(record, keys)
        return Pair(*(Exchange(system, asked, answer) for answer in answers))
    if addition is not None:
        _refuse_beside_prompt(keys["input"], "put it into the prompt")
    sides = [
        _parse_prompt({**record, keys["prompt"]: prompt, name: answer}, {**keys, "completion": name})
        for name, answer in zip(names, answers, strict=True)
    ]
    return Pair(*sides)


def _refuse_beside_prompt(key: str, hint: str) -> NoReturn:
    unsupported(
        f"`{key}` beside a prompt that is a string: nothing says where in the text it belongs",
        hint=f"{hint}; remove `{key}` if it means another thing",
    )


def _pair_in(name: str) -> Callable[[JsonObject, dict[str, str]], Exchange | Conversation]:
    """Return the parser of a question, perhaps with an `input`, and its answer, by the required roles of a schema.

    A system text and the `history` beside them come first; all answers count in the loss.
    """

    def parse(record: JsonObject, columns: dict[str, str]) -> Exchange | Conversation:
        columns = SCHEMAS[name].keys_of(record, columns)
        question, answer = (columns[role] for role in SCHEMAS[name].required)
        prompt, completion = field(record, question, str), field(record, answer, str)
        addition = optional_text(record, columns["input"]) if "input" in columns else None
        if addition is not None:
            prompt = f"{prompt}\n{addition}" if prompt else addition
        if is_blank(prompt) and is_blank(completion):
            empty(f"`{question}` and `{answer}` are blank")
        exchange = Exchange(optional_text(record, system_key(record, columns)), prompt, completion)
        return _with_history(exchange, record, columns["history"])

    return parse


def _with_history(exchange: Exchange, record: JsonObject, key: str) -> Exchange | Conversation:
    if not record.get(key):
        return exchange
    earlier: list[Message] = []
    for index, pair in enumerate(typed(record[key], list, key)):
        path = f"{key}[{index}]"
        if len(typed(pair, list, path)) != 2:
            wrong(f"`{path}` has {len(pair)} entries, expected a question and its answer")
        for place, role in enumerate(("user", "assistant")):
            earlier.append(Message(role, typed(pair[place], str, f"{path}[{place}]")))
    *system, question, last = exchange.conversation.messages
    return Conversation((*system, *earlier, question, last))


def _refuse_history(record: JsonObject, columns: dict[str, str]) -> None:
    """Raise RecordError where `record` has earlier exchanges beside what has a place of its own for them."""
    key = columns["history"]
    if record.get(key):
        unsupported(
            f"`{key}` has earlier exchanges, which are not planned in this layout",
            hint=f"write the whole conversation as `messages`; remove `{key}` if it means another thing",
        )


def _with_system(conversation: Conversation, record: JsonObject, columns: dict[str, str], path: str) -> Conversation:
    """Put the system text beside a conversation, which may be Gemini's message with `parts`, in front of it."""
    key = system_key(record, columns)
    value = record.get(key)
    if isinstance(value, dict) and "parts" in value:
        [said] = parse_messages([{**value, "role": "system"}], key)
        system = None if is_blank(said.content) else said.content
    else:
        system = optional_text(record, key)
    if system is None:
        return conversation
    messages = conversation.messages
    first = messages[0].content if messages[0].role == "system" else None
    if first is not None and not is_blank(first) and first.strip() != system.strip():
        wrong(
            f"`{key}` and the system message that `{path}` begins with say different things",
            hint="write both as one, or leave one of the two out",
        )
    if first is not None and not is_blank(first):
        return conversation
    rest = messages[1:] if messages[0].role == "system" else messages
    return Conversation((Message("system", system), *rest), conversation.tools)


def _tools(record: JsonObject, columns: dict[str, str]) -> list[JsonObject] | None:
    """Return the tools, or the `functions` that OpenAI had before; each may be written as JSON. None for none."""
    key, functions_key = columns["tools"], columns["functions"]
    found, functions = objects(record.get(key), key), objects(record.get(functions_key), functions_key)
    if any("functionDeclarations" in tool for tool in found):
        unsupported(f"`{key}` has `functionDeclarations` of Gemini, which no chat template reads")
    if found and functions:
        wrong(f"`{key}` and `{functions_key}` are both there", hint="leave one of the two out")
    return found or as_tools(functions) or None


#: By name, in the order of detection: the more a schema says about the record, the earlier it is asked. Those of one
#: group say as much: where a record fits two of them, what it says has to be the same. A length is asked only where
#: there is nothing to train on.
_GROUPS: tuple[dict[str, Schema], ...] = (
    {
        "preference": Schema(
            {"chosen": ("chosen",), "rejected": ("rejected",)},
            _parse_preference,
            {
                "prompt": ("prompt", "question", "instruction", "messages", "conversations"),
                "input": ("input", "context"),
                **{role: keys for role, keys in _BESIDE_CHAT.items() if role != "label"},
            },
        )
    },
    {
        "messages": Schema({"messages": ("messages", "contents")}, _conversation_in("messages"), _BESIDE_CHAT),
        "conversations": Schema(
            {"conversations": ("conversations", "conversation")}, _conversation_in("conversations"), _BESIDE_CHAT
        ),
    },
    {
        "prompt+completion": Schema(
            {"prompt": ("prompt",), "completion": ("completion",)}, _parse_prompt, _BESIDE_CHAT
        ),
        "instruction": Schema(
            {"instruction": ("instruction",), "output": ("output", "response")},
            _pair_in("instruction"),
            {"input": ("input", "context"), **_BESIDE},
        ),
        "question+answer": Schema(
            {
                "question": ("question", "problem", "query", "prompt", "input", "human"),
                "answer": ("answer", "solution", "response", "response", "output", "assistant"),
            },
            _pair_in("question+answer"),
            _BESIDE,
            is_paired=True,
        ),
    },
    {
        "prompt_ids+response_ids": Schema(
            {
                "prompt_ids": ("prompt_ids", "prompts", "prompt_token_ids"),
                "response_ids": ("response_ids", "responses", "response_token_ids", "completion_ids"),
            },
            parse_response,
            _BESIDE_TOKENS,
            reads=marks_of,
        )
    },
    {"input_ids": Schema({"input_ids": ("input_ids",)}, parse_tokens, _BESIDE_TOKENS, reads=marks_of)},
    {"text": Schema({"text": ("text", "content")}, _parse_text)},
    {"length": Schema({"length": ("length", "num_tokens", "n_tokens", "token_count")}, _parse_length)},
)
SCHEMAS = {name: schema for group in _GROUPS for name, schema in group.items()}
GROUPS = tuple(map(tuple, _GROUPS))
