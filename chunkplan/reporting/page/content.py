"""The pages: what of a plan, or of an analysis, is on one."""

from __future__ import annotations

from typing import Any

from chunkplan.lengths import length_report
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.chunk_frame import chunk_frame
from chunkplan.reporting.page.document import render
from chunkplan.reporting.page.parts import Section
from chunkplan.reporting.page.sections import candidates_section, gantt_section, lengths_section, steps_section
from chunkplan.reporting.page.summary_words import analysis_facts, plan_facts, summary_table
from chunkplan.reporting.per_step import per_step
from chunkplan.reporting.plan_words import caveats
from chunkplan.summary import summarize_plan

_PREDICTIONS = "Times and memory are predictions of a cost model: they rank plans, they do not promise seconds."


def plan_page(
    plan: Plan, analysis: Analysis | None, why_no_analysis: str | None, tuning: dict[str, Any] | None, step: int | None
) -> str:
    """HTML of a plan; `tuning` is as `tuning_document` has it, `step` the number of one to draw first."""
    chunks = chunk_frame(plan)
    steps = per_step(plan, chunks)
    summary = summarize_plan(plan.steps(), chunks.to_arrow(), plan.manifest)
    sections = [
        lengths_section(analysis, why_no_analysis, chunks, summary.chunk_size),
        candidates_section(tuning),
        steps_section(steps),
        gantt_section(plan, steps, step),
        Section("numbers", "All of the plan", [_PREDICTIONS], tables=[summary_table(summary)]),
    ]
    title = (
        f"A plan of {summary.num_steps:,} steps: {summary.num_sequences:,} sequences in {summary.num_chunks:,} chunks"
    )
    return render(title, caveats(plan.manifest), plan_facts(plan, summary), sections)


def analysis_page(analysis: Analysis, tuning: dict[str, Any] | None) -> str:
    """HTML of an analysis; `tuning` is as `tuning_document` has it."""
    sections = [lengths_section(analysis, None, None, None)]
    sections += [candidates_section(tuning)] if tuning is not None else []
    facts = analysis_facts(analysis, length_report(analysis))
    title = f"An analysis of {analysis.num_sequences:,} sequences"
    return render(
        title, caveats({"analysis": {"exact": analysis.is_exact, "sample": analysis.sample}}), facts, sections
    )
