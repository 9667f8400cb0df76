"""The sections of a page: which charts and tables there are, and what is said beside them."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.planfile.plan import Plan
from chunkplan.reporting.page.candidates import candidates_figure, candidates_tables, choice_of_plan, limit_words
from chunkplan.reporting.page.chosen_steps import MOST_ACTIONS, DrawnStep, drawn_steps
from chunkplan.reporting.page.chunk_texts import chunk_drawers
from chunkplan.reporting.page.examples import MOST_SOURCES, MOST_TOKENS, example_texts, with_sequences
from chunkplan.reporting.page.gantt import MOST_HATCHED, gantt_figure, gantt_table
from chunkplan.reporting.page.lengths import histogram, lengths_figure, lengths_table
from chunkplan.reporting.page.marked_runs import HOW_MARKED
from chunkplan.reporting.page.over_steps import (
    has_balance,
    over_steps_figure,
    over_steps_table,
    points,
    points_note,
)
from chunkplan.reporting.page.parts import Chart, Section
from chunkplan.reporting.page.plan_tables import plan_tables
from chunkplan.reporting.page.summary_words import summary_table
from chunkplan.reporting.page.text_source import TextSource
from chunkplan.reporting.plan_report import PlanReport
from chunkplan.tuning.document_entries import TuningDocument

_NO_MACHINE = "the plan does not describe the model and the GPU it was made for"
_BEFORE_AND_AFTER = (
    "The same tokens, in sequences and in chunks. A micro-batch of one sequence is as long as the sequence; no "
    "chunk has more than ChunkSize tokens."
)
_AFTER = (
    "How many chunks there are of each length, and how many of all tokens are in them. None has more than ChunkSize "
    "tokens."
)
_LENGTHS = "How many sequences there are of each length, and how many of all tokens are in them."


def analysis_lengths_section(num_tokens: Int32Array) -> Section:
    """Show the lengths of the sequences of an analysis."""
    before = histogram(num_tokens)
    chart = Chart(
        "lengths-chart", "Histogram of sequences by their number of tokens.", {"": lengths_figure(before, None, None)}
    )
    return Section("lengths", "Lengths", [_LENGTHS], charts=[chart], tables=[lengths_table("sequences", before)])


def examples_section(source: TextSource, held: Int64Array | None = None) -> list[Section]:
    """Show a few sequences with their targets; or say why not. Nothing where nobody could expect any text.

    `held`: the ids of those that a plan holds, ascending, int64 [n].
    """
    title = "What is trained"
    how = "`chunkplan inspect --record FILE:LINE` shows any record."
    if source.analysis is None or source.tokenizer is None:
        said = [f"Examples are not shown: {source.why_not}", how]
        return [] if source.why_not is None else [Section("examples", title, said)]
    num_sources = len(with_sequences(source.analysis))
    first = f"the first {MOST_SOURCES} of {num_sources:,} sources" if num_sources > MOST_SOURCES else "each source"
    notes = [
        f"The shortest, the median and the longest sequence, and the first one of {first}, as the model meets them. Of "
        f"more than {MOST_TOKENS} tokens the first and the last are here. {HOW_MARKED} {how}"
    ]
    return [Section("examples", title, notes, texts=example_texts(source.analysis, source.tokenizer, held))]


def plan_lengths_section(
    num_tokens: Int32Array | None, said: Sequence[str], chunks: pl.DataFrame, chunk_size: int
) -> Section:
    """Show the lengths of the sequences of a plan, where they are known, and of its chunks, with notes `said`."""
    before = None if num_tokens is None else histogram(num_tokens)
    after = histogram(chunks.filter(pl.col("num_tokens") > 0)["num_tokens"].to_numpy())
    shown = [(name, each) for name, each in (("sequences", before), ("chunks", after)) if each is not None]
    title, note = "Lengths before, chunks after", _BEFORE_AND_AFTER
    if before is None:
        title, note = "Lengths of chunks", _AFTER
    words = f"Histogram of {' and '.join(name for name, _ in shown)} by their number of tokens."
    return Section(
        "lengths",
        title,
        [note, *said],
        charts=[Chart("lengths-chart", words, {"": lengths_figure(before, after, chunk_size)})],
        tables=[lengths_table(name, each) for name, each in shown],
    )


def candidates_section(tuning: TuningDocument | None, warnings: Sequence[str], plan: Plan | None) -> Section:
    """Show what a tuning found, with `warnings` of it and the choice of `plan`; or how to get a tuning."""
    title = "Candidates: time against memory"
    if tuning is None:
        how = "`chunkplan tune --output FILE` writes them, `chunkplan inspect --html PAGE --tuning FILE` shows them."
        return Section("candidates", title, [how])
    shape, hardware = (tuning["cost_model"][name]["name"] for name in ("shape", "hardware"))
    rivals = "choice that the runtime can run" if tuning["recommended"] else "choice that fits"
    notes = [
        f"What `tune` predicts for {shape} on {hardware}, {tuning['options']['global_batch']:,} sequences a step. "
        f"No {rivals} is both faster and smaller than one on the Pareto front. Plan only: the runtime cannot run it.",
        f"{limit_words(tuning)} Diamonds are what people run today; a log scale is named at its axis.",
    ]
    own = None if plan is None else choice_of_plan(tuning, plan)
    if own is not None:
        notes.append("The ring is the choice with ChunkSize, K, layout, schedule and ways to save memory of this plan.")
    elif plan is not None:
        notes.append("No choice has ChunkSize, K, layout, schedule and ways to save memory of this plan.")
    words = "Time of a step against memory of each choice, with what people run today."
    return Section(
        "candidates",
        title,
        notes,
        warnings,
        [Chart("candidates-chart", words, {"": candidates_figure(tuning, own)})],
        candidates_tables(tuning, own),
    )


def steps_section(steps: pl.DataFrame) -> Section:
    """Show time, fill and balance of `steps`, the `per_step` of a plan."""
    reduced = pl.col("predicted_us", "lower_bound_us") + pl.col("reduction_us").fill_null(0.0)
    runs = points(steps.with_columns(reduced))
    shown = ["Predicted time with its lower bound", "tokens over ChunkSize of the chunks"]
    shown += ["predicted cost of the heaviest rank over the mean of the ranks"] if has_balance(runs) else []
    words = ", ".join(shown) + "."
    return Section(
        "steps",
        "Over the steps",
        [words, *points_note(runs)],
        charts=[Chart("steps-chart", words, {"": over_steps_figure(runs)}, zooms=True)],
        tables=[over_steps_table(runs)],
    )


def gantt_section(
    plan: Plan, steps: pl.DataFrame, report: PlanReport, first: int | None, source: TextSource
) -> Section:
    """Show what stages do when in some steps of `plan`, as `drawn_steps` has them, and what their chunks hold; `report`
    is the plan's."""
    title = "A step, stage by stage"
    if report.memory is None:
        return Section("gantt", title, [f"Steps are not drawn: {_NO_MACHINE}."])
    drawn = drawn_steps(plan, steps, report.times.median_step, first)
    how = "Numbers are chunks. Hatched bars are chunks of split sequences, which depend on one another"
    notes = [
        f"{how}; where a stage does more than {MOST_HATCHED} things, none are hatched. A line below bars is the "
        "critical path: what the step waits for, one thing after the other. Grey is the bubble, in which a stage has "
        "nothing to do. A click on a bar, or the list below, opens what its chunk holds."
    ]
    if report.shared:
        notes.append(
            "Cross-hatched bars are chunks that ranks share: they begin together, when the last of them is there. "
            "Where a stage waits for the others for more than a thousandth of the step, a thin bar says so."
        )
    if len(drawn) < steps.height:
        some = f"{len(drawn)} of {steps.height:,} steps are here"
        notes.insert(0, f"{some}; `chunkplan inspect --html PAGE --step N` adds one.")
    notes += [words for each in drawn for words in _left_out(each)]
    words = "What every stage does when: a row a stage, a bar an action."
    chart = Chart("gantt-chart", words, {each.label: gantt_figure(each) for each in drawn}, zooms=True)
    drawers = chunk_drawers(drawn, chart.name, source)
    return Section("gantt", title, notes, charts=[chart], tables=[gantt_table(drawn)], drawers=drawers)


def _left_out(drawn: DrawnStep) -> list[str]:
    """Say which ranks and actions of a step are drawn, where not all are."""
    said, number = [], drawn.step.step
    is_shared = any(simulation.step is not None for simulation in drawn.ranks.values())
    if len(drawn.ranks) < len(drawn.step.chunks):
        those = "rank that is" if len(drawn.ranks) == 1 else f"{len(drawn.ranks):,} ranks that are"
        path = " Where the critical path has a gap, ranks that are not drawn are on it." if is_shared else ""
        said.append(f"Of step {number:,}, the {those} done last, of {len(drawn.step.chunks):,}.{path}")
    if drawn.num_actions > MOST_ACTIONS:
        said.append(
            f"Of step {number:,}, the first {MOST_ACTIONS:,} of {drawn.num_actions:,} actions. "
            f"`chunkplan simulate --step {number} --trace FILE` shows them all."
        )
    return said


def numbers_section(report: PlanReport) -> Section:
    """Show all numbers that `inspect` prints of a plan."""
    notes = [
        "Times and memory are predictions of a cost model: they rank plans, they do not promise seconds. Attention is "
        "counted in pairs of a query and a key."
    ]
    if report.summary.reduction_us:
        notes.append(
            "Times of the slowest steps are without the reduction at the end of each: when all ranks are done they sum "
            "gradients and share what was updated, all for the same time."
        )
    if report.shared:
        notes.append(
            "Ranks share sequences: by heads, each attends with some of the heads over all tokens; by pages, with all "
            "heads for its own tokens, and fetches the keys and values of the others. Exchange is what of their time "
            "they wait for that. Each rank's part of a shared sequence counts as a chunk, however few tokens it has: a "
            "low fill is no fault there."
        )
    if report.memory is None:
        notes.append(f"Memory is not shown: {_NO_MACHINE}.")
    return Section("numbers", "All of the plan", notes, tables=[summary_table(report.summary), *plan_tables(report)])
