"""The prompt of a preference pair, which may be what both of its answers begin with.

The shapes are those that TRL documents (docs/source/dataset_formats.md): a prompt of its own, or none, with texts or
lists of messages; and those of LLaMA-Factory, where an answer is one message behind `conversations`. Where there is no
prompt, it is found as by `extract_prompt` of trl/data_utils.py: the turns or the characters that both answers share, of
which one is left to each. Behind a prompt that is there and empty all of an answer counts, as there.
"""

from __future__ import annotations

from itertools import takewhile
from operator import eq
from typing import Any

from chunkplan.intake.records import JsonObject
from chunkplan.intake.schemas.fields import is_blank, json_type, wrong
from chunkplan.intake.schemas.messages import objects_in

_NO_PROMPT = "give the prompt under `prompt`, or as the messages that both answers begin with"


def split_pair(record: JsonObject, prompt_key: str, names: tuple[str, str]) -> tuple[Any, list[Any]]:
    """The prompt of a pair and its two answers behind it, found under `names`: all texts, or all lists of messages.

    Raises RecordError where one is missing or neither, or where nothing is the prompt.
    """
    for name in names:
        if record.get(name) is None:
            found = "null" if name in record else "missing"
            wrong(
                f"`{name}` is {found}, expected an answer: a pair has two",
                "give both answers, or leave this record out",
            )
    answers = [_as_messages(record[name]) for name in names]
    kinds = {type(answer) for answer in answers}
    if kinds not in ({str}, {list}):
        found = " and ".join(f"`{name}` is {json_type(record[name])}" for name in names)
        wrong(f"{found}, expected two strings or two lists of messages")
    prompt = _as_messages(record.get(prompt_key))
    if prompt is None or prompt == [] or (prompt == "" and kinds == {list}):
        return (_split_texts if kinds == {str} else _split_messages)(answers, names)
    if isinstance(prompt, list) and kinds == {str}:
        return prompt, [[{"role": "assistant", "content": answer}] for answer in answers]
    if kinds == {list}:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        begun = _num_shared(*answers)
        if begun and _says(answers[0][begun - 1]) == _says(asked[-1]) is not None:  # the answers repeat the prompt
            return _split_messages(answers, names)
        return asked, answers
    return prompt, answers


def _as_messages(value: Any) -> Any:
    """One message as a list, and a list that is written as JSON as what it is; all else as it stands."""
    return [value] if isinstance(value, dict) else objects_in(value) or value


def _split_texts(answers: list[Any], names: tuple[str, str]) -> tuple[str, list[str]]:
    """The characters that both texts begin with, without a space at their end, and what follows in each.

    Of a text that the other one begins with, the last character is its answer.
    """
    chosen, rejected = answers
    num_shared = sum(takewhile(bool, map(eq, chosen, rejected)))
    is_prefix = num_shared == min(len(chosen), len(rejected))
    shared = chosen[: num_shared - 1] if is_prefix else chosen[:num_shared].removesuffix(" ")
    if chosen == rejected or is_blank(shared):
        found = "are the same text" if chosen == rejected else "begin differently"
        wrong(f"`{names[0]}` and `{names[1]}` {found}, so that nothing says what is the prompt", _NO_PROMPT)
    return shared, [chosen[len(shared) :], rejected[len(shared) :]]


def _split_messages(answers: list[Any], names: tuple[str, str]) -> tuple[list[Any], list[Any]]:
    """The messages that both lists begin with, of which at least one is left to each, and those that follow."""
    chosen, rejected = answers
    num_shared = _num_shared(chosen, rejected)
    if not num_shared:
        wrong(f"`{names[0]}` and `{names[1]}` share no message, so that nothing says what is the prompt", _NO_PROMPT)
    return chosen[:num_shared], [chosen[num_shared:], rejected[num_shared:]]


def _num_shared(chosen: list[Any], rejected: list[Any]) -> int:
    most = max(min(len(chosen), len(rejected)) - 1, 0)
    return next((index for index in range(most) if chosen[index] != rejected[index]), most)


def _says(message: Any) -> Any:
    """The text of a message, without spaces around it; None where it is none."""
    said = message.get("content", message.get("value")) if isinstance(message, dict) else None
    return said.strip() if isinstance(said, str) else None
