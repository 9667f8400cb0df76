"""Writes the rows of a plan, or a whole dataset packed, in the format of another trainer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.errors import DataError, UsageError
from chunkplan.exporting.batches import RowBatch, read_batches
from chunkplan.exporting.checks import check_source
from chunkplan.exporting.hf import write_hf
from chunkplan.exporting.jsonl import write_jsonl
from chunkplan.exporting.megatron_bridge import write_megatron_bridge
from chunkplan.exporting.rows import SplitSequences, WholeSequences, split_sequences
from chunkplan.exporting.source import open_source
from chunkplan.files.folder import EXPORT, refuse_other_content, replace_folder
from chunkplan.files.json_file import write_json
from chunkplan.version import __version__

#: Of each format, what writes a folder of it. It is given rows and a fingerprint of this export, and names the files
#: that it has written.
FORMATS: dict[str, Callable[[Path, Iterable[RowBatch], str], list[str]]] = {
    "hf": write_hf,
    "megatron-bridge": write_megatron_bridge,
    "jsonl": write_jsonl,
}

#: Called with the tokens written and those there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written into the folder `path`, and what of the source is not in it.

    `left_out` or `cut`: the sequences in parts, by what was asked for. A sequence that is cut counts once for each
    time that it occurs. `files` have the rows, in order.
    """

    path: Path
    format: str
    tool_version: str
    source: Path
    source_kind: str
    source_content_hash: str
    chunk_size: int
    num_rows: int
    num_sequences: int
    num_tokens: int
    num_target_tokens: int
    left_out: WholeSequences | None
    cut: SplitSequences | None
    files: list[str]

    @property
    def token_fill(self) -> float:
        """Tokens over chunk size of the rows."""
        return self.num_tokens / (self.num_rows * self.chunk_size)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for one JSON document; export.json holds the same."""
        return {**asdict(self), "path": str(self.path), "source": str(self.source)}


def export(
    source: str | Path,
    output: str | Path,
    to: str,
    *,
    chunk_size: int | None = None,
    packing: str | None = None,
    whole_only: bool = False,
    allow_split: bool = False,
    analysis: str | Path | None = None,
    progress: Progress | None = None,
) -> Export:
    """Write rows in one of the `FORMATS` into a folder: the chunks of a plan in order, or a packed analysis.

    An analysis is packed into rows of `chunk_size` tokens by the algorithm `packing` (default "auto"). Other trainers
    carry no keys and values from row to row, so that a sequence in several rows is refused: `whole_only` leaves it
    out, `allow_split` makes a sequence of each part. `analysis` is that of a plan, if it has moved.

    Raises:
        UsageError: there is nothing at `source`, it has no tokens, sequences are in parts, or `output` is something
            else.
        DataError: a file is damaged or was changed, or the analysis is not the plan's.
    """
    output = Path(output)
    if to not in FORMATS:
        raise UsageError(
            f"there is no format {to!r}",
            hint=f"known are {', '.join(FORMATS)}; `chunkplan.export_order` writes torch-pipelining",
        )
    if whole_only and allow_split:
        raise UsageError("--whole-only and --allow-split exclude each other", hint="leave one of them out")
    refuse_other_content(output, "export")
    opened = open_source(Path(source), chunk_size=chunk_size, packing=packing, analysis=analysis)
    rows, tokens, split = opened.rows, opened.analysis.tokens(), None
    if rows.is_part.any():
        split = split_sequences(rows, opened.analysis, tokens)
        if not (whole_only or allow_split):
            raise opened.refusal(split, to, output)
        rows = opened.whole_rows() if whole_only else rows
    if not rows.num_rows:
        raise UsageError(
            "every sequence is in parts, none is left", where=str(opened.path), hint="export with --allow-split"
        )
    stated = int(opened.analysis.num_target_tokens[rows.sequence_id[rows.start == 0]].sum(dtype=np.int64))
    stated -= split.num_lost_targets if split and allow_split else 0
    described = Export(
        path=output,
        format=to,
        tool_version=__version__,
        source=opened.path,
        source_kind=opened.kind,
        source_content_hash=opened.content_hash,
        chunk_size=opened.chunk_size,
        num_rows=rows.num_rows,
        num_sequences=rows.num_sequences,
        num_tokens=rows.num_tokens,
        num_target_tokens=stated,
        left_out=split.whole if split and whole_only else None,
        cut=split if allow_split else None,
        files=[],
    )
    fingerprint = _fingerprint(described, packing=packing, whole_only=whole_only, allow_split=allow_split)
    with replace_folder(output, "export") as folder:
        check_source(opened.analysis)
        counted = _count(read_batches(rows, tokens), rows.num_tokens, stated, opened.path, progress)
        written = replace(described, files=FORMATS[to](folder, counted, fingerprint))
        write_json(folder / EXPORT, written.to_dict(), indent=2)
    return written


#: What of an export is in its fingerprint: all but where it lies, and what follows from the rest.
_IN_FINGERPRINT = (
    *("format", "tool_version", "source_kind", "source_content_hash", "chunk_size"),
    *("num_rows", "num_sequences", "num_tokens", "num_target_tokens"),
)


def _fingerprint(described: Export, **asked: str | bool | None) -> str:
    """16 hexadecimal digits that differ where the rows may: by the source, the format, and what was `asked` for."""
    facts = {name: getattr(described, name) for name in _IN_FINGERPRINT} | asked
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _count(
    batches: Iterator[RowBatch], num_tokens: int, num_target_tokens: int, source: Path, progress: Progress | None
) -> Iterator[RowBatch]:
    """Pass on `batches`, say how far they are, and see that they have the targets that were stated."""
    done = targets = 0
    for batch in batches:
        yield batch
        done += batch.input_ids.size
        targets += int(np.count_nonzero(batch.target))
        if progress:
            progress(done, num_tokens)
    if targets != num_target_tokens:
        raise DataError(
            f"the rows have {targets:,} targets, its sequences {num_target_tokens:,}",
            where=str(source),
            hint="`chunkplan validate` names what is wrong with it",
        )
