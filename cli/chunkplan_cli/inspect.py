"""`chunkplan inspect`: shows a plan, a step or a chunk of it, an analysis, or a record of the data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkplan import domains
from chunkplan.config.intake import IntakeOptions
from chunkplan.errors import UsageError
from chunkplan.options import Advanced, Options, option, options_of
from chunkplan_cli.analyze import AnalyzeOptions
from chunkplan_cli.declared import OPTIONS, CliValues, JsonOption, WorkspaceOption, find_plan, ranks, steps, takes
from chunkplan_cli.inspect_record import FILES, MOST_TOKENS, READING, RecordRequest, show_record
from chunkplan_cli.progress import note_compilation
from chunkplan_cli.terminal import note, print_json, stdout, warn

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import RecordTokenizer
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.planfile.plan import Plan, PlanStep
    from chunkplan.reporting.shared_sequences import StepShares
    from chunkplan.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Options of what is read or written beside the plan."""

    record: str | None = option(
        domains.text("FILE:LINE"),
        "Show a record as the chat template renders it, with its targets marked; in files without lines: 'FILE, record "
        "N'.",
        group=OPTIONS,
        default=None,
    )
    tokenizer: str | None = option(
        domains.text("TOKENIZER"),
        "The tokenizer to encode or decode with.",
        group=Advanced(OPTIONS),
        default=None,
        default_words="that of the analysis",
    )
    analysis: Path | None = option(
        domains.path("DIR"), "The plan's analysis, if it was moved.", group=Advanced(OPTIONS), default=None
    )
    actions: bool = option(
        domains.FLAG, "List the actions of each stage of that step, in order.", group=OPTIONS, default=False
    )
    html: Path | None = option(
        domains.path("FILE"),
        "Write one HTML page with charts instead; --step N is drawn first.",
        group=OPTIONS,
        default=None,
    )
    tuning: Path | None = option(
        domains.path("FILE"),
        "The result of `tune`, to show on that page.",
        group=Advanced(OPTIONS),
        default=None,
        default_words="tuning.json of WORKSPACE or beside the plan, if it is for the same data, model and GPUs",
    )


@takes("reading", "files", beside=InspectOptions, reading=(IntakeOptions, READING), files=(AnalyzeOptions, FILES))
def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN|ANALYSIS", help="What to show. Default: WORKSPACE/plan.", show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show the chunks of one step, and what its stages do.", autocompletion=steps),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            help="Show only this data-parallel rank of that step.",
            show_default=False,
            autocompletion=ranks,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(metavar="C", help="Show only this chunk of that rank, and where its segments come from."),
    ] = None,
    text: Annotated[
        bool,
        typer.Option("--text", help="Show that chunk as text, targets marked, ends of long parts; all of a --record."),
    ] = False,
    *,
    beside: CliValues,
    reading: CliValues,
    files: CliValues,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a summary of a plan, the lengths of the sequences of an analysis, or a record of the data.

    `validate` checks a plan or an analysis, `diff` compares two of them, `simulate` plays a step of a plan through.

    With `--record`, options of `analyze` say how the record is read. Their defaults are those of ANALYSIS, or of the
    analysis in the workspace.

    Example: chunkplan inspect --step 3
    """
    from chunkplan.planfile.load import is_analysis, load_plan
    from chunkplan.workspace import Workspace

    place = Workspace.find(workspace)
    options = InspectOptions(**beside)
    asked = [name for name, value in (("step", step), ("rank", rank), ("chunk", chunk)) if value is not None]
    asked += ["text"] if text else []
    given = [*asked, *(name for name, value in beside.items() if value is not False)]
    if options.record is not None:
        _refuse_beside("record", given, ("text", "record", "tokenizer"))
        request = RecordRequest(options.record, options.tokenizer, reading, files, shows_all=text, as_json=as_json)
        show_record(request, path, place)
        return
    _refuse_without_record(reading, files)
    path = find_plan(path, place, "a PLAN or an ANALYSIS")
    if options.html is not None:
        shown = [*given, *(["json"] if as_json else [])]
        _refuse_beside("html", shown, ("step", "analysis", "html", "tuning", "tokenizer"))
        _write_page(options.html, path, options, step, place)
        return
    if options.tuning is not None:
        raise UsageError("--tuning needs --html", hint="give --html, or leave --tuning out")
    if is_analysis(path):
        if given:
            raise UsageError(
                f"--{given[0]} is for plans, this is an analysis", where=str(path), hint="give the folder of a plan"
            )
        _show_analysis(path, as_json)
        return
    _refuse_alone(given)
    plan = load_plan(path)
    if step is None:
        _show_plan(plan, as_json)
    elif chunk is None:
        _show_step(plan, step, rank, lists_actions=options.actions, as_json=as_json)
    else:
        _show_chunk(plan, step, _one_rank(plan, rank), chunk, options, decodes=text, as_json=as_json)


#: Option -> the one that it needs.
_NEEDS = {"rank": "step", "actions": "step", "chunk": "step", "text": "chunk", "tokenizer": "text", "analysis": "chunk"}


def _refuse_alone(given: Sequence[str]) -> None:
    """Refuse what is of no use without another option, or beside one."""
    for name, other in _NEEDS.items():
        if name in given and other not in given:
            raise UsageError(f"--{name} needs --{other}", hint=f"give --{other}, or leave --{name} out")
    if "actions" in given and "chunk" in given:
        raise UsageError("--actions and --chunk exclude one another", hint="leave one of them out")


def _refuse_beside(name: str, given: Sequence[str], allowed: Collection[str]) -> None:
    """Refuse what makes no sense beside the option `name`."""
    for other in given:
        if other not in allowed:
            raise UsageError(f"--{other} and --{name} exclude one another", hint="leave one of them out")


def _refuse_without_record(reading: CliValues, files: CliValues) -> None:
    """Refuse options that say how a record is read, where none is asked for."""
    flags = [options_of(IntakeOptions)[name].flag for name in reading]
    flags += [options_of(AnalyzeOptions)[name].flag for name in files]
    for flag in flags:
        raise UsageError(f"{flag} needs --record", hint=f"give --record FILE:LINE, or leave {flag} out")


def _write_page(page: Path, shown: Path, options: InspectOptions, step: int | None, place: Workspace) -> None:
    """Write the page of what is at `shown`, and say so."""
    from chunkplan.reporting.page.write import write_report

    tuning = options.tuning or _tuning_of(shown, options.analysis, place)
    with note_compilation():
        warnings = write_report(
            page, shown, tuning=tuning, analysis=options.analysis, tokenizer=options.tokenizer, step=step
        )
    for warning in warnings:
        warn(warning)
    note(f"page in {page}")


def _tuning_of(shown: Path, analysis: Path | None, place: Workspace) -> Path | None:
    """The tuning of the workspace, for its own analysis and plan; for others that of the workspace or of their folder,
    if it was made for the same."""
    from chunkplan.reporting.page.write import is_tuning_of
    from chunkplan.workspace import Workspace

    if shown in (place.plan, place.analysis):
        return place.tuning if place.tuning.is_file() else None
    found = (place.tuning, Workspace(shown.parent).tuning)
    return next((each for each in found if is_tuning_of(each, shown, analysis)), None)


def _show_analysis(path: Path, as_json: bool) -> None:
    from chunkplan.lengths import length_report
    from chunkplan.planfile.load import load_analysis
    from chunkplan_cli.analysis_report import print_length_report

    analysis = load_analysis(path)
    report = length_report(analysis)
    if as_json:
        print_json({"analysis": str(path), "report": report.to_dict(), "manifest": analysis.manifest})
    else:
        print_length_report(stdout(), report, analysis)


def _show_plan(plan: Plan, as_json: bool) -> None:
    from chunkplan.reporting.plan_report import plan_report
    from chunkplan_cli.plan_report import print_plan_report, print_plan_tables

    with note_compilation():
        report = plan_report(plan)
    if as_json:
        print_json({"plan": str(plan.path), "manifest": plan.manifest, **report.to_dict()})
    else:
        print_plan_report(stdout(), report.summary, plan.manifest, report.memory)
        print_plan_tables(stdout(), report, plan.manifest)


def _show_step(plan: Plan, number: int, rank: int | None, *, lists_actions: bool, as_json: bool) -> None:
    from chunkplan.planfile.plan import check_rank, find_step
    from chunkplan.reporting.shared_sequences import step_shares
    from chunkplan_cli.step_report import print_step

    step = find_step(plan, number)
    shares = step_shares(plan, step)
    if rank is not None:
        check_rank(plan, rank)
        shares = shares.of_rank(rank)
        step = replace(
            step,
            chunks={rank: step.chunks.get(rank, [])},
            actions={place: done for place, done in step.actions.items() if place[0] == rank},
        )
    if as_json:
        _print_step_json(step, shares, plan)
    else:
        print_step(stdout(), step, shares, plan, lists_actions=lists_actions)


def _one_rank(plan: Plan, rank: int | None) -> int:
    """The rank whose chunk is meant: the only one, where there is one."""
    if rank is None and plan.config.dp > 1:
        raise UsageError(
            "--chunk needs --rank: every rank numbers its own chunks",
            hint=f"the plan has ranks 0 to {plan.config.dp - 1}",
        )
    return rank or 0


def _show_chunk(
    plan: Plan, step: int, rank: int, chunk: int, options: InspectOptions, *, decodes: bool, as_json: bool
) -> None:
    from chunkplan.planfile.load import load_same_analysis
    from chunkplan.reporting.chunk_view import view_chunk
    from chunkplan_cli.step_report import print_chunk

    analysis = None
    if decodes or options.analysis or plan.analysis_path.exists():
        analysis = load_same_analysis(plan, options.analysis)
    else:
        warn(f"the analysis of the plan is not at {plan.analysis_path}: say where it is with --analysis")
    decoder = _decoder(analysis, options.tokenizer) if decodes and analysis else None
    most = None if as_json else MOST_TOKENS
    view = view_chunk(plan, step, chunk, dp_rank=rank, analysis=analysis, tokenizer=decoder, most_tokens=most)
    if as_json:
        print_json({"exact": plan.manifest["analysis"]["exact"], **view.to_dict()})
    else:
        print_chunk(stdout(), view, plan)


def _decoder(analysis: Analysis, tokenizer: str | None) -> RecordTokenizer:
    """The tokenizer to decode with; another one than the analysis's is taken where it is asked for, loudly."""
    from chunkplan.reporting.token_text import open_tokenizer

    analysis.tokens()  # without tokens no tokenizer is of any help
    found = open_tokenizer(analysis, tokenizer)
    made_by = analysis.manifest["tokenizer"]
    if made_by is not None and made_by["content_hash"] != found.content_hash:
        warn(f"the tokens are of another tokenizer, {made_by['path']}: the text may not be theirs")
    return found


def _print_step_json(step: PlanStep, shares: StepShares, plan: Plan) -> None:
    from chunkplan.planfile.manifest import reduction_us_of

    document = {"exact": plan.manifest["analysis"]["exact"], **asdict(step)}
    document["reduction_us"] = reduction_us_of(plan.manifest)
    del document["actions"], document["schedule_us"], document["slots"]
    document["shared_sequences"] = [asdict(sequence) for sequence in shares.sequences]
    document["unshared_lower_bound_us"] = shares.unshared_lower_bound_us
    document["chunks"] = [
        {"dp_rank": rank, **chunk.to_dict()} for rank, chunks in step.chunks.items() for chunk in chunks
    ]
    document["schedule"] = [
        {
            "dp_rank": rank,
            "stage": stage,
            "predicted_us": step.schedule_us[rank, stage],
            "actions": [asdict(action) for action in actions],
            **({"slots": step.slots[rank, stage]} if step.slots else {}),
        }
        for (rank, stage), actions in step.actions.items()
    ]
    print_json(document)
