"""`--train-turns`: which turns of a conversation are trained, in how many sequences, and how they are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chunkplan import load_analysis
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, Message
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.tokenizer import by_turns
from tests.support.command_line import Run
from tests.support.places import ROOT
from tests.support.template_cases import PLAIN, SPECIAL, THOUGHT, conversation, counting, source_of


def test_turns_are_trained_as_rendered_or_the_last_or_each_as_the_model_met_it() -> None:
    def say(turns: Any) -> list[list[str]]:
        return [counting("qwen3", one) for one in by_turns(THOUGHT, turns)]

    first, last = "<think>\nhm\n</think>\n\nHello.<|im_end|>", "<think>\nso\n</think>\n\nWell.<|im_end|>"
    assert say("rendered") == [["Hello.<|im_end|>", last]]
    assert say("last") == [[last]]
    assert say("each") == [[first], [last]]


def test_a_turn_goes_on_through_the_answers_of_tools() -> None:
    call = {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"x": "p"}}}]}
    messages = (
        *(Message("user", "Where?"), Message("assistant", "", None, call), Message("tool", "here")),
        *(
            Message("assistant", "Here."),
            Message("user", "Thanks."),
            Message("assistant", "Bye."),
            Message("user", "?"),
        ),
    )
    each = by_turns(Conversation(messages), "each")
    assert [len(one.messages) for one in each] == [4, 6]
    called = '<tool_call>\n{"name": "look", "arguments": {"x": "p"}}\n</tool_call><|im_end|>'
    assert counting("qwen3", each[0]) == [called, "<think>\n\n</think>\n\nHere.<|im_end|>"]
    [last] = by_turns(Conversation(messages), "last")
    assert (len(last.messages), counting("qwen2_5", last)) == (7, ["Bye.<|im_end|>"])


def test_messages_that_do_not_count_are_no_turn_of_their_own() -> None:
    said = conversation("a", "b", "c", "d")
    silent = Conversation(tuple(message._replace(loss=False) for message in said.messages))
    assert by_turns(silent, "each") == by_turns(silent, "last") == [silent]
    first = Conversation((*said.messages[:3], said.messages[3]._replace(loss=False)))
    assert [len(one.messages) for one in by_turns(first, "each")] == [2]
    assert counting("qwen2_5", by_turns(first, "last")[0]) == ["b<|im_end|>"]


SAID = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nWell."},
]


def test_each_turn_is_a_sequence_of_its_record_and_all_are_counted(command: Run, tmp_path: Path) -> None:
    lines = [{"messages": SAID}, {"messages": SAID[:2]}, {"messages": [{"role": "user", "content": " "}]}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "t.jinja").write_text(source_of("qwen3"))
    asked = ("analyze", "chat.jsonl", "--tokenizer", ROOT / "sample_data" / "tokenizer", "--chat-template", "t.jinja")
    assert (
        "trained of conversations: all that the assistant wrote, as rendered\n     (others: --train-turns last,"
        in command(*asked).err
    )
    ran = command(*asked, "--train-turns", "each", width=120)
    assert ran.code == 0, ran.err
    assert "3 records + 1 more turns = 3 sequences + 1 rejected" in ran.err
    assert "trained of conversations: every turn, each in a sequence of its own (--train-turns each)" in ran.err
    analysis = load_analysis(tmp_path / "chunkplan-out" / "analysis")
    assert analysis.options is not None and analysis.options.turns == "each"
    decode = load_tokenizer(ROOT / "sample_data" / "tokenizer").library.decode
    tokens = (analysis.tokens()(sequence) for sequence in range(3))
    first, last = "<think>\nhm\n</think>\n\nHello.<|im_end|>", "<think>\nso\n</think>\n\nWell.<|im_end|>"
    assert [decode(ids[target].tolist()) for ids, target in tokens] == [first, last, first]
    assert [analysis.place(sequence) for sequence in range(3)] == ["chat.jsonl:1", "chat.jsonl:1", "chat.jsonl:2"]
    assert command("validate", tmp_path / "chunkplan-out" / "analysis").code == 0


def test_a_turn_that_cannot_be_rendered_is_rejected_by_itself(command: Run, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for said in (SAID, SAID[:2])))
    refusing = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + source_of("qwen3")
    (tmp_path / "t.jinja").write_text(refusing)
    options = ("--chat-template", "t.jinja", "--train-turns", "each", "--on-error", "skip")
    ran = command("analyze", "chat.jsonl", "--tokenizer", ROOT / "sample_data" / "tokenizer", *options, width=120)
    assert "2 records + 1 more turns = 2 sequences + 1 rejected" in ran.err
    assert command("validate", tmp_path / "chunkplan-out" / "analysis").code == 0


def test_turns_that_are_too_long_are_rejected_one_by_one(command: Run, tmp_path: Path) -> None:
    """A conversation is longer at every turn: those that fit are kept."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": SAID}) + "\n")
    (tmp_path / "t.jinja").write_text(source_of("qwen3"))
    options = ("--chat-template", "t.jinja", "--train-turns", "each", "--max-length", "38", "--overlong", "drop")
    ran = command("analyze", "chat.jsonl", "--tokenizer", ROOT / "sample_data" / "tokenizer", *options, width=120)
    assert "1 record + 1 more turns = 1 sequence + 1 rejected" in ran.err, ran.err
    assert command("validate", tmp_path / "chunkplan-out" / "analysis").code == 0


def test_turns_are_trained_by_blocks_too_however_many_a_message_has() -> None:
    twice = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}<think>"
        "{% endgeneration %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
        "<|im_end|>{% endif %}\n{% endfor %}"
    )
    [last] = by_turns(PLAIN, "last")
    text, spans = ChatTemplate(twice, SPECIAL, "x").render(last)
    assert "".join(text[start:stop] for start, stop in spans) == "<think>Well.<|im_end|>"
