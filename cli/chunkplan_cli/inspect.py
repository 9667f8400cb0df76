"""`chunkplan inspect`: shows a plan, a step of it, or an analysis."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkplan_cli.terminal import print_json, stdout

if TYPE_CHECKING:
    from chunkplan.planfile.plan import Plan, PlanStep


def inspect(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN|ANALYSIS", help="What to show. Default: WORKSPACE/plan.", show_default=False),
    ] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Show the chunks and actions of one step.")] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Show what a plan comes to, or how long the sequences of an analysis are.

    `validate` checks what this shows.

    Example: chunkplan inspect --step 3
    """
    from chunkplan.errors import UsageError
    from chunkplan.planfile.load import load_plan
    from chunkplan.validation import is_analysis
    from chunkplan.workspace import Workspace

    place = Workspace.find(workspace)
    if path is None and not place.plan.exists():
        raise UsageError(
            f"there is no plan in the workspace {place.root}",
            hint="run `chunkplan build --chunk-size 8192 --k 4`, or give a PLAN or an ANALYSIS",
        )
    path = path or place.plan
    if path.is_file() or is_analysis(path):
        if step is not None:
            raise UsageError(
                "--step is for plans, this is an analysis", where=str(path), hint="give the folder of a plan"
            )
        _show_analysis(path, as_json)
    elif step is not None:
        _show_step(load_plan(path), step, as_json)
    else:
        _show_plan(load_plan(path), as_json)


def _show_analysis(path: Path, as_json: bool) -> None:
    from chunkplan.lengths import length_report
    from chunkplan.planfile.load import load_analysis
    from chunkplan_cli.length_report import print_length_report

    analysis = load_analysis(path)
    report = length_report(analysis)
    if as_json:
        print_json({"analysis": str(path), "report": report.to_dict(), "manifest": analysis.manifest})
    else:
        print_length_report(stdout(), report, analysis.manifest)


def _show_plan(plan: Plan, as_json: bool) -> None:
    from chunkplan.summary import summarize_plan
    from chunkplan_cli.plan_report import print_plan_report

    summary = summarize_plan(plan.steps(), plan.chunks(), plan.manifest)
    if as_json:
        print_json({"plan": str(plan.path), "manifest": plan.manifest, "summary": summary.to_dict()})
    else:
        print_plan_report(stdout(), summary, plan.manifest)


def _show_step(plan: Plan, number: int, as_json: bool) -> None:
    from chunkplan.errors import UsageError
    from chunkplan_cli.plan_report import print_step

    num_steps = plan.manifest["totals"]["num_steps"]
    if not 0 <= number < num_steps:
        raise UsageError(f"there is no step {number}", hint=f"the plan has steps 0 to {num_steps - 1}")
    step = next(plan.iter_steps(number))
    if as_json:
        print_json({"exact": plan.manifest["analysis"]["exact"], **_step_document(step)})
    else:
        print_step(stdout(), step, plan.manifest)


def _step_document(step: PlanStep) -> dict[str, Any]:
    document = asdict(step)
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
    return document
