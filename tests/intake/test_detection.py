"""The layout of a source is found from its first records and what the user says, and never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from chunkplan.errors import DataError, UsageError
from chunkplan.intake.records import RecordError
from chunkplan.intake.schemas import SCHEMAS, detect

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("record", "schema"),
    [
        ({"messages": MESSAGES, "text": "a"}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}], "id": 1}, "conversations"),
        ({"prompt": "a", "completion": "b", "text": "ab"}, "prompt+completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "instruction"),
        ({"instruction": "a", "response": "b"}, "instruction"),
        ({"question": "a", "answer": "b"}, "question+answer"),
        ({"input_ids": [1], "length": 1}, "input_ids"),
        ({"text": "a b", "length": 3}, "text"),
        ({"prompt": "a", "text": "b"}, "text"),
        ({"length": 3}, "length"),
        ({"id": "doc-1", "num_tokens": 3}, "length"),
        ({"n_tokens": 3}, "length"),
        ({"token_count": 3, "source": "books"}, "length"),
    ],
)
def test_the_schema_that_says_most_is_detected(record: dict[str, Any], schema: str) -> None:
    layout = detect([record])
    assert layout.schema == schema
    assert layout.columns.keys() == SCHEMAS[schema].roles.keys()
    assert all(layout.columns[role] in record for role in SCHEMAS[schema].required)


def test_records_may_differ_in_other_keys() -> None:
    records: list[dict[str, Any]] = [
        {"text": "a"},
        {"text": "b", "url": "x"},
        {"text": "c", "meta": {}, "messages": None},
    ]
    assert detect(records).schema == "text"


def test_an_unknown_schema_shows_the_keys_found_with_counts_and_the_closest_schema() -> None:
    with pytest.raises(DataError) as caught:
        detect([{"body": "a"}, {"body": "b", "id": 1}])
    for word in ("`body` in 2 of 2", "`id` in 1 of 2", "closest is text (`text`)"):
        assert word in caught.value.message
    assert caught.value.hint == "try this: --column text=body"
    with pytest.raises(DataError, match="no schema fits") as caught:
        detect([{"a": 1, "b": {}}])
    assert "--format" in caught.value.hint
    assert "--column" in caught.value.hint


def test_records_of_different_schemas_are_no_source() -> None:
    with pytest.raises(DataError, match="different schemas: 2 text, 1 messages"):
        detect([{"text": "a"}, {"text": "b"}, {"messages": MESSAGES}])


def test_few_records_that_fit_no_schema_are_left_to_be_rejected_and_many_are_not() -> None:
    assert detect([{"text": "a"}, {"txt": "b"}]).schema == "text"
    with pytest.raises(DataError, match="no schema fits"):
        detect([{"text": "a"}, {"txt": "b"}, {"txt": "c"}])


@pytest.mark.parametrize(
    "record",
    [{"length": 3, "body": "some words"}, {"length": 3, "sentences": ["a"]}, {"num_tokens": 3, "turns": {"a": 1}}],
)
def test_a_length_beside_something_to_train_on_is_not_taken_for_all_there_is(record: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no schema fits"):
        detect([record])
    assert detect([record], schema="length").schema == "length"


def test_preference_pairs_of_another_schema_and_images_are_refused_by_name() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "messages": MESSAGES}
    assert detect([pair, pair]).schema == "preference"
    with pytest.raises(RecordError, match="preference pair"):
        detect([pair, pair], schema="messages")
    with pytest.raises(RecordError, match="`images`"):
        detect([{"messages": MESSAGES, "images": ["x"]}], schema="messages")
    with pytest.raises(DataError, match="different schemas: 1 preference, 1 text"):
        detect([pair, {"text": "a"}])


def test_a_named_schema_takes_the_keys_that_are_there() -> None:
    records = [{"text": "a", "question": "b", "answer": "c"}]
    assert detect(records).schema == "question+answer"
    assert detect(records, schema="text").columns == {"text": "text"}
    with pytest.raises(DataError, match="--format messages expects `messages` or `contents`"):
        detect(records, schema="messages")


def test_named_columns_alone_decide_the_schema() -> None:
    layout = detect([{"body": "a", "messages": MESSAGES}], columns={"text": "body"})
    assert (layout.schema, layout.columns) == ("text", {"text": "body"})
    layout = detect([{"prompt": "a", "canonical_solution": "b"}], columns={"completion": "canonical_solution"})
    assert layout.schema == "prompt+completion"
    assert layout.columns["prompt"] == "prompt"
    assert detect([{"q": 1, "size": 3}], columns={"length": "size"}).schema == "length"


def test_roles_and_keys_that_are_not_there_are_named() -> None:
    with pytest.raises(UsageError, match="no schema has such a role") as caught:
        detect([{"text": "a"}], columns={"txt": "text"})
    assert "completion" in caught.value.hint
    with pytest.raises(UsageError, match="text has no such role") as caught:
        detect([{"text": "a"}], schema="text", columns={"prompt": "text"})
    assert caught.value.hint == "roles are text"
    with pytest.raises(UsageError, match="no schema has all of the roles"):
        detect([{"text": "a"}], columns={"text": "text", "prompt": "text"})
    with pytest.raises(UsageError, match="there is no such schema") as caught:
        detect([{"text": "a"}], schema="texts")
    assert "prompt+completion" in caught.value.hint
    with pytest.raises(DataError, match="no record has the key `body` of --column text=body"):
        detect([{"text": "a"}], columns={"text": "body"})


def test_without_records_only_a_named_schema_is_known() -> None:
    assert detect([], schema="text").columns == {"text": "text"}
    with pytest.raises(DataError, match="no record can be read"):
        detect([])
