"""In chat templates of real models, what counts is what the assistant wrote, in the rendering of transformers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan.intake.records import Conversation, Message, RecordError
from chunkplan.intake.template import ChatTemplate
from tests.support.template_cases import (
    ENDS,
    PLAIN,
    SPECIAL,
    TEMPLATES,
    THOUGHT,
    conversation,
    counting,
    in_transformers,
    source_of,
    template,
)

#: They take lists of parts alone.
PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")


NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
NAMES = [name for name in NAMES if name not in PARTS_ONLY]


#: Templates whose twins for training render the same, with blocks around what the assistant wrote.
TWINS = [name for name in NAMES if (TEMPLATES / f"{name}_training.jinja").exists()]


#: A header that is a prefix of what follows, and contents like headers.
ODD = conversation("<b>", "<b>x</b>", "\n", "<think", "a", "assistant\n")


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


#: Templates that put the name of who speaks into the header, as ChatML has it and as Kimi-K2's template has it; and one
#: of which the whole header is that name. Each with its header of a message by Bob.
NAMED = {
    "<|im_start|>{{ m.role }}{{ ' name=' + m.name if m.name }}\n": "<|im_start|>assistant name=Bob\n",
    "<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>": "<|im_assistant|>Bob<|im_middle|>",
    "{{ m.name or m.role }}: ": "Bob: ",
}


@pytest.mark.parametrize("header", NAMED)
@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_name_of_who_speaks_is_part_of_the_header(header: str, is_fixed: bool) -> None:
    prompt = header.replace("m.role", "'assistant'").replace("m.name", "none")
    asking = "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    body = "{% for m in messages %}" + header + "{{ m.content }}<|im_end|>\n"
    end = "{% endfor %}" + asking if is_fixed else "{% if loop.last %}" + asking + "{% endif %}{% endfor %}"
    read = ChatTemplate(body + end, SPECIAL, "x", ends=ENDS)
    named = [
        Message(message.role, message.content, None, {"name": name} if name else {})
        for message, name in zip(PLAIN.messages, ("Ann", "Bob", None, None), strict=True)
    ]
    for messages in (named, named[1:], [*named[:3], named[1]]):
        text, spans = read.render(Conversation(tuple(messages)))
        assert f"{NAMED[header]}Hello." in text
        said = [f"{message.content}<|im_end|>" for message in messages if message.role == "assistant"]
        assert [text[start:stop] for start, stop in spans] == said


def test_a_name_that_changes_more_than_the_header_is_refused_by_its_message() -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.name }}\n{{ m.content }}{{ m.name }}<|im_end|>{% endfor %}"
    )
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    asked = Conversation((PLAIN.messages[0], Message("assistant", "Hello.", None, {"name": "Bob"})))
    with pytest.raises(RecordError, match=r"begins `messages\[1\]` neither with its generation prompt nor"):
        ChatTemplate(source, SPECIAL, "x", ends=ENDS).render(asked)


def test_tools_that_are_bare_functions_are_tools_to_a_template_that_raises_at_them() -> None:
    """Others get them as they are, as in transformers; where the template raises at both, it says why of tools."""
    bare = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    asked, tool = Conversation(PLAIN.messages, [bare]), {"type": "function", "function": bare}
    text, spans = template("gptoss").render(asked)
    assert text == in_transformers(source_of("gptoss"), Conversation(PLAIN.messages, [tool]))[0]
    assert [text[start:stop].split(">")[-2] for start, stop in spans] == ["Hello.<|end|", "Well.<|return|"]
    assert template("qwen3").render(asked)[0] == in_transformers(source_of("qwen3"), asked)[0]
    with pytest.raises(RecordError, match="no previous assistant message with a tool call"):
        template("gptoss").render(Conversation((Message("user", "Hi?"), Message("tool", "x")), [bare]))


def test_of_two_calls_of_one_tool_both_have_to_be_put_out() -> None:
    """gpt-oss puts out the first call of a message alone; what is said beside the calls may name the tool as well."""
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    for content, thought in (
        ("", {}),
        ("I look: look twice.", {}),
        ("", {"reasoning_content": "I look, look and look."}),
    ):
        said = Message("assistant", content, None, {"tool_calls": [call, call], **thought})
        asked = Conversation((Message("user", "Where?"), said))
        with pytest.raises(RecordError, match=r"leaves out the call of `look` that `messages\[1\]` makes"):
            template("gptoss").render(asked)
        [counted] = counting("qwen3", asked)
        assert counted.count('{"name": "look"') == 2
    one = Message("assistant", "", None, {"tool_calls": [call]})
    assert len(counting("gptoss", Conversation((Message("user", "Where?"), one)))) == 1


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
