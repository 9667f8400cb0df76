"""`chunkplan export`: a plan, or a packed dataset, in the format of another trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from chunkplan.config.plan import PACKERS
from chunkplan.domains import one_of, tokens
from chunkplan.errors import UsageError, one_line
from chunkplan.options import Options, option
from chunkplan.quantities import percent
from chunkplan_cli.declared import CliValues, JsonOption, WorkspaceOption, find_plan, output_option, takes
from chunkplan_cli.progress import note_compilation, progress
from chunkplan_cli.terminal import facts_grid, note, print_json, stdout

if TYPE_CHECKING:
    from chunkplan.exporting.export import Export
    from chunkplan.exporting.rows import SplitSequences, WholeSequences
    from chunkplan.exporting.torch_pipelining import OrderExport


_OF_ANALYSIS = "Of an ANALYSIS"


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Options of packing an analysis into rows; a plan has its own."""

    chunk_size: int | None = option(
        tokens(), "Most tokens in a row. Required for an analysis.", group=_OF_ANALYSIS, default=None
    )
    packing: str | None = option(
        one_of(*PACKERS),
        "The packer of rows: auto, bfd, mbs, column-generation or exact.",
        group=_OF_ANALYSIS,
        default=None,
        default_words="auto",
    )


Files = Literal["hf", "megatron-bridge", "jsonl", "torch-pipelining"]
Doors = Literal["transformers", "trl", "axolotl", "ms-swift", "verl", "slime", "nemo-rl", "prime-rl", "megatron"]

#: What `--to` names: a format, or a framework that takes no files and is answered by the way to it.
Target = Literal[Files, Doors, "torchtitan"]


@takes(rows=ExportOptions)
def export(
    to: Annotated[
        Target,
        typer.Option(
            metavar="FORMAT",
            help="hf: a dataset of Hugging Face, as SFTTrainer of TRL takes it. megatron-bridge: packed Parquet. "
            "jsonl: a JSON object a row. torch-pipelining: the order of a PLAN, for pipelines of torch.",
            show_default=False,
        ),
    ],
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN|ANALYSIS", help="What to export. Default: WORKSPACE/plan.", show_default=False),
    ] = None,
    *,
    rows: CliValues,
    whole_only: Annotated[
        bool, typer.Option("--whole-only", help="Leave out sequences that are in several rows.")
    ] = False,
    allow_split: Annotated[
        bool,
        typer.Option("--allow-split", help="Make a sequence of each part of such a sequence: parts lose their prefix."),
    ] = False,
    analysis: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The plan's analysis, if it is not where it was.")
    ] = None,
    output: Annotated[Path | None, output_option("The folder to write. Default: WORKSPACE/export-FORMAT.")] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write packed rows for another trainer: the chunks of a plan in its order, or a whole analysis packed.

    Other frameworks call the planner and need no files: `--to NAME` says how, for transformers, trl, axolotl, ms-swift,
    verl, slime, nemo-rl, prime-rl, megatron and torchtitan.

    Other trainers carry no keys and values from row to row. Where a sequence is in several rows, choose --whole-only or
    --allow-split. `build` makes plans; `train` uses them as they are.

    Example: chunkplan export --to hf --whole-only
    """
    from chunkplan.exporting.export import DOORS
    from chunkplan.exporting.export import export as run
    from chunkplan.workspace import Workspace

    if to in DOORS:
        note(f"{to} reads no files, it calls the planner; in every process (docs/integrations.md has the rest):")
        print(DOORS[to])
        return
    place = Workspace.find(workspace)
    source = find_plan(path, place, "a PLAN or an ANALYSIS")
    target = output or place.root / f"export-{to}"
    if to == "torch-pipelining":
        _refuse_options_of_rows(whole_only=whole_only, allow_split=allow_split, analysis=analysis, **rows)
        _export_order(source, target, as_json)
        return
    with note_compilation(), progress("exporting", "M tokens", 1_000_000) as report_progress:
        written = run(
            source,
            target,
            to,
            **rows,
            whole_only=whole_only,
            allow_split=allow_split,
            analysis=analysis,
            progress=report_progress,
        )
    if as_json:
        print_json(written.to_dict())
    else:
        stdout().print(_report(written))
    note(f"export in {target}")


def _refuse_options_of_rows(**given: object) -> None:
    """Raise UsageError where an option of rows was given for an order, which has no tokens."""
    if names := [f"--{name.replace('_', '-')}" for name, value in given.items() if value]:
        raise UsageError(
            f"torch-pipelining is an order and takes no {' or '.join(names)}",
            hint="leave that out: all chunks of the plan are in the order, as they are",
        )


def _export_order(source: Path, target: Path, as_json: bool) -> None:
    from chunkplan.exporting.torch_pipelining import export_order
    from chunkplan.planfile.load import is_analysis

    if is_analysis(source):
        raise UsageError(
            "torch-pipelining is the order of a plan, this is an analysis",
            where=str(source),
            hint="`chunkplan build` makes a plan; give it, or leave the path out",
        )
    written = export_order(source, target)
    if as_json:
        print_json(written.to_dict())
    else:
        stdout().print(_report_order(written))
    note(f"export in {target}")


def _report_order(written: OrderExport) -> Table:
    microbatches = f"{written.num_microbatches:,} of up to {written.chunk_size:,} tokens"
    rows = [
        ("source", one_line(f"plan {written.source}")),
        ("order", f"{written.schedule} on {written.num_stages} stages of {written.pp} ranks"),
        ("steps", f"{written.num_steps:,}, each on {written.dp:,} data-parallel ranks"),
        ("micro-batches", microbatches),
    ]
    if written.num_recomputed:
        rows.append(("to recompute", f"{written.num_recomputed:,}: give these activation checkpointing"))
    if written.num_parts:
        rows.append(("parts", f"{written.num_parts:,} of split sequences: stages have to carry keys and values"))
    if written.num_shared:
        rows.append(("shared", f"{written.num_shared:,} slices: ranks have to exchange keys and values"))
    rows.append(("files", f"one a step and rank, named by {written.microbatches}"))
    return facts_grid(rows)


def _report(written: Export) -> Table:
    rows = [
        ("source", one_line(f"{written.source_kind} {written.source}")),
        ("rows", f"{written.num_rows:,} of up to {written.chunk_size:,} tokens, {percent(written.token_fill)} full"),
        ("sequences", f"{written.num_sequences:,}"),
        ("tokens", f"{written.num_tokens:,}, of which {written.num_target_tokens:,} targets"),
    ]
    if written.left_out:
        rows.append(("left out", _left_out(written.left_out)))
    if written.cut:
        rows.append(("cut", _cut(written.cut)))
    rows.append(("files", f"{len(written.files):,}: {written.files[0]}" + (" ..." if len(written.files) > 1 else "")))
    return facts_grid(rows)


def _left_out(whole: WholeSequences) -> str:
    return f"{whole.num_sequences:,} sequences: {whole.num_tokens:,} tokens, {whole.num_target_tokens:,} targets"


def _cut(split: SplitSequences) -> str:
    return (
        f"{split.whole.num_sequences:,} sequences into {split.num_parts:,} parts: "
        f"{split.num_tokens_without_prefix:,} tokens do not see what is before their part, "
        f"{split.num_lost_targets:,} targets are lost"
    )
