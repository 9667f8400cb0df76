"""Chat templates of real models get what transformers gives them, and no null of a record becomes a word to learn."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chunkplan import load_analysis
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, RecordError
from chunkplan.intake.template import ChatTemplate
from tests.support.command_line import Ran, Run
from tests.support.intake_checks import parse_as
from tests.support.places import ROOT
from tests.support.template_cases import with_arguments

TOKENIZER = ROOT / "sample_data" / "tokenizer"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
REFERENCE = AutoTokenizer.from_pretrained(TOKENIZER)
NAMES = (
    *("llama3", "llama3_training", "llama3_1", "qwen2_5", "qwen2_5_training", "qwen2_5_vl", "qwen3", "qwen3_training"),
    *("qwen3_5_think_training", "glm4moe_training", "gptoss", "gptoss_training", "gemma3", "gemma4", "deepseekv3"),
    *("idefics3", "lfm2_v2", "cohere2", "phi3_5", "smolvlm", "nemotron_3_nano_training"),
)


@cache
def _source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@cache
def _template(name: str) -> ChatTemplate:
    return ChatTemplate(_source(name), {**REFERENCE.special_tokens_map, "bos_token": "<s>"}, name)


def _transformers(name: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    text = REFERENCE.apply_chat_template(
        messages, tools=tools, chat_template=_source(name), tokenize=False, bos_token="<s>"
    )
    return str(text)


def _parse(record: dict[str, Any]) -> Conversation:
    parsed = parse_as("messages", record)
    assert isinstance(parsed, Conversation)
    return parsed


def _call(arguments: Any, name: str = "look_up", **others: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **others}


TEXTS = st.sampled_from(["", "a", " b\n", "None", "日本", "<think>hm</think>c", "<|im_end|>", '{"x": 1}'])
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
VALUES = st.sampled_from(["p", 1, 2.5, True, None, [None, 1], {"y": None}, "None", "ü"])
ARGUMENTS = st.one_of(
    st.dictionaries(st.sampled_from(["x", "z"]), VALUES, max_size=2),
    st.dictionaries(st.sampled_from(["x", "z"]), VALUES, max_size=2).map(json.dumps),
    st.none(),
)
CALLS = st.lists(
    st.builds(_call, ARGUMENTS, id=st.sampled_from(["call00001", None]), name=st.just("look_up")),
    min_size=1,
    max_size=2,
)
TOOLS = st.lists(
    st.builds(
        lambda description, default: {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"type": "string", "description": "d", "default": default}},
                },
            },
        },
        st.sampled_from(["d", "None", None]),
        VALUES,
    ),
    min_size=1,
    max_size=2,
)
SAID = st.builds(lambda content: {"content": content}, st.one_of(TEXTS, TEXTS, PARTS))
ANSWER = st.builds(lambda said, others: {**said, **others}, SAID, st.sampled_from([{}, {"tool_calls": None}]))
REASONED = st.builds(
    lambda said, key, text: {**said, key: text},
    SAID,
    st.sampled_from(["reasoning_content", "thinking", "reasoning"]),
    st.sampled_from(["hm", None]),
)
CALLED = st.builds(
    lambda calls, others: {"tool_calls": calls, **others},
    CALLS,
    st.one_of(SAID, st.sampled_from([{}, {"content": None}, {"content": None, "name": None}])),
)


def _with_role(role: str, *kinds: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(*kinds).map(lambda message: {"role": role, **message})


USER, TOOL = _with_role("user", SAID), _with_role("tool", SAID)
ASSISTANT = _with_role("assistant", ANSWER, REASONED)
TURN = st.one_of(
    st.tuples(USER, ASSISTANT),
    st.tuples(USER, _with_role("assistant", CALLED), TOOL, ASSISTANT),
    st.tuples(USER, _with_role("assistant", CALLED)),
)
CONVERSATIONS = st.builds(
    lambda system, turns: [*system, *itertools.chain(*turns)],
    st.lists(_with_role("system", SAID), max_size=1),
    st.lists(TURN, min_size=1, max_size=2),
)
ANY_ORDER = st.lists(st.one_of(USER, ASSISTANT, TOOL, _with_role("assistant", CALLED)), min_size=1, max_size=4)


def _renderings(name: str, record: dict[str, Any]) -> set[str]:
    """What transformers makes of a record, with lists of parts as they are or joined, for every role either way.

    Arguments of calls are parsed; where a template raises at that, they are JSON. Content that is missing beside calls
    is an empty text where a template raises without.
    """
    messages = record["messages"]
    with_parts = {message["role"] for message in messages if isinstance(message.get("content"), list)}
    found, others = set(), []
    for number in range(len(with_parts) + 1):
        for joined in itertools.combinations(sorted(with_parts), number):
            shown = [
                {**message, "content": "".join(part["text"] for part in message["content"])}
                if isinstance(message.get("content"), list) and (message["role"] in joined or not message["content"])
                else message
                for message in messages
            ]
            try:
                found.add(_transformers(name, with_arguments(shown, is_json=False), record["tools"]))
            except Exception as error:
                assert error
                others.append(shown)
    for shown in others if not found else ():
        try:
            found.add(_transformers(name, with_arguments(shown, is_json=True), record["tools"]))
        except Exception as error:
            assert error
    if not found and any(message.get("content") is None for message in messages):
        filled = [message if message.get("content") is not None else message | {"content": ""} for message in messages]
        return _renderings(name, record | {"messages": filled})
    return found


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(messages=st.one_of(CONVERSATIONS, CONVERSATIONS, ANY_ORDER), tools=st.one_of(st.none(), TOOLS))
def test_a_rendering_is_that_of_transformers_or_the_record_is_refused(
    name: str, messages: list[dict[str, Any]], tools: Any
) -> None:
    record = {"messages": messages, "tools": tools}
    try:
        conversation = _parse(record)
    except RecordError as error:
        assert error.reason in ("empty", "schema")
        return
    expected = _renderings(name, record)
    try:
        text, spans = _template(name).render(conversation)
    except RecordError as error:
        assert error.reason == "template"
        assert "raised on this conversation" not in error.message or not expected
        return
    assert text in expected
    if "None" not in json.dumps(record):
        assert not any("None" in text[start:end] for start, end in spans)


TOOL_USE = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": None, "tool_calls": [_call({"x": "p"})]},
    {"role": "tool", "content": "here", "name": "look_up"},
    {"role": "assistant", "content": "It is here.", "tool_calls": None},
]


@pytest.mark.parametrize("content", [{"content": None}, {}])
@pytest.mark.parametrize("name", ["llama3_1", "llama3_2", "qwen3_training", "glm4moe_training", "gptoss_training"])
def test_content_that_is_null_beside_calls_is_left_out_as_transformers_does(name: str, content: dict[str, Any]) -> None:
    call = {key: value for key, value in TOOL_USE[1].items() if key != "content"} | content
    messages = [TOOL_USE[0], call, *TOOL_USE[2:]]
    text, spans = _template(name).render(_parse({"messages": messages, "tools": None}))
    assert text == _transformers(name, messages)
    assert "None" not in text
    assert "look_up" in "".join(text[start:end] for start, end in spans)


def _analyze(command: Run, folder: Path, source: str, *lines: list[dict[str, Any]]) -> Ran:
    (folder / "t.jinja").write_text(source)
    (folder / "tools.jsonl").write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    return command("analyze", "tools.jsonl", "--tokenizer", TOKENIZER, "--chat-template", "t.jinja", width=120)


def test_no_token_that_counts_spells_none_where_content_is_null(command: Run, tmp_path: Path) -> None:
    source = _source("llama3").replace("bos_token + content", "content")
    source = source.replace("| trim", "| trim + (message.tool_calls | tojson if message.tool_calls else '')")
    ran = _analyze(command, tmp_path, source, TOOL_USE)
    assert ran.code == 0, ran.err
    input_ids, target = load_analysis(tmp_path / "chunkplan-out" / "analysis").tokens()(0)
    decode = load_tokenizer(TOKENIZER).library.decode
    calls = json.dumps(TOOL_USE[1]["tool_calls"])
    assert decode(input_ids[target].tolist()) == f"{calls}<|eot_id|>It is here.<|eot_id|>"
    assert "None" not in decode(input_ids.tolist())


def test_a_call_that_the_template_leaves_out_is_named(command: Run, tmp_path: Path) -> None:
    """What would be left of the message is an empty answer."""
    ran = _analyze(command, tmp_path, _source("llama3_training").replace("bos_token", "''"), TOOL_USE)
    assert ran.code == 3
    assert "tools.jsonl:1: the chat template leaves out the call of `look_up` that `messages[1]` makes" in ran.err


def test_a_call_that_is_left_out_is_named_though_the_tool_is_named_elsewhere() -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {}}}]
    messages = [TOOL_USE[0], {**TOOL_USE[1], "content": "Let me see."}, *TOOL_USE[2:]]
    assert _transformers("lfm2", messages, tools).count("look_up") == 1
    with pytest.raises(RecordError, match="leaves out the call of `look_up`"):
        _template("lfm2").render(_parse({"messages": messages, "tools": tools}))


@pytest.mark.parametrize(
    ("name", "arguments"), [("qwen3_5_think_training", {"x": None}), ("gemma4", {"x": ["p", {"y": None}]})]
)
def test_a_null_that_a_template_makes_a_word_is_named(name: str, arguments: dict[str, Any]) -> None:
    messages = [TOOL_USE[0], {**TOOL_USE[1], "tool_calls": [_call(arguments)]}, *TOOL_USE[2:]]
    assert "None" in _transformers(name, messages)
    path = r"`messages\[1\]\.tool_calls\[0\]\.function\.arguments\.x"
    with pytest.raises(RecordError, match=path) as caught:
        _template(name).render(_parse({"messages": messages, "tools": None}))
    assert caught.value.reason == "template"


def test_the_word_none_of_the_data_counts_though_there_are_nulls_beside_it() -> None:
    arguments = {"x": "None", "z": None}
    messages = [TOOL_USE[0], {**TOOL_USE[1], "tool_calls": [_call(arguments)]}, *TOOL_USE[2:]]
    text, spans = _template("qwen3_training").render(_parse({"messages": messages, "tools": None}))
    assert text == _transformers("qwen3_training", messages)
    assert '{"x": "None", "z": null}' in "".join(text[start:end] for start, end in spans)


def test_a_null_in_what_tools_are_is_what_transformers_makes_of_it() -> None:
    """It is read, not learned."""
    tools = [{"type": "function", "function": {"name": "look_up", "description": None, "parameters": {}}}]
    text, _ = _template("nemotron_3_nano_training").render(_parse({"messages": TOOL_USE, "tools": tools}))
    assert text == _transformers("nemotron_3_nano_training", TOOL_USE, tools)
    assert "<description>None</description>" in text


SPACED = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
JOINED = " a b"


@pytest.mark.parametrize(
    ("name", "role", "is_read"),
    [
        ("idefics3", "assistant", True),  # would render nothing of a string
        ("gemma3", "user", True),
        ("gemma4_v2", "developer", False),  # reads them of a developer that speaks later
        ("gemma3", "system", False),  # would render the first part alone
        ("qwen2_5_vl", "assistant", True),
        ("glm4moe", "user", True),
        ("glm4moe", "tool", False),  # would print parts as Python does
        ("qwen3", "assistant", False),  # would leave them out
        ("llama3_1", "user", False),
        ("qwen2_5", "assistant", False),  # would raise
    ],
)
def test_parts_are_given_to_templates_that_read_them_and_joined_for_others(name: str, role: str, is_read: bool) -> None:
    def messages(content: Any) -> list[dict[str, Any]]:
        said = {"role": role, "content": content}
        match role:
            case "user":
                return [said]
            case "system" | "developer":
                return [said, TOOL_USE[0]]
            case "tool":
                return [*TOOL_USE[:2], said]
            case _:
                return [TOOL_USE[0], said]

    text, _ = _template(name).render(_parse({"messages": messages(SPACED), "tools": None}))
    assert text == _transformers(name, messages(SPACED if is_read else JOINED))


def test_tokens_are_those_of_transformers() -> None:
    messages = [{"role": "system", "content": SPACED}, *TOOL_USE]
    tools = [_call({})]
    text, spans = _template("qwen2_5").render(_parse({"messages": messages, "tools": tools}))
    [(input_ids, _, _)] = load_tokenizer(TOKENIZER).library.rendered([text], [spans])
    joined = [{"role": "system", "content": JOINED}, *TOOL_USE]
    found = REFERENCE.apply_chat_template(joined, tools=tools, chat_template=_source("qwen2_5"))
    assert input_ids.tolist() == found["input_ids"]
