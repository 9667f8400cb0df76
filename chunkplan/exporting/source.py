"""What is exported: a plan with its analysis, or an analysis to pack."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chunkplan.errors import UsageError
from chunkplan.exporting.rows import ExportRows, SplitSequences, packed_rows, plan_rows
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.load import is_analysis, load_analysis, load_plan, load_same_analysis


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

    def refusal(self, split: SplitSequences, to: str, output: Path) -> UsageError:
        """That some sequences are in parts, what an export in the format `to` can do about it, and what that costs."""
        whole = split.whole
        real, here = Path(os.path.realpath(self.analysis.path)), Path.cwd()
        analysis = str(real.relative_to(here) if real.is_relative_to(here) else real)
        longest = str(self.analysis.num_tokens.max())
        words = ["export", analysis, "--chunk-size", longest, "--to", to, "--output", str(output)]
        command = shlex.join(["chunkplan", *words])
        unshared = "; a plan built with `--cp off` may split fewer" if self.may_share else ""
        found = "are split" if self.kind == "plan" else f"have more than {self.chunk_size:,} tokens, and would be split"
        return UsageError(
            f"{whole.num_sequences:,} of {self.rows.num_sequences:,} sequences {found} into {split.num_parts:,} parts; "
            "other trainers carry no keys and values from part to part",
            where=str(self.path),
            hint=f"--whole-only leaves these sequences out ({whole.num_tokens:,} tokens, {whole.num_target_tokens:,} "
            f"targets); --allow-split makes a sequence of each part ({split.num_tokens_without_prefix:,} tokens do not "
            f"see what is before their part, {split.num_lost_targets:,} targets are lost); `{command}` packs all of "
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


def _open_analysis(analysis: Analysis, chunk_size: int | None, packing: str) -> ExportSource:
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
        rows=packed_rows(analysis, chunk_size, packing, drop_longer=False),
        whole_rows=lambda: packed_rows(analysis, chunk_size, packing, drop_longer=True),
    )
