"""In chat templates of real models, what counts is what the assistant wrote, in the rendering of transformers."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from chunkplan import load_analysis
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.records import Conversation, Message
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.turns import by_turns
from tests.support.command_line import Run
from tests.support.places import ROOT

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

#: The tokens that end a turn, of all these models; of GLM those that begin the turn of somebody else.
ENDS = {
    *("</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>", "<|eot|>"),
    *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<|user|>", "<|observation|>", "<|system|>"),
}

#: They take lists of parts alone.
PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
NAMES = [name for name in NAMES if name not in PARTS_ONLY]

#: Templates whose twins for training render the same, with blocks around what the assistant wrote.
TWINS = [name for name in NAMES if (TEMPLATES / f"{name}_training.jinja").exists()]


@cache
def source_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), SPECIAL, name, ends=ENDS)


def conversation(*said: str, system: bool = False) -> Conversation:
    """Texts of the user and of the assistant by turns."""
    first = (Message("system", "Be kind."),) if system else ()
    return Conversation((*first, *(Message(("user", "assistant")[at % 2], text) for at, text in enumerate(said))))


def counting(name: str, asked: Conversation) -> list[str]:
    text, spans = template(name).render(asked)
    assert text == in_transformers(source_of(name), asked)[0]
    return [text[start:stop] for start, stop in spans]


def in_transformers(source: str, asked: Conversation) -> tuple[str, list[str]]:
    """The rendering, and what stands in generation blocks."""
    [text], [spans] = render_jinja_template(
        [[message.for_template() for message in asked.messages]],
        chat_template=source,
        return_assistant_tokens_mask=True,
        **SPECIAL,
    )
    return str(text), [text[start:stop] for start, stop in spans]


PLAIN = conversation("Hi?", "Hello.", "And?", "Well.")
#: A header that is a prefix of what follows, and contents like headers.
ODD = conversation("<b>", "<b>x</b>", "\n", "<think", "a", "assistant\n")
THOUGHT = conversation("Hi?", "<think>\nhm\n</think>\n\nHello.", "And?", "<think>\nso\n</think>\n\nWell.")

#: Looked at by hand: template -> what counts of PLAIN, and of THOUGHT.
TABLE: dict[str, tuple[list[str], list[str]]] = {
    "qwen2_5": (
        ["Hello.<|im_end|>", "Well.<|im_end|>"],
        ["<think>\nhm\n</think>\n\nHello.<|im_end|>", "<think>\nso\n</think>\n\nWell.<|im_end|>"],
    ),
    "qwen3": (
        ["Hello.<|im_end|>", "<think>\n\n</think>\n\nWell.<|im_end|>"],
        ["Hello.<|im_end|>", "<think>\nso\n</think>\n\nWell.<|im_end|>"],
    ),
    "qwen3_5_think": (  # its generation prompt ends with <think> and a line end
        ["Hello.<|im_end|>", "\n</think>\n\nWell.<|im_end|>"],
        ["Hello.<|im_end|>", "so\n</think>\n\nWell.<|im_end|>"],
    ),
    "gptoss": (
        ["<|channel|>final<|message|>Hello.<|end|>", "<|channel|>final<|message|>Well.<|return|>"],
        [
            "<|channel|>final<|message|><think>\nhm\n</think>\n\nHello.<|end|>",
            "<|channel|>final<|message|><think>\nso\n</think>\n\nWell.<|return|>",
        ],
    ),
    "glm4moe": (  # <|user|> is what ends a turn; behind the last one there is none
        ["\n<think></think>\nHello.<|user|>", "\n<think></think>\nWell."],
        ["\n<think></think>\nHello.<|user|>", "\n<think>so</think>\nWell."],
    ),
    "deepseekv3": (
        ["Hello.<｜end▁of▁sentence｜>", "Well.<｜end▁of▁sentence｜>"],
        ["\n\nHello.<｜end▁of▁sentence｜>", "\n\nWell.<｜end▁of▁sentence｜>"],
    ),
    "gemma4_v5": (
        ["Hello.<turn|>", "Well.<turn|>"],
        ["<think>\nhm\n</think>\n\nHello.<turn|>", "<think>\nso\n</think>\n\nWell.<turn|>"],
    ),
    "llama3_1": (
        ["Hello.<|eot_id|>", "Well.<|eot_id|>"],
        ["<think>\nhm\n</think>\n\nHello.<|eot_id|>", "<think>\nso\n</think>\n\nWell.<|eot_id|>"],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_what_counts_is_what_was_looked_at_by_hand(name: str) -> None:
    plain, thought = TABLE[name]
    assert counting(name, PLAIN) == plain
    assert counting(name, THOUGHT) == thought


#: The twins of these count the header, too, which nobody writes: it is the generation prompt.
WITH_HEADER = {
    "gptoss": "<|start|>assistant",
    "muse_glimmer": "<|start|>assistant",
    "deepseekv3": "<｜Assistant｜>",
    "deepseek_r1_distill": "<｜Assistant｜>",
    "qwen2_5": "\n",
}


def written(block: str) -> str:
    """Without line ends behind it, and without thoughts that are empty or that the generation prompt begins."""
    return re.sub(r"^(<think>)?\s*(</think>)?\s*", "", block).rstrip("\n")


@pytest.mark.parametrize("name", TWINS)
def test_what_counts_is_the_mask_of_transformers_in_the_twin_for_training(name: str) -> None:
    """But for what a model does not write: headers, line ends behind turns, a `<think>` of the generation prompt."""
    twin = (TEMPLATES / f"{name}_training.jinja").read_text(encoding="utf-8")
    compared = 0
    for asked in (PLAIN, THOUGHT, ODD, conversation("Hi?", "Hello.", system=name != "gemma")):
        text, blocks = in_transformers(twin, asked)
        if text != in_transformers(source_of(name), asked)[0]:
            continue  # the twin renders earlier turns as it renders the last one
        compared += 1
        expected = "".join(written(block.removeprefix(WITH_HEADER.get(name, ""))) for block in blocks)
        assert "".join(map(written, counting(name, asked))) == expected
    assert compared or name in ("glm4moe", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6")


TEXTS = st.sampled_from(
    [
        "Hello.",
        " a\n",
        "<b>x</b>",
        "<think>\nhm\n</think>\n\nSo.",
        "日本",
        "```\ncode\n```",
        "assistant\n",
        "1",
        "Hello.",
    ]
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(said=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5), reasons=st.booleans())
def test_every_conversation_is_kept(name: str, said: list[tuple[str, str]], reasons: bool) -> None:
    """None that the template itself renders is refused; no word of the user counts, all of the last answer does."""
    messages = []
    for at, (asked, answer) in enumerate(said):
        fields = {"reasoning_content": f"thought{at}"} if reasons else {}
        messages += [Message("user", f"ask{at} {asked}"), Message("assistant", f"{answer} answer{at}", None, fields)]
    full = Conversation(tuple(messages))
    try:
        in_transformers(source_of(name), full)
    except Exception:
        with pytest.raises(RecordError):
            template(name).render(full)
        return
    counted = "".join(counting(name, full))
    assert not re.search(r"ask\d", counted)
    assert [f"answer{at}" in counted for at in range(len(said))] == [True] * len(said)


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
        "trained of conversations: all that the assistant wrote, as rendered\n     (others: --turns last,"
        in command(*asked).err
    )
    ran = command(*asked, "--turns", "each", width=120)
    assert ran.code == 0, ran.err
    assert "3 records + 1 more turns = 3 sequences + 1 rejected" in ran.err
    assert "trained of conversations: every turn, each in a sequence of its own (--turns each)" in ran.err
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
    options = ("--chat-template", "t.jinja", "--turns", "each", "--on-error", "skip")
    ran = command("analyze", "chat.jsonl", "--tokenizer", ROOT / "sample_data" / "tokenizer", *options, width=120)
    assert "2 records + 1 more turns = 2 sequences + 1 rejected" in ran.err
    assert command("validate", tmp_path / "chunkplan-out" / "analysis").code == 0


def test_turns_that_are_too_long_are_rejected_one_by_one(command: Run, tmp_path: Path) -> None:
    """A conversation is longer at every turn: those that fit are kept."""
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": SAID}) + "\n")
    (tmp_path / "t.jinja").write_text(source_of("qwen3"))
    options = ("--chat-template", "t.jinja", "--turns", "each", "--max-length", "38", "--long", "drop")
    ran = command("analyze", "chat.jsonl", "--tokenizer", ROOT / "sample_data" / "tokenizer", *options, width=120)
    assert "1 record + 1 more turns = 1 sequences + 1 rejected" in ran.err, ran.err
    assert command("validate", tmp_path / "chunkplan-out" / "analysis").code == 0


@pytest.mark.parametrize(
    ("name", "arguments"), [("deepseekv3", {"place": "hérе"}), ("gemma4_v5", '{"place": "hérе"}'), ("qwen3", {"a": 1})]
)
def test_arguments_of_calls_are_given_in_the_form_that_a_template_does_not_raise_at(name: str, arguments: Any) -> None:
    """Objects to one that writes a string into the text, JSON to one that walks over an object."""

    def asked(form: Any) -> Conversation:
        call = {"type": "function", "function": {"name": "look", "arguments": form}}
        messages = (Message("user", "Where?"), Message("assistant", "", None, {"tool_calls": [call]}))
        return Conversation((*messages, Message("tool", "here", None, {"name": "look"}), Message("assistant", "Here.")))

    other = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else json.loads(arguments)
    taken = arguments if name == "qwen3" else other
    text, spans = template(name).render(asked(arguments))
    assert text == in_transformers(source_of(name), asked(taken))[0]
    assert "look" in "".join(text[start:stop] for start, stop in spans)


def test_a_message_without_a_header_counts_from_its_beginning() -> None:
    """DeepSeek-V3's template puts out the header of the first call only; of one like a header nothing is guessed."""
    call = {"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": "{}"}}]}
    turn = (Message("user", "Where?"), Message("assistant", "", None, call), Message("tool", "here"))
    messages = (*turn, Message("assistant", "Here."), *turn, Message("assistant", "There."))
    called = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert counting("deepseekv3", Conversation(messages)) == [
        f"<｜tool▁calls▁begin｜>{called}<｜end▁of▁sentence｜>",
        "Here.<｜end▁of▁sentence｜>",
        f"\n{called}<｜end▁of▁sentence｜>",
        "There.<｜end▁of▁sentence｜>",
    ]
    numbered = source_of("qwen2_5_vl").replace("{{ message['role'] }}", "{{ loop.index }}{{ message['role'] }}")
    assert numbered != source_of("qwen2_5_vl")
    with pytest.raises(RecordError, match=r"begins `messages\[1\]` neither with its generation prompt nor"):
        ChatTemplate(numbered, SPECIAL, "x", ends=ENDS).render(PLAIN)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_template_that_leaves_out_what_is_said_is_named(name: str) -> None:
    with pytest.raises(RecordError, match=r"leaves out what the assistant says in `messages\[1\]`"):
        template(name).render(PLAIN)
    parts = Conversation(tuple(message._replace(parts=(message.content or "",)) for message in PLAIN.messages))
    text, spans = template(name).render(parts)
    assert [text[start:stop] for start, stop in spans] == [" Hello.<end_of_utterance>", " Well.<end_of_utterance>"]


BODY = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASK = "{{ '<|im_start|>assistant\\n' }}"
WHEN_ASKED = "{% if add_generation_prompt %}" + ASK + "{% endif %}"

#: What a hostile reader came up with: template -> what counts.
HOSTILE = {
    "a prompt that is always put out": (
        "{% for m in messages %}" + BODY + "{% endfor %}" + ASK,
        ["Hello.<|im_end|>", "Well.<|im_end|>"],
    ),
    "an end that is no special token": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n<|over|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ["Hello.\n<|over|>", "Well.\n<|over|>"],
    ),
    "the next message within a message": (
        "{% for m in messages %}" + BODY + "{% if m.role == 'assistant' and loop.nextitem is defined %}"
        "{{ loop.nextitem.content | upper }} asked{% endif %}{% endfor %}" + WHEN_ASKED,
        ["Hello.<|im_end|>", "Well.<|im_end|>"],
    ),
    "a longer header for some": (
        "{% set think = '<think>\n\n</think>\n\n' if 'Hi?' in messages[0].content else '' %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}<|im_start|>assistant\n{{ think }}{{ m.content }}<|im_end|>\n{% else %}"
        + BODY
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + ASK
        + "{{ think }}{% endif %}",
        ["Hello.<|im_end|>", "Well.<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_neither_headers_nor_words_of_others_ever_count(name: str) -> None:
    source, expected = HOSTILE[name]
    asked = conversation("Hi?", "Hello.", "And what now?", "Well.")
    read = ChatTemplate(source, SPECIAL, "x", ends={"<|im_end|>", "<|im_start|>", "<|user|>", "<|assistant|>"})
    text, spans = read.render(asked)
    assert [text[start:stop] for start, stop in spans] == expected


def test_what_is_proved_without_tools_is_proved_again_with_them() -> None:
    condition = "{% if tools and m.role == 'assistant' and loop.nextitem is defined %}"
    next_one = condition + "{{ loop.nextitem.content }}{% endif %}"
    source = "{% for m in messages %}" + BODY + next_one + "{% endfor %}" + WHEN_ASKED
    read = ChatTemplate(source, SPECIAL, "x", ends={"<|im_end|>"})
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        text, spans = read.render(Conversation(PLAIN.messages, tools))
        assert [text[start:stop] for start, stop in spans] == ["Hello.<|im_end|>", "Well.<|im_end|>"]


def test_what_a_neighbour_says_never_counts_whatever_brings_it_there() -> None:
    """A template that looks at texts: what was proved of other texts does not hold."""
    trap = "{% if 'trap' in m.content %}{{ loop.nextitem.content }}{% endif %}"
    source = "{% for m in messages %}{{ loop.length }}" + BODY + trap + "{% endfor %}" + WHEN_ASKED
    read = ChatTemplate(source.replace("{{ loop.length }}", ""), SPECIAL, "x", ends={"<|im_end|>"})
    with pytest.raises(RecordError, match=r"puts what `messages\[2\]` says into `messages\[1\]`"):
        read.render(conversation("Hi?", "A trap.", "And what now?", "Well."))


def test_the_header_of_a_second_answer_in_a_row_does_not_count() -> None:
    messages = (*PLAIN.messages[:2], Message("assistant", "More."), *PLAIN.messages[2:])
    assert counting("glm4moe", Conversation(messages)) == [
        "\n<think></think>\nHello.",
        "\n<think></think>\nMore.<|user|>",
        "\n<think></think>\nWell.",
    ]


def test_the_end_of_the_text_counts_where_it_is_the_beginning_too() -> None:
    both = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{{ eos_token }}"
    text, spans = ChatTemplate(source, both, "x").render(PLAIN)
    assert [text[start:stop] for start, stop in spans][-1] == "Well.\n\n<|endoftext|>"


def test_turns_are_trained_by_blocks_too_however_many_a_message_has() -> None:
    twice = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}<think>"
        "{% endgeneration %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}"
        "<|im_end|>{% endif %}\n{% endfor %}"
    )
    [last] = by_turns(PLAIN, "last")
    text, spans = ChatTemplate(twice, SPECIAL, "x").render(last)
    assert "".join(text[start:stop] for start, stop in spans) == "<think>Well.<|im_end|>"
