"""Data for the benchmark of the intake: real records, repeated with their numbers mixed in, so that none is twice."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.config.intake import MAX_RECORD_BYTES
from chunkplan.errors import DataError
from chunkplan.intake.backends import load_tokenizer
from chunkplan.intake.readers import cut, first_records, read
from chunkplan.intake.records import Conversation, Exchange, Message, PromptRecord, Record, TextRecord
from chunkplan.intake.schemas import detect
from chunkplan.intake.sources import find_sources


@dataclass(frozen=True)
class Data:
    """Texts and conversations of a folder, and the tokens of the texts."""

    texts: list[str]
    conversations: list[Conversation]
    token_ids: list[list[int]]


def load(folder: Path, tokenizer: Path) -> Data:
    """Read all sources of a folder: what is no conversation is a text."""
    texts, conversations = [], []
    for record in _records(folder):
        match record:
            case TextRecord(text):
                texts.append(text)
            case PromptRecord(prompt, completion):
                texts.append(prompt + completion)
            case Exchange():
                conversations.append(record.conversation)
            case Conversation():
                conversations.append(replace(record, messages=tuple(map(_without_gaps, record.messages))))
    token_ids = [ids.tolist() for ids in load_tokenizer(tokenizer).library.texts(texts)]
    return Data(texts, conversations, token_ids)


def _records(folder: Path) -> Iterator[Record]:
    with tempfile.TemporaryDirectory() as spool:
        for index, file in enumerate(find_sources(sorted(folder.glob("*.json*")))):
            for piece in cut(file, index, Path(spool)):
                try:
                    layout = detect(first_records(piece))
                except DataError as error:
                    print(f"left out: {file.path}: {error}")
                    break
                for batch in read(piece, layout, max_record_bytes=MAX_RECORD_BYTES):
                    assert isinstance(batch.records, list)
                    yield from batch.records


def _without_gaps(message: Message) -> Message:
    """Give a message without content its tool calls as content, which any template can render."""
    return Message(message.role, message.content or json.dumps(message.fields.get("tool_calls")))


def texts(data: Data) -> Iterator[str]:
    """Yield all texts over and over, each with a number of its own."""
    for number in count():
        yield f"{number} {data.texts[number % len(data.texts)]}"


def conversations(data: Data) -> Iterator[Conversation]:
    """Yield all conversations over and over, each with a number of its own in its first message."""
    for number in count():
        conversation = data.conversations[number % len(data.conversations)]
        first, *rest = conversation.messages
        yield Conversation((first._replace(content=f"{number} {first.content}"), *rest))


def token_lists(data: Data) -> Iterator[list[int]]:
    """Yield the tokens of all texts over and over, each list with another beginning."""
    for number in count():
        ids = data.token_ids[number % len(data.token_ids)]
        yield [number % 1000, number // 1000 % 1000, *ids]


def lengths(data: Data) -> Iterator[int]:
    """Yield the lengths of all texts over and over."""
    values = [len(ids) for ids in data.token_ids]
    return (values[number % len(values)] + number % 7 for number in count())


def text_lines(data: Data) -> Iterator[bytes]:
    """Yield texts as lines of JSON."""
    return (_line({"text": text}) for text in texts(data))


def chat_lines(data: Data) -> Iterator[bytes]:
    """Yield conversations as lines of JSON."""
    for conversation in conversations(data):
        messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
        yield _line({"messages": messages})


def token_lines(data: Data) -> Iterator[bytes]:
    """Yield tokens as lines of JSON."""
    bodies = [json.dumps(ids).encode()[1:] for ids in data.token_ids]
    for number in count():
        body = bodies[number % len(bodies)]
        yield b'{"input_ids": [%d, %d, %s}\n' % (number % 1000, number // 1000 % 1000, body)


def length_lines(data: Data) -> Iterator[bytes]:
    """Yield lengths as lines of JSON."""
    return (b'{"length": %d}\n' % length for length in lengths(data))


def described_length_lines(data: Data) -> Iterator[bytes]:
    """Yield lengths that have names as lines of JSON."""
    line = b'{"id": "record-%012d", "source": "sample", "length": %d}\n'
    return (line % numbered for numbered in enumerate(lengths(data)))


def write_lines(path: Path, lines: Iterator[bytes], num_bytes: int) -> None:
    """Write so many lines that they have `num_bytes` or a little more."""
    with path.open("wb") as file:
        for block in blocks(lines, num_bytes):
            file.write(block)


def blocks(lines: Iterator[bytes], num_bytes: int) -> Iterator[bytes]:
    """Yield blocks of joined lines, which have `num_bytes` together or a little more."""
    while num_bytes > 0 and (block := b"".join(islice(lines, 256))):
        yield block
        num_bytes -= len(block)


def write_parquet(path: Path, column: str, kind: pa.DataType, values: Iterator[Any], num_rows: int) -> None:
    """Write Parquet of one column, in row groups of 65,536 numbers or 1,024 other rows."""
    with pq.ParquetWriter(path, pa.schema([(column, kind)])) as writer:
        while num_rows > 0:
            taken = list(islice(values, min(num_rows, 1 << 16 if pa.types.is_integer(kind) else 1 << 10)))
            writer.write_table(pa.table({column: pa.array(taken, kind)}))
            num_rows -= len(taken)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
