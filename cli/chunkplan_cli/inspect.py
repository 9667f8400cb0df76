"""`chunkplan inspect`: shows a plan, a step or a chunk of it, or an analysis."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chunkplan_cli.completion import ranks, steps
from chunkplan_cli.declared import JsonOption, WorkspaceOption
from chunkplan_cli.page import write_page
from chunkplan_cli.places import find_plan
from chunkplan_cli.terminal import print_json, stdout, warn

if TYPE_CHECKING:
    from chunkplan.intake.tokenizer import RecordTokenizer
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.planfile.plan import Plan, PlanStep


def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN|ANALYSIS", help="What to show. Default: WORKSPACE/plan.", show_default=False),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show the chunks and actions of one step.", autocompletion=steps),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", help="Of that step only this data-parallel rank.", show_default=False, autocompletion=ranks
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(metavar="C", help="Of that step and rank only this chunk, with where its segments come from."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Decode that chunk's tokens, targets marked.")] = False,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TOKENIZER", help="Decode with this one. Default: the analysis's own, where it was."),
    ] = None,
    analysis: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the plan's analysis is now. Default: where it was.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one HTML page with charts instead; --step N is drawn first."),
    ] = None,
    tuning: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show on that page what `tune --output FILE` found.")
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a plan comes to, or how long the sequences of an analysis are.

    `validate` checks what this shows, `diff` compares two of them, `simulate` plays a step of a plan through.

    Example: chunkplan inspect --step 3
    """
    from chunkplan.errors import UsageError
    from chunkplan.planfile.load import is_analysis, load_plan
    from chunkplan.workspace import Workspace

    place = Workspace.find(workspace)
    path = find_plan(path, place, "a PLAN or an ANALYSIS")
    given: dict[str, object] = {"step": step, "rank": rank, "chunk": chunk}
    given |= {"text": text or None, "tokenizer": tokenizer, "analysis": analysis}
    if tuning is not None and html is None:
        raise UsageError("--tuning needs --html", hint="give --html, or leave --tuning out")
    if html is not None:
        for name, value in {**given, "json": as_json or None}.items():
            if value is not None and name not in ("step", "analysis"):
                raise UsageError(f"--{name} and --html exclude one another", hint="leave one of them out")
        write_page(html, path, tuning=tuning, analysis=analysis, step=step)
        return
    if is_analysis(path):
        for name, value in given.items():
            if value is not None:
                raise UsageError(
                    f"--{name} is for plans, this is an analysis", where=str(path), hint="give the folder of a plan"
                )
        _show_analysis(path, as_json)
        return
    for name, other in _NEEDS.items():
        if given[name] is not None and given[other] is None:
            raise UsageError(f"--{name} needs --{other}", hint=f"give --{other}, or leave --{name} out")
    plan = load_plan(path)
    if step is None:
        _show_plan(plan, as_json)
    elif chunk is None:
        _show_step(plan, step, rank, as_json)
    else:
        _show_chunk(plan, step, _one_rank(plan, rank), chunk, text, tokenizer, analysis, as_json)


#: What an option is of no use without.
_NEEDS = {"rank": "step", "chunk": "step", "text": "chunk", "tokenizer": "text", "analysis": "chunk"}


def _show_analysis(path: Path, as_json: bool) -> None:
    from chunkplan.lengths import length_report
    from chunkplan.planfile.load import load_analysis
    from chunkplan_cli.length_report import print_length_report

    analysis = load_analysis(path)
    report = length_report(analysis)
    if as_json:
        print_json({"analysis": str(path), "report": report.to_dict(), "manifest": analysis.manifest})
    else:
        print_length_report(stdout(), report, analysis)


def _show_plan(plan: Plan, as_json: bool) -> None:
    from chunkplan.reporting.plan_report import plan_report
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan_cli.compilation import note_compilation
    from chunkplan_cli.plan_report import print_plan_report
    from chunkplan_cli.plan_tables import print_plan_tables

    with note_compilation():
        report = plan_report(plan)
    if as_json:
        print_json({"plan": str(plan.path), "manifest": plan.manifest, **report.to_dict()})
    else:
        header = PlanHeader.of(plan.manifest)
        print_plan_report(stdout(), report.summary, header, report.memory)
        print_plan_tables(stdout(), report, header)


def _show_step(plan: Plan, number: int, rank: int | None, as_json: bool) -> None:
    from chunkplan.planfile.places import check_rank, find_step
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan_cli.step_report import print_step

    step = find_step(plan, number)
    if rank is not None:
        check_rank(plan, rank)
        step = replace(
            step,
            chunks={rank: step.chunks.get(rank, [])},
            actions={place: done for place, done in step.actions.items() if place[0] == rank},
        )
    if as_json:
        _print_step_json(step, exact=plan.manifest["analysis"]["exact"])
    else:
        print_step(stdout(), step, PlanHeader.of(plan.manifest))


def _one_rank(plan: Plan, rank: int | None) -> int:
    """The rank whose chunk is meant: the only one, where there is one."""
    from chunkplan.errors import UsageError

    if rank is None and plan.config.dp > 1:
        raise UsageError(
            "--chunk needs --rank: every rank numbers its own chunks",
            hint=f"the plan has ranks 0 to {plan.config.dp - 1}",
        )
    return rank or 0


def _show_chunk(
    plan: Plan,
    step: int,
    rank: int,
    chunk: int,
    text: bool,
    tokenizer: str | None,
    moved: Path | None,
    as_json: bool,
) -> None:
    from chunkplan.planfile.load import load_same_analysis
    from chunkplan.reporting.chunk_view import view_chunk
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan_cli.chunk_report import print_chunk

    analysis = None
    if text or moved or plan.analysis_path.exists():
        analysis = load_same_analysis(plan, moved)
    else:
        warn(f"the analysis of the plan is not at {plan.analysis_path}: say where it is with --analysis")
    decoder = _decoder(analysis, tokenizer) if text and analysis else None
    view = view_chunk(plan, step, chunk, dp_rank=rank, analysis=analysis, tokenizer=decoder)
    if as_json:
        print_json({"exact": plan.manifest["analysis"]["exact"], **view.to_dict()})
    else:
        print_chunk(stdout(), view, PlanHeader.of(plan.manifest))


def _decoder(analysis: Analysis, tokenizer: str | None) -> RecordTokenizer:
    """The tokenizer to decode with; another one than the analysis's is taken where it is asked for, loudly."""
    from chunkplan.reporting.token_text import open_tokenizer

    analysis.tokens()  # without tokens no tokenizer is of any help
    found = open_tokenizer(analysis, tokenizer)
    made_by = analysis.manifest["tokenizer"]
    if made_by is not None and found.content_hash != made_by["content_hash"]:
        warn(f"the tokens are of another tokenizer, {made_by['path']}: the text may not be theirs")
    return found


def _print_step_json(step: PlanStep, *, exact: bool) -> None:
    document = {"exact": exact, **asdict(step)}
    del document["actions"], document["schedule_us"]
    document["chunks"] = [
        {"dp_rank": rank, **asdict(chunk)} for rank, chunks in step.chunks.items() for chunk in chunks
    ]
    document["schedule"] = [
        {
            "dp_rank": rank,
            "stage": stage,
            "predicted_us": step.schedule_us[rank, stage],
            "actions": [asdict(action) for action in actions],
        }
        for (rank, stage), actions in step.actions.items()
    ]
    print_json(document)
