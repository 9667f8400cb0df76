"""Layouts that real data come in: other names for the same, bare lists, JSON in strings; and none is guessed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import analyze
from chunkplan.errors import DataError
from chunkplan.intake.records import Conversation, Exchange, Message, RecordError, TextRecord
from chunkplan.intake.schemas import detect, parse
from tests.support.command_line import Run
from tests.support.intake_checks import ANSWERED, chat, marked_texts, parse_as, question_and_answer
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

MESSAGES = question_and_answer("Hi!", "Hello.")
TURNS = question_and_answer("Hi!", "Hello.", who="from", what="value")


def _read(record: dict[str, Any]) -> Any:
    return parse(detect([record]), record)


def _roles(*names: str) -> list[str]:
    parsed = parse_as("messages", chat(*({"role": name, "content": "a"} for name in names)))
    assert isinstance(parsed, Conversation)
    return [message.role for message in parsed.messages]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("question", "answer"),
        ("problem", "solution"),
        ("query", "response"),
        ("prompt", "response"),
        ("input", "output"),
        ("human", "assistant"),
    ],
)
def test_pairs_of_names_are_a_question_and_its_answer(question: str, answer: str) -> None:
    record = {question: "Hi!", answer: "Hello.", "id": "x", "system": "S"}
    layout = detect([record])
    assert (layout.schema, layout.columns["question"], layout.columns["answer"]) == (
        "question+answer",
        question,
        answer,
    )
    assert layout.evidence == f"`{question}` and `{answer}` in the first record, with `system`"
    assert parse(layout, record) == Exchange("S", "Hi!", "Hello.")


def test_the_names_of_a_pair_belong_together() -> None:
    assert _read({"problem": "a", "solution": "b", "answer": "c"}) == Exchange(None, "a", "b")
    with pytest.raises(DataError, match="no schema fits"):
        detect([{"problem": "a", "answer": "c"}])
    layout = detect([{"problem": "a", "answer": "c"}], columns={"question": "problem"})
    assert parse(layout, {"problem": "a", "answer": "c"}) == Exchange(None, "a", "c")
    layout = detect([{"problem": "a", "solution": "b"}, {"question": "a", "answer": "b", "solution": "c"}])
    assert parse(layout, {"question": "a", "answer": "b", "solution": "c"}) == Exchange(None, "a", "b")
    assert parse(layout, {"problem": "c", "solution": "d"}) == Exchange(None, "c", "d")


def test_a_conversation_under_either_name_in_either_layout_also_as_json() -> None:
    expected = Conversation((Message("user", "Hi!"), Message("assistant", "Hello.")))
    for key in ("messages", "conversations", "conversation"):
        for value in (MESSAGES, TURNS):
            assert _read({key: value}) == _read({key: json.dumps(value)}) == expected
    evidence = detect([{"messages": json.dumps(MESSAGES)}]).evidence
    assert evidence == "`messages` in the first record; roles user, assistant"


def test_an_object_is_a_question_and_its_answer_only_if_it_is_nothing_else() -> None:
    """Two keys of one role, other keys, and what is no text, are not read as one; nothing of them is lost."""
    for turn in (
        {"human": "a", "user": "b", "assistant": "c"},
        {"human": "a", "assistant": "b", "mood": "c"},
        {"input": "a", "output": 1},
        {"human": "a"},
    ):
        with pytest.raises(RecordError, match=r"`conversation\[0\]\.from` is missing"):
            _read({"conversation": [turn]})
    blank = {"conversation": [{"human": "", "assistant": "b", "id": None}]}
    assert _read(blank) == Conversation((Message("user", ""), Message("assistant", "b")))


def test_a_thought_of_gemini_is_reasoning() -> None:
    parts = [{"text": "Hm.", "thought": True}, {"text": "Hello.", "thought": False}]
    record = {"contents": [{"role": "user", "parts": [{"text": "Hi!"}]}, {"role": "model", "parts": parts}]}
    answer = Message("assistant", "Hello.", None, {"reasoning_content": "Hm."}, ("Hello.",))
    assert _read(record).messages[1] == answer
    assert _read({"contents": record["contents"], "messages": None}).messages[1] == answer


def test_content_is_text_unless_it_is_a_message() -> None:
    assert _read({"content": "a b", "path": "x"}) == TextRecord("a b")
    for record in ({"content": "a b", "role": "user"}, {"content": ["a"]}):
        with pytest.raises(DataError, match="no schema fits"):
            detect([record])


def test_names_that_mean_other_things_too_are_taken_for_texts_only() -> None:
    assert _read({"text": "a b", "input": 1, "output": [2]}) == TextRecord("a b")
    assert detect([{"text": "a b", "input": 1, "output": 2, "s": "S"}, {"text": "a"}]).schema == "text"
    with pytest.raises(DataError, match="no schema fits"):
        detect([{"input": 1, "output": 2, "s": "S"}], columns={"system": "s"})
    assert _read({"text": "a b", "conversation": "17"}) == TextRecord("a b")
    assert _read({"text": "a b", "content": {"html": "c"}}) == TextRecord("a b")


@pytest.mark.parametrize(
    "record",
    [
        {"question": "a", "answer": "b", "problem": "a", "solution": "c"},
        {"text": "a b", "content": "c d"},
        {"messages": MESSAGES, "conversations": TURNS[1:]},
        {"conversations": TURNS, "conversation": MESSAGES[1:]},
        {"instruction": "a", "output": "b", "response": "c"},
        {"prompt": "a", "completion": "b", "response": "c"},
    ],
)
def test_two_readings_that_differ_are_two_sequences_of_which_a_flag_would_lose_one(record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a record can be read in two ways that differ: ") as caught:
        detect([record])
    assert caught.value.hint == (
        "they are two sequences: write a record for each, or take away the key that is not trained"
    )


def test_of_two_lengths_a_flag_decides(command: Run) -> None:
    Path("x.jsonl").write_text('{"length": 5, "num_tokens": 6}\n')
    ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER)
    assert ran.code == 3
    flags = ran.err.partition("\nhint: say which: ")[2].split(", or ")
    for line, number in zip(flags, (5, 6), strict=True):
        ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--json", *shlex.split(line))
        assert json.loads(ran.out)["sources"][0]["num_tokens"] == number


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        ({"messages": MESSAGES, "conversations": TURNS}, "messages"),
        ({"messages": MESSAGES, "conversations": []}, "messages"),
        ({"messages": "3", "conversations": TURNS}, "conversations"),
        ({"instruction": "a", "input": "", "output": "b"}, "instruction"),
        ({"instruction": "a", "input": "b", "output": "c", "text": "d"}, "instruction"),
        ({"prompt": "a", "response": "b", "text": "c", "messages": MESSAGES}, "messages"),
        ({"problem": "a", "solution": "b", "question": "a", "answer": "b"}, "question+answer"),
        ({"text": "a b", "content": "a b"}, "text"),
        ({"text": "a b", "content": " "}, "text"),
    ],
)
def test_readings_that_are_the_same_or_that_say_less_are_no_error(record: dict[str, Any], schema: str) -> None:
    assert detect([record]).schema == schema


def test_a_function_call_of_openai_and_its_functions_are_a_tool_call_and_tools() -> None:
    functions = [{"name": "f", "parameters": {}}]
    record = chat(
        {"role": "user", "content": "a", "function_call": None},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "3"},
        {"role": "assistant", "content": "b", "function_call": {}},
        functions=functions,
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert parse_as("messages", record) == Conversation(
        (
            Message("user", "a"),
            Message("assistant", None, None, {"tool_calls": [call]}),
            Message("tool", "3", None, {"name": "f"}),
            Message("assistant", "b"),
        ),
        [{"type": "function", "function": functions[0]}],
    )
    for changed, said in (
        ({**record, "tools": functions}, "`tools` and `functions` are both there"),
        (
            chat({"role": "assistant", "content": "", "function_call": {"name": "f"}, "tool_calls": [call]}),
            "`messages[0]` has both `function_call` and `tool_calls`",
        ),
        (
            chat({"role": "assistant", "function_call": {"arguments": "{}"}}),
            "`messages[0].function_call` is an object, expected an object with `name`",
        ),
    ):
        with pytest.raises(RecordError) as caught:
            parse_as("messages", changed)
        assert said in caught.value.message
    assert parse_as("messages", {**record, "tools": [], "functions": json.dumps(functions)}) == parse_as(
        "messages", record
    )


def test_roles_are_known_by_the_names_that_data_have_for_them() -> None:
    assert _roles("user", "human", "Human", "prompter") == ["user"] * 4
    assert _roles("assistant", "gpt", "model", "bot", "chatbot", "CHATBOT", "ai") == ["assistant"] * 7
    assert _roles("tool", "function", "ipython", "observation", "tool_response") == ["tool"] * 5
    assert _roles("developer", "user") == ["system", "user"]
    assert _roles("system", "developer") == ["system", "developer"]
    assert _roles("developer", "system") == ["developer", "system"]
    assert _roles("user", "developer") == ["user", "developer"]


def test_an_unknown_role_is_named_with_its_place_and_passed_on_if_it_says_whether_it_counts() -> None:
    for record, place in (
        (chat(*MESSAGES, {"role": "critic", "content": "a"}), "`messages[2].role`"),
        ({"conversations": [{"from": "critic", "value": "a"}]}, "`conversations[0].from`"),
    ):
        with pytest.raises(RecordError) as caught:
            _read(record)
        assert caught.value.message.startswith(f'{place} is "critic", expected one of system, developer, user, human')
        assert "`loss`" in caught.value.hint
    with pytest.raises(RecordError) as caught:
        _read(chat({"role": "x" * 10_000, "content": "a"}))
    assert len(caught.value.message) < 400
    record = chat(*MESSAGES, {"role": "critic", "content": "a", "loss": False})
    assert parse_as("messages", record) == Conversation(
        (Message("user", "Hi!"), Message("assistant", "Hello."), Message("critic", "a", False))
    )


def test_what_a_chat_template_says_of_a_role_is_there(command: Run) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no ' ~ m.role) }}{% endif %}{% endfor %}"
    )
    Path("t.jinja").write_text(template)
    Path("x.jsonl").write_text(json.dumps(chat(*MESSAGES, {"role": "critic", "content": "a", "loss": True})) + "\n")
    ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--chat-template", "t.jinja")
    assert ran.err.startswith("error: x.jsonl:1: the chat template raised on this conversation: no critic\n")


@pytest.mark.parametrize("schema", ["instruction", "question+answer"])
def test_a_history_is_the_turns_before(schema: str) -> None:
    one, other = ("instruction", "output") if schema == "instruction" else ("query", "response")
    record = {one: "c", other: "d", "system": "S", "history": [["a", "b"]]}
    parsed = parse(detect([record]), record)
    assert parsed == Conversation(
        (
            Message("system", "S"),
            *(Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")),
        )
    )
    for wrong, said in (
        ("a", "`history` is a string, expected a list"),
        ([["a"]], "`history[0]` has 1 entries, expected a question and its answer"),
        ([["a", "b"], ["c", 1]], "`history[1][1]` is a number, expected a string"),
        ([{"role": "user"}], "`history[0]` is an object, expected a list"),
    ):
        with pytest.raises(RecordError) as caught:
            parse_as(schema, {one: "c", other: "d", "history": wrong}, **_named(schema, one, other))
        assert caught.value.message == said


def _named(schema: str, one: str, other: str) -> dict[str, str]:
    return {} if schema == "instruction" else {"question": one, "answer": other}


def test_rows_of_a_table_are_read_like_lines(tmp_path: Path) -> None:
    """Where every row has every column, those that are null say nothing."""
    lists = {"conversation": [{"human": "Hi!", "assistant": "Hello."}], "id": 1}
    called = [{**message, "function_call": None, "train": None} for message in MESSAGES]
    pair, problem = {"query": "Hi!", "response": "Hello."}, {"problem": "Hi!", "solution": "Hello."}
    mixed = [{**problem, "history": None}, {**pair, "history": []}, {**problem, "query": "x"}]
    for rows, unread in (
        ([lists, lists], {"id"}),
        ([{"messages": json.dumps(MESSAGES), "rejected_response": None}], set()),
        ([{"messages": called, "functions": None}], set()),
        (mixed, {"query"}),
    ):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
        if rows is mixed:
            columns = dict.fromkeys(key for row in rows for key in row)
            pq.write_table(pa.Table.from_pylist([{**columns, **row} for row in rows]), tmp_path / "x.parquet")
        analysis = analyze(tmp_path / "x.parquet", tmp_path / "out", tokenizer=TOKENIZER)
        assert marked_texts(analysis) == [ANSWERED] * len(rows)
        assert analysis.manifest["sources"][0]["unread_keys"].keys() == unread
