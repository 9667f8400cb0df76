"""Calls of tools, however data have them, are what the model's own template writes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from chunkplan import load_analysis
from chunkplan.intake.records import Conversation, RecordError
from chunkplan.intake.schemas.messages import parse_messages
from chunkplan.intake.template import ChatTemplate
from tests.support.command_line import Run
from tests.support.intake_checks import parse_as
from tests.support.places import ROOT
from tests.support.template_cases import ENDS, SPECIAL, TEMPLATES, source_of, template, with_arguments

TOKENIZER = ROOT / "sample_data" / "tokenizer"

TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer", "description": "x"}}},
    },
}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


def _messages(*calls: dict[str, Any], said: str = "") -> list[dict[str, Any]]:
    answers = [{"role": "tool", "name": "move", "tool_call_id": "call00001", "content": "done"} for _ in calls]
    return [
        {"role": "user", "content": "Go to (0, 1)."},
        {"role": "assistant", "content": said, "tool_calls": list(calls)},
        *answers,
        {"role": "assistant", "content": "I moved."},
    ]


def _rendered(source: str, messages: list[dict[str, Any]]) -> str:
    """What transformers makes of messages as they are."""
    [text], _ = render_jinja_template([messages], tools=[TOOL], chat_template=source, **SPECIAL)
    return str(text)


def _has_calls(source: str) -> str | None:
    """The rendering of parsed calls, or of JSON where the template raises at these; None where it has no calls."""
    for is_json in (False, True):
        try:
            text = _rendered(source, with_arguments(_messages(_call("move", {"x": 0, "y": "ü"})), is_json=is_json))
        except Exception as error:
            assert error
            continue
        if "move" in text.partition("(0, 1)")[2].partition("I moved.")[0]:
            return text
    return None


NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
KNOW_CALLS = {name: text for name in NAMES if (text := _has_calls(source_of(name))) is not None}
COMMON = ("qwen2_5", "qwen3", "gptoss", "gemma4", "llama3_1", "deepseekv3", "glm4moe", "nemotron_3_nano", "lfm2_v2")


def test_most_templates_have_calls() -> None:
    assert set(COMMON) <= KNOW_CALLS.keys()
    assert len(KNOW_CALLS) > 40


@pytest.mark.parametrize("arguments", ['{"x": 0, "y": "\\u00fc"}', {"x": 0, "y": "ü"}, '"{\\"x\\":0,\\"y\\":\\"ü\\"}"'])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in COMMON else pytest.mark.soak) for name in KNOW_CALLS]
)
def test_arguments_that_are_json_are_rendered_as_the_values_that_they_say(name: str, arguments: Any) -> None:
    """Where a template asks for JSON it gets the JSON of the data, to the byte."""
    record = {"messages": _messages(_call("move", arguments)), "tools": [TOOL]}
    conversation = parse_as("messages", record)
    assert isinstance(conversation, Conversation)
    expected = KNOW_CALLS[name]
    if name == "deepseekv3" and isinstance(arguments, str):
        expected = _rendered(source_of(name), record["messages"])
        assert arguments in expected
    text, spans = template(name).render(conversation)
    assert text == expected
    assert "move" in "".join(text[start:stop] for start, stop in spans)


ASK_FOR_JSON = {
    "added": "{{ '<call>' + c.function.name + c.function.arguments + '</call>' }}",
    "printed": "<call>{{ c.function.name }}{{ c.function.arguments }}</call>",
    "asked": "<call>{{ c.function.name }}{% set a = c.function.arguments %}{{ a if a is string }}</call>",
    "no content": "{% if m.content %}{{ m.content }}{% else %}{{ c.function.name ~ c.function.arguments }}{% endif %}",
}
FOR_OBJECTS = {
    "as JSON": "<call>{{ c.function | tojson }}</call>",
    "walked over": "<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>"
    "{% endfor %}</call>",
    "either": "{{ c.function.name }}{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
    "whole": "<call>{{ c }}</call>",
    "with tools only": "{% if tools %}<call>{{ c.function | tojson }}</call>{% endif %}",
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for c in m.tool_calls %}%s{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("arguments", ['{"x":0,  "y": [1, null]}', "{}", '{"x": "{}"}'])
@pytest.mark.parametrize("form", [*ASK_FOR_JSON, *FOR_OBJECTS])
def test_a_template_is_asked_by_rendering_which_form_it_takes(form: str, arguments: str) -> None:
    source = CHATML.replace("%s", {**ASK_FOR_JSON, **FOR_OBJECTS}[form])
    messages = _messages(_call("move", arguments), _call("move", arguments))
    conversation = parse_as("messages", {"messages": messages, "tools": [TOOL]})
    assert isinstance(conversation, Conversation)
    expected = messages if form in ASK_FOR_JSON else with_arguments(messages, is_json=False)
    try:
        text, _ = ChatTemplate(source, SPECIAL, "t", ends=ENDS).render(conversation)
    except RecordError as error:
        assert "None" in error.message and form in ("whole", "walked over")  # a null that it would print
        return
    assert text == _rendered(source, expected)


@pytest.mark.parametrize("arguments", ["print(1)", '{"x": 0', ""])
def test_arguments_that_are_no_json_stay_text_and_blank_ones_are_none(arguments: str) -> None:
    conversation = parse_as("messages", {"messages": _messages(_call("move", arguments)), "tools": [TOOL]})
    assert isinstance(conversation, Conversation)
    text, _ = template("qwen2_5").render(conversation)
    assert text == _rendered(source_of("qwen2_5"), _messages(_call("move", arguments or {})))


MOVE, SAY = {"name": "move", "arguments": {"x": 0}}, {"name": "say", "arguments": {"text": "ü"}}


def _turns(*turns: tuple[str, Any], layout: str = "conversations") -> Conversation:
    """A conversation of ShareGPT's layout, or of swift's, which has the names of roles in OpenAI's."""
    who, said = ("from", "value") if layout == "conversations" else ("role", "content")
    listed = [{who: role, said: text} for role, text in turns]
    parsed = parse_as(layout, {layout: listed, "tools": json.dumps([TOOL])})
    assert isinstance(parsed, Conversation)
    return parsed


def _with_calls(calls: list[dict[str, Any]], said: str = "", answers: int = 1) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Go."},
        {
            "role": "assistant",
            "content": said,
            "tool_calls": [{"type": "function", "function": call} for call in calls],
        },
        *[{"role": "tool", "content": "done"}] * answers,
        {"role": "assistant", "content": "I moved."},
    ]


TURNS: dict[str, tuple[list[tuple[str, Any]], list[dict[str, Any]]]] = {
    "one": ([("function_call", json.dumps(MOVE))], _with_calls([MOVE])),
    "a list": ([("function_call", json.dumps([MOVE, SAY]))], _with_calls([MOVE, SAY])),
    "values": ([("function_call", [MOVE, SAY])], _with_calls([MOVE, SAY])),
    "a value": ([("function_call", MOVE)], _with_calls([MOVE])),
    "turn by turn": ([("tool_call", json.dumps(MOVE)), ("tool_call", json.dumps(SAY))], _with_calls([MOVE, SAY])),
    "arguments as JSON": (
        [("tool_call", json.dumps({"name": "move", "arguments": json.dumps({"x": 0})}))],
        _with_calls([MOVE]),
    ),
    "parameters": ([("tool_call", json.dumps({"name": "move", "parameters": {"x": 0}}))], _with_calls([MOVE])),
    "OpenAI's": ([("Function_Call", json.dumps({"type": "function", "function": MOVE}))], _with_calls([MOVE])),
    "behind a thought": (
        [("function_call", f"<think>\nI go.\n</think>\n\n{json.dumps(MOVE)}")],
        _with_calls([MOVE], "<think>\nI go.\n</think>"),
    ),
    "behind a text": ([("gpt", "I go."), ("function_call", json.dumps(MOVE))], _with_calls([MOVE], "I go.")),
}


@pytest.mark.parametrize("layout", ["conversations", "messages"])
@pytest.mark.parametrize("case", TURNS)
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "gptoss", "gemma4", "llama3_1", "deepseekv3", "glm4moe"])
def test_turns_that_call_tools_are_calls_of_the_template(name: str, case: str, layout: str) -> None:
    turns, messages = TURNS[case]
    conversation = _turns(("user", "Go."), *turns, ("observation", "done"), ("assistant", "I moved."), layout=layout)
    source = source_of(name)
    try:
        expected = _rendered(source, with_arguments(messages, is_json=name == "deepseekv3"))
    except Exception:  # Llama takes one call at a time
        expected = "raised on"
    if expected == "raised on" or (name == "gptoss" and len(messages[1]["tool_calls"]) > 1):  # and it puts out one
        with pytest.raises(RecordError, match=r"the chat template (raised on|leaves out the call)"):
            template(name).render(conversation)
        return
    text, spans = template(name).render(conversation)
    assert text == expected
    counted = "".join(text[start:stop] for start, stop in spans)
    assert all(call["function"]["name"] in counted for call in messages[1]["tool_calls"])


def test_calls_of_turns_with_keys_of_their_own_go_on_but_for_thoughts() -> None:
    def calls(*more: dict[str, Any]) -> list[int]:
        turns = [
            {"role": "tool_call", "content": json.dumps(MOVE), "id": str(at), **each} for at, each in enumerate(more)
        ]
        parsed = parse_as("messages", {"messages": [{"role": "user", "content": "Go."}, *turns]})
        assert isinstance(parsed, Conversation)
        text, _ = template("qwen3").render(parsed)
        return [one.count("<tool_call>") for one in text.split("<|im_start|>assistant\n")[1:]]

    assert calls({}, {}, {}) == [3]
    assert calls({"reasoning_content": "hm"}, {}, {"reasoning_content": "so"}) == [2, 1]


def test_calls_that_do_not_count_stay_a_message_of_their_own() -> None:
    turns = [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "I go.", "loss": False}]
    turns += [{"from": "function_call", "value": json.dumps(MOVE)}, {"from": "observation", "value": "done"}]
    conversation = parse_as("conversations", {"conversations": [*turns, {"from": "gpt", "value": "I moved."}]})
    assert isinstance(conversation, Conversation)
    text, spans = template("qwen2_5").render(conversation)
    counted = [text[start:stop] for start, stop in spans]
    assert counted == [f"<tool_call>\n{json.dumps(MOVE)}\n</tool_call><|im_end|>", "I moved.<|im_end|>"]
    assert "I go.<|im_end|>" in text


def test_a_template_without_calls_keeps_them_as_text() -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    said = json.dumps(MOVE)
    conversation = _turns(("human", "Go."), ("function_call", said), ("observation", "done"), ("gpt", "I moved."))
    text, spans = ChatTemplate(source, SPECIAL, "t", ends=ENDS).render(conversation)
    assert [text[start:stop] for start, stop in spans] == [f"{said}<|im_end|>", "I moved.<|im_end|>"]


@pytest.mark.parametrize(
    "said",
    ["I call it.", "move(x=0)", '{"name": "move"', "{}", "[]", "[1]", "null", '{"name": 1}', "<think>{}</think>"],
)
@pytest.mark.parametrize("role", ["function_call", "tool_call"])
def test_a_turn_that_calls_tools_and_is_no_call_is_refused(role: str, said: str) -> None:
    with pytest.raises(RecordError, match=r"`conversations\[1\]`") as caught:
        _turns(("human", "Go."), (role, said), ("gpt", "I moved."))
    assert caught.value.reason == "schema"


@pytest.mark.parametrize("tools", ["null", "[]", "", " ", None, []])
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_no_tools_are_no_tools_however_they_are_written(key: str, tools: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    parsed = parse_as("messages", {"messages": messages, key: tools})
    assert isinstance(parsed, Conversation)
    assert parsed.tools is None


@pytest.mark.parametrize("workers", [1, 2])
def test_calls_are_the_same_from_a_command(command: Run, tmp_path: Path, workers: int) -> None:
    (tmp_path / "t.jinja").write_text(source_of("qwen2_5"), encoding="utf-8")
    as_json, as_values = (
        {"messages": with_arguments(_messages(_call("move", {"x": 0})), is_json=is_json), "tools": "null"}
        for is_json in (True, False)
    )
    (tmp_path / "a.jsonl").write_text(json.dumps(as_json) + "\n" + json.dumps(as_values) + "\n")
    asked = ("analyze", "a.jsonl", "--tokenizer", TOKENIZER, "--chat-template", "t.jinja", "--workers", workers)
    ran = command(*asked)
    assert ran.code == 0, ran.err
    tokens = load_analysis(tmp_path / "chunkplan-out" / "analysis").tokens()
    (one, target), (other, same) = tokens(0), tokens(1)
    assert one.tolist() == other.tolist()
    assert target.tolist() == same.tolist()


_CALL = {"type": "function", "function": {"name": "move", "arguments": {"x": 0}}}


@pytest.mark.parametrize("calls", [json.dumps([_CALL]), _CALL])
def test_calls_that_are_no_list_are_not_lost(calls: Any) -> None:
    listed, other = (
        parse_messages([{"role": "assistant", "content": "I call it.", "tool_calls": each}], "messages")
        for each in ([_CALL], calls)
    )
    assert other == listed


@pytest.mark.parametrize("calls", ["null", "[]", "", None, []])
def test_no_calls_are_none_however_they_are_written(calls: Any) -> None:
    [message] = parse_messages([{"role": "assistant", "content": "Hello.", "tool_calls": calls}], "messages")
    assert "tool_calls" not in message.fields


@pytest.mark.parametrize("name", COMMON)
def test_null_beside_calls_is_rendered_as_an_empty_text_where_the_template_needs_one(name: str) -> None:
    """As transformers renders both, where it renders null at all."""
    texts = []
    for content in (None, ""):
        messages = [{**one, "content": content} if "tool_calls" in one else one for one in _messages(_call("move", {}))]
        conversation = parse_as("messages", {"messages": messages, "tools": [TOOL]})
        assert isinstance(conversation, Conversation)
        texts.append(template(name).render(conversation)[0])
    assert texts[0] == texts[1]
