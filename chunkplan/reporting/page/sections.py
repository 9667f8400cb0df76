"""The sections of a page: which charts and tables there are, and what is said beside them."""

from __future__ import annotations

from typing import Any

import polars as pl

from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.page.candidates import candidates_figure, candidates_tables
from chunkplan.reporting.page.chosen_steps import drawn_steps
from chunkplan.reporting.page.gantt import gantt_figure, gantt_table
from chunkplan.reporting.page.lengths import histogram, lengths_figure, lengths_table
from chunkplan.reporting.page.over_steps import over_steps_figure, over_steps_table, points, points_note
from chunkplan.reporting.page.parts import Chart, Section


def lengths_section(
    analysis: Analysis | None, why_not: str | None, chunks: pl.DataFrame | None, chunk_size: int | None
) -> Section:
    """Lengths of `analysis`, or `why_not`; with `chunks`, the `chunk_frame` of a plan, those beside them."""
    before = None if analysis is None else histogram(analysis.num_tokens)
    after = None if chunks is None else histogram(chunks.filter(pl.col("num_tokens") > 0)["num_tokens"].to_numpy())
    counted = [(name, each) for name, each in (("sequences", before), ("chunks", after)) if each is not None]
    title = "Lengths" if after is None else "Lengths before, chunks after"
    notes = ["How many sequences there are of each length, and how many of all tokens are in them."]
    if after is not None:
        notes = [
            "The same tokens, in sequences and in chunks. A micro-batch of one sequence is as long as the sequence; no "
            "chunk has more than ChunkSize tokens."
        ]
    words = f"Histogram of {' and '.join(name for name, _ in counted)} by their number of tokens."
    return Section(
        "lengths",
        title,
        notes if why_not is None else [*notes, why_not],
        [Chart("lengths-chart", words, {"": lengths_figure(before, after, chunk_size)})],
        [lengths_table(name, each) for name, each in counted],
    )


def candidates_section(tuning: dict[str, Any] | None) -> Section:
    """What a tuning (see `tuning_document`) found, or how to get one."""
    title = "Candidates: time against memory"
    if tuning is None:
        how = "`chunkplan tune --output FILE` writes them, `chunkplan inspect --html PAGE --tuning FILE` shows them."
        return Section("candidates", title, [how])
    shape, hardware = (tuning["cost_model"][name]["name"] for name in ("shape", "hardware"))
    rivals = "choice that the runtime can run" if tuning["recommended"] else "choice that fits"
    notes = [
        f"What `tune` predicts for {shape} on {hardware}, {tuning['options']['global_batch']:,} sequences a step. "
        f"No {rivals} is both faster and smaller than one on the Pareto front. Plan only: the runtime cannot run it."
    ]
    words = "Time of a step against memory of each choice, with what people run today."
    return Section(
        "candidates",
        title,
        notes,
        [Chart("candidates-chart", words, {"": candidates_figure(tuning)})],
        candidates_tables(tuning),
    )


def steps_section(steps: pl.DataFrame) -> Section:
    """Time, fill and balance of `steps`, the `per_step` of a plan."""
    runs = points(steps)
    notes = [
        "Predicted time with its lower bound, tokens over ChunkSize of the chunks, and predicted cost of the heaviest "
        "rank over the mean of the ranks."
    ]
    return Section(
        "steps",
        "Over the steps",
        [*notes, *points_note(runs)],
        [
            Chart(
                "steps-chart",
                "Predicted time, fill and balance of every step.",
                {"": over_steps_figure(runs)},
                zooms=True,
            )
        ],
        [over_steps_table(runs)],
    )


def gantt_section(plan: Plan, steps: pl.DataFrame, first: int | None) -> Section:
    """What stages do when in some steps of `plan`, of which `first` is drawn first; `steps` is its `per_step`."""
    drawn, left_out = drawn_steps(plan, steps, first)
    notes = [
        f"{len(drawn):,} of {steps.height:,} steps are here; `chunkplan inspect --html PAGE --step N` adds one. "
        "Hatched bars are chunks of split sequences, which depend on one another; numbers are chunks."
    ]
    for each in drawn:
        if len(each.ranks) < len(each.step.chunks):
            ranks = f"the {len(each.ranks):,} ranks that are done last, of {len(each.step.chunks):,}"
            notes.append(f"Of step {each.step.step:,}, {ranks}.")
    if left_out:
        numbers = ", ".join(f"{number:,}" for number in left_out)
        notes.append(
            f"Too many actions to draw: step {numbers}. `chunkplan simulate --step N --trace FILE` shows them."
        )
    figures = {f"step {each.step.step:,}: {each.why}": gantt_figure(each) for each in drawn}
    words = "What every stage does when: a row a stage, a bar an action."
    charts = [Chart("gantt-chart", words, figures, zooms=True)] if figures else []
    return Section("gantt", "A step, stage by stage", notes, charts, [gantt_table(drawn)] if drawn else [])
