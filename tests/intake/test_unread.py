"""Keys beside those that are read: used, refused by name, or listed with the source; none is dropped without a word."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chunkplan import IntakeOptions, analyze, validate
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.records import Conversation, Exchange, RecordError
from chunkplan.intake.shard import merge, write_shard
from tests.support.command_line import Run
from tests.support.intake_checks import ANSWERS, parse_as
from tests.support.places import ROOT
from tests.support.table_cases import write_records

TOKENIZER = ROOT / "sample_data" / "tokenizer"
_write = partial(write_records, rows=10)

_LISTS = {"prompt": [{"role": "user", "content": "Hi!"}], "completion": [{"role": "assistant", "content": "Hello."}]}


def _unread(path: Path, folder: Path, **options: Any) -> tuple[dict[str, int | None], int]:
    analysis = analyze(path, folder / "out", IntakeOptions(**options))
    assert validate(folder / "out").ok
    [source] = analysis.manifest["sources"]
    return source["unread_keys"], source["num_unread_keys"]


@pytest.mark.parametrize(("schema", "record"), [*ANSWERS.items(), ("prompt+completion", _LISTS)])
def test_a_system_text_is_part_of_the_conversation_in_every_schema(schema: str, record: dict[str, Any]) -> None:
    if isinstance(record.get("prompt"), str):
        with pytest.raises(RecordError, match="`system` beside a prompt that is a string") as caught:
            parse_as(schema, {**record, "system": "S"})
        assert caught.value.reason == "unsupported"
        assert "--column question=prompt --column answer=completion" in caught.value.hint
    else:
        found = parse_as(schema, {**record, "system": "S"})
        conversation = found.conversation if isinstance(found, Exchange) else found
        said = [(message.role, message.content) for message in conversation.messages]
        assert said == [("system", "S"), ("user", "Hi!"), ("assistant", "Hello.")]
    assert parse_as(schema, {**record, "system": " "}) == parse_as(schema, record)
    with pytest.raises(RecordError, match="`system` is a number"):
        parse_as(schema, {**record, "system": 5})


def test_what_the_hint_says_of_a_system_text_beside_a_prompt_works(tmp_path: Path) -> None:
    file = _write(tmp_path / "x.jsonl", [{**ANSWERS["prompt+completion"], "system": "Be brief."}])
    columns = {"question": "prompt", "answer": "completion"}
    analysis = analyze(file, tmp_path / "out", IntakeOptions(columns=columns), tokenizer=TOKENIZER)
    longer = _write(tmp_path / "y.jsonl", [{**ANSWERS["question+answer"], "system": "Be brief."}])
    assert analysis.manifest["sources"][0]["unread_keys"] == {}
    expected = analyze(longer, tmp_path / "expected", tokenizer=TOKENIZER)
    assert analysis.tokens()(0)[0].tolist() == expected.tokens()(0)[0].tolist()


@pytest.mark.parametrize("schema", ["messages", "conversations"])
def test_a_system_text_that_the_messages_have_is_there_once_and_another_is_refused(schema: str) -> None:
    who, what = ("role", "content") if schema == "messages" else ("from", "value")
    other = [{who: "system", what: "S"}, *ANSWERS[schema][schema]]
    found = parse_as(schema, {schema: other, "system": " S\n"})
    assert isinstance(found, Conversation)
    assert found == parse_as(schema, {schema: other})
    blank = [{who: "system", what: " "}, *ANSWERS[schema][schema]]
    assert parse_as(schema, {schema: blank, "system": "S"}) == found
    with pytest.raises(RecordError, match=f"`system` and the system message that `{schema}` begins with") as caught:
        parse_as(schema, {schema: other, "system": "T"})
    assert caught.value.reason == "schema"


@pytest.mark.parametrize(("schema", "record"), list(ANSWERS.items())[:3])
def test_earlier_exchanges_are_refused_by_name_where_messages_have_them(schema: str, record: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="`history` has earlier exchanges") as caught:
        parse_as(schema, {**record, "history": [["a", "b"]]})
    assert caught.value.reason == "unsupported"
    assert parse_as(schema, {**record, "history": []}) == parse_as(schema, record)


def test_tools_beside_a_prompt_that_is_a_string_are_refused_by_name() -> None:
    with pytest.raises(RecordError, match="`tools` beside a prompt that is a string"):
        parse_as("prompt+completion", {**ANSWERS["prompt+completion"], "tools": [{"name": "f"}]})
    assert parse_as("prompt+completion", {**ANSWERS["prompt+completion"], "tools": []})


@pytest.mark.parametrize(
    ("record", "unread"),
    [
        ({"question": "a", "Response": "c", "answer": "d"}, {"Response"}),
        ({"instruction": "a", "output": "b", "response": "b", "input": "", "id": 0}, {"response", "id"}),
        ({"problem": "a", "solution": "b", "answer": "c"}, {"answer"}),
        ({"messages": json.dumps(ANSWERS["messages"]["messages"]), "conversation_id": "x"}, {"conversation_id"}),
        ({"conversation": json.dumps([{"from": "gpt", "value": "a", "mood": "b"}])}, {"conversation[].mood"}),
        ({"messages": ANSWERS["messages"]["messages"], "tools": [], "images": [], "n": None, "m": {}}, {"m"}),
        ({"text": "a", "label": True, "system": "b", "history": []}, {"label", "system", "history"}),
        ({"prompt": "a", "completion": "b", "chosen": "c"}, {"chosen"}),
        ({"input_ids": [1, 2], "labels": [1, 2], "token_type_ids": [0, 0]}, {"token_type_ids"}),
        ({"input_ids": [1, 2], "source": "web", "é": "\n"}, {"source", "é"}),
        ({"length": 5, "num_tokens": 5, "id": "x"}, {"num_tokens", "id"}),
        ({"messages": [{"role": "assistant", "content": "a", "name": "b"}]}, set()),
        (
            {"messages": [{"role": "assistant", "content": "a", "mood": "b", "id": 3}]},
            {"messages[].mood", "messages[].id"},
        ),
        (
            {"conversations": [{"from": "gpt", "value": "a", "weight": 1, "mood": "b", "markdown": None}]},
            {"conversations[].mood"},
        ),
    ],
)
def test_keys_that_nothing_is_made_of_are_listed(tmp_path: Path, record: dict[str, Any], unread: set[str]) -> None:
    """However the records are read: fast or slow, as lines or as rows."""
    file = _write(tmp_path / "x.jsonl", [record] * 3)
    assert _unread(file, tmp_path) == (dict.fromkeys(unread, 3), len(unread))
    if any(value == {} for value in record.values()):
        return  # no type of a table
    for name in ("x.parquet", "x.arrow"):
        found, number = _unread(_write(tmp_path / name, [record] * 3), tmp_path)
        assert (found.keys(), number) == (unread, len(unread))
        assert set(found.values()) <= {3, None}


@pytest.mark.parametrize("schema", ["text", "length", "input_ids"])
def test_keys_are_counted_in_all_records_of_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    """Also those that only later records have, in any number of pieces; and those of no rejected record."""
    value = {"text": "a b c", "length": 7, "input_ids": [1, 2, 3]}[schema]
    records: list[dict[str, Any]] = [{schema: value, "id": number} for number in range(500)]
    for number in range(400, 500):
        records[number]["late"] = "x"
    records[3]["null"] = None
    records[450] = {schema: {"text": "", "length": 0, "input_ids": []}[schema], "id": 1, "late": "x", "blank": 2}
    expected = {"id": 499, "late": 99}
    for num_bytes in (1 << 20, 1000):
        monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", num_bytes)
        file = _write(tmp_path / f"{num_bytes}.jsonl", records)
        assert _unread(file, tmp_path, schema=schema) == (expected, 2)
    sampled, _ = _unread(file, tmp_path, schema=schema, sample=0.5)
    assert 0 < (sampled["id"] or 0) < 499


def test_columns_of_numbers_tell_as_many_keys_apart_as_there_are(tmp_path: Path) -> None:
    """More than the fast way knows, and longer than a screen is wide."""
    records = [{"length": 5, f"key {number}": 1, "x" * 500: 2} for number in range(90)]
    found, number = _unread(_write(tmp_path / "x.jsonl", records), tmp_path)
    assert number == 91
    assert found == {"x" * 100 + "...": 90, **{f"key {number}": 1 for number in range(90)}}


def test_of_thousands_of_keys_the_most_frequent_are_listed(command: Run) -> None:
    records = [{"text": "a b c", "often": 1, f"id-{number:04}": 1} for number in range(3000)]
    _write(Path("x.jsonl"), records)
    ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER)
    assert "     not read: `often` in 3,000 records, `id-0000` in 1, `id-0001` in 1," in ran.err
    assert " and at least 2,993 more " in " ".join(ran.err.split())
    [source] = json.loads(command("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--json").out)["sources"]
    assert (len(source["unread_keys"]), source["num_unread_keys"]) == (100, 3001)


def test_shards_the_cache_and_one_run_list_the_same_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 2_000)
    records = [{"text": f"text {number}", "id": number, **({} if number % 2 else {"even": 1})} for number in range(300)]
    files = [_write(tmp_path / name, records) for name in ("a.jsonl", "b.parquet", "c.arrow")]
    first = analyze(files, tmp_path / "out", tokenizer=TOKENIZER)
    listed = [source["unread_keys"] for source in first.manifest["sources"]]
    assert listed == [{"id": 300, "even": 150}, {"id": None, "even": None}, {"id": None, "even": None}]
    monkeypatch.setattr("chunkplan.intake.process.read", None)  # what is not in the cache fails
    assert analyze(files, tmp_path / "out", tokenizer=TOKENIZER).manifest == first.manifest
    monkeypatch.undo()
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 2_000)
    for index in (1, 2, 3):
        request = IntakeRequest(paths=files, cache=tmp_path / f"cache-{index}", tokenizer=TOKENIZER)
        write_shard(request, tmp_path / f"shard-{index}", (index, 3))
    merged = merge([tmp_path / f"shard-{index}" for index in (1, 2, 3)], tmp_path / "merged")
    assert merged.manifest == first.manifest


@pytest.mark.parametrize(
    "change",
    [
        {"unread_keys": {"id": 400}},
        {"num_unread_keys": 0},
        {"reasons": {"empty": 1}},
        {"reasons": {"empty": 1}, "rejected": 1},
    ],
)
def test_validate_finds_sources_that_contradict_themselves(tmp_path: Path, change: dict[str, Any]) -> None:
    file = _write(tmp_path / "x.jsonl", [{"text": f"text {number}", "id": number} for number in range(300)])
    analyze(file, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sources"][0] |= change
    path.write_text(json.dumps(manifest))
    assert {violation.invariant for violation in validate(tmp_path / "out").violations} == {"records"}
