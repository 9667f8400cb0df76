"""The pages: what of a plan, or of an analysis, is on one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chunkplan.lengths import length_report
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import counted
from chunkplan.reporting.by_source import sources_of
from chunkplan.reporting.page.candidates import choice_of_plan
from chunkplan.reporting.page.document import render
from chunkplan.reporting.page.head_words import gain_facts, no_gain_facts, source_facts, train_command
from chunkplan.reporting.page.planned_lengths import holds_all_once, planned_lengths
from chunkplan.reporting.page.sections import (
    analysis_lengths_section,
    candidates_section,
    examples_section,
    gantt_section,
    numbers_section,
    plan_lengths_section,
    steps_section,
)
from chunkplan.reporting.page.sources import sources_section
from chunkplan.reporting.page.summary_words import analysis_facts, plan_facts
from chunkplan.reporting.page.text_source import TextSource
from chunkplan.reporting.per_step import per_step
from chunkplan.reporting.plan_chunks import plan_chunks
from chunkplan.reporting.plan_report import report_of
from chunkplan.reporting.plan_words import PlanHeader, caveats
from chunkplan.tuning.document_entries import TuningDocument


def plan_page(
    plan: Plan,
    text: TextSource,
    why_no_lengths: str | None,
    tuning: TuningDocument | None,
    warnings: Sequence[str],
    step: int | None,
) -> str:
    """Return the HTML of a plan; `tuning` is as `tuning_document` has it, `step` the number of one to draw first.

    `text` has its analysis; where that is None, `why_no_lengths` stands in the place of the lengths of sequences.
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
        plan_lengths_section(lengths, said, chunks.frame, summary.chunk_size),
        *([] if analysis is None else sources_section(sources_of(analysis, chunks.table))),
        candidates_section(tuning, warnings, plan),
        steps_section(steps),
        gantt_section(plan, steps, report, step, text),
        *(examples_section(text, np.unique(chunks.table.sequence_id)) if text.tokenizer is not None else []),
        numbers_section(report),
    ]
    sequences, num_chunks = counted(summary.num_sequences, "sequence"), counted(summary.num_chunks, "chunk")
    title = f"A plan of {counted(summary.num_steps, 'step')}: {sequences} in {num_chunks}"
    header = PlanHeader.of(plan.manifest)
    warned = caveats(exact=header.exact, sample=header.sample)
    own = None if tuning is None else choice_of_plan(tuning, plan)
    if tuning is not None and not warnings:
        gain = gain_facts(tuning, own, summary)
    else:
        gain = no_gain_facts(plan, is_other=tuning is not None)
    facts = [*gain, *source_facts(analysis), *plan_facts(plan, report)]
    return render(title, warned, facts, sections, train_command(plan))


def analysis_page(analysis: Analysis, text: TextSource, tuning: TuningDocument | None, warnings: Sequence[str]) -> str:
    """Return the HTML of an analysis, which is that of `text`; `tuning` is as `tuning_document` has it."""
    sections = [
        analysis_lengths_section(analysis.num_tokens),
        *sources_section(sources_of(analysis)),
        *examples_section(text),
    ]
    sections += [candidates_section(tuning, warnings, None)] if tuning is not None else []
    gain = gain_facts(tuning, None, None) if tuning is not None and not warnings else []
    facts = [*gain, *analysis_facts(analysis, length_report(analysis))]
    title = f"An analysis of {counted(analysis.num_sequences, 'sequence')}"
    return render(title, caveats(exact=analysis.is_exact, sample=analysis.sample), facts, sections)
