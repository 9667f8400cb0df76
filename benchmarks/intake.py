"""Measures the intake: `chunkplan.analyze` beside a bare loop of the tokenizer, what needs none, and memory.

    python benchmarks/intake.py                     # about 10 minutes on 2 cores, without memory
    python benchmarks/intake.py --quick             # a tenth of the data
    python benchmarks/intake.py --only memory       # 5 GB of lengths and of tokens, through a pipe; 10 GB of disk
    python benchmarks/intake.py --data DIR --tokenizer FOLDER FOLDER   # everything with each of them

The data are the records of JSON and JSONL files, repeated with their numbers mixed in. The bare loop takes the same
strings, already in memory, in batches of 1,000 with the tokenizer's own threads on, and the ids out of every encoding:
`encode_batch_fast` for text, `encode_batch` for rendered conversations. `analyze` is the whole of it without the
cache, from the start of its process to its end: it reads, parses, renders, encodes, masks, hashes, writes and syncs.
The two take turns, and what counts is the ratio of a pair. What it takes with next to nothing to do is
reported beside.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from intake_data import (
    Data,
    chat_lines,
    conversations,
    length_lines,
    lengths,
    load,
    text_lines,
    texts,
    token_lines,
    token_lists,
    write_lines,
    write_parquet,
)
from intake_memory import analyze, measure_memory
from machine import machine
from planning import measure_all
from tokenizers import Tokenizer

from chunkplan.intake.backends import load_tokenizer

SAMPLES = Path(__file__).parents[1] / "sample_data"

_BATCH = 1000

Row = dict[str, Any]


def bare_loop(tokenizer: Path, strings: Path, with_offsets: bool) -> tuple[int, float]:
    """Count tokens and seconds of the loop alone; called in a process of its own, as the tokenizer starts threads."""
    loaded = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    values = json.loads(strings.read_text())
    encode = loaded.encode_batch if with_offsets else loaded.encode_batch_fast
    started = time.perf_counter()
    num_tokens = 0
    for start in range(0, len(values), _BATCH):
        for encoding in encode(values[start : start + _BATCH], add_special_tokens=not with_offsets):
            num_tokens += len(encoding.ids)
    return num_tokens, time.perf_counter() - started


def measure_tokenizing(data: Data, tokenizer: Path, num_bytes: int, repeats: int, folder: Path) -> list[Row]:
    """Measure text and conversations; each starts a process, which is part of its seconds."""
    template = load_tokenizer(tokenizer).template
    inputs: dict[str, tuple[Iterator[bytes], Iterator[str]]] = {"text": (text_lines(data), texts(data))}
    if template is not None and data.conversations:
        inputs["chat"] = chat_lines(data), (template.render(one)[0] for one in conversations(data))
    rows = []
    for name, (lines, strings) in inputs.items():
        file, listed = folder / f"{name}.jsonl", folder / f"{name}.json"
        write_lines(file, lines, num_bytes)
        listed.write_text(json.dumps(list(islice(strings, count_lines(file)))))
        pairs = []
        for _ in range(repeats):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                bare_tokens, bare = pool.submit(bare_loop, tokenizer, listed, name == "chat").result()
            run = analyze(folder / "workspace", [file], tokenizer=tokenizer)
            pairs.append((bare_tokens / bare, run.num_tokens / run.seconds, bare / run.seconds))
        bare_speeds, speeds, ratios = zip(*pairs, strict=True)
        rows.append(
            {
                "records": f"{name}, JSONL",
                "MB": num_bytes // 1_000_000,
                "bare loop M tokens/s": spread(bare_speeds, 1e6),
                "analyze M tokens/s": spread(speeds, 1e6),
                "ratio": spread(ratios),
            }
        )
    return rows


def measure_reading(data: Data, tokenizer: Path, num_bytes: int, repeats: int, folder: Path) -> list[Row]:
    """Measure what takes no tokenizer, and text from Parquet."""
    kinds: dict[str, tuple[Callable[[Data], Iterator[bytes]], str, pa.DataType, Callable[[Data], Iterator[Any]]]] = {
        "lengths": (length_lines, "length", pa.int64(), lengths),
        "tokens": (token_lines, "input_ids", pa.list_(pa.int32()), token_lists),
        "text": (text_lines, "text", pa.string(), texts),
    }
    rows = [startup(tokenizer, repeats, folder)]
    for name, (lines, column, kind, values) in kinds.items():
        wanted = tokenizer if name == "text" else None
        size = num_bytes // 4 if name == "text" else num_bytes
        file, table = folder / f"{name}.jsonl", folder / f"{name}.parquet"
        write_lines(file, lines(data), size)
        write_parquet(table, column, kind, values(data), count_lines(file))
        for source in (file, table):
            runs = [analyze(folder / "workspace", [source], tokenizer=wanted) for _ in range(repeats)]
            seconds = statistics.median(run.seconds for run in runs)
            rows.append(
                {
                    "input": f"{name}, {source.suffix[1:]}",
                    "MB": round(source.stat().st_size / 1e6),
                    "s": spread([run.seconds for run in runs]),
                    "MB/s": round(source.stat().st_size / 1e6 / seconds),
                    "M records/s": round(runs[0].num_sequences / 1e6 / seconds, 3),
                    "M tokens/s": "" if name == "lengths" else round(runs[0].num_tokens / 1e6 / seconds, 2),
                }
            )
    return rows


def startup(tokenizer: Path, repeats: int, folder: Path) -> Row:
    """Measure a dozen records, which takes as long as it takes to start."""
    file = folder / "few.jsonl"
    file.write_text('{"text": "a few words"}\n' * 12)
    runs = [analyze(folder / "workspace", [file], tokenizer=tokenizer) for _ in range(repeats)]
    return {
        "input": "12 records",
        "MB": 0,
        "s": spread([run.seconds for run in runs]),
        "MB/s": "",
        "M records/s": "",
        "M tokens/s": "",
    }


def measure_cache(data: Data, tokenizer: Path, num_bytes: int, folder: Path) -> list[Row]:
    """Measure the same input once more, and with a file of a tenth more."""
    files = [folder / "first.jsonl", folder / "second.jsonl"]
    lines = text_lines(data)
    write_lines(files[0], lines, num_bytes)
    write_lines(files[1], lines, num_bytes // 10)
    time.sleep(3)  # a file that was just written is not trusted to stay as it is
    rows = []
    for name, paths in {"first": files[:1], "again": files[:1], "with a file more": files, "both again": files}.items():
        run = analyze(folder / "kept", paths, tokenizer=tokenizer, use_cache=True)
        rows.append(
            {
                "run": name,
                "MB": round(sum(path.stat().st_size for path in paths) / 1e6),
                "s": round(run.seconds, 2),
            }
        )
    return rows


def count_lines(path: Path) -> int:
    """Count the lines of a file."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def spread(values: Any, unit: float = 1) -> str:
    """The median as text, with the least and most in brackets."""
    least, median, most = (f(values) / unit for f in (min, statistics.median, max))
    return f"{median:.3g} ({least:.3g}-{most:.3g})"


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=["tokenizing", "reading", "cache"])
    parser.add_argument("--data", type=Path, default=SAMPLES, help="a folder of JSON and JSONL files")
    parser.add_argument("--tokenizer", type=Path, nargs="+", default=[SAMPLES / "tokenizer"])
    parser.add_argument("--megabytes", type=int, default=100, help="of each input; a fifth of each of those read again")
    parser.add_argument("--memory-megabytes", type=int, default=5000, help="of lengths, and of tokens")
    parser.add_argument("--memory-text-megabytes", type=int, default=200, help="of text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of all sizes, once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    scale = 100_000 if options.quick else 1_000_000
    repeats = 1 if options.quick else options.repeats
    size, large, text = (
        megabytes * scale for megabytes in (options.megabytes, options.memory_megabytes, options.memory_text_megabytes)
    )
    loaded = {tokenizer: load(options.data, tokenizer) for tokenizer in options.tokenizer}
    parts: dict[str, Callable[[Path, Data, Path], list[Row]]] = {
        "tokenizing": lambda tokenizer, data, folder: measure_tokenizing(data, tokenizer, size, repeats, folder),
        "reading": lambda tokenizer, data, folder: measure_reading(data, tokenizer, 2 * size, repeats, folder),
        "cache": lambda tokenizer, data, folder: measure_cache(data, tokenizer, size // 5, folder),
        "memory": lambda tokenizer, data, folder: measure_memory(data, tokenizer, large, text, folder),
    }

    def with_each(name: str, folder: Path) -> list[Row]:
        return [
            {"tokenizer": tokenizer.resolve().name, **row}
            for tokenizer, data in loaded.items()
            for row in parts[name](tokenizer, data, folder)
        ]

    chosen = {name: partial(with_each, name) for name in options.only}
    packages = ("chunkplan", "tokenizers", "pyarrow", "numpy", "msgspec")
    measure_all(chosen, TITLES, machine(*packages), as_json=options.json)


TITLES = {
    "tokenizing": "`analyze` beside a bare loop of the tokenizer: medians, least and most",
    "reading": "`analyze` of input that is tokens or lengths already, and of text from Parquet",
    "cache": "`analyze` again: nothing is done twice",
    "memory": "Memory of all processes together (PSS)",
}


if __name__ == "__main__":
    main()
