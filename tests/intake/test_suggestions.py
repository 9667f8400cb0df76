"""Where no schema fits, the message has the line to type: taken out of it, it works; and it never fills a screen."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from chunkplan.errors import DataError
from chunkplan.intake.schemas import detect, parse
from chunkplan.planfile.load import load_analysis
from tests.support.command_line import Run
from tests.support.intake_checks import marked_texts, question_and_answer
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

MESSAGES = question_and_answer("Hi!", "Hello.")


def _hint(*records: dict[str, Any], **options: Any) -> str:
    with pytest.raises(DataError, match="no schema fits") as caught:
        detect(records, **options)
    return caught.value.hint


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            {"instruction_text": "a", "answer_text": "b"},
            "--column question=instruction_text --column answer=answer_text",
        ),
        (
            {"question": "a", "response": "b", "system_prompt": "S", "id": "niv.1"},
            "--column system=system_prompt --column question=question --column answer=response",
        ),
        ({"Problem": "a", "gold_answer": "b"}, "--column question=Problem --column answer=gold_answer"),
        (
            {"source": "web", "created_at": "on a day", "request": "a", "model_response": "b"},
            "--column question=request --column answer=model_response",
        ),
        ({"userQuery": "a", "botReply": "b"}, "--column question=userQuery --column answer=botReply"),
        (
            {"question": "a", "question_id": "q7", "num_words": 7, "final_answer": None, "answers": "c"},
            "--column question=question --column answer=answers",
        ),
        ({"question": "a", "response": "b"}, "--column question=question --column answer=response"),
        ({"User": "a", "Bot": "b"}, "--column question=User --column answer=Bot"),
        ({"Question Text": "a", "Best Answer": "b"}, "--column 'question=Question Text' --column 'answer=Best Answer'"),
        ({"inputs": "a", "targets": "b"}, "--column question=inputs --column answer=targets"),
        ({"q_text": "a b", "a_answer": "b c"}, "--column question=q_text --column answer=a_answer"),
        ({"Q": "a b", "A": "b c"}, "--column question=Q --column answer=A"),
        ({"the_prompt": "a", "model_answer": "b"}, "--column question=the_prompt --column answer=model_answer"),
        ({"prompt": "a", "canonical_solution": "b"}, "--column prompt=prompt --column completion=canonical_solution"),
        ({"Prompt": "a", "Completion": "b"}, "--column prompt=Prompt --column completion=Completion"),
        ({"input": "a", "completion": "b"}, "--column prompt=input --column completion=completion"),
        (
            {"Instruction": "a", "Input": "b", "Output": "c"},
            "--column instruction=Instruction --column input=Input --column output=Output",
        ),
        (
            {"Instruction": "a", "Context": "", "Response": "c", "System": "S"},
            "--column system=System --column instruction=Instruction --column input=Context --column output=Response",
        ),
        ({"prompt": MESSAGES[:1], "response": MESSAGES[1:]}, "--column prompt=prompt --column completion=response"),
        ({"Context": "a b", "Response": "b c"}, "--column question=Context --column answer=Response"),
        ({"source": "a b", "target": "b c"}, "--column question=source --column answer=target"),
        (
            {"problem": "a b", "generated_solution": "b c", "expected_answer": "", "problem_source": "x"},
            "--column question=problem --column answer=generated_solution",
        ),
        ({"my chat": MESSAGES, "id": "3"}, "--column 'messages=my chat'"),
        ({"dialogue": json.dumps(MESSAGES)}, "--column messages=dialogue"),
        ({"dialogue": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "--column messages=dialogue"),
        ({"dialog": [{"human": "a", "assistant": "b"}]}, "--column messages=dialog"),
        ({"chat": [{"role": "model", "parts": [{"text": "a"}]}]}, "--column messages=chat"),
        ({"body": "some words", "url": "x"}, "--column text=body"),
        ({"article_text": "words", "url": "some words"}, "--column text=article_text"),
        ({"it's": "the only words", "id": "x"}, """--column 'text=it'"'"'s'"""),
        ({"token_ids": [1, 2, 3], "doc_id": 7}, "--column input_ids=token_ids"),
        (
            {"q_text": "a", "a_text": "b", "sys": "S", "hist": [["c", "d"]]},
            "--column system=sys --column history=hist --column question=q_text --column answer=a_text",
        ),
        ({"dialog": MESSAGES, "sys": "S"}, "--column system=sys --column messages=dialog"),
        ({"prompt_len": 512, "source": "web"}, "--column length=prompt_len"),
    ],
)
def test_the_line_that_is_suggested_reads_the_records(record: dict[str, Any], line: str) -> None:
    assert _hint(record, record, record) == f"try this: {line}"
    columns = dict(word.split("=", 1) for word in shlex.split(line) if word != "--column")
    layout = detect([record] * 3, columns=columns)
    assert layout.columns | columns == layout.columns
    parse(layout, record)


def test_the_line_that_is_suggested_works_when_it_is_pasted(command: Run) -> None:
    Path("x.jsonl").write_text(3 * (json.dumps({"Question Text": "a", "it's": "b"} | {"Best Answer": "b"}) + "\n"))
    said = ("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--ignore-column", "it's")
    ran = command(*said)
    line = "--column 'question=Question Text' --column 'answer=Best Answer'"
    assert (ran.code, ran.err.splitlines()[-1]) == (3, f"hint: try this: {line}")
    ran = command(*said, *shlex.split(line), "--json")
    assert (ran.code, json.loads(ran.out)["sources"][0]["columns"]["answer"]) == (0, "Best Answer")


def test_a_line_repeats_what_the_user_has_said() -> None:
    record = {"q": "a", "the_answer": "b"}
    assert _hint(record, columns={"question": "q"}) == "try this: --column question=q --column answer=the_answer"
    assert _hint(record, columns={"prompt": "q"}) == "try this: --column prompt=q --column completion=the_answer"
    asked = {"my_question": "a", "the_answer": "b"}
    line = "try this: --column instruction=my_question --column output=the_answer"
    assert _hint(asked, schema="instruction") == line
    assert _hint({"dialogue": MESSAGES}, schema="conversations") == "try this: --column conversations=dialogue"


@pytest.mark.parametrize(
    "record",
    [
        {"input_en": "a", "input_fr": "b", "output_en": "c"},
        {"answer_id": "x", "prompt_id": "y"},
        {"question": "a"},
        {"score": 3, "meta": {}},
        {"context": "some words", "prompt_a": "a b", "prompt_b": "b c", "response": "few words"},
        {"article_text": "words", "title": "some words", "text_type": "a b"},
        {"token_ids": [1, 2, 3], "advantages": [0.1, 0.2, 0.3]},
        {"prompt": "a b", "prompt_len": 512},
        {"question\n\x1b[31m": "a", "answer": "b"},
        {"question" + "x" * 200: "a", "answer": "b"},
        {"": "some words"},
        {"answer": 3, "question_text": "b"},
    ],
)
def test_without_a_good_suggestion_the_hint_says_how_to_name_a_schema_and_where_they_are(
    record: dict[str, Any],
) -> None:
    with pytest.raises(DataError) as caught:
        detect([record, record])
    assert len(caught.value.message) < 250
    assert "try this" not in caught.value.hint
    assert "--format NAME" in caught.value.hint
    assert "--column ROLE=KEY" in caught.value.hint
    assert caught.value.hint.endswith("`chunkplan analyze --help` lists the schemas")


def test_what_is_suggested_fits_most_of_the_records() -> None:
    good, bad = {"user_text": "a", "reply_text": "b"}, {"user_text": 1, "reply_text": 2}
    assert _hint(good, good, bad) == "try this: --column question=user_text --column answer=reply_text"
    assert "try this" not in _hint(good, bad, bad)


def test_the_message_names_the_schema_that_is_closest_and_no_other() -> None:
    """That of the line to type, else the one most of whose keys are there."""
    counts = "no schema fits the keys of the records: `{}` in 1 of 1"
    assert _found({"Body": "a b"}) == counts.format("Body") + "; closest is text (`text`)"
    assert (
        _found({"prompt": "a"})
        == counts.format("prompt") + "; closest is prompt+completion (`prompt` and `completion`)"
    )
    assert (
        _found({"solution": "a"})
        == counts.format("solution") + "; closest is question+answer (`problem` and `solution`)"
    )
    assert _found({"foo": 3}) == counts.format("foo")


def test_what_was_said_already_may_be_repeated(command: Run) -> None:
    """A line that repeats it works beside it and in its place; two different keys of a role do not."""
    Path("x.jsonl").write_text('{"q_text": "a", "gold_answer": "b"}\n')
    said = ("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--column", "question=q_text")
    pasted = shlex.split(command(*said).err.partition("try this: ")[2])
    assert command(*said, *pasted).code == 0
    assert command(*said[:4], *pasted).code == 0
    assert "two columns for the role question" in command(*said, "--column", "question=gold_answer").err


def test_a_key_that_is_not_there_is_replaced_by_one_that_is(command: Run) -> None:
    Path("x.jsonl").write_text('{"prompt": "a", "canonical_solution": "b"}\n')
    said = ("analyze", "x.jsonl", "--tokenizer", TOKENIZER, "--column", "completion=answer")
    ran = command(*said)
    assert "no record has the key `answer` of --column completion=answer; found: `prompt` in 1 of 1" in ran.err
    assert command(*said[:4], *shlex.split(ran.err.partition("in place of it, try this: ")[2])).code == 0


def test_records_that_are_no_records_are_named() -> None:
    assert "`messages`" in _hint(*MESSAGES)
    assert "one message" in _hint(*MESSAGES)
    assert _hint({"version": 1, "data": [{"text": "a"}] * 5}) == (
        "`data` is a list of 5 objects: write these as the records"
    )

    assert _hint({"data": [{"text": "a"}]}) == "`data` is a list of 1 object: write these as the records"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("keys", "roles"),
    [(("speaker", "text"), ("user", "bot")), (("role", "text"), ("user", "bot")), (("by", "body"), ("Human", "AI"))],
)
def test_messages_of_other_keys_are_never_to_be_written_as_records(
    count: int, keys: tuple[str, str], roles: tuple[str, str]
) -> None:
    """They would be texts, and all that the user says be trained."""
    chat = [dict(zip(keys, turn, strict=True)) for turn in zip(roles, ("hi", "yo"), strict=True)]
    assert _hint(*[{"chat": chat, "n": 1}] * count) == (
        f"`chat` is a conversation whose messages have `{keys[0]}` and `{keys[1]}`: "
        "name these keys `role` and `content`, and the list `messages`; "
        f"or say so: --column messages=chat --column role={keys[0]},content={keys[1]}"
    )


def test_messages_without_an_answer_are_not_suggested() -> None:
    prompt = MESSAGES[:1]
    hint = _hint({"prompt": prompt, "answer": "yo"})
    assert hint == (
        "`prompt` has no answer: add `answer` to its messages as one with the `role` assistant, "
        "and name the list `messages`"
    )
    assert _hint({"prompt": prompt}).endswith("and one has to be the assistant's")


def test_a_format_that_is_not_that_of_the_records_is_to_be_another(command: Run) -> None:
    Path("x.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    said = ("analyze", "x.jsonl", "--tokenizer", TOKENIZER)
    for schema in ("text", "conversations"):
        hint = command(*said, "--format", schema).err.partition("hint: ")[2]
        assert hint == "in place of it, try this: --format messages\n"
    assert command(*said, "--format", "messages").code == 0
    Path("y.jsonl").write_text('{"text": "some words"}\n')
    hint = command(*said, "y.jsonl", "--format", "text").err.partition("try this: ")[2]
    assert hint == "--format x.jsonl=messages\n"
    assert command(*said, "y.jsonl", "--format", "text", *shlex.split(hint)).code == 0


def test_a_message_without_content_is_named_with_the_keys_that_it_has() -> None:
    layout = detect([{"messages": [{"role": "user", "text": "hi"}]}])
    with pytest.raises(DataError, match=r"`messages\[0\].content` is missing .*; found the keys `role`, `text`"):
        parse(layout, {"messages": [{"role": "user", "text": "hi"}]})


def _found(record: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        detect([record])
    return caught.value.message


def test_a_hint_of_a_system_text_beside_a_prompt_names_keys_only_where_these_are_all() -> None:
    record = {"prompt": "a", "completion": "b", "system": "S", "label": True}
    for more, has_keys in (({}, True), ({"id": 7}, True), ({"notes": "c"}, False)):
        with pytest.raises(DataError) as caught:
            parse(detect([record]), {**record, **more})
        assert ("--column question=prompt --column answer=completion" in caught.value.hint) == has_keys


#: A key, what records have there, and what of that has to be trained.
CONTENT = {
    "article": "art one",
    "Highlights": "hi two",
    "summary_text": "sum three",
    "title": "ti four",
    "body": "bo five",
    "premise": "pre six",
    "hypothesis": "hyp seven",
    "passage": "pas eight",
    "my question": "que nine",
    "inquiry": "inq ten",
    "options": ["opt eleven", "opt twelve"],
    "the_answer": "ans thirteen",
    "gold_answer": "gol fourteen",
    "reply": "rep fifteen",
    "sys": "sys sixteen",
    "system_prompt": "spr seventeen",
    "ctx": "ctx eighteen",
    "instruction_text": "ins nineteen",
    "source": "sou twenty words",
    "translation": {"en": "eng twentyone", "de": "deu twentytwo"},
    "hist": [["his twentythree", "his twentyfour"]],
    "talk": [{"role": "user", "content": "tal twentyfive"}, {"role": "assistant", "content": "tal twentysix"}],
    "dialog": [{"speaker": "usr", "utterance": "dia twentyseven"}, {"speaker": "bot", "utterance": "dia twentyeight"}],
    "dialog_json": '[{"from": "human", "value": "jso twentynine"}, {"from": "gpt", "value": "jso thirty"}]',
    "my_label": 1,
    "is_good": True,
    "trained": [0, 1],
}
ABOUT = {"id": "x 1", "lang": "en", "source_url": "http://a b", "created_at": "some day", "n_words": 3, "note": " "}

#: Two ways to read the same, of which one is to be chosen, and one way.
PASTED = re.compile(r"(?:try|say which)(?: this)?: (.*)")


def _texts(value: Any) -> list[str]:
    """The words of two parts in a value, which are in no other."""
    return re.findall(r"\b[a-z]{2,3} [a-z]+", json.dumps(value)) or [f"not text: {value}"]


def _check_nothing_is_lost(keys: Sequence[str], command: Run) -> bool:
    """That what is pasted trains all content, and what is not to be pasted names it; whether something was pasted."""
    record = {key: CONTENT[key] for key in keys} | ABOUT
    Path("x.jsonl").write_text(2 * (json.dumps(record) + "\n"))
    ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER)
    assert ran.code == 3, ran.err
    hint = ran.err.partition("\nhint: ")[2]
    lines = [line for found in PASTED.findall(hint) for line in found.split(", or ")]
    for line in lines:
        ran = command("analyze", "x.jsonl", "--tokenizer", TOKENIZER, *shlex.split(line))
        assert ran.code == 0, ran.err
        (trained, again) = marked_texts(load_analysis(Path("chunkplan-out/analysis")))
        assert trained == again
        whole = trained.replace("⟦", "").replace("⟧", "")
        assert [text for key in keys for text in _texts(CONTENT[key]) if text not in whole] == [], (keys, line)
    assert lines or len(keys) == 1 or [key for key in keys if f"`{key}`" not in hint] == [], (keys, hint)
    return bool(lines)


def test_a_line_reads_all_content_of_a_record_or_there_is_none_and_all_is_named(command: Run) -> None:
    pasted = [
        _check_nothing_is_lost(keys, command)
        for keys in (
            ("dialog", "sys"),
            ("my question", "ctx", "reply", "hist"),
            ("article", "Highlights"),
            ("premise", "hypothesis", "my_label"),
            ("passage", "my question", "options", "the_answer"),
            ("talk", "sys"),
            ("talk", "summary_text"),
            ("my question", "the_answer", "sys", "hist"),
            ("translation",),
            ("body", "is_good"),
            ("dialog_json", "title"),
        )
    ]
    assert pasted == [False, False, True, False, False, True, False, True, False, False, False]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
def test_no_content_of_any_record_is_lost(seed: int, command: Run) -> None:
    random = Random(seed)
    for _ in range(10):
        _check_nothing_is_lost(random.sample([*CONTENT], random.randint(1, 4)), command)
