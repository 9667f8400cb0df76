"""What stands at the top of a page of a plan beside its settings: what it gains, its data, and how to train with it."""

from __future__ import annotations

import shlex
from pathlib import PurePath

from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted, seconds
from chunkplan.summary import PlanSummary
from chunkplan.tuning.document_entries import ChoiceEntry, TuningDocument
from chunkplan.tuning.plan_only import why_plan_only
from chunkplan.tuning.tune import A_GAIN

#: Sources that are named.
_NAMED = 3


def gain_facts(tuning: TuningDocument, own: ChoiceEntry | None, summary: PlanSummary | None) -> list[tuple[str, str]]:
    """Say how many times as fast a step is as with the fastest way of today that fits and loses no token.

    The step is that of `own`, the choice of a plan; or of a plan that is none of the choices, with `summary`, its mean
    step; or of the choice that the tuning takes, where there is no plan. Of a plan with other settings it is said what
    that choice takes.
    """
    today = min(
        (row for row in tuning["baselines"] if row["fits"] and not row["lost_tokens"]),
        key=lambda row: row["step_seconds"],
        default=None,
    )
    if today is None:
        return [("gain", "no way of today fits without cutting sequences")]
    chosen = tuning["chosen"]
    if summary is None or own is not None:
        step = (own or chosen)["step_seconds"]
    else:
        step = summary.total_us / 1e6 / summary.num_sequences * min(summary.global_batch, summary.num_sequences)
    is_chosen = summary is None or own == chosen
    todays = f"{seconds(today['step_seconds'] * 1e6)} a step"
    if today["step_seconds"] >= A_GAIN * step:
        words = f"{today['step_seconds'] / step:.2f}x as fast as {today['name']} ({todays}), the fastest baseline"
    elif is_chosen:
        words = f"nothing to gain: {today['name']} takes {todays}"
    else:
        words = f"none with this plan, which takes {seconds(step * 1e6)} a step; {today['name']} takes {todays}"
    if not is_chosen:
        words += f"; the setting that `tune` chose takes {seconds(chosen['step_seconds'] * 1e6)}"
    return [("gain", words)]


def no_gain_facts(plan: Plan, *, is_other: bool) -> list[tuple[str, str]]:
    """Say how to find what a plan gains: there is no tuning, or it `is_other`, for something else than the plan."""
    gpus = plan.config.dp * plan.manifest["predictions"]["cost_model"]["tp"] * plan.config.pp
    why = "the tuning is not for this plan; " if is_other else ""
    command = f"`chunkplan tune ANALYSIS --gpus {gpus} --global-batch {plan.config.global_batch} --output FILE`"
    return [("gain", f"not known: {why}{command} finds it, with `--model-config` and `--hardware` of the plan")]


def source_facts(analysis: Analysis | None) -> list[tuple[str, str]]:
    """Name the sources of the data; nothing where they are not known."""
    paths = [] if analysis is None else [source["path"] for source in analysis.manifest.get("sources", ())]
    if not paths:
        return []
    names = ", ".join(PurePath(path).name or path for path in paths[:_NAMED])
    more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
    return [(counted(len(paths), "data source"), names + more)]


def train_command(plan: Plan) -> str | None:
    """Return the command that trains with `plan`; None where the runtime cannot, or where lengths are estimated or a
    sample."""
    described = plan.manifest["analysis"]
    try:
        cost = plan.cost
    except DataError:
        return None
    if not described["exact"] or described.get("sample") is not None or why_plan_only(plan.config, cost) is not None:
        return None
    return shlex.join(["chunkplan", "train", "--plan", str(plan.path), "--model", "NAME"])
