"""The pages of a plan and of an analysis: their heads, their sections, and the HTML file that holds them."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import takewhile
from pathlib import PurePath

import numpy as np
from jinja2 import Environment, StrictUndefined
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from chunkplan.cost.hardware import SHIPPED
from chunkplan.errors import DataError
from chunkplan.lengths import LengthReport, length_report
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted, gibibytes, k_words, percent, seconds, trained_words
from chunkplan.reporting.by_source import SourceRow, sources_of
from chunkplan.reporting.page.candidates import choice_of_plan
from chunkplan.reporting.page.lengths import holds_all_once, planned_lengths
from chunkplan.reporting.page.parts import Section
from chunkplan.reporting.page.sections import (
    analysis_lengths_section,
    candidates_section,
    examples_section,
    gantt_section,
    memory_section,
    numbers_section,
    plan_lengths_section,
    steps_section,
    ways_section,
    what_if_section,
)
from chunkplan.reporting.page.ways import time_error
from chunkplan.reporting.per_step import per_step, plan_chunks
from chunkplan.reporting.plan_report import PlanReport, report_of
from chunkplan.reporting.plan_words import caveats, machine_words, overview_rows
from chunkplan.reporting.tables import Table
from chunkplan.reporting.token_text import TextSource
from chunkplan.reporting.way_row import way_row
from chunkplan.summary import PlanSummary
from chunkplan.tuning.document_entries import ChoiceEntry, TuningDocument
from chunkplan.tuning.trial import why_plan_only
from chunkplan.tuning.tune import A_GAIN

# Sections as one HTML file that fetches nothing: styles, scripts and plotly.js are in it.


#: Characters that a script block of JSON must escape.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(
    title: str,
    warnings: Sequence[str],
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    command: str | None = None,
) -> str:
    """Return the page. All words are escaped; equal arguments give equal text. `command`: what to type next.

    Its Content-Security-Policy allows nothing from elsewhere, and of scripts only those that are meant, by their hash.
    """
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_resource("page.html"))
    scripts = [get_plotlyjs(), _resource("page.js")]
    return template.render(
        title=title,
        warnings=warnings,
        facts=facts,
        command=command,
        sections=sections,
        style=_resource("page.css"),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        charts=_charts_json(sections),
    )


def _charts_json(sections: Sequence[Section]) -> str:
    """Return JSON of {chart: {label: figure}} that is harmless inside a script block."""
    figures = {
        chart.name: {
            label: json.loads(to_json_plotly(figure, engine="json")) for label, figure in chart.figures.items()
        }
        for section in sections
        for chart in section.charts
    }
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _resource(name: str) -> str:
    return (files("chunkplan.reporting.page") / name).read_text(encoding="utf-8")


# Top of the page of a plan, beside its settings: its gain, its data, and how to train with it.


#: Sources that are named.
_NAMED = 3


def gain_facts(tuning: TuningDocument, own: ChoiceEntry | None, summary: PlanSummary | None) -> list[tuple[str, str]]:
    """Return the speedup of a step over the baseline that the tuning compares with: the fastest, or the one named.

    The step is that of `own`, the choice of a plan; without one, the mean step of `summary`, for a plan that is none of
    the choices; without a plan, that of the chosen one. For a plan with other settings the chosen step is added.
    """
    today = next((row for row in tuning["baselines"] if row["name"] == tuning["speedup_over"]), None)
    if today is None:
        return [("gain", "nothing to compare with: no way of today, or not the one that was named, fits")]
    whole = [row["step_seconds"] for row in tuning["baselines"] if row["fits"] and not row["lost_tokens"]]
    is_fastest = not today["lost_tokens"] and today["step_seconds"] == min(whole, default=0.0)
    chosen = tuning["chosen"]
    if summary is None or own is not None:
        step = (own or chosen)["step_seconds"]
    else:
        step = summary.total_us / 1e6 / summary.num_sequences * min(summary.global_batch, summary.num_sequences)
    is_chosen = summary is None or own == chosen
    todays = f"{seconds(today['step_seconds'] * 1e6)} a step"
    if today["step_seconds"] >= A_GAIN * step:
        gain, error = today["step_seconds"] / step, time_error(tuning)
        words = f"{gain:.2f}x as fast as {today['name']} ({todays}{', the fastest of today' if is_fastest else ''})"
        words += f"; predictions may be off by {error:.0%}: measure both" if gain < 1 + error else ""
    elif is_chosen:
        words = f"none: keep {today['name']} ({todays}); a plan takes {seconds(step * 1e6)}"
    else:
        words = f"none with this plan, which takes {seconds(step * 1e6)} a step; {today['name']} takes {todays}"
    if not is_chosen:
        words += f"; the setting that `tune` chose takes {seconds(chosen['step_seconds'] * 1e6)}"
    return [("gain", words)]


def tuned_facts(tuning: TuningDocument) -> tuple[str, list[tuple[str, str]]]:
    """Return a title, the model and GPUs that were tuned for, and what the choice to take is predicted to need."""
    chosen, options, cost_model = tuning["chosen"], tuning["options"], tuning["cost_model"]
    gpus, hardware = chosen["dp"] * chosen["tp"] * chosen["pp"], cost_model["hardware"]["name"]
    setting = f"ChunkSize {chosen['chunk_size']:,}, K {k_words(chosen['k'], chosen['k_by_length'])}"
    row = way_row(chosen, options["global_batch"], tuning["data"]["num_sequences"])
    facts = [
        ("recommended", ", ".join([setting, *row.how])),
        ("a step", f"{counted(options['global_batch'], 'sequence')}: {row.step}, {row.rate} tokens/s"),
        ("an epoch", f"{row.hours} GPU-hours"),
        ("memory", f"{gibibytes(chosen['memory']['total'])} of {gibibytes(options['gpu_memory'])} a GPU"),
    ]
    trained = trained_words(cost_model.get("lora_rank", 0), cost_model.get("load_in_4bit", False))
    return f"{cost_model['shape']['name']}, {trained}, on {gpus:,} x {hardware.upper()}", facts


def no_gain_facts(plan: Plan, analysis: Analysis | None, *, is_other: bool) -> list[tuple[str, str]]:
    """Return the command that finds a plan's gain: there is no tuning, or it `is_other`, for something else."""
    cost_model = plan.manifest["predictions"]["cost_model"]
    hardware, gpus = cost_model["hardware"]["name"], plan.config.dp * cost_model["tp"] * plan.config.pp
    words = ["DATA" if analysis is None else str(analysis.path), "--model", cost_model["shape"]["name"], "--gpus"]
    words += [f"{gpus}x{hardware}"] if hardware in SHIPPED else [str(gpus), "--hardware", f"{hardware}.toml"]
    words += ["--global-batch", str(plan.config.global_batch)]
    words += ["--lora-rank", str(cost_model["lora_rank"])] if cost_model.get("lora_rank") else []
    why = "the tuning is not for this plan; " if is_other else ""
    return [("gain", f"not known: {why}`{shlex.join(['chunkplan', 'gain', *words])}` finds it")]


def source_facts(analysis: Analysis | None) -> list[tuple[str, str]]:
    """Name the sources of the data; nothing where they are not known."""
    paths = [] if analysis is None else [source["path"] for source in analysis.manifest.get("sources", ())]
    if not paths:
        return []
    names = ", ".join(PurePath(path).name or path for path in paths[:_NAMED])
    more = f" and {len(paths) - _NAMED:,} more" if len(paths) > _NAMED else ""
    return [(counted(len(paths), "data source"), names + more)]


#: Rows of the numbers of a plan that stand at the top.
_AT_THE_TOP = ("predicted", "GPU memory", "GPUs", "ChunkSize, K", "steps", "eval", "mix", "shared sequences")


def plan_facts(plan: Plan, report: PlanReport) -> list[tuple[str, str]]:
    """List what a plan is, what it holds of the data, and what it is predicted to take."""
    config, cost_model = plan.config, plan.manifest["predictions"]["cost_model"]
    facts = [("model and GPUs", machine_words(cost_model))]
    rows = overview_rows(report.summary, plan.manifest, report.memory)
    facts += [row for row in rows if row[0] in _AT_THE_TOP]
    if plan.manifest["selection"]["num_held_out"]:
        facts.append(("part", {"train": "to train on", "eval": "held out, to evaluate on"}[config.part]))
    facts += [("epochs", f"{config.epochs:,}")] if config.epochs > 1 else []
    return [*facts, ("content hash", plan.content_hash[:16])]


def analysis_facts(analysis: Analysis, report: LengthReport) -> list[tuple[str, str]]:
    """List which data an analysis is of, and how much that is."""
    return [
        *(source_facts(analysis) or [("source", str(analysis.path))]),
        ("sequences", f"{report.num_sequences:,}"),
        ("tokens", f"{report.num_tokens:,}"),
        ("longest", f"{report.longest:,} tokens"),
    ]


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


# The data sources on a page: what each has, and what of it is split, left out, rejected or cut.


#: Sources that are listed: those with the most tokens.
_MOST_SOURCES = 100

#: Columns that are there where a source has any of it: their names, values, and what they mean.
_LOSSES: tuple[tuple[str, Callable[[SourceRow], int | None], str], ...] = (
    (
        "left out",
        lambda row: row.num_absent_tokens,
        "Left out are tokens of sequences that the plan does not hold: they are held out, dropped or not taken.",
    ),
    (
        "records rejected",
        lambda row: row.num_rejected,
        "Rejected records became no sequence; `rejected.jsonl` of the analysis says why.",
    ),
    ("tokens cut", lambda row: row.num_cut_tokens, "Cut are the tokens of sequences beyond the maximum length."),
)


def sources_section(sources: Sequence[SourceRow]) -> list[Section]:
    """Show the sources of an analysis, or what a plan holds of them; nothing where there are none."""
    if not sources:
        return []
    is_plan = sources[0].num_split_tokens is not None
    notes = ["What the plan holds of each source of the data." if is_plan else "What each source of the data has."]
    losses = [loss for loss in _LOSSES if any(loss[1](row) for row in sources)]
    notes += [" ".join(words for _, _, words in losses) or "Nothing of them is lost."]
    shown = sources
    if len(sources) > _MOST_SOURCES:
        largest = sorted(range(len(sources)), key=lambda place: -sources[place].num_tokens)[:_MOST_SOURCES]
        shown = [sources[place] for place in sorted(largest)]
        notes.append(f"The {_MOST_SOURCES} with the most tokens, of {len(sources):,}.")
    folder = _common_folder([row.path for row in shown])
    notes += [f"The folder of all of them: {folder}"] if folder else []
    total = max(sum(row.num_tokens for row in sources), 1)
    head = ["source", "sequences", "tokens", "of all tokens", "trained tokens", "longest"]
    head += ["in split sequences"] if is_plan else []
    rows = [
        (
            row.path.removeprefix(folder),
            f"{row.num_sequences:,}",
            f"{row.num_tokens:,}",
            percent(row.num_tokens / total),
            f"{row.num_target_tokens:,}",
            f"{row.longest:,}",
            *([percent((row.num_split_tokens or 0) / max(row.num_tokens, 1))] if is_plan else []),
            *(_number(value(row)) for _, value, _ in losses),
        )
        for row in shown
    ]
    table = Table("Sources of the data", [*head, *(name for name, _, _ in losses)], rows)
    return [Section("sources", "Data sources", notes, tables=[table])]


def _common_folder(paths: Sequence[str]) -> str:
    """The folders that all paths begin with, up to and with a slash; "" for a single path or where there are none."""
    folders = zip(*(path.split("/")[:-1] for path in paths), strict=False) if len(paths) > 1 else ()
    return "".join(f"{each[0]}/" for each in takewhile(lambda each: len(set(each)) == 1, folders))


def _number(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def plan_page(
    plan: Plan,
    text: TextSource,
    why_no_lengths: str | None,
    tuning: TuningDocument | None,
    warnings: Sequence[str],
    step: int | None,
) -> str:
    """Return the HTML of a plan; `tuning` is a `tuning_document`, `step` the number of the step to draw first.

    `text` has its analysis; without one, `why_no_lengths` replaces the lengths of sequences.
    """
    chunks = plan_chunks(plan)
    steps = per_step(plan, chunks.frame)
    report = report_of(plan, chunks, steps)
    summary = report.summary
    analysis = text.analysis
    said = [] if why_no_lengths is None else [why_no_lengths]
    if analysis is not None and not holds_all_once(plan):
        said.append(
            f"The plan does not hold every sequence of its analysis once: of the {analysis.num_sequences:,} there, "
            "those are counted that it holds, as often as it holds them."
        )
    lengths = None if analysis is None else planned_lengths(plan, analysis)
    sections = [
        *([] if tuning is None else [ways_section(tuning)]),
        plan_lengths_section(lengths, said, chunks.frame, summary.chunk_size),
        *([] if analysis is None else sources_section(sources_of(analysis, chunks.table))),
        *([] if tuning is None else [*what_if_section(tuning), candidates_section(tuning, warnings, plan)]),
        steps_section(steps),
        memory_section(plan, report),
        gantt_section(plan, steps, report, step, text),
        *(examples_section(text, np.unique(chunks.table.sequence_id)) if text.tokenizer is not None else []),
        numbers_section(plan, report),
    ]
    sequences, num_chunks = counted(summary.num_sequences, "sequence"), counted(summary.num_chunks, "chunk")
    title = f"A plan of {counted(summary.num_steps, 'step')}: {sequences} in {num_chunks}"
    warned = caveats(plan.manifest["analysis"])
    own = None if tuning is None else choice_of_plan(tuning, plan)
    if tuning is not None and not warnings:
        gain = gain_facts(tuning, own, summary)
    else:
        gain = no_gain_facts(plan, analysis, is_other=tuning is not None)
    facts = [*gain, *source_facts(analysis), *plan_facts(plan, report)]
    return render(title, warned, facts, sections, train_command(plan))


def analysis_page(analysis: Analysis, text: TextSource, tuning: TuningDocument | None, warnings: Sequence[str]) -> str:
    """Return the HTML of an analysis, which is that of `text`; `tuning` is as `tuning_document` has it."""
    found = [] if tuning is None else [*what_if_section(tuning), candidates_section(tuning, warnings, None)]
    sections = [
        *([] if tuning is None else [ways_section(tuning)]),
        analysis_lengths_section(analysis.num_tokens),
        *sources_section(sources_of(analysis)),
        *found,
        *examples_section(text),
    ]
    facts = analysis_facts(analysis, length_report(analysis))
    title = f"An analysis of {counted(analysis.num_sequences, 'sequence')}"
    if tuning is not None and not warnings:
        title, answer = tuned_facts(tuning)
        facts = [*gain_facts(tuning, None, None), *answer, *facts]
    return render(title, caveats(analysis.manifest), facts, sections)
