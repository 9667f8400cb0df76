"""Data in the layouts of other programs, as their documents describe them: what is rendered, and what counts.

The records are ours; the layouts are those of

- axolotl: docs/rlhf.qmd, and inst_tune.qmd, conversation.qmd, pretraining.qmd and stepwise_supervised.qmd in
  docs/dataset-formats (github.com/axolotl-ai-cloud/axolotl);
- ms-swift: docs/source_en/Customization/Custom-dataset.md (github.com/modelscope/ms-swift);
- LLaMA-Factory: data/README.md (github.com/hiyouga/LLaMA-Factory);
- XTuner: docs/en/user_guides/dataset_format.md (github.com/InternLM/xtuner);
- Firefly: the `conversation` of its data sets (github.com/yangjianxin1/Firefly), as swift has it;
- Gemini: "Prepare supervised fine-tuning data for Gemini models"
  (cloud.google.com/vertex-ai/generative-ai/docs/models/gemini-supervised-tuning-prepare).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chunkplan import analyze
from chunkplan.errors import DataError
from tests.support.intake_checks import marked_texts
from tests.support.places import ROOT

TOKENIZER = ROOT / "sample_data" / "tokenizer"

_SYSTEM = "<|im_start|>system⏎Be brief.<|im_end|>⏎"
_HEAD, _END = "<|im_start|>assistant⏎", "<|im_end|>⏎"


def _turns(*said: str, system: str = "") -> str:
    """What is rendered of questions and answers in turn; the answers count."""
    asked = [f"<|im_start|>user⏎{text}{_END}" for text in said[::2]]
    answered = [f"{_HEAD}⟦{text}<|im_end|>⟧⏎" for text in said[1::2]]
    return system + "".join(one + other for one, other in zip(asked, answered, strict=True))


def _chat(who: str, what: str, *said: tuple[str, str], **others: Any) -> list[dict[str, Any]]:
    return [{who: name, what: text, **others} for name, text in said]


_TWO = (("human", "Hi!"), ("gpt", "Hello."), ("human", "Bye!"), ("gpt", "See you."))
_TWO_RENDERED = _turns("Hi!", "Hello.", "Bye!", "See you.")
_CALL, _TOOLS = '{"name": "add", "arguments": {"a": 1, "b": 2}}', '[{"name": "add", "parameters": {}}]'
_CALLED = (("human", "1+2?"), ("function_call", _CALL), ("observation", "3"), ("gpt", "Three."))

_READ: dict[str, tuple[str, dict[str, Any], str]] = {
    "axolotl alpaca": ("instruction", {"instruction": "Add.", "input": "1 2", "output": "3"}, _turns("Add.⏎1 2", "3")),
    "axolotl gpteacher": (
        "instruction",
        {"instruction": "Add one to two.", "input": "", "response": "3"},
        _turns("Add one to two.", "3"),
    ),
    "axolotl jeopardy": (
        "question+answer",
        {"question": "Which is odd?", "category": "numbers", "answer": "Three."},
        _turns("Which is odd?", "Three."),
    ),
    "axolotl sharegpt": ("conversations", {"conversations": _chat("from", "value", *_TWO)}, _TWO_RENDERED),
    "axolotl chat_template": (
        "conversations",
        {"conversations": _chat("role", "content", ("user", "Hi!"), ("assistant", "Hello."))},
        _turns("Hi!", "Hello."),
    ),
    "axolotl chat_template, messages": (
        "messages",
        {"messages": _chat("role", "content", ("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello."))},
        _turns("Hi!", "Hello.", system=_SYSTEM),
    ),
    "axolotl message_field_training": (
        "conversations",
        {
            "conversations": [
                {"from": "human", "value": "Hi!", "train": False},
                {"from": "gpt", "value": "Hm.", "train": False},
                {"from": "human", "value": "Hi?", "train": False},
                {"from": "gpt", "value": "Hello.", "train": True},
            ]
        },
        f"<|im_start|>user⏎Hi!{_END}{_HEAD}Hm.{_END}" + _turns("Hi?", "Hello."),
    ),
    "axolotl pygmalion": (
        "conversations",
        {"conversations": _chat("role", "value", ("system", "Be brief."), ("human", "Hi!"), ("bot", "Hello."))},
        _turns("Hi!", "Hello.", system=_SYSTEM),
    ),
    "axolotl pretraining": ("text", {"text": "Once upon"}, "On⟦ce upon⟧"),
    "swift messages": (
        "messages",
        {"messages": _chat("role", "content", ("user", "Hi!"), ("assistant", "Hello."))},
        _turns("Hi!", "Hello."),
    ),
    "swift loss": (
        "messages",
        {
            "messages": [
                *_chat("role", "content", ("user", "Hi!")),
                *_chat("role", "content", ("assistant", "Hm."), loss=False),
                *_chat("role", "content", ("user", "Hi?")),
                *_chat("role", "content", ("assistant", "Hello."), loss=True),
            ]
        },
        f"<|im_start|>user⏎Hi!{_END}{_HEAD}Hm.{_END}" + _turns("Hi?", "Hello."),
    ),
    "swift pre-training": (
        "messages",
        {"messages": _chat("role", "content", ("assistant", "Once upon a time."))},
        f"{_HEAD}⟦Once upon a time.<|im_end|>⟧⏎",
    ),
    "swift sharegpt": (
        "conversations",
        {
            "system": "Be brief.",
            "conversation": [{"human": "Hi!", "assistant": "Hello."}, {"human": "Bye!", "assistant": "See you."}],
        },
        _SYSTEM + _TWO_RENDERED,
    ),
    "swift sharegpt, one exchange alone": (
        "question+answer",
        {"system": "Be brief.", "human": "Hi!", "assistant": "Hello."},
        _turns("Hi!", "Hello.", system=_SYSTEM),
    ),
    "Firefly": (
        "conversations",
        {"category": "chat", "conversation": [{"human": "Hi!", "assistant": "Hello."}]},
        _turns("Hi!", "Hello."),
    ),
    "XTuner": (
        "conversations",
        {
            "conversation": [
                {"system": "Be brief.", "input": "Hi!", "output": "Hello."},
                {"input": "Bye!", "output": "See you."},
            ]
        },
        _SYSTEM + _TWO_RENDERED,
    ),
    "XTuner in a table": (
        "conversations",
        {
            "conversation": [
                {"system": "", "input": "Hi!", "output": "Hello."},
                {"system": None, "input": "Bye!", "output": "See you."},
            ]
        },
        _TWO_RENDERED,
    ),
    "Gemini": (
        "messages",
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Hi!"}]},
                {"role": "model", "parts": [{"text": "Hel"}, {"text": "lo."}]},
                {"role": "user", "parts": [{"text": "Bye!"}]},
                {"role": "model", "parts": [{"text": "See you."}]},
            ],
        },
        _SYSTEM + _TWO_RENDERED,
    ),
    "swift alpaca": (
        "instruction",
        {"system": "Be brief.", "instruction": "Add.", "input": "1 2", "output": "3"},
        _turns("Add.⏎1 2", "3", system=_SYSTEM),
    ),
    "swift query and response": (
        "question+answer",
        {"system": "Be brief.", "query": "Bye!", "response": "See you.", "history": [["Hi!", "Hello."]]},
        _SYSTEM + _TWO_RENDERED,
    ),
    "swift agent": (
        "messages",
        {
            "tools": _TOOLS,
            "messages": _chat(
                "role",
                "content",
                *(("user", "1+2?"), ("tool_call", _CALL), ("tool_response", "3"), ("assistant", "Three.")),
            ),
        },
        _turns("1+2?", _CALL) + f"<|im_start|>tool⏎3{_END}{_HEAD}⟦Three.<|im_end|>⟧⏎",
    ),
    "swift KTO": (
        "messages",
        {"messages": _chat("role", "content", ("user", "Hi!"), ("assistant", "Hello.")), "label": True},
        _turns("Hi!", "Hello."),
    ),
    "LLaMA-Factory alpaca": (
        "instruction",
        {
            "instruction": "Bye!",
            "input": "",
            "output": "See you.",
            "system": "Be brief.",
            "history": [["Hi!", "Hello."]],
        },
        _SYSTEM + _TWO_RENDERED,
    ),
    "LLaMA-Factory sharegpt": (
        "conversations",
        {"conversations": _chat("from", "value", *_CALLED), "system": "Be brief.", "tools": _TOOLS},
        _turns("1+2?", _CALL, system=_SYSTEM) + f"<|im_start|>tool⏎3{_END}{_HEAD}⟦Three.<|im_end|>⟧⏎",
    ),
    "LLaMA-Factory openai": (
        "messages",
        {"messages": _chat("role", "content", ("system", "Be brief."), ("user", "Hi!"), ("assistant", "Hello."))},
        _turns("Hi!", "Hello.", system=_SYSTEM),
    ),
    "LLaMA-Factory pre-training": ("text", {"text": "Once upon"}, "On⟦ce upon⟧"),
    "LLaMA-Factory KTO": (
        "instruction",
        {"instruction": "Hi!", "input": "", "output": "Hello.", "kto_tag": True},
        _turns("Hi!", "Hello."),
    ),
}

_MESSAGES = _chat("role", "content", ("user", "Hi!"), ("assistant", "Hello."))
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "axolotl train_detail": (
        {
            "conversations": [
                {
                    "from": "gpt",
                    "value": "Hello.",
                    "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}],
                }
            ]
        },
        "`conversations[0].train_detail` has parts of a message",
    ),
    "axolotl stepwise": (
        {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]},
        "no schema fits the keys of the records",
    ),
    "axolotl open_orca": (
        {"system_prompt": "Be brief.", "question": "Hi!", "response": "Hello."},
        "no schema fits the keys of the records",
    ),
    "swift DPO": ({"messages": _MESSAGES, "rejected_response": "No."}, "a preference pair (`rejected_response` beside"),
    "swift DPO of messages": (
        {"messages": _MESSAGES, "rejected_messages": _MESSAGES},
        "a preference pair (`rejected_messages` beside",
    ),
    "swift KTO": ({"messages": _MESSAGES, "label": False}, "`label` is false: a bad answer"),
    "swift classification": ({"messages": _MESSAGES[:1], "label": 1}, "no token of its 1 sequence counts in the loss"),
    "swift multimodal": ({"messages": _MESSAGES, "images": ["x.jpg"]}, "`images` beside the text"),
    "Gemini with a file": (
        {"contents": [{"role": "user", "parts": [{"text": "Hi!"}, {"fileData": {"fileUri": "gs://x/y.png"}}]}]},
        "`contents[0].parts[1]` has `fileData`: only text is planned",
    ),
    "Gemini with a call": (
        {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}]},
        "`contents[0].parts[0]` has `functionCall`: only text is planned",
    ),
    "Gemini with tools": (
        {
            "contents": [{"role": "model", "parts": [{"text": "Hi!"}]}],
            "tools": [{"functionDeclarations": [{"name": "f"}]}],
        },
        "`tools` has `functionDeclarations` of Gemini",
    ),
    "Gemini with two systems": (
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [{"role": "system", "parts": [{"text": "Be long."}]}],
        },
        "`systemInstruction` and the system message that `contents` begins with say different things",
    ),
    "contents that are none of Gemini's": ({"contents": "chapter one"}, "no schema fits the keys of the records"),
    "OpenAI preference": (
        {"input": {"messages": []}, "preferred_output": [{"role": "assistant"}], "non_preferred_output": [{}]},
        "a preference pair (`preferred_output` and `non_preferred_output`)",
    ),
    "LLaMA-Factory KTO": ({"instruction": "a", "output": "b", "kto_tag": False}, "`kto_tag` is false: a bad answer"),
}


@pytest.mark.parametrize("name", _READ)
def test_a_layout_of_another_program_is_rendered_and_its_answers_count(name: str, tmp_path: Path) -> None:
    schema, record, expected = _READ[name]
    for file, content in (
        (tmp_path / "x.jsonl", json.dumps(record) + "\n"),
        (tmp_path / "x.json", json.dumps([record], indent=2)),
    ):
        file.write_text(content)
        analysis = analyze(file, tmp_path / "out", tokenizer=TOKENIZER)
        assert analysis.manifest["sources"][0]["schema"] == schema
        assert marked_texts(analysis) == [expected]


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_no_answer_to_learn_is_refused_by_name(name: str, tmp_path: Path) -> None:
    record, message = _REFUSED[name]
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError) as caught:
        analyze(tmp_path / "x.jsonl", tmp_path / "out", tokenizer=TOKENIZER)
    assert message in caught.value.message


def test_nothing_of_these_layouts_is_left_unread_but_what_says_nothing_of_the_answer(tmp_path: Path) -> None:
    unread = {}
    for name, (_, record, _) in _READ.items():
        (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n")
        source = analyze(tmp_path / "x.jsonl", tmp_path / "out", tokenizer=TOKENIZER).manifest["sources"][0]
        unread |= {name: list(source["unread_keys"])} if source["unread_keys"] else {}
    assert unread == {"axolotl jeopardy": ["category"], "Firefly": ["category"]}
