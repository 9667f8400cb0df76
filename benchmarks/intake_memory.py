"""Runs `chunkplan.analyze` and watches the memory of all its processes together. Linux only.

What is watched is the sum of their proportional set sizes (PSS): a page that several of them share counts once, and the
pages of files that are mapped count while they are in memory. It is looked at 10 times a second.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil
from intake_data import Data, blocks, described_length_lines, text_lines, token_lines

_EVERY = 0.1

#: How many records, of how many megabytes each; the last two are more than is read by default.
_RECORDS = ((1, 1), (1, 4), (1, 7.9), (4, 7.9), (1, 16), (1, 500))


@dataclass(frozen=True)
class IntakeRun:
    """One run of `analyze`: seconds from the start of its process to its end, and what it left.

    `peak_bytes` are the most bytes of memory, if that was watched. `manifest` is empty where input was refused, and
    `error` then says why.
    """

    seconds: float
    peak_bytes: int
    manifest: dict[str, Any]
    error: str

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences together."""
        return int(self.manifest["totals"]["num_tokens"])

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return int(self.manifest["totals"]["num_sequences"])


_PROGRAM = """
import json, sys
import chunkplan
from chunkplan.errors import ChunkplanError
arguments = json.loads(sys.argv[1])
try:
    chunkplan.analyze(arguments.pop("paths"), arguments.pop("output"), **arguments)
except ChunkplanError as error:
    sys.exit(str(error))
"""


def analyze(
    folder: Path,
    paths: Iterable[Path | str],
    *,
    tokenizer: Path | None = None,
    use_cache: bool = False,
    data: Iterator[bytes] | None = None,
) -> IntakeRun:
    """Analyze `paths` into `folder`, in a process of its own.

    `data` is what is written into the standard input; only with it memory is watched, which takes time itself.
    """
    arguments = {
        "paths": list(map(str, paths)),
        "output": str(folder / "analysis"),
        "tokenizer": tokenizer and str(tokenizer),
        "use_cache": use_cache,
    }
    command = [sys.executable, "-c", _PROGRAM, json.dumps(arguments)]
    shutil.rmtree(folder / "analysis", ignore_errors=True)
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        stdin = subprocess.DEVNULL if data is None else subprocess.PIPE
        process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, stderr=said)
        feeder = threading.Thread(target=_feed, args=(process, data))
        feeder.start()
        peak = 0
        while data is not None and process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(_EVERY)
        process.wait()
        seconds = time.perf_counter() - started
        feeder.join()
        said.seek(0)
        error = said.read().decode()
    file = folder / "analysis" / "manifest.json"
    manifest = {} if process.returncode else json.loads(file.read_text())
    return IntakeRun(seconds, peak, manifest, error)


def _feed(process: subprocess.Popen[bytes], data: Iterator[bytes] | None) -> None:
    if data is None or process.stdin is None:
        return
    try:
        for block in data:
            process.stdin.write(block)
        process.stdin.close()
    except BrokenPipeError:  # it has refused what came before
        pass


def _memory(pid: int) -> int:
    total = 0
    try:
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            total += one.memory_full_info().pss
    except psutil.Error:  # one that ends while it is looked at
        return 0
    return total


def measure_memory(data: Data, tokenizer: Path, num_bytes: int, text_bytes: int, folder: Path) -> list[dict[str, Any]]:
    """Measure input that comes through a pipe, so that nothing but the intake itself takes room on the disk."""
    inputs: dict[str, tuple[Iterator[bytes], int, Path | None]] = {
        "lengths with names, JSONL": (described_length_lines(data), num_bytes, None),
        "tokens, JSONL": (token_lines(data), num_bytes, None),
        "text, JSONL": (text_lines(data), text_bytes, tokenizer),
    }
    rows = []
    for name, (lines, size, wanted) in inputs.items():
        run = analyze(folder, ["-"], tokenizer=wanted, data=blocks(lines, size))
        if not run.manifest:
            raise SystemExit(run.error)
        rows.append(_row(name, size, run))
        shutil.rmtree(folder)
    for count, megabytes in _RECORDS:
        size = round(megabytes * 1_000_000)
        run = analyze(folder, ["-"], tokenizer=tokenizer, data=repeat(one_record(data, size), count))
        name = f"text, {count} of {megabytes} MB" + (", refused" if not run.manifest else "")
        rows.append(_row(name, count * size, run))
        shutil.rmtree(folder)
    return rows


def one_record(data: Data, num_bytes: int) -> bytes:
    """Make a line of `num_bytes` or a little less, of as many texts."""
    body, size = [], len('{"text": ""}')
    for text in _over_and_over(data.texts):
        encoded = json.dumps(text, ensure_ascii=False).encode()[1:-1]
        if size + len(encoded) > num_bytes - 1:
            break
        body.append(encoded)
        size += len(encoded)
    return b'{"text": "' + b"".join(body) + b'"}\n'


def _over_and_over(values: list[str]) -> Iterator[str]:
    while True:
        yield from values


def _row(name: str, num_bytes: int, run: IntakeRun) -> dict[str, Any]:
    return {
        "input": name,
        "M sequences": round(run.num_sequences / 1e6, 2) if run.manifest else 0,
        "MB": num_bytes // 1_000_000,
        "s": round(run.seconds, 1),
        "peak MB": round(run.peak_bytes / 1e6),
    }
