"""`analyze`: data files -> an analysis folder, in one pass and bounded memory; the Python twin of the command.

Every record becomes one sequence or is counted as rejected with its reason; nothing is dropped uncounted. The same
files, tokenizer and options give the same content hash.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.arrays import BoolArray, Int32Array
from chunkplan.errors import DataError, UsageError
from chunkplan.intake.estimate import estimate_tokens
from chunkplan.intake.jsonl import JsonLines
from chunkplan.intake.records import Record
from chunkplan.intake.schemas import detect_schema, parse_record
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.intake.tokenizer_files import load_tokenizer
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.folder import replace_folder
from chunkplan.planfile.load import load_analysis

#: Records are encoded together up to whichever comes first; more only costs memory.
_BATCH_BYTES = 4 << 20
_BATCH_RECORDS = 1024

_LONGEST = np.iinfo(np.int32).max

#: Called with the bytes read so far and the bytes of all files.
Progress = Callable[[int, int], None]


def analyze(
    paths: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    progress: Progress | None = None,
) -> Analysis:
    """Analyze JSONL files, or folders of them, into the folder `output`, which is replaced as a whole at the end.

    Args:
        paths: files, and folders that stand for the `*.jsonl` files directly in them.
        output: the folder of the analysis.
        tokenizer: a tokenizer.json or a folder with one; without it lengths are estimated and no tokens are stored.
        max_length: longer sequences are cut to their first `max_length` tokens.
        progress: called as records are read.

    Raises:
        UsageError: a path is not there, a folder has no data in it, or an option makes no sense.
        DataError: a record is not what its source's schema says, or there is nothing to train on.
    """
    if max_length is not None and max_length < 1:
        raise UsageError(f"a maximum length of {max_length} leaves nothing", hint="give 1 or more tokens")
    files = find_files([paths] if isinstance(paths, (str, Path)) else paths)
    encoder = load_tokenizer(Path(tokenizer)) if tokenizer is not None else None
    total = sum(file.stat().st_size for file in files)
    with replace_folder(Path(output), "analysis") as folder:
        intake = _Intake(AnalysisWriter(folder), encoder, max_length)
        done = 0
        for file in files:
            for num_bytes in intake.read(file):
                if progress is not None:
                    progress(done + num_bytes, total)
            done += intake.sources[-1]["bytes"]
        intake.finish()
    return load_analysis(output)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files that `paths` name, in order; a folder stands for the `*.jsonl` files directly in it, sorted.

    Raises:
        UsageError: there is no such path, or no file in a folder.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(file for file in path.glob("*.jsonl") if file.is_file())
            if not found:
                raise UsageError(f"{path} has no *.jsonl files", hint="folders within it are not searched")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(f"there is no file {path}", hint="give JSONL files, or folders of them")
    if not files:
        raise UsageError("no data", hint="give JSONL files, or folders of them")
    return files


class _Intake:
    """Reads sources into a writer and counts what becomes of their records."""

    def __init__(self, writer: AnalysisWriter, encoder: RecordTokenizer | None, max_length: int | None) -> None:
        self._writer = writer
        self._encoder = encoder
        self._max_length = max_length
        self._rejected: Counter[str] = Counter()
        self._truncated = {"num_sequences": 0, "num_tokens": 0}
        self._num_targets = 0  # of the current source
        self.sources: list[dict[str, Any]] = []

    def read(self, file: Path) -> Iterator[int]:
        """Read one source, yielding the bytes read so far after every batch."""
        lines = JsonLines(file)
        schema = None
        num_records = 0
        first, rejected = self._writer.num_sequences, self._rejected.total()
        self._num_targets = 0
        batch: list[tuple[int, Record]] = []
        batch_start = 0
        for number, record in lines:
            where = f"{file}:{number}"
            schema = schema or detect_schema(record, where)
            batch.append((number - 1, parse_record(schema, record, where)))
            num_records += 1
            if len(batch) >= _BATCH_RECORDS or lines.num_bytes - batch_start >= _BATCH_BYTES:
                self._add(batch, file)
                batch, batch_start = [], lines.num_bytes
                yield lines.num_bytes
        self._add(batch, file)
        self.sources.append(
            {
                "path": os.fsencode(file).decode("utf-8", "backslashreplace"),  # names may be any bytes
                "format": "jsonl",
                "schema": schema,
                "bytes": lines.num_bytes,
                "records": num_records,
                "rejected": self._rejected.total() - rejected,
                "content_hash": lines.content_hash,
                "first_sequence_id": first,
                "num_sequences": self._writer.num_sequences - first,
            }
        )
        self._check(self.sources[-1])
        yield lines.num_bytes

    def finish(self) -> None:
        """Write what is left and the manifest.

        Raises:
            DataError: no record became a sequence.
        """
        if not self._writer.num_sequences:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._rejected.items())
            raise DataError(
                f"no sequence in {', '.join(s['path'] for s in self.sources)} ({reasons or 'no records'})",
                hint="give files with at least one record that is not empty",
            )
        encoder = self._encoder
        self._writer.finish(
            sources=self.sources,
            tokenizer=encoder
            and {
                "path": str(encoder.path),
                "content_hash": encoder.content_hash,
                "vocab_size": encoder.vocab_size,
                "eos_token": encoder.eos and encoder.eos[0],
            },
            template_hash=encoder and encoder.template and encoder.template.content_hash,
            options={"max_length": self._max_length},
            exact=encoder is not None,
            rejected=dict(self._rejected),
            truncated=self._truncated,
        )

    def _add(self, batch: list[tuple[int, Record]], file: Path) -> None:
        kept = [(line, record) for line, record in batch if not record.is_empty]
        self._reject(len(batch) - len(kept))
        source = len(self.sources)
        if self._encoder is None:
            for line, record in kept:
                length = self._cut(estimate_tokens(record), f"{file}:{line + 1}")
                self._writer.add_length(source, line, length, length - 1)
            return
        for (line, _), encoded in zip(kept, self._encoder.encode([record for _, record in kept]), strict=True):
            self._add_tokens(source, line, *encoded, where=f"{file}:{line + 1}")

    def _add_tokens(self, source: int, line: int, input_ids: Int32Array, target: BoolArray, *, where: str) -> None:
        if not len(input_ids):  # text of which the tokenizer leaves nothing
            self._reject(1)
            return
        length = self._cut(len(input_ids), where)
        input_ids, target = input_ids[:length], target[:length]
        self._writer.add(source, line, input_ids, target)
        self._num_targets += int(target.sum())

    def _reject(self, count: int) -> None:
        if count:
            self._rejected["empty"] += count

    def _cut(self, num_tokens: int, where: str) -> int:
        """The length that is kept of a sequence of `num_tokens`."""
        if self._max_length is not None and num_tokens > self._max_length:
            self._truncated["num_sequences"] += 1
            self._truncated["num_tokens"] += num_tokens - self._max_length
            num_tokens = self._max_length
        if num_tokens > _LONGEST:
            raise DataError(
                f"a sequence of {num_tokens} tokens; {_LONGEST} is the most a plan can address",
                where=where,
                hint="split the record, or cut it with --max-length",
            )
        return num_tokens

    def _check(self, source: dict[str, Any]) -> None:
        assert source["records"] == source["num_sequences"] + source["rejected"]
        if self._encoder is None or source["schema"] == "text" or not source["num_sequences"] or self._num_targets:
            return
        raise DataError(
            f"no token of its {source['num_sequences']} sequences counts in the loss (schema {source['schema']})",
            where=source["path"],
            hint="check the roles, `loss` and `weight` of its messages, its completions, the chat template"
            + (", and --max-length" if self._max_length else ""),
        )
