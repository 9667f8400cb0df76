"""`chunkplan gain`: from data to what a plan would gain on them, beside the ways that people train today."""

from __future__ import annotations

import shlex
import webbrowser
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkplan.config.intake import IntakeOptions
from chunkplan.cost.hardware import ERRORS, source_of
from chunkplan.errors import DataError, UsageError
from chunkplan.quantities import counted, percent
from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.analyze import AnalyzeOptions, reading_of, with_files
from chunkplan_cli.declared import (
    CliValues,
    JsonOption,
    WorkspaceOption,
    find_analysis,
    output_option,
    takes,
    tune_options,
)
from chunkplan_cli.plan_report import note_loss, warn_of_positions
from chunkplan_cli.progress import note_compilation, tuning_progress
from chunkplan_cli.terminal import note, print_json, stdout, warn
from chunkplan_cli.tune import print_tuned_for, print_verdict, verdict_title
from chunkplan_cli.ways_report import print_way, print_way_heads

if TYPE_CHECKING:
    from chunkplan.cost.shape import ModelShape
    from chunkplan.intake.first_look import LengthEstimate
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.tuning.tune import Tuning
    from chunkplan.workspace import Workspace

#: Options of how records are read; `analyze` has more.
_READING = ("schema", "columns", "turns", "max_length", "long", "on_error")
_FILES = ("tokenizer", "chat_template", "length_column")


@takes("reading", "files", asked=TuneOptions, reading=(IntakeOptions, _READING), files=(AnalyzeOptions, _FILES))
def gain(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Data as `analyze` reads them, an analysis, or a .parquet/.npy file of lengths. Default: "
            "WORKSPACE/analysis.",
            show_default=False,
        ),
    ] = None,
    *,
    asked: CliValues,
    reading: CliValues,
    files: CliValues,
    output: Annotated[
        Path | None, output_option("Where to write the page. Default: WORKSPACE/gain.html.", metavar="FILE")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict what a plan would gain on your data, against the ways that people train today.

    Reads lengths, of much data from a sample; times packing, cutting, context and tensor parallelism and ZeRO-3 on the
    same GPUs, each with what is best for it; and `tune`s. Needs no GPU. `build --auto` builds what it recommends.

    Example: chunkplan gain train.jsonl --model Qwen/Qwen2.5-7B --gpus 8xH100
    """
    from chunkplan.tuning.document import tuning_document, write_tuning
    from chunkplan.tuning.tune import tune as run
    from chunkplan.workspace import Workspace

    options = tune_options(CliValues({"gpus": 8} | asked if asked.keys().isdisjoint(("gpus", "dp", "pp")) else asked))
    if output is not None and not output.resolve().parent.is_dir():
        raise UsageError(f"{output.parent} is not a folder", hint=f"make it first: mkdir -p {output.parent}")
    place = Workspace.find(workspace)
    analysis, estimate, cutting = _lengths(data, place, reading, files, options.shape)
    warn_of_positions(analysis, options.shape)
    note_loss(analysis, asked)
    console = stdout()
    if not as_json:
        tokens = analysis.num_tokens
        print_tuned_for(console, options, tokens.size, float(tokens.mean()), int(tokens.max()))
        console.print()
        print_way_heads(console, "Ways to train", options)
    with note_compilation(), tuning_progress() as report_progress:
        tuning = run(
            analysis,
            options,
            progress=report_progress,
            found=None if as_json else lambda row: print_way(console, row, options, analysis.num_sequences),
        )
    if as_json:
        more = {"estimated": estimate and asdict(estimate), "time_error": ERRORS[source_of(options.hardware)]}
        print_json(tuning_document(tuning) | {"kind": "gain", **more})
    else:
        print_way(console, tuning.best, options, analysis.num_sequences)
        console.print()
        print_verdict(console, tuning, verdict_title(tuning) if tuning.has_gain else "nothing to gain")
    place.root.mkdir(parents=True, exist_ok=True)
    write_tuning(tuning, place.tuning)
    _write_page(output, place, analysis, tuning, opens=opens)
    if not tuning.has_gain and tuning.best_baseline is not None:
        keep = f"keep {tuning.best_baseline.name}"
        note(f"next: {keep}; plans gain more on fewer GPUs (--gpus) and slower links (--hardware); or all the same:")
    _print_next("next:" if tuning.has_gain else "     ", data, workspace, estimate, files, cutting)


def _lengths(
    data: list[str] | None, place: Workspace, reading: CliValues, files: CliValues, model: ModelShape
) -> tuple[Analysis, LengthEstimate | None, list[str]]:
    """The lengths of data, how they were estimated, and options that cut what is too long for the model."""
    from chunkplan.intake.first_look import first_look
    from chunkplan.planfile.load import load_analysis
    from chunkplan.workspace import find_tokenizer

    if not data or _is_measured(data):
        loaded = load_analysis(find_analysis(Path(data[0]) if data else None, place))
        if not loaded.is_exact:
            _warn_of_estimate()
        return loaded, None, []
    how, reading = with_files(None, place, files, reading)
    most, cutting = model.max_positions, []
    if most and reading.keys().isdisjoint(("max_length", "long")):
        reading = CliValues(reading | {"max_length": most, "long": "truncate"})
        cutting = ["--max-length", str(most), "--overlong", "truncate"]
    options = AnalyzeOptions(**how)
    options = replace(options, tokenizer=find_tokenizer(options.tokenizer, place))
    with reading_of(data, IntakeOptions(**reading), options, place, []) as request:
        analysis, estimate = first_look(request, place.analysis, place.root / "first-look")
    if estimate is not None:
        note(
            f"lengths of {estimate.num_records:,} records from their bytes, by the tokens of {estimate.num_counted:,} "
            f"of them: off by {percent(estimate.error)} in the middle of the longest tenth; none is left out"
        )
    elif not analysis.is_exact:
        _warn_of_estimate()
    if cutting and (num_cut := int((analysis.num_tokens == most).sum())):
        warn(f"{counted(num_cut, 'sequence')} cut to the {most:,} tokens that {model.name} takes")
        note("hint: `--overlong drop` leaves them out; a model with more positions, or rope scaling, takes them whole")
    return analysis, estimate, cutting


def _warn_of_estimate() -> None:
    warn("no tokenizer: the lengths are estimated from bytes; times and memory are, too")
    note("hint: `chunkplan analyze` with --tokenizer FILE, or set CHUNKPLAN_TOKENIZER")


def _is_measured(data: list[str]) -> bool:
    """True for an analysis or a file of lengths, False for data to read."""
    from chunkplan.planfile.load import is_analysis, load_lengths

    path = Path(data[0])
    if len(data) > 1 or path.is_dir():
        return len(data) == 1 and is_analysis(path)
    if path.suffix != ".parquet" or not path.is_file():
        return path.suffix == ".npy"
    try:
        return bool(load_lengths(path))
    except DataError:
        return False


def _write_page(output: Path | None, place: Workspace, analysis: Analysis, tuning: Tuning, *, opens: bool) -> None:
    """Write the page, and open it if asked to; where nobody asked for it and what it needs is missing, say so."""
    from chunkplan.reporting.page.write import write_report

    target = output or place.root / "gain.html"
    try:
        write_report(target, analysis, tuning=tuning)
    except UsageError as error:
        if output is not None or opens:
            raise
        note(f"no page: {error}; {error.hint}")
        return
    note(f"page in {target}")
    if opens and not webbrowser.open(target.resolve().as_uri()):
        warn(f"no browser could be started: open {target} in one")


def _print_next(
    lead: str,
    data: list[str] | None,
    workspace: Path | None,
    estimate: LengthEstimate | None,
    files: CliValues,
    cutting: list[str],
) -> None:
    """Print the commands that build what is recommended, which work as they are, behind `lead`."""
    where = ["--workspace", str(workspace)] if workspace else []
    if estimate is not None and data:
        given = [(f"--{name.replace('_', '-')}", files.typed[name]) for name in _FILES if name in files]
        note(f"{lead} " + shlex.join(["chunkplan", "analyze", *data, *chain(*given), *cutting, *where]))
    measured = data if data and _is_measured(data) else []
    build = shlex.join(["chunkplan", "build", *measured, "--auto", *where])
    note(f"{lead if estimate is None else '     '} {build}")
