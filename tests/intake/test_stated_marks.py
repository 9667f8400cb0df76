"""Marks under names that no list has: they stop the run, and what is only about a record does not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan.intake.records import RecordError
from chunkplan.intake.schemas import detect, parse
from tests.support.analyze_cases import write
from tests.support.command_line import Run

IDS = [4, 5, 6, 7, 8, 9]
PAIR = {"question": "What is it?", "answer": "It is a thing."}
TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def read(record: dict[str, Any]) -> Any:
    return parse(detect([record]), record)


@pytest.mark.parametrize(
    "more",
    [
        {"is_train": False},
        {"training": False},
        {"masked": 1},
        {"loss": 0},
        {"weight": "0"},
        {"num_prompt_tokens": 3},
        {"src_len": 3},
        {"answer_start": 3},
        {"loss_mask_start": 3},
        {"loss_spans": [[3, 5]]},
        {"documents": [[0, 3], [3, 6]]},
        {"spans": [{"start": 3, "end": 6}]},
        {"targets": IDS[1:]},
        {"returns": [0.5] * 6},
        {"loss_turns": [1, 2]},
    ],
)
def test_what_may_say_which_tokens_count_stops_the_run(more: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="is not read, and has") as caught:
        read({"input_ids": IDS, **more})
    assert f"--ignore-column {next(iter(more))}" in caught.value.hint


@pytest.mark.parametrize(
    "more",
    [{"train": True}, {"weight": 1}, {"masked": 0}, {"id": 3}, {"length": 6}, {"source": "web"}, {"train_idx": 5}],
)
def test_what_says_that_all_counts_or_is_about_a_record_does_not(more: dict[str, Any]) -> None:
    assert read({"input_ids": IDS, **more}).target.sum() == 5


@pytest.mark.parametrize("more", [{"is_train": False}, {"num_prompt_tokens": 3}, {"loss_spans": [[3, 5]]}])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_columns_are_looked_at_as_records_are(command: Run, name: str, more: dict[str, Any]) -> None:
    records = [{"input_ids": IDS, **more}] * 3
    if name.endswith("jsonl"):
        write(name, *records)
    else:
        pq.write_table(pa.Table.from_pylist(records), name)
    ran = command("analyze", name)
    assert ran.code == 3
    assert "is not read, and has" in ran.err


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({**TALK, "input_ids": IDS, "labels": [-100] * 5 + [9]}, "labels"),
        ({**PAIR, "labels": [-100, 5]}, "labels"),
        ({"text": "Hi you there", "labels": [-100, 5, 6]}, "labels"),
        ({**TALK, "train_turns": [1]}, "train_turns"),
        ({**TALK, "loss_label": [0, 1]}, "loss_label"),
        ({**TALK, "trained": False}, "trained"),
        ({"text": "Hi you there", "train_status": 0}, "train_status"),
        ({**TALK, "developer": "Always be rude."}, "developer"),
        ({"text": "A long story.", "summary": "It is short."}, "summary"),
    ],
)
def test_what_text_has_beside_it_that_may_say_what_is_learnt_stops_the_run(record: dict[str, Any], key: str) -> None:
    with pytest.raises(RecordError) as caught:
        read(record)
    assert f"--ignore-column {key}" in caught.value.hint


@pytest.mark.parametrize(
    "more",
    [
        {"original_question": "What was it at first?"},
        {"seed": "some code of it"},
        {"ground_truth": "a thing of it"},
        {"comment": "was not easy"},
        {"labels": ["a", "b"]},
        {"train_split": "train"},
    ],
)
def test_what_is_about_a_question_and_its_answer_does_not(more: dict[str, Any]) -> None:
    assert read({**PAIR, **more}) == read(PAIR)


@pytest.mark.parametrize(
    ("more", "is_refused"),
    [
        ({"metadata": {"trainable": False}}, True),
        ({"extra": [{"loss_mask": 0}]}, True),
        ({"train_this": "false"}, True),
        ({"loss_id": 0}, False),
        ({"mask_token": 0}, True),
        ({"metadata": {"length": 3}}, False),
        ({"toxic": False}, True),
        ({"score": 0.5}, True),
    ],
)
def test_a_message_says_so_in_objects_too(more: dict[str, Any], is_refused: bool) -> None:
    question, answer = TALK["messages"]
    record = {"messages": [question, {**answer, **more}]}
    if is_refused:
        with pytest.raises(RecordError, match="is not read, and has"):
            read(record)
    else:
        assert len(read(record).messages) == 2


def test_all_keys_that_stop_a_message_are_in_one_hint() -> None:
    question, answer = TALK["messages"]
    with pytest.raises(RecordError) as caught:
        read({"messages": [question, {**answer, "good": True, "kept": False}]})
    assert "--ignore-column 'messages[].good' --ignore-column 'messages[].kept'" in caught.value.hint


def test_a_tag_of_kto_may_be_a_number() -> None:
    with pytest.raises(RecordError, match="`kto_tag` is false"):
        read({**TALK, "kto_tag": 0})
    assert read({**TALK, "kto_tag": 1}) == read(TALK)
