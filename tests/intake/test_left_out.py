"""What a chat template leaves out of a conversation is refused where it is an answer, else counted and told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chunkplan import IntakeOptions, analyze, validate
from chunkplan.config.intake import Turns
from chunkplan.intake.reading import IntakeRequest
from chunkplan.intake.records import Conversation, Message, RecordError
from chunkplan.intake.shard import merge, write_shard
from chunkplan.intake.template import ChatTemplate
from chunkplan.intake.tokenizer import by_turns
from tests.support.command_line import Run
from tests.support.intake_checks import chat, question_and_answer, write_lines
from tests.support.places import ROOT
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

TOKENIZER = ROOT / "sample_data" / "tokenizer"

CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"place": "here"}}}
CALLED = (
    Message("user", "Where is it?"),
    Message("assistant", "I look it up.", None, {"tool_calls": [CALL]}),
    Message("tool", "Over there.", None, {"name": "look_up"}),
    Message("assistant", "There."),
)

#: A template of which a message is `%s`.
CHATML = (
    "{% for m in messages %}%s{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"


def _left_out(source: str, asked: Conversation) -> set[str]:
    found: set[str] = set()
    ChatTemplate(source, SPECIAL, "x", ends=ENDS).render(asked, found)
    return found


def _shown(condition: str, message: str = MESSAGE) -> str:
    """A template that puts out what messages say under a condition; with generation blocks, and without."""
    return CHATML.replace(
        "%s", message.replace("{{ m.content }}", f"{{% if {condition} %}}{{{{ m.content }}}}{{% endif %}}")
    )


def _in_blocks(source: str) -> str:
    """The same template with a generation block around what follows the header of each answer."""
    start, end = "{% if m.role == 'assistant' %}", "{% endif %}"
    before, content = source.split("{{ m.role }}\n")
    content, after = content.split("<|im_end|>")
    written = f"{content}<|im_end|>"
    block = f"{start}{{% generation %}}{written}{{% endgeneration %}}{{% else %}}{written}{end}"
    return f"{before}{{{{ m.role }}}}{{{{ '\\n' }}}}{block}{after}"


@pytest.mark.parametrize("name", ["smolvlm_training", "idefics3_training"])
def test_an_answer_that_is_not_in_a_template_with_generation_blocks_is_refused(name: str) -> None:
    """What would be trained is an answer of nothing."""
    assert "Hello." not in in_transformers(source_of(name), PLAIN)[0]
    with pytest.raises(RecordError, match=r"leaves out what the assistant says in `messages\[1\]`") as caught:
        template(name).render(PLAIN)
    assert (caught.value.reason, "list of text parts" in caught.value.hint) == ("template", True)
    parts = Conversation(tuple(message._replace(parts=(message.content or "",)) for message in PLAIN.messages))
    text, spans = template(name).render(parts)
    assert [text[start:stop].strip() for start, stop in spans] == [
        "Hello.<end_of_utterance>",
        "Well.<end_of_utterance>",
    ]


@pytest.mark.parametrize("blocks", [False, True])
def test_an_answer_that_is_left_out_for_what_it_says_is_refused(blocks: bool) -> None:
    """Nothing that was proved of other words says so; also where others say the same, or it does not stand alone."""
    source = _shown("m.content != 'secret'")
    source = _in_blocks(source) if blocks else source
    for said in (
        ("Hi?", "secret"),
        ("Hi?", "secret", "secret things?", "Well."),
        ("Say secret!", "secret", "Hi?", "secret, no"),
        ("Hi?", "Hello.", "And?", "secret"),
    ):
        with pytest.raises(RecordError, match=rf"assistant says in `messages\[{said.index('secret')}\]`"):
            _left_out(source, conversation(*said))
    assert _left_out(source, conversation("Hi?", "A secret.", "secretly?", "secrets")) == set()
    silent = PLAIN.messages[1]._replace(content="secret", loss=False)
    assert _left_out(source, Conversation((PLAIN.messages[0], silent, *PLAIN.messages[2:]))) == {"assistant"}


@pytest.mark.parametrize("blocks", [False, True])
def test_what_others_say_and_a_template_leaves_out_is_told(blocks: bool) -> None:
    system = Message("system", "Be kind.")
    cases = {
        "m.content != 'secret'": (conversation("secret", "Hello.", "Is it secret?", "Well."), {"user"}),
        "m.role != 'system'": (Conversation((system, *PLAIN.messages)), {"system"}),
        "m.role != 'system' or loop.first": (
            Conversation((system, *PLAIN.messages[:2], Message("system", "Be kind."), *PLAIN.messages[2:])),
            {"system"},
        ),
        "m.role != 'tool'": (
            Conversation((PLAIN.messages[0], Message("tool", "Here."), *PLAIN.messages[1:])),
            {"tool"},
        ),
        "m.role != 'critic'": (Conversation((Message("critic", "Poor.", False), *PLAIN.messages)), {"other"}),
    }
    for condition, (asked, expected) in cases.items():
        for shown, found in ((condition, expected), ("true", set())):
            source = _in_blocks(_shown(shown)) if blocks else _shown(shown)
            assert _left_out(source, asked) == found, condition


def test_what_counts_and_is_left_out_is_refused_whoever_says_it() -> None:
    counts = Conversation((PLAIN.messages[0]._replace(loss=True), *PLAIN.messages[1:]))
    with pytest.raises(RecordError, match=r"leaves out what the user says in `messages\[0\]`"):
        _left_out(_shown("m.content != 'Hi?'"), counts)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, {"assistant"}) for name in ("llama3_1", "llama3_2", "gptoss", "gptoss_training", "muse_glimmer")),
        *((name, set[str]()) for name in ("qwen2_5", "qwen3", "qwen3_training", "glm4moe_training", "gemma4_v5")),
    ],
)
def test_text_beside_a_call_that_is_left_out_is_told(name: str, expected: set[str]) -> None:
    """At inference the template does the same to it: what is trained is what the model meets."""
    asked, found = Conversation(CALLED), set[str]()
    text, spans = template(name).render(asked, found)
    assert text == in_transformers(source_of(name), asked)[0]
    assert ("I look it up." in text) == (not expected)
    assert found == expected
    assert "look_up" in "".join(text[start:stop] for start, stop in spans)


def test_the_answers_of_tools_are_told_where_a_template_wants_calls_before_them() -> None:
    """Calls as text are none to Gemma 4's template."""
    asked = Conversation((CALLED[0], Message("assistant", '{"name": "look_up"}'), *CALLED[2:]))
    assert "Over there." not in in_transformers(source_of("gemma4"), asked)[0]
    assert _left_out(source_of("gemma4"), asked) == {"tool"}


def test_thinking_that_is_left_out_is_told_where_it_counts() -> None:
    """Qwen3's template leaves it out of earlier turns; as the last one each turn has its own."""
    reasoned = [
        message._replace(fields={"reasoning_content": f"thought {at}"}) if at % 2 else message
        for at, message in enumerate(PLAIN.messages)
    ]
    choices: tuple[Turns, ...] = ("rendered", "last", "each")
    for asked in (THOUGHT, Conversation(tuple(reasoned))):
        found = [[_left_out(source_of("qwen3"), one) for one in by_turns(asked, turns)] for turns in choices]
        assert found == [[{"thinking"}], [set()], [set(), set()]]
    assert _left_out(source_of("llama3_1"), THOUGHT) == set()
    assert _left_out(source_of("llama3_1"), Conversation(tuple(reasoned[:2]))) == {"thinking"}


def test_a_last_answer_that_nothing_ends_is_told() -> None:
    assert _left_out(source_of("glm4moe"), PLAIN) == {"end"}
    assert _left_out(source_of("glm4moe"), Conversation(PLAIN.messages[:3])) == set()  # the last is the user
    assert _left_out(source_of("glm4moe"), Conversation((PLAIN.messages[0], Message("assistant", "a", False)))) == set()
    assert _left_out(source_of("glm4moe_training"), PLAIN) == set()
    outside = _in_blocks(_shown("true")).replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert _left_out(outside, PLAIN) == {"end"}
    assert _left_out(CHATML.replace("%s", MESSAGE.replace("<|im_end|>", "<|over|>")), PLAIN) == set()


def test_the_lines_of_the_page_end_the_last_answer_of_glm() -> None:
    page = (ROOT / "docs" / "templates.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"```jinja\n(.*?)\n```", page, re.DOTALL)
    whole = source_of("glm4moe") + lines
    for asked, end in ((PLAIN, "<|user|>"), (Conversation(CALLED[:2]), "<|observation|>")):
        read = ChatTemplate(whole, SPECIAL, "x", ends=ENDS)
        found: set[str] = set()
        text, spans = read.render(asked, found)
        assert found == set()
        assert text == in_transformers(source_of("glm4moe"), asked)[0] + end
        assert text[spans[-1][0] : spans[-1][1]].endswith(end) or spans[-1] == (len(text) - len(end), len(text))
        before = counting("glm4moe", asked)
        assert "".join(text[start:stop] for start, stop in spans) == "".join(before) + end


#: Texts that templates write in other forms, which is not to leave them out.
ODD = (
    'He said "no"\n\tand <b>left</b> & ünï\\ 日本 😀',
    "  two   spaces \n\n\n and lines\n",
    '{"a": ["ü", "<x>", 1.50], "b": null}',
    "1",
)
FORMS = ("tojson", "tojson(ensure_ascii=true)", "upper", "e", "trim", "replace('\\n', ' ')", "split() | join(' ')")


@pytest.mark.parametrize("form", FORMS)
def test_a_text_in_another_form_is_not_left_out(form: str) -> None:
    written = "m.content.split() | join(' ')" if form.startswith("split") else f"m.content | {form}"
    source = CHATML.replace("%s", MESSAGE.replace("m.content", written))
    for text in ODD:
        assert _left_out(source, conversation(text, text, "Hi?", text, system=True)) == set()


def _names() -> Iterator[Any]:
    for path in sorted(TEMPLATES.glob("*.jinja")):
        few = path.stem in ("llama3_1", "gemma4", "qwen3", "deepseekv3", "lfm2_2_5_v2")
        if not path.stem.startswith(("idefics3", "smolvlm", "llava_next")):
            yield pytest.param(path.stem, marks=[] if few else pytest.mark.soak)


@pytest.mark.parametrize("name", [*_names()])
def test_of_odd_texts_nothing_is_told_that_is_there(name: str) -> None:
    end = {"end"} if name == "glm4moe" else set()
    for at in range(len(ODD)):
        first, second, third = (ODD[(at + place) % len(ODD)] for place in range(3))
        assert _left_out(source_of(name), conversation(first, second, "And?", third)) == end
        called = (
            CALLED[0],
            CALLED[1]._replace(content=""),
            CALLED[2]._replace(content=first),
            Message("assistant", second),
        )
        asked, found = Conversation(called), set[str]()
        try:
            text, _ = template(name).render(asked, found)
        except RecordError as error:
            assert re.search("raised|leaves out the call", error.message)
        else:
            assert ("tool" in found) <= (first.split()[-1] not in text)


def _records(number: int) -> list[dict[str, Any]]:
    """Conversations, of which those of an even number have a system message, and the third a text beside a call."""
    records = [
        chat(
            *([{"role": "system", "content": "Be kind."}] if at % 2 else []),
            *question_and_answer(f"Hi {at}?", "Hello."),
        )
        for at in range(1, number + 1)
    ]
    records[2] = chat(*(message.for_template() for message in CALLED))
    return records


@pytest.fixture
def jinja(tmp_path: Path) -> Path:
    """A template without system messages, without texts beside calls, and without an end of the last turn."""
    calls = "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    message = MESSAGE.replace("<|im_end|>", calls + "{% if not loop.last %}<|im_end|>{% endif %}")
    path = tmp_path / "t.jinja"
    path.write_text(_shown("m.role != 'system' and not m.tool_calls", message))
    return path


def test_what_is_left_out_is_on_the_screen_and_in_the_manifest(command: Run, tmp_path: Path, jinja: Path) -> None:
    write_lines(tmp_path / "a.jsonl", _records(20)[:2])
    write_lines(tmp_path / "b.jsonl", _records(20))
    ran = command("analyze", "a.jsonl", "b.jsonl", "--tokenizer", TOKENIZER, "--chat-template", jinja, "--json")
    assert ran.code == 0, ran.err
    first, second = json.loads(ran.out)["sources"]
    assert (first["left_out"], first["first_left_out"]) == ({"end": 2, "system": 1}, {"end": 0, "system": 0})
    assert second["left_out"] == {"assistant": 1, "end": 20, "system": 9}
    assert second["first_left_out"] == {"assistant": 2, "end": 0, "system": 0}
    leaves = "warning: the chat template leaves out or changes what the"
    for line in (
        f"{leaves} system message says in 10 sequences, the first of a.jsonl:1\n",
        f"{leaves} assistant says in 1 sequence, the first of b.jsonl:3\n",
        "hint: `chunkplan inspect --record a.jsonl:1` shows what is left; --chat-template takes another template\n",
        "warning: no end-of-turn token behind the last answer in 22 sequences, the first of a.jsonl:1: "
        "the model is not taught to stop there\n",
        "hint: give --chat-template one that puts such a token there; for GLM-4.5 see docs/templates.md\n",
    ):
        assert ran.err.count(line) == 1, ran.err
    shown = command("inspect", "--record", "b.jsonl:3", "--tokenizer", TOKENIZER, "--chat-template", jinja).out
    assert re.search(r"left out +what the assistant says; the token that ends the last turn *\n", shown)


def test_a_token_of_prompt_and_answer_is_on_the_screen_and_in_the_manifest(command: Run, tmp_path: Path) -> None:
    pairs = [("Feeling:", " good"), ("Feeling: ", "good"), ("Feeling: ", "bad")]
    write_lines(tmp_path / "c.jsonl", [{"prompt": prompt, "completion": said} for prompt, said in pairs])
    ran = command("analyze", "c.jsonl", "--tokenizer", TOKENIZER, "--json")
    [source] = json.loads(ran.out)["sources"]
    assert (source["left_out"], source["first_left_out"]) == ({"shared": 2}, {"shared": 1})
    assert "one token holds the end of a prompt and the begin of an answer" in ran.err
    assert "(in 2 sequences, the first of c.jsonl:2; it is trained)" in ran.err
    assert "warning" not in ran.err
    asked = ("inspect", "--record", "c.jsonl:2", "--tokenizer", TOKENIZER)
    assert json.loads(command(*asked, "--json").out)["sequences"]["rendered"][0]["left_out"] == ["shared"]
    shown = command(*asked).out
    assert "⟦ good<|im_end|>⟧" in shown
    assert re.search(r"shared +a token that holds the end of a prompt", shown)
    assert "left_out" not in command("validate", "chunkplan-out/analysis").out


def test_shards_the_cache_and_one_run_count_the_same(
    tmp_path: Path, jinja: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkplan.intake.pieces.PIECE_BYTES", 500)
    file = write_lines(tmp_path / "b.jsonl", _records(40))
    given: dict[str, Any] = {"tokenizer": TOKENIZER, "chat_template": jinja}
    first = analyze(file, tmp_path / "out", **given)
    [source] = first.manifest["sources"]
    assert source["left_out"] == {"assistant": 1, "end": 40, "system": 19}
    assert analyze(file, tmp_path / "out", **given).manifest == first.manifest
    for index in (1, 2, 3):
        request = IntakeRequest(paths=[file], cache=tmp_path / f"cache-{index}", **given)
        write_shard(request, tmp_path / f"shard-{index}", (index, 3))
    merged = merge([tmp_path / f"shard-{index}" for index in (1, 2, 3)], tmp_path / "merged")
    assert merged.manifest["sources"] == first.manifest["sources"]


def test_of_sequences_that_are_too_long_nothing_is_told(tmp_path: Path, jinja: Path) -> None:
    file = write_lines(tmp_path / "b.jsonl", _records(20))
    options = IntakeOptions(max_length=22, long="drop")
    found = analyze(file, tmp_path / "out", options, tokenizer=TOKENIZER, chat_template=jinja)
    [source] = found.manifest["sources"]
    assert 0 < source["num_sequences"] < 20
    assert source["left_out"]["end"] == source["num_sequences"]
    assert "assistant" not in source["left_out"]


@pytest.mark.parametrize("change", [{"left_out": {"end": 30, "system": 9, "assistant": 1}}, {"first_left_out": {}}])
def test_validate_finds_counts_that_cannot_be(tmp_path: Path, jinja: Path, change: dict[str, Any]) -> None:
    file = write_lines(tmp_path / "b.jsonl", _records(20))
    analyze(file, tmp_path / "out", tokenizer=TOKENIZER, chat_template=jinja)
    assert not validate(tmp_path / "out").violations
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["sources"][0] |= change
    path.write_text(json.dumps(manifest))
    assert {violation.invariant for violation in validate(tmp_path / "out").violations} == {"records"}
