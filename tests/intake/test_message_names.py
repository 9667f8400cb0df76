"""Keys and roles within messages that the user names are read as the usual ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import IntakeOptions, analyze
from chunkplan.config.intake import COLUMNS
from chunkplan.errors import DataError, UsageError
from tests.support.intake_checks import write_lines
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"
USUAL = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hello."}]
OWN = [{"by": "customer", "said": "Hi!", "mood": 3}, {"by": "agent", "said": "Hello.", "mood": 5}]
NAMES = {"role": "by", "content": "said", "role.user": "customer", "role.assistant": "agent"}


def read(folder: Path, record: dict[str, Any], columns: dict[str, str], name: str = "a.jsonl") -> Any:
    write_lines(folder / name, [record])
    return analyze(folder / name, folder / "out", IntakeOptions(columns=columns), tokenizer=TOKENIZER)


@pytest.mark.parametrize(
    ("messages", "columns"),
    [
        (USUAL, {}),
        ([{key: value for key, value in one.items() if key != "mood"} for one in OWN], NAMES),
        ([{"from": "customer", "said": "Hi!"}, {"from": "agent", "said": "Hello."}], {**NAMES, "role": "from"}),
        ([{"from": "human", "said": "Hi!"}, {"from": "gpt", "said": "Hello."}], {"content": "said"}),
        ([{"role": "customer", "content": "Hi!"}, USUAL[1]], {"role.user": "customer"}),
        ([{"role": "Q", "text": "Hi!"}, {"role": "A", "text": "Hello."}],
         {"content": "text", "role.user": "Q", "role.assistant": "A"}),
    ],
)  # fmt: skip
def test_named_keys_and_roles_give_the_same_tokens(tmp_path: Path, messages: Any, columns: dict[str, str]) -> None:
    expected = read(tmp_path / "usual", {"messages": USUAL}, {})
    for key, value in (("messages", messages), ("turns", messages), ("turns", json.dumps(messages))):
        named = {**columns, **({} if key == "messages" else {"messages": key})}
        found = read(tmp_path / "own", {key: value}, named)
        assert found.manifest["content_hashes"] == expected.manifest["content_hashes"]
        assert found.manifest["sources"][0]["columns"].items() >= columns.items()
    pq.write_table(pa.table({"turns": [messages]}), tmp_path / "a.parquet")
    found = analyze(
        tmp_path / "a.parquet",
        tmp_path / "table",
        IntakeOptions(columns={**columns, "messages": "turns"}),
        tokenizer=TOKENIZER,
    )
    assert found.manifest["content_hashes"] == expected.manifest["content_hashes"]


def test_calls_tools_and_what_is_not_read_stay_what_they_are(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}, "by": "vendor"}]
    call = '{"name": "find", "arguments": {"a": 1}}'
    usual = [USUAL[0], {"role": "function_call", "content": call}, {"role": "tool", "content": "1"}, USUAL[1]]
    own = [OWN[0], {"by": "asks", "said": call}, {"by": "api", "said": "1"}, {**OWN[1], "topic": "x y"}]
    plain = [{key: value for key, value in one.items() if key != "mood"} for one in own]
    expected = read(tmp_path / "usual", {"messages": usual, "tools": tools}, {})
    found = read(
        tmp_path / "own",
        {"messages": plain, "tools": tools},
        {**NAMES, "role.tool": "api", "role.function_call": "asks"},
    )
    assert found.manifest["content_hashes"] == expected.manifest["content_hashes"]
    assert found.manifest["sources"][0]["unread_keys"] == {"messages[].topic": 1}
    with pytest.raises(DataError, match=r"messages\[0\].mood` is not read, and has a number that may say what counts"):
        read(tmp_path / "flag", {"messages": OWN}, NAMES)


def test_what_is_not_there_or_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no message has the key `who` of --column role=who; found: `content`, `role`"):
        read(tmp_path, {"messages": USUAL}, {"role": "who"})
    both = [{**USUAL[0], "text": "Ho!"}, USUAL[1]]
    with pytest.raises(DataError, match="has both `text`, which is named as its `content`, and `content`"):
        read(tmp_path, {"messages": both}, {"content": "text"})
    with pytest.raises(UsageError, match="no schema has such a role") as raised:
        read(tmp_path, {"messages": USUAL}, {"role.robot": "agent"})
    assert "role.user" in raised.value.hint


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (("customer", "assistant"), "--column role.user=customer"),
        (("customer", "agent"), "--column role.user=customer --column role.assistant=agent"),
        (("human", "agent"), "--column role.assistant=agent"),
    ],
)
@pytest.mark.parametrize(("key", "content"), [("role", "content"), ("from", "value")])
def test_the_hint_of_unknown_speakers_names_whose_each_is(
    command, tmp_path: Path, names: tuple[str, str], flags: str, key: str, content: str
) -> None:
    messages = [{key: name, content: text} for name, text in zip(names, ("Hi!", "Hello."), strict=True)]
    write_lines(tmp_path / "a.jsonl", [{"messages": messages}])
    refused = command("analyze", "a.jsonl", "--tokenizer", TOKENIZER)
    assert (refused.code, f"such as {flags}; or say" in refused.err) == (3, True)
    assert command("analyze", "a.jsonl", "--tokenizer", TOKENIZER, *flags.split()).code == 0


def test_what_is_typed_behind_one_flag_is_for_the_sources_of_the_first() -> None:
    assert COLUMNS.read(["messages=turns,role=by,content=said"]) == {
        "messages": "turns",
        "role": "by",
        "content": "said",
    }
    assert COLUMNS.read(["a.jsonl:role=by,role.user=me"]) == {"a.jsonl:role": "by", "a.jsonl:role.user": "me"}
    assert COLUMNS.read(["text=a,b", "content=x,y"]) == {"text": "a,b", "content": "x,y"}


@pytest.mark.parametrize(
    ("asks", "answers", "roles"),
    [
        ("me", "bot", "role.user=me"),
        ("customer", "agent", "role.user=customer,role.assistant=agent"),
        ("user", "agent", "role.assistant=agent"),
    ],
)
def test_the_line_of_the_hint_reads_the_data(command, tmp_path: Path, asks: str, answers: str, roles: str) -> None:
    chat = [{"speaker": asks, "body": "Hi!"}, {"speaker": answers, "body": "Hello."}]
    write_lines(tmp_path / "a.jsonl", [{"chat": chat}])
    refused = command("analyze", "a.jsonl", "--tokenizer", TOKENIZER)
    assert refused.code == 3
    line = "--column messages=chat --column role=speaker,content=body," + roles
    assert f"or say so: {line}" in refused.err
    ran = command("analyze", "a.jsonl", "--tokenizer", TOKENIZER, *line.split())
    assert (ran.code, "read a.jsonl: messages, 1 record" in ran.err) == (0, True)
    shown = command("inspect", "--record", "a.jsonl:1", "--tokenizer", TOKENIZER, *line.split())
    assert "⟦Hello.<|im_end|>⟧" in shown.out
