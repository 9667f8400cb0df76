"""What tests of the intake share: sources read whole, whatever their pieces and batches, and records encoded."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from chunkplan.intake.pieces import Batch, LengthColumn, Piece
from chunkplan.intake.readers import cut, read
from chunkplan.intake.records import Record, RecordError, Rejected, TokensRecord
from chunkplan.intake.schemas import SCHEMAS, RecordLayout, parse
from chunkplan.intake.sources import find_sources
from chunkplan.intake.tokenizer import Encoded, RecordTokenizer
from chunkplan.planfile.analysis import Analysis
from tests.support.places import ROOT

TEXT = RecordLayout("text", {"text": "text"}, "")
LENGTH = RecordLayout("length", {"length": "length"}, "")
TOKENS = RecordLayout("input_ids", {role: role for role in ("input_ids", "labels", "attention_mask")}, "")

#: More than any record of a test has.
LARGE = 64 << 20


def question_and_answer(*contents: str, who: str = "role", what: str = "content") -> list[dict[str, str]]:
    """Messages of a user and of the assistant."""
    return [{who: role, what: content} for role, content in zip(("user", "assistant"), contents, strict=False)]


#: A record of every schema that trains an answer.
ANSWERS: dict[str, dict[str, Any]] = {
    "messages": {"messages": question_and_answer("Hi!", "Hello.")},
    "conversations": {"conversations": question_and_answer("Hi!", "Hello.", who="from", what="value")},
    "prompt+completion": {"prompt": "Hi!", "completion": "Hello."},
    "instruction": {"instruction": "Hi!", "output": "Hello."},
    "question+answer": {"question": "Hi!", "answer": "Hello."},
}

#: What becomes of those that are conversations with the sample tokenizer, as docs/data.md shows it.
ANSWERED = "<|im_start|>user⏎Hi!<|im_end|>⏎<|im_start|>assistant⏎⟦Hello.<|im_end|>⟧⏎"

#: Records of four layouts, with blank ones among them.
TEXTS = [{"text": text} for text in ("one", "", "two two two two", " \n", "日本語 😀", "three")]
PROMPTS = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "", "completion": ""}, {"prompt": "Say", "completion": ""}]
CHATS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no", "loss": False}]},
]
SHAREGPT = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """Records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parse_as(schema: str, record: dict[str, Any], **columns: str) -> Record:
    """A record of a schema, whose roles have their usual keys but for `columns`."""
    usual = {role: keys[0] for role, keys in SCHEMAS[schema].roles.items()}
    return parse(RecordLayout(schema, usual | columns, ""), record)


def chat(*messages: Any, **others: Any) -> dict[str, Any]:
    """A record of messages."""
    return {"messages": list(messages), **others}


def encode_all(tokenizer: RecordTokenizer, *records: Record) -> list[Encoded]:
    """The tokens of records that all have some."""
    encoded = []
    for one in tokenizer.encode(records):
        assert not isinstance(one, RecordError)
        encoded.append(one)
    return encoded


def pieces_of(path: Path | str, spool: Path) -> list[Piece]:
    """All pieces of one source."""
    (file,) = find_sources([path])
    return list(cut(file, 0, spool))


def marked_texts(analysis: Analysis, tokenizer: Path = ROOT / "sample_data" / "tokenizer") -> list[str]:
    """The sequences as docs/data.md shows them: what counts in the loss is in ⟦ ⟧, ⏎ is a line end."""
    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tokens, found = analysis.tokens(), []
    for index in range(len(analysis.num_tokens)):
        runs = groupby(zip(*map(list, tokens(index)), strict=True), key=lambda pair: pair[1])
        texts = [(counts, model.decode([int(token) for token, _ in run], False)) for counts, run in runs]
        found.append("".join(f"⟦{text}⟧" if counts else text for counts, text in texts).replace("\n", "⏎"))
    return found


def batches_of(
    path: Path | str, layout: RecordLayout, spool: Path, *, limit: int = LARGE, sample: float | None = None
) -> list[list[Batch]]:
    """The batches of every piece of one source; checks that they count what they hold."""
    found = []
    for piece in pieces_of(path, spool):
        batches = list(read(piece, layout, max_record_bytes=limit, sample=sample))
        for batch in batches:
            counted = len(batch.numbers) + len(batch.rejected)
            assert counted == batch.num_records if sample is None else counted <= batch.num_records
        found.append(batches)
    return found


def tokens_of(record: Record) -> Any:
    """The ids and the targets of a record that is tokens, as lists; of a packed row those of each of its documents."""
    assert isinstance(record, TokensRecord)
    documents = [(ids.tolist(), target.tolist()) for ids, target in record.documents]
    return documents[0] if len(documents) == 1 else documents


def rows_of(batches: list[list[Batch]]) -> tuple[dict[int, Any], dict[int, Rejected]]:
    """Records and rejections by their row in the source; lengths are numbers, tokens pairs of lists."""
    records: dict[int, Any] = {}
    rejected: dict[int, Rejected] = {}
    row = 0
    for piece in batches:
        for batch in piece:
            match batch.records:
                case LengthColumn(num_tokens):
                    found = num_tokens.tolist()
                case several:
                    found = [tokens_of(one) if isinstance(one, TokensRecord) else one for one in several]
            records |= dict(zip((row + batch.numbers).tolist(), found, strict=True))
            rejected |= {row + one.number: one._replace(number=row + one.number) for one in batch.rejected}
        row += sum(batch.num_rows for batch in piece)
    return records, rejected
