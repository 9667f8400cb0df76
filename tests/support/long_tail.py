"""Made-up data of many shapes: lengths with a long tail, every schema of text, many scripts, nothing at all."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORDS = ("chunk", "of", "the", "longest", "größer", "数据", "данные", "🙂", "a\u0301", "x = y[3]\n", "\t", "12,345")


def _message(who: str, text: str) -> dict[str, str]:
    return {"role": who, "content": text}


#: Schema -> a record of it with a question and an answer.
_RECORDS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "text": lambda question, answer: {"text": question + answer},
    "messages": lambda question, answer: {"messages": [_message("user", question), _message("assistant", answer)]},
    "conversations": lambda question, answer: {
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    },
    "prompt": lambda question, answer: {"prompt": question, "completion": answer},
    "instruction": lambda question, answer: {"instruction": question, "output": answer},
    "question": lambda question, answer: {"question": question, "answer": answer},
}


def write_long_tail(folder: Path, records: int, longest: int, seed: int = 0) -> list[Path]:
    """`records` of every schema, one file each, some compressed; the last record of all has `longest` words.

    Every 20th record is empty, which is no sequence of a training set.
    """
    chance = random.Random(seed)
    paths = []
    for place, (schema, make) in enumerate(_RECORDS.items()):
        lines = []
        for record in range(records):
            words = min(int(chance.lognormvariate(2.8, 1.1)) + 2, longest)
            if (place, record) == (len(_RECORDS) - 1, records - 1):
                words = longest
            text = " ".join(chance.choices(_WORDS, k=words))
            question, answer = text[: len(text) // 3], text[len(text) // 3 :]
            lines.append(make("", "") if record % 20 == 19 and words < longest else make(question, answer))
        content = "".join(json.dumps(line, ensure_ascii=place % 2 == 0) + "\n" for line in lines).encode()
        path = folder / (f"{schema}.jsonl.gz" if place % 3 == 2 else f"{schema}.jsonl")
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        paths.append(path)
    return paths
