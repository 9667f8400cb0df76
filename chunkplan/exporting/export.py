"""Writes the rows of a plan, or a whole dataset packed, in the format of another trainer."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from chunkplan.arrays import sum_runs
from chunkplan.errors import DataError, UsageError
from chunkplan.exporting.batches import LazyRows, RowBatch, read_batches
from chunkplan.exporting.checks import check_source
from chunkplan.exporting.formats import write_hf, write_jsonl, write_megatron_bridge
from chunkplan.exporting.rows import ExportRows, SplitSequences, WholeSequences, count_split, packed_rows, plan_rows
from chunkplan.files.folder import EXPORT, refuse_other_content, replace_folder
from chunkplan.files.json_file import write_json
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import is_analysis, load_analysis, load_plan, load_same_analysis
from chunkplan.planfile.samples import refuse_samples
from chunkplan.quantities import short_repr
from chunkplan.version import __version__


@dataclass(frozen=True)
class ExportSource:
    """A plan or an analysis (`kind`) at `path`, and its rows of at most `chunk_size` tokens.

    `rows` have all sequences, some of them in parts; `whole_rows` makes those without them. `may_share`: some parts may
    be what ranks share of a sequence.
    """

    path: Path
    kind: str
    content_hash: str
    analysis: Analysis
    chunk_size: int
    rows: ExportRows
    whole_rows: Callable[[], ExportRows]
    may_share: bool = False

    def chosen(
        self, *, whole_only: bool, allow_split: bool, choices: tuple[str, str, str]
    ) -> tuple[ExportRows, SplitSequences | None]:
        """The rows to give, and what of the source is in parts: `whole_only` leaves it out, `allow_split` gives it.

        Raises:
            UsageError: something is and neither was chosen, by the words of `choices`, both and a third; or all is.
        """
        if not self.rows.is_part.any():
            return self.rows, None
        split = count_split(self.rows, self.analysis, self.analysis.tokens())
        if whole_only or allow_split:
            rows = self.whole_rows() if whole_only else self.rows
            if rows.num_rows:
                return rows, split
            raise UsageError("every sequence is in parts, none is left", where=str(self.path), hint=f"use {choices[1]}")
        whole = split.whole
        unshared = "; a plan built with `--cp off` may split fewer" if self.may_share else ""
        found = "are split" if self.kind == "plan" else f"have more than {self.chunk_size:,} tokens, and would be split"
        raise UsageError(
            f"{whole.num_sequences:,} of {self.rows.num_sequences:,} sequences {found} into {split.num_parts:,} parts; "
            "other trainers carry no keys and values from part to part",
            where=str(self.path),
            hint=f"{choices[0]} leaves these sequences out ({whole.num_tokens:,} tokens, {whole.num_target_tokens:,} "
            f"targets); {choices[1]} makes a sequence of each part ({split.num_tokens_without_prefix:,} tokens do not "
            f"see what is before their part, {split.num_lost_targets:,} targets are lost); {choices[2]} packs all of "
            f"the analysis into rows that split none{unshared}",
        )


def open_source(
    path: Path, *, chunk_size: int | None = None, packing: str | None = None, analysis: str | Path | None = None
) -> ExportSource:
    """Open the plan or the analysis at `path`.

    `chunk_size` and `packing` are for an analysis, `analysis` is that of a plan, if it has moved.

    Raises:
        UsageError: there is nothing, an option is missing or for the other kind, or there is no such packing.
        DataError: a file is damaged, or the analysis is not the plan's.
    """
    if is_analysis(path):
        if analysis is not None:
            raise UsageError("--analysis is for a plan, this is an analysis", where=str(path), hint="leave it out")
        return _open_analysis(load_analysis(path), chunk_size, packing or "auto")
    plan = load_plan(path)
    if chunk_size is not None or packing is not None:
        raise UsageError(
            "--chunk-size and --packing are for an analysis, this is a plan",
            where=str(path),
            hint="leave them out: the rows of a plan are its chunks; or give the ANALYSIS",
        )
    found = load_same_analysis(plan, analysis)
    refuse_samples(found, "an export")
    rows = plan_rows(plan, found)
    return ExportSource(
        path=path,
        kind="plan",
        content_hash=plan.content_hash,
        analysis=found,
        chunk_size=plan.config.chunk_size,
        rows=rows,
        whole_rows=lambda: rows.only(~rows.is_part),
        may_share=plan.config.cp != "off" and plan.config.dp > 1,
    )


def _open_analysis(analysis: Analysis, chunk_size: int | None, packing: str, multiple: int = 1) -> ExportSource:
    refuse_samples(analysis, "an export")
    if chunk_size is None:
        raise UsageError(
            "--chunk-size is missing, the most tokens in a row",
            where=str(analysis.path),
            hint="for example --chunk-size 8192; or give a PLAN, which has one",
        )
    return ExportSource(
        path=analysis.path,
        kind="analysis",
        content_hash=analysis.content_hash,
        analysis=analysis,
        chunk_size=chunk_size,
        rows=packed_rows(analysis, chunk_size, packing, multiple, drop_longer=False),
        whole_rows=lambda: packed_rows(analysis, chunk_size, packing, multiple, drop_longer=True),
    )


def open_rows(
    path: str | Path, most: int, *, multiple: int = 1, whole_only: bool = False, allow_split: bool = False
) -> LazyRows:
    """The chunks of a plan in order, or an analysis packed, as rows that are read one at a time: no file is written.

    A row has `most` inputs, tokens that predict one, those of each sequence padded to a `multiple`. Sequences in parts
    are refused, left out (`whole_only`), or each part is given as a sequence (`allow_split`).

    Raises:
        UsageError: there is nothing at `path`, it has no tokens, sequences are in parts, or a row has more inputs.
        DataError: a file is damaged or was changed.
    """
    path = Path(path)
    is_plan = not is_analysis(path)
    opened = open_source(path) if is_plan else _open_analysis(load_analysis(path), most, "auto", multiple)
    tokens, longest = opened.analysis.tokens(), opened.analysis.num_tokens.max()
    whole = f"`{opened.analysis.path}` with rows of {-(-longest // multiple) * multiple} tokens"
    choices = ("whole_only=True", "allow_split=True", whole)
    rows, _ = opened.chosen(whole_only=whole_only, allow_split=allow_split, choices=choices)
    widest = int(sum_runs(rows.num_inputs(multiple), rows.rows).max())
    if widest > most:
        raise UsageError(
            f"a row of the plan has {widest:,} tokens, of sequences padded to a multiple of {multiple}; {most:,} fit",
            where=str(path),
            hint=f"use rows of {widest} tokens or more, or build the plan with --chunk-size {most} or less",
        )
    return LazyRows(rows, tokens)


#: Of each format, what writes a folder of it. It is given rows and a fingerprint of this export, and names the files
#: that it has written.
FORMATS: dict[str, Callable[[Path, Iterable[RowBatch], str], list[str]]] = {
    "hf": write_hf,
    "megatron-bridge": write_megatron_bridge,
    "jsonl": write_jsonl,
}

#: Of frameworks that take no files of ours, by name: what makes them call the planner, in every process.
DOORS = {
    module.replace("_", "-"): f"from chunkplan.adapters import {module}; {module}.install()"
    for module in ("megatron", "ms_swift", "nemo_rl", "prime_rl", "slime", "verl")
} | {
    "axolotl": """from chunkplan_runtime.adapters.transformers import with_plan_step
# in a BasePlugin, with sample_packing and max_steps:
def get_trainer_cls(self, cfg):
    return with_plan_step(AxolotlTrainer, cap=cfg.sequence_len)""",
    "torchtitan": """from chunkplan.adapters.torchtitan import ChunkplanRowsConfig
dataloader = GrainDataLoader.Config(dataset=ChunkplanRowsConfig(path="chunkplan-out/plan"))""",
    "transformers": """from chunkplan_runtime.adapters.transformers import with_plan
# of a plan of `chunkplan build --micro-batches N`, N = args.gradient_accumulation_steps:
trainer = with_plan(Trainer, "chunkplan-out/plan")(
    model, args, train_dataset=rows, data_collator=DataCollatorWithFlattening()
)""",
    "trl": """from chunkplan_runtime.adapters.transformers import with_plan_step
# args = SFTConfig("run", padding_free=True, max_length=None):
trainer = with_plan_step(SFTTrainer, cap=16384)(model, args, train_dataset=rows)
# DPOTrainer, KTOTrainer, GRPOTrainer, RLOOTrainer, in chunks (docs/rl.md):
from chunkplan_runtime.adapters.trl import with_chunks
trainer = with_chunks(DPOTrainer, chunk_size=8192)(model, args=DPOConfig("run"), train_dataset=pairs)""",
}


def refuse_door(name: str) -> None:
    """Raise UsageError, with the way on, where `name` is a framework that takes no files."""
    if name.lower() in DOORS:
        hint = f"`chunkplan export --to {name.lower()}` says how, and docs/integrations.md"
        raise UsageError(f"{name} reads no files, it calls the planner", hint=hint)


#: Called with the tokens written and those there are.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Export:
    """A written export in the folder `path`, and what it leaves out of the source.

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

    __repr__ = short_repr

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

    Example: `chunkplan.export("plan", "rows", "jsonl", whole_only=True)`

    An analysis is packed into rows of `chunk_size` tokens by the algorithm `packing` (default "auto"). Other trainers
    carry no keys and values from row to row, so that a sequence in several rows is refused: `whole_only` leaves it
    out, `allow_split` makes a sequence of each part. `analysis` is that of a plan, if it has moved.

    Raises:
        UsageError: there is nothing at `source`, it has no tokens, sequences are in parts, or `output` is something
            else.
        DataError: a file is damaged or was changed, or the analysis is not the plan's.
    """
    output = Path(output)
    refuse_door(to)
    if to not in FORMATS:
        raise UsageError(
            f"there is no format {to!r}",
            hint=f"known are {', '.join(FORMATS)}; `chunkplan.export_order` writes torch-pipelining",
        )
    if whole_only and allow_split:
        raise UsageError("--whole-only and --allow-split exclude each other", hint="leave one of them out")
    refuse_other_content(output, "export")
    opened = open_source(Path(source), chunk_size=chunk_size, packing=packing, analysis=analysis)
    tokens, longest = opened.analysis.tokens(), str(opened.analysis.num_tokens.max())
    real, here = Path(os.path.realpath(opened.analysis.path)), Path.cwd()
    named = str(real.relative_to(here) if real.is_relative_to(here) else real)
    words = ["chunkplan", "export", named, "--chunk-size", longest, "--to", to, "--output", str(output)]
    choices = ("--whole-only", "--allow-split", f"`{shlex.join(words)}`")
    rows, split = opened.chosen(whole_only=whole_only, allow_split=allow_split, choices=choices)
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
