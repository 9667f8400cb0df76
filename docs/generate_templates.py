"""Writes docs/templates.md: what becomes of conversations in the chat templates of many models.

The templates are those that the library `trl` has of them (its folder `chat_templates`), the conversations are ours.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trl

from chunkplan.intake.pieces import LEFT_OUT
from chunkplan.intake.records import Conversation, Message, RecordError
from chunkplan.intake.template import ChatTemplate

PAGE = Path(__file__).with_name("templates.md")
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

#: They take lists of parts alone.
PARTS_ONLY = {"idefics3", "llava_next", "smolvlm"}

#: Texts of users and of assistants; those of assistants with a beginning that a template may take for its own.
ASKED = ("Hi?", "<b>bold</b>", "日本語で", "1\n2\n")
SAID = ("Hello.", " spaced ", "<i>x</i>", "```\ncode\n```")

CALL: dict[str, Any] = {"type": "function", "function": {"name": "look_up", "arguments": {"place": "here"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Says where a place is.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}

INTRODUCTION = """\
# Conversations in the chat templates of models

Results of `analyze` for the chat templates that trl {trl} has of these models (transformers {transformers}; written by
`docs/generate_templates.py`), of {number} conversations of each kind: turns of plain text; *system*: behind a system
message; *thinking*: with `<think>` in the text; *reasoning*: with `reasoning_content`; *tools*: with calls and answers.

*Not*: kinds of which the template refuses some, or leaves out the call. *Left out*: what it does not put out of those
that are kept, which `analyze` counts: *thinking*, or of *earlier* turns alone; the text *beside calls*. *End*: what it
puts behind the last answer; of none ([GLM-4.5](#glm-45)) `analyze` warns.

| templates | not | left out | end |
| --- | --- | --- | --- |
"""

GLM = """
## GLM-4.5

Its models end a turn with what begins the next: `<|user|>` or `<|observation|>`. The template puts none behind the last
answer, so nothing would teach the model to stop. These lines at the end of a copy, given with `--chat-template`, do:

```jinja
{line}
```
"""

#: What ends the last turn in GLM-4.5's template, put behind its own text.
GLM_LINE = """\
{%- if messages[-1].role == 'assistant' and not add_generation_prompt -%}
    {{- '<|observation|>' if messages[-1].tool_calls else '<|user|>' -}}
{%- endif -%}"""


def turns(number: int, start: int, kind: str) -> list[Message]:
    """A conversation of `number` turns; texts are taken from place `start` on."""
    messages = [Message("system", "Be kind.")] if kind == "system" else []
    for at in range(start, start + number):
        said = SAID[at % len(SAID)]
        said = f"<think>\nI see {at}.\n</think>\n\n{said}" if kind == "thinking" else said
        fields = {"reasoning_content": f"I see {at}."} if kind == "reasoning" else {}
        messages += [Message("user", ASKED[at % len(ASKED)]), Message("assistant", said, None, fields)]
    if kind == "tools":
        messages[-1:] = [
            Message("assistant", "I look." if start % 2 else "", None, {"tool_calls": [CALL]}),
            Message("tool", "It is here."),
            messages[-1],
        ]
    return messages


def conversations(kind: str) -> list[Conversation]:
    """The conversations of one kind."""
    tools = [TOOL] if kind == "tools" else None
    return [
        Conversation(tuple(turns(number, start, kind)), tools)
        for number, start in itertools.product((1, 2, 3, 4), range(4))
    ]


KINDS = {kind: conversations(kind) for kind in ("turns", "system", "thinking", "reasoning", "tools")}


def all_kept(template: ChatTemplate, kind: str) -> bool:
    """True if all conversations of a kind are kept."""
    for asked in KINDS[kind]:
        try:
            template.render(asked)
        except RecordError as error:
            if not error.message.startswith(("the chat template raised", "the chat template leaves out the call")):
                raise AssertionError(f"refused by us: {error.message}") from error
            return False
    return True


def left_out(template: ChatTemplate) -> str:
    """What the template leaves out of any of the conversations; a dash for nothing."""
    found: dict[str, set[int]] = {}
    for asked in itertools.chain(*KINDS.values()):
        kinds: set[str] = set()
        with suppress(RecordError):
            template.render(asked, kinds)
        for kind in kinds - {"end"}:
            found.setdefault(kind, set()).add(sum(message.role == "user" for message in asked.messages))
    words = {"thinking": "thinking" if 1 in found.get("thinking", ()) else "earlier thinking"}
    words["assistant"] = "beside calls"
    return ", ".join(words.get(kind, kind) for kind in LEFT_OUT if kind in found) or "-"


def end(template: ChatTemplate) -> str:
    """What the template puts behind the last answer, for the model to learn."""
    kinds: set[str] = set()
    text, spans = template.render(Conversation(tuple(turns(1, 0, "turns"))), kinds)
    behind = text[: spans[-1][1]].rpartition(SAID[0])[2]
    return "none" if "end" in kinds else f"`{''.join(behind.split())}`"


def page() -> str:
    """The text of the page."""
    text = INTRODUCTION.format(trl=version("trl"), transformers=version("transformers"), number=len(KINDS["turns"]))
    rows: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        if path.stem.endswith("_training") or path.stem in PARTS_ONLY:
            continue
        template = ChatTemplate(path.read_text(encoding="utf-8"), SPECIAL, path.stem)
        refused = ", ".join(kind for kind in KINDS if not all_kept(template, kind)) or "-"
        rows.setdefault((refused, left_out(template), end(template).replace("|", "\\|")), []).append(path.stem)
    text += "".join(f"| {', '.join(names)} | {' | '.join(found)} |\n" for found, names in rows.items())
    return text + GLM.replace("{line}", GLM_LINE)


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
