"""`chunkplan inspect --record`: a record as it is rendered, what would be trained of it, and mistakes explained."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from tests.support.command_line import Run
from tests.support.places import ROOT
from tests.support.template_cases import TEMPLATES

TOKENIZER = ROOT / "sample_data" / "tokenizer"
TOOLS = ROOT / "sample_data" / "tools.jsonl"

HOSTILE = "a\x1b[31mred\x07\r\x9b2J [bold]tag[/bold] \u202eback ⟦not a mark⟧ \u200b\x7f end"


def said(*contents: str, **more: Any) -> dict[str, Any]:
    """A record of messages of the user and of the assistant by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)], **more}


THOUGHTFUL = said(
    "What is 1 + 1?", "<think>\nEasy.\n</think>\n\n2.", "And 2 + 2?", "<think>\nAlso easy.\n</think>\n\n4.", id=7
)


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def plain(text: str) -> str:
    """What a screen says, whatever its width and colour."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "phi3"])
def test_each_choice_of_turns_is_what_analyze_makes_of_it(command: Run, tmp_path: Path, template: str) -> None:
    """With templates of real models, one of which leaves out earlier thinking."""
    write(tmp_path / "data.jsonl", THOUGHTFUL)
    words = ("--tokenizer", TOKENIZER, "--chat-template", TEMPLATES / f"{template}.jinja")
    document = json.loads(command("inspect", "--record", "data.jsonl:1", *words, "--json").out)
    table = re.findall(
        r"^(\w+)(?: \(shown\))? +(\d+) +(\d+) +(\d+)  (.*?) *$",
        command("inspect", "--record", "data.jsonl:1", *words).out,
        re.M,
    )
    assert [row[0] for row in table] == ["rendered", "last", "each"]
    assert [row[4] for row in table] == ["all 2", "2 of 2", "all 2, one a sequence"]
    for turns, *numbers, _ in table:
        assert command("analyze", "data.jsonl", *words, "--train-turns", turns).code == 0
        analysis = chunkplan.load_analysis("chunkplan-out/analysis")
        made = document["sequences"][turns]
        assert [each["num_tokens"] for each in made] == analysis.num_tokens.tolist()
        assert [each["num_target_tokens"] for each in made] == analysis.num_target_tokens.tolist()
        totals = (len(made), analysis.num_tokens.sum(), analysis.num_target_tokens.sum())
        assert [int(number) for number in numbers] == [*totals]
    assert [each["trained"] for each in document["sequences"]["each"]] == [[1], [2]]
    each, rendered = (sum(one["num_tokens"] for one in document["sequences"][turns]) for turns in ("each", "rendered"))
    assert each > rendered


def test_the_choice_that_was_asked_for_is_shown(command: Run, tmp_path: Path) -> None:
    write(tmp_path / "data.jsonl", THOUGHTFUL)
    words = ("inspect", "--record", "data.jsonl:1", "--tokenizer", TOKENIZER)
    assert plain(command(*words, "--train-turns", "last").out).count("⟦") == 2
    shown = plain(command(*words, "--train-turns", "each").out)
    assert "each (shown)" in shown
    assert "sequence 1 of 2: " in shown and "sequence 2 of 2: " in shown
    assert shown.count("And 2 + 2?") == 1 and shown.count("What is 1 + 1?") == 2


@pytest.mark.parametrize("colour", [False, True])
def test_targets_and_special_tokens_stand_out(command: Run, tmp_path: Path, colour: bool) -> None:
    write(tmp_path / "data.jsonl", said("Hi!", "Hello."))
    out = command("inspect", "--record", "data.jsonl:1", "--tokenizer", TOKENIZER, colour=colour).out
    assert "⟦Hello.<|im_end|>⟧" in plain(out)
    assert ("\x1b[32m" in out) == ("\x1b[1;32m<|im_end|>" in out) == ("\x1b[1;36m<|im_start|>" in out) == colour


def test_text_cannot_reach_the_terminal(command: Run, tmp_path: Path) -> None:
    """Neither what is rendered, nor keys, nor the record as it is stored."""
    write(
        tmp_path / "data.jsonl", said("Hi!", HOSTILE), {"text": 7, HOSTILE: HOSTILE}, said("Hi!", "a", **{HOSTILE: 1})
    )
    for line in (1, 2, 3):
        ran = command("inspect", "--record", f"data.jsonl:{line}", "--tokenizer", TOKENIZER, "--format", "messages")
        assert not set(ran.out) & set("\x1b\x07\r\x9b\u202e\u200b\x7f")
        assert "\\u27e6not a mark\\u27e7" in plain(ran.out)


@pytest.fixture
def analyzed(command: Run, tmp_path: Path) -> Path:
    """A folder with an analysis that was not made as it is made by default."""
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "chat.jsonl", *(said(f"Question {n}?", "Yes.", "Sure?", "Yes, very.") for n in range(3)))
    write(tmp_path / "data" / "texts.jsonl", {"body": "A text, and some more of it, up to here."})
    shutil.copytree(TOKENIZER, tmp_path / "tokenizer")
    words = ("--train-turns", "each", "--max-length", 25, "--column", "texts.jsonl:text=body")
    words = (*words, "--max-record-mb", 0.5)
    assert command("analyze", "data", "--tokenizer", "tokenizer", *words).code == 0
    return tmp_path


def test_an_analysis_says_how_its_records_are_read(
    command: Run, analyzed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder, and what is given goes before it."""
    shown = command("inspect", "--record", "data/chat.jsonl:2", width=120)
    assert shown.err == ""
    assert (
        "defaults of the analysis chunkplan-out/analysis: its tokenizer, "
        "--column texts.jsonl:text=body, --train-turns each, --max-length 25, --max-record-mb 0.5 "
    ) in plain(shown.out)
    assert "each (shown)" in shown.out
    assert re.search(r"tokens +\d+, and \d+ cut off by --max-length", shown.out)
    text = plain(command("inspect", "--record", "data/texts.jsonl:1").out)
    assert "keys `body` (text)" in text
    again = plain(command("inspect", "--record", "data/chat.jsonl:2", "--format", "messages").out)
    assert "read as messages (--format messages: " in again and "--column" not in again
    given = plain(command("inspect", "--record", "data/chat.jsonl:2", "--train-turns", "last", "--max-length", 99).out)
    assert "last (shown)" in given and "cut off" not in given and "--train-turns each" not in given
    (analyzed / "elsewhere").mkdir()
    monkeypatch.chdir(analyzed / "elsewhere")
    other = command("inspect", "../chunkplan-out/analysis", "--record", "data/chat.jsonl:2", width=120)
    assert other.err == ""
    assert other.out.split("--train-turns would")[1] == shown.out.split("--train-turns would")[1]


def test_of_a_file_that_was_not_analyzed_the_keys_are_its_own(command: Run, analyzed: Path) -> None:
    write(analyzed / "other.jsonl", {"text": "Another text."})
    ran = command("inspect", "--record", "other.jsonl:1")
    assert (ran.code, ran.err) == (0, "")
    assert (
        "of which this file is no source: its tokenizer, --train-turns each, --max-length 25, --max-record-mb 0.5 "
        "tokens" in plain(ran.out)
    )


def test_a_record_that_is_not_what_was_analyzed_is_warned_of(command: Run, analyzed: Path) -> None:
    """Its file has changed, or its template was another one."""
    words = ("inspect", "--record", "data/chat.jsonl:2")
    template = ("--chat-template", TEMPLATES / "phi3.jinja")
    write(analyzed / "few.jsonl", said("Hi!", "Hello."))
    assert command("analyze", "few.jsonl", "--tokenizer", "tokenizer", *template, "--output", "few").code == 0
    assert "was it made with --chat-template" in command("inspect", "few", "--record", "few.jsonl:1").err
    assert command("inspect", "few", "--record", "few.jsonl:1", *template).err == ""
    assert command(*words).err == ""
    with (analyzed / "data" / "chat.jsonl").open("a") as file:
        file.write("\n")
    assert "has another size than when it was analyzed" in plain(command(*words).err)


CALLS = {"tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"what": "it"}}}]}

REJECTED: dict[str, tuple[str, tuple[object, ...], str]] = {
    "the template raises": (
        json.dumps({"messages": [{"role": "system", "content": "Be kind."}, *said("Hi!", "Hello.")["messages"]]}),
        ("--chat-template", TEMPLATES / "gemma.jinja"),
        '"content": "Be kind."',
    ),
    "no target is known": (
        json.dumps({"messages": [*said("Hi!")["messages"], {"role": "assistant", "content": "Hello.", **CALLS}]}),
        ("--chat-template", "without_calls.jinja"),
        "as rendered; what counts in it is not known user: Hi!<|im_end|>assistant: Hello.<|im_end|>",
    ),
    "no JSON": ('{"messages": [{"role"', (), 'as it is stored {"messages": [{"role"'),
    "another type": ('{"messages": 7}', (), '"messages": 7'),
    "blank": ('{"messages": []}', (), '"messages": []'),
    "too long": (json.dumps(said("Hi!", "Hello.")), ("--max-length", 17, "--overlong", "drop"), "⟦Hello.<|im_end|>⟧"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_a_rejected_record_is_shown_with_the_message_of_analyze(command: Run, tmp_path: Path, case: str) -> None:
    line, words, shown = REJECTED[case]
    (tmp_path / "without_calls.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(said("Good?", "Yes.")), line, ""]))
    ran = command("inspect", "--record", "data.jsonl:2", "--tokenizer", TOKENIZER, *words)
    assert ran.code == 3
    assert shown in plain(ran.out)
    document = json.loads(
        command("inspect", "--record", "data.jsonl:2", "--tokenizer", TOKENIZER, *words, "--json").out
    )
    assert ran.err.startswith(f"error: data.jsonl:2: {document['rejected']['message']}\nhint: ")
    assert f"rejected {document['rejected']['reason']}: " in plain(ran.out)
    told = command("analyze", "data.jsonl", "--tokenizer", TOKENIZER, "--on-error", "skip", *words)
    assert told.code == 0, told.err
    rows = Path("chunkplan-out/analysis/rejected.jsonl").read_text(encoding="utf-8").splitlines()
    [entry] = [row for row in map(json.loads, rows) if row["line"] == 2]
    del document["rejected"]["hint"], entry["file"], entry["line"]
    assert document["rejected"] == entry


def test_of_a_long_record_both_ends_are_shown_and_all_where_asked_for(command: Run, tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(3000)]
    write(tmp_path / "data.jsonl", {"text": " ".join(words)})
    asked = ("inspect", "--record", "data.jsonl:1", "--tokenizer", TOKENIZER)
    out = command(*asked).out
    assert "word1 " in out and "word2998" in out and "word1500" not in out
    [(left, targets)] = re.findall(r"\.\.\. ([\d,]+) tokens left out here, ([\d,]+) targets among them; --text", out)
    document = json.loads(command(*asked, "--json").out)
    [sequence] = document["sequences"]["rendered"]
    assert int(left.replace(",", "")) == sequence["num_tokens"] - 800
    assert left == targets
    assert "".join(piece["text"] for piece in sequence["text"]["first"]) == " ".join(words)
    whole = "".join(command(*asked, "--text").out.split())
    assert whole.endswith("".join(words).replace("word0", "word⟦0") + "⟧")


def test_of_a_record_that_is_too_large_what_is_not_kept_is_said_to_be_left_out(command: Run, tmp_path: Path) -> None:
    """`--text` shows what is kept of it, and the hint has the way to read it."""
    write(tmp_path / "huge.jsonl", {"text": "a" * 9_000_000})
    size = (tmp_path / "huge.jsonl").stat().st_size - 1
    beyond = f"{size - 65_536:,} bytes of what is too much to show ..."
    asked = ("inspect", "--record", "huge.jsonl:1", "--tokenizer", TOKENIZER)
    ran = command(*asked)
    assert f"... left out here: 62,536 characters, which --text shows, and {beyond}" in plain(ran.out)
    assert "raise --max-record-mb" in plain(ran.err)
    shown = plain(command(*asked, "--text").out)
    assert f"... left out here: {beyond}" in shown
    assert shown.count("a") > 65_000
    assert json.loads(command(*asked, "--json").out)["num_stored_left_out"] == size - 65_536


def test_an_element_of_an_array_that_is_no_object_is_called_one(command: Run, tmp_path: Path) -> None:
    (tmp_path / "mixed.json").write_text('[{"text": "one"}, {"text": "two"}, 3]')
    ran = command("inspect", "--record", "mixed.json, record 2", "--tokenizer", TOKENIZER)
    assert "found a number, expected a JSON object as the element of the array" in plain(ran.err)
    assert "hint: a .json file is an array of JSON objects" in plain(ran.err)
    assert "line" not in ran.err


def test_what_is_no_conversation_is_shown_as_well(command: Run, tmp_path: Path) -> None:
    write(tmp_path / "pairs.jsonl", {"prompt": "def two():", "completion": " return 2"})
    write(tmp_path / "ids.jsonl", {"input_ids": [4094, 85, 83, 4095], "labels": [-100, -100, 83, 4095]})
    (tmp_path / "text.txt").write_text("Once upon a time.")
    np.save(tmp_path / "lengths.npy", np.array([5, 1024]))
    words = ("--tokenizer", TOKENIZER)
    pair = plain(command("inspect", "--record", "pairs.jsonl:1", *words).out)
    assert "def two():⟦ return 2<|im_end|>⟧" in pair
    assert "--train-turns makes no difference: it is no conversation" in pair
    assert "On⟦ce upon a time.⟧" in plain(command("inspect", "--record", "text.txt", *words).out)
    ids = ("inspect", "--record", "ids.jsonl:1")
    assert "<|im_start|>v⟦t<|im_end|>⟧" in plain(command(*ids, *words).out)
    without = command(*ids)
    assert without.code == 0
    assert "tokens 4 target tokens 2, 50.0% of the tokens text its tokens are not decoded" in plain(without.out)
    length = command("inspect", "--record", "lengths.npy, record 1")
    assert length.code == 0
    assert "tokens 1,024 text none: a length is all that is known of it" in plain(length.out)
    assert "target tokens" not in length.out


MISTAKES: dict[str, tuple[tuple[object, ...], int, str, str]] = {
    "no such file": (("none.jsonl:3",), 2, "there is no file none.jsonl", "FILE:LINE"),
    "a folder": ((".",), 2, ". is a folder", "FILE:LINE"),
    "beyond the end": (("data.jsonl:9",), 2, "data.jsonl has 3 lines, and no line 9", "from 'data.jsonl:1' to"),
    "line 0": (("data.jsonl:0",), 2, "data.jsonl has no line 0", "lines are counted from 1: 'data.jsonl:1'"),
    "no line": (("data.jsonl",), 2, "data.jsonl does not say which record", "'data.jsonl:1' is the first"),
    "a record where there are lines": (("data.jsonl, record 1",), 2, "data.jsonl has no record 1", "'data.jsonl:1'"),
    "a line where there are records": (("array.json:1",), 2, "array.json has no line 1", "'array.json, record 0'"),
    "beyond the records": (("array.json, record 1",), 2, "has 1 record, and no record 1", "'array.json, record 0'"),
    "a line of a text": (("text.txt:1",), 2, "text.txt is one record", "give 'text.txt'"),
    "a blank line": (("data.jsonl:2",), 2, "data.jsonl:2 is blank, which is no record", "not blank"),
    "no tokenizer": (("data.jsonl:1",), 2, "data.jsonl:1: no tokenizer is known", "give --tokenizer"),
    "no schema": (("odd.jsonl:1", "--tokenizer", TOKENIZER), 3, "odd.jsonl: no schema fits", "--format"),
    "no such key": (("data.jsonl:1", "--column", "text=body"), 3, "no record has the key `body`", "--column text=text"),
    "no template": (("chat.jsonl:1", "--tokenizer", "bare"), 2, "bare has no chat template", "--chat-template"),
    "a template alone": (("data.jsonl:1", "--chat-template", "x"), 2, "a chat template without a", "--tokenizer"),
    "a step": (("data.jsonl:1", "--step", 1), 2, "--step and --record exclude", "leave one"),
    "a page": (("data.jsonl:1", "--html", "x.html"), 2, "--html and --record exclude", "leave one"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_to_do(command: Run, tmp_path: Path, mistake: str) -> None:
    words, code, message, hint = MISTAKES[mistake]
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n  \n{"text": "two"}\n')
    (tmp_path / "array.json").write_text('[{"text": "one"}]')
    (tmp_path / "text.txt").write_text("one")
    (tmp_path / "bare").mkdir()
    shutil.copy(TOKENIZER / "tokenizer.json", tmp_path / "bare")
    write(tmp_path / "odd.jsonl", {"a": 1})
    write(tmp_path / "chat.jsonl", said("Hi!", "Hello."))
    ran = command("inspect", "--record", *words)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert hint in ran.err.split("hint: ")[1]


def test_options_of_records_are_refused_without_one(command: Run) -> None:
    for words in (("--format", "text"), ("--train-turns", "last"), ("--chat-template", "x"), ("--length-column", "n")):
        ran = command("inspect", *words)
        assert (ran.code, ran.out) == (2, "")
        assert f"{words[0]} needs --record" in ran.err


def test_a_plan_is_not_where_records_are(command: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([300, 100, 27]))
    command("build", "lengths.npy", "--chunk-size", 128, "--k", 1)
    ran = command("inspect", "chunkplan-out/plan", "--record", "lengths.npy, record 0")
    assert ran.code == 2
    assert "--record is of data, this is a plan" in ran.err
