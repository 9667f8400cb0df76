"""Damage to the files of a plan and of an analysis, and what becomes of it.

As a program, `corruption_cases.py FOLDER KIND SEED SECONDS` damages the plan or the analysis in FOLDER again and again
within little memory, and ends with an error where something else comes of it than should.
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from chunkplan import PlanConfig, build, load_analysis, load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile import analysis_writer
from chunkplan.planfile.analysis_writer import AnalysisWriter

#: Bytes of address space, and seconds that a case may take at most.
_MEMORY, _PATIENCE = 3 << 30, 20

#: What no reader reads: a report for people.
_REPORT = "rejected.jsonl"


def write_pair(folder: Path, seed: int) -> None:
    """An analysis of 48 sequences in several token files and record batches, and its plan for dp 2 and pp 2."""
    random = np.random.default_rng(seed)
    analysis = folder / "analysis"
    analysis.mkdir(parents=True)
    writer = AnalysisWriter(analysis)
    with (
        patch.object(analysis_writer, "TOKEN_FILE_TOKENS", 400),
        patch.object(analysis_writer, "WAITING_SEQUENCES", 12),
        patch.object(analysis_writer, "BATCH_ROWS", 8),
    ):
        for record, length in enumerate(random.integers(3, 60, 48).tolist()):
            target = random.random(length) < 0.7
            target[0] = False
            writer.add(0, record, random.integers(0, 50, length, dtype=np.int32), target)
        source = {"path": "d.jsonl", "format": "jsonl", "schema": "text", "records": 49, "rejected": 1}
        writer.finish(exact=True, sources=[source], rejected={"empty": 1})
    (analysis / _REPORT).write_text('{"file": "d.jsonl", "line": 49, "reason": "empty", "message": "no text"}\n')
    config = PlanConfig(chunk_size=32, k=1, global_batch=8, dp=2, pp=2, tail_sharing=True, seed=seed)
    build(analysis, folder / "plan", config)


def files_of(folder: Path) -> list[Path]:
    """The files that readers read."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _REPORT)


def read(folder: Path, kind: str) -> Any:
    """Everything that a reader gets of the plan or the analysis in a folder."""
    if kind == "plan":
        plan = load_plan(folder / kind)
        return plan.content_hash, plan.config, list(plan.iter_steps())
    analysis = load_analysis(folder / kind)
    tokens = analysis.tokens()
    columns = (analysis.num_tokens, analysis.num_target_tokens, analysis.source, analysis.record)
    return (
        analysis.content_hash,
        [column.tolist() for column in columns],
        [[array.tolist() for array in tokens(sequence_id)] for sequence_id in range(analysis.num_sequences)],
    )


def outcome(folder: Path, kind: str, original: Any) -> str:
    """What becomes of a plan or an analysis that was damaged: "refused", "found" by `validate`, or still the "same".

    Raises:
        AssertionError: it is valid, but not the same.
    """
    try:
        is_valid = validate(folder / kind).ok
    except (DataError, UsageError):
        is_valid, word = False, "refused"
    else:
        word = "found"
    if is_valid:
        assert read(folder, kind) == original
        return "same"
    with suppress(DataError, UsageError):
        read(folder, kind)  # whoever reads it without validating it must not be struck down
    return word


def damages(content: bytes, random: np.random.Generator) -> Iterator[tuple[str, bytes]]:
    """Endless damage, with its name. The ends of files, which say what is where, are hit more often."""
    while True:
        size = len(content)
        at = int(random.integers(size)) if random.random() < 0.7 else max(size - 1 - int(random.integers(2000)), 0)
        length = int(random.integers(1, 64))
        how = str(random.choice(["bit", "bit", "bit", "byte", "overwritten", "zeros", "cut short", "appended"]))
        damaged = bytearray(content)
        if how == "bit":
            damaged[at] ^= 1 << int(random.integers(8))
        elif how == "byte":
            damaged[at] = int(random.choice([0, 127, 128, 255]))
        elif how in ("overwritten", "zeros"):
            stop = min(at + length, size)
            damaged[at:stop] = random.bytes(stop - at) if how == "overwritten" else bytes(stop - at)
        elif how == "cut short":
            del damaged[at:]
        else:
            damaged += random.bytes(length)
        if damaged != content:
            yield f"{how} at {at}", bytes(damaged)


def _main(folder: Path, kind: str, seed: int, seconds: float) -> None:
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    original = read(folder, kind)
    files = [(path, path.read_bytes()) for path in files_of(folder / kind)]
    random = np.random.default_rng(seed)
    endless = [(path, content, damages(content, random)) for path, content in files]
    end, counts = time.monotonic() + seconds, Counter[str]()
    while time.monotonic() < end:
        path, content, ways = endless[int(random.integers(len(endless)))]
        what, damaged = next(ways)
        path.unlink()  # what is mapped by the case before stays as it is
        path.write_bytes(damaged)
        print(f"{path.name}: {what}", end="\r", flush=True)  # the last one is what ended the process, if it ends
        faulthandler.dump_traceback_later(_PATIENCE, exit=True)
        counts[outcome(folder, kind, original)] += 1
        faulthandler.cancel_dump_traceback_later()
        path.unlink()
        path.write_bytes(content)
    print(f"\n{dict(counts)}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
