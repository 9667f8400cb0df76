"""The sections of a page: which charts and tables there are, and what is said beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from chunkplan.arrays import Int32Array, Int64Array
from chunkplan.cost.hardware import typed_gpus
from chunkplan.errors import visible
from chunkplan.intake.tokenizer import RecordTokenizer
from chunkplan.planfile.analysis import Analysis, TokenReader
from chunkplan.planfile.manifest import SourceEntry
from chunkplan.planfile.plan import Chunk, Plan
from chunkplan.quantities import counted, kept_words
from chunkplan.reporting.chunk_view import SegmentView, segment_text, view_segments
from chunkplan.reporting.page.candidates import (
    candidates_figure,
    candidates_table,
    choice_of_plan,
    limit_words,
)
from chunkplan.reporting.page.gantt import (
    MOST_ACTIONS,
    MOST_HATCHED,
    DrawnStep,
    drawn_steps,
    gantt_figure,
    gantt_table,
    ranks_figure,
)
from chunkplan.reporting.page.lengths import histogram, lengths_figure, lengths_table
from chunkplan.reporting.page.over_steps import (
    has_balance,
    memory_figure,
    memory_over_step_figure,
    over_steps_figure,
    over_steps_table,
    points,
    points_note,
)
from chunkplan.reporting.page.parts import Chart, Drawer, Drawers, MarkedText, Section
from chunkplan.reporting.page.ways import (
    best_by_chunk_size,
    chunk_sizes_figure,
    layouts_figure,
    time_error,
    ways_figure,
    ways_table,
)
from chunkplan.reporting.plan_memory import memory_over_step
from chunkplan.reporting.plan_report import PlanReport
from chunkplan.reporting.plan_words import memory_words, overview_rows
from chunkplan.reporting.tables import Table, plan_tables
from chunkplan.reporting.token_text import SequenceText, TextPiece, TextSource, decode_sequence
from chunkplan.tuning.document_entries import TuningDocument

#: Words for how a page marks targets.
HOW_MARKED = "What counts in the loss has a background, special tokens are bold."

#: The symbol of a line end, and one that more fonts have.
_LINE_END = "\u240a", "\u21b5"


def marked_runs(text: SequenceText) -> Iterator[tuple[str, str]]:
    """Yield the runs of a `MarkedText`."""
    yield from map(_run, text.first)
    if text.num_left_out:
        targets = counted(text.num_targets_left_out, "target")
        yield f"\n... {counted(text.num_left_out, 'token')} left out here, {targets} among them ...\n", "note"
    yield from map(_run, text.last)


def _run(piece: TextPiece) -> tuple[str, str]:
    kinds = [*(["special"] if piece.is_special else []), *(["target"] if piece.is_target else [])]
    return visible(piece.text).replace(*_LINE_END), " ".join(kinds)


# Contents of the chunks of drawn steps: source and positions of each segment and, if decoded, its text.


#: Chunks of all steps together, segments of a chunk, and tokens of a segment that a page has: it stays small.
_MOST_CHUNKS, MOST_SEGMENTS, MOST_CHUNK_TOKENS = 160, 6, 100


def chunk_drawers(drawn: Sequence[DrawnStep], chart: str, source: TextSource) -> list[Drawers]:
    """Show the first chunks of each rank of `drawn`, the figures of `chart`, and say how to see the others.

    Raises:
        DataError: the analysis has no such sequences, or is damaged.
    """
    analysis = source.analysis
    tokens = analysis.tokens() if analysis is not None and analysis.has_tokens else None
    most = max(_MOST_CHUNKS // max(len(drawn), 1), 1)
    return [_of_step(each, chart, source, tokens, most) for each in drawn]


def _of_step(drawn: DrawnStep, chart: str, source: TextSource, tokens: TokenReader | None, most: int) -> Drawers:
    step, has_ranks = drawn.step.step, len(drawn.step.chunks) > 1
    places = [(chunk.chunk_id, rank, chunk) for rank in drawn.ranks for chunk in drawn.step.chunks[rank]]
    shown = sorted(places, key=lambda place: place[:2])[:most]
    shown.sort(key=lambda place: (place[1], place[0]))
    command = f"chunkplan inspect --step {step}{' --rank R' if has_ranks else ''} --chunk C"
    notes = []
    if source.why_not is not None:
        notes.append(f"Text is not shown: {source.why_not}")
    elif source.tokenizer is not None:
        command += " --text"
        notes.append(
            f"{HOW_MARKED} Of a segment with more than {MOST_CHUNK_TOKENS} tokens the first and the last are here."
        )
    if len(shown) < len(places):
        notes.append(f"The first {len(shown):,} of {counted(len(places), 'chunk')} are here, of each rank alike.")
    notes.append(f"`{command}` shows all of a chunk.")
    drawers = [_of_chunk(chunk, step, rank, source, tokens, has_ranks=has_ranks) for _, rank, chunk in shown]
    return Drawers(chart, drawn.label, f"What the chunks of step {step:,} hold", notes, drawers)


def _of_chunk(
    chunk: Chunk, step: int, rank: int, source: TextSource, tokens: TokenReader | None, *, has_ranks: bool
) -> Drawer:
    name = f"{f'rank {rank}, ' if has_ranks else ''}chunk {chunk.chunk_id}"
    size = f"{counted(chunk.num_tokens, 'token')} in {counted(len(chunk.segments), 'segment')}"
    notes = [f"{counted(chunk.num_target_tokens, 'target')} predicted here."]
    if not chunk.segments:
        notes = ["It holds nothing and counts for nothing: ranks that have too few chunks get such ones."]
    if chunk.prefix_tokens:
        notes.append(f"Its part of a sequence attends to {counted(chunk.prefix_tokens, 'token')} before it.")
    if words := kept_words(chunk.kept_attention):
        notes.append(f"It is run again, with its attention kept {words}.")
    if len(chunk.segments) > MOST_SEGMENTS:
        notes.append(f"The first {MOST_SEGMENTS} segments of {len(chunk.segments):,} are here.")
    texts = [
        _of_segment(segment, source.tokenizer, tokens)
        for segment in view_segments(chunk, source.analysis, tokens, MOST_SEGMENTS)
    ]
    return Drawer(f"chunk-{step}-{rank}-{chunk.chunk_id}", f"{name}: {size}", [" ".join(notes)], texts)


def _of_segment(segment: SegmentView, tokenizer: RecordTokenizer | None, tokens: TokenReader | None) -> MarkedText:
    words = [f"sequence {segment.sequence_id:,}", f"[{segment.start:,}, {segment.end:,})"]
    if segment.sequence_tokens is not None:
        words[-1] += f" of {counted(segment.sequence_tokens, 'token')}"
    if segment.part is not None:
        words.append(f"part {segment.part[0] + 1} of {segment.part[1]}")
    words += [] if segment.num_target_tokens is None else [counted(segment.num_target_tokens, "target")]
    words += [] if segment.place is None else [segment.place]
    runs: list[tuple[str, str]] = []
    if tokenizer is not None and tokens is not None:
        runs = list(marked_runs(segment_text(segment, tokens, tokenizer, MOST_CHUNK_TOKENS)))
    return MarkedText(", ".join(words), runs)


# A few sequences as they will be trained, decoded from the tokens that the analysis has: those that say most.


#: Sources of which there is an example, and the tokens of one that are shown.
MOST_SOURCES, MOST_TOKENS = 6, 600


def example_texts(analysis: Analysis, tokenizer: RecordTokenizer, held: Int64Array | None) -> list[MarkedText]:
    """The shortest, the median and the longest sequence, and the first of each of the first sources that have any; of a
    long one, how it begins and ends.

    `held`: the ids of those that a plan holds, ascending, int64 [n]; by default all of them are chosen from.

    Raises:
        DataError: a token file is damaged.
    """
    tokens = analysis.tokens()
    texts = []
    for sequence_id, reasons in _chosen(analysis, held).items():
        input_ids, target = tokens(sequence_id)
        size = f"{counted(len(input_ids), 'token')}, {counted(int(target.sum()), 'target')}"
        shown = decode_sequence(tokenizer.library, input_ids, target, MOST_TOKENS)
        caption = f"{', '.join(reasons).capitalize()}: {analysis.place(sequence_id)}: {size}"
        texts.append(MarkedText(caption, list(marked_runs(shown))))
    return texts


def with_sequences(analysis: Analysis) -> list[SourceEntry]:
    """The sources that sequences are of."""
    return [source for source in analysis.manifest["sources"] if source["num_sequences"]]


def _chosen(analysis: Analysis, held: Int64Array | None) -> dict[int, list[str]]:
    """Return ids of sequences in the order in which they are shown, and why each is."""
    ids = np.arange(analysis.num_sequences) if held is None else held
    by_length = ids[np.argsort(analysis.num_tokens[ids], kind="stable")]
    reasons: dict[int, list[str]] = {}
    for why, place in (("shortest", 0), ("median", (ids.size - 1) // 2), ("longest", -1)):
        reasons.setdefault(int(by_length[place]), []).append(why)
    for source in with_sequences(analysis)[:MOST_SOURCES]:
        first = source["first_sequence_id"]
        place = int(np.searchsorted(ids, first))
        if place < ids.size and ids[place] < first + source["num_sequences"]:
            reasons.setdefault(int(ids[place]), []).append("first of its source")
    return reasons


#: Of more ranks a page has the heaviest and the lightest, half of each.
_MOST_RANKS = 100

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
    """Show a few sequences with their targets, or the reason why not; nothing for bare lengths.

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


def ways_section(tuning: TuningDocument) -> Section:
    """Show what a step takes with each way of today, and with the choice that the tuning takes."""
    note = (
        "Fastest first, chunkplan in green. Each way of today is on the layout that is fastest for it, with the same "
        f"kernels and the same memory. Times are predictions, within {time_error(tuning):.0%}. GPU-hours are those of "
        "an epoch."
    )
    words = "Time of a step with each way to train, in seconds."
    chart = Chart("ways-chart", words, {"": ways_figure(tuning)})
    return Section("ways", "Ways to train", [note], charts=[chart], tables=[ways_table(tuning)], is_open=True)


def what_if_section(tuning: TuningDocument) -> list[Section]:
    """Show the best step with each ChunkSize and on each layout, where the search timed several."""
    charts, notes, fewest = [], [], tuning["fewest_gpus"]
    of_them = typed_gpus(fewest, tuning["cost_model"]["hardware"]["name"])
    if len(best_by_chunk_size(tuning)) > 1:
        notes.append("The fastest choice that fits with each ChunkSize that was simulated; the one to take is green.")
        words = "Time of a step with the fastest choice that fits of each ChunkSize, in seconds."
        charts.append(Chart("chunk-sizes-chart", words, {"": chunk_sizes_figure(tuning)}))
    if len(tuning["layouts"]) > 1:
        notes.append("Then the same GPUs in other layouts, of which only the best were searched in full.")
        words = "Time of a step on each layout of the GPUs that was compared, in seconds."
        charts.append(Chart("layouts-chart", words, {"": layouts_figure(tuning)}))
    notes.append(f"The fewest GPUs on which something fits: {fewest:,}; `--gpus {of_them}` times a step on them.")
    title = "What if: another ChunkSize, another layout, fewer GPUs"
    return [Section("what-if", title, [" ".join(notes)], charts=charts)] if charts else []


def candidates_section(tuning: TuningDocument, warnings: Sequence[str], plan: Plan | None) -> Section:
    """Show what a tuning found, with `warnings` of it and the choice of `plan`."""
    title = "Candidates: time against memory"
    shape, hardware = (tuning["cost_model"][name]["name"] for name in ("shape", "hardware"))
    rivals = "choice that the runtime can run" if tuning["recommended"] else "choice that fits"
    own = None if plan is None else choice_of_plan(tuning, plan)
    unfit = sum(not row["fits"] for row in (*tuning["choices"], *tuning["baselines"]))
    left_out = f" {unfit:,} that do not fit are not drawn." if unfit else ""
    notes = [
        f"What `tune` predicts for {shape} on {hardware}, {tuning['options']['global_batch']:,} sequences a step. "
        f"No {rivals} is both faster and smaller than one on the Pareto front. Plan only: the runtime cannot run it.",
        f"{limit_words(tuning, own)}{left_out} Orange are baselines; a log scale is named at its axis.",
    ]
    if own is not None:
        notes.append("The ring is the choice with ChunkSize, K, layout, schedule and ways to save memory of this plan.")
    elif plan is not None:
        notes.append("No choice has ChunkSize, K, layout, schedule and ways to save memory of this plan.")
    words = "Time of a step against memory of each choice, with baselines."
    return Section(
        "candidates",
        title,
        notes,
        warnings,
        [Chart("candidates-chart", words, {"": candidates_figure(tuning, own)})],
        [candidates_table(tuning, own)],
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
    ranks = []
    if plan.config.dp > 1:
        notes.append("The first chart has a bar for each rank, until it is done: the others wait for the last.")
        words = "Time until each rank of a step is done, in seconds."
        ranks.append(Chart("ranks-chart", words, {each.label: ranks_figure(each.step) for each in drawn}))
    drawers = chunk_drawers(drawn, chart.name, source)
    return Section("gantt", title, notes, charts=[*ranks, chart], tables=[gantt_table(drawn)], drawers=drawers)


def _left_out(drawn: DrawnStep) -> list[str]:
    """Explain which ranks and actions of a step are drawn, where not all are."""
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


def memory_section(plan: Plan, report: PlanReport) -> Section:
    """Show what takes the memory of the fullest GPU of a plan, at its peak and over that step, and what is free."""
    first, *more = memory_words(report.memory, report.summary.longest_sequence)
    notes = [". ".join([first.removesuffix("."), *(line[:1].upper() + line[1:] for line in more)]) + "."]
    charts = []
    if report.memory is not None:
        words = "Memory of the fullest GPU at its peak, part by part, with the memory that it has."
        charts.append(Chart("memory-chart", words, {"": memory_figure(report.memory)}))
        words = f"Memory of that GPU over step {report.memory.step:,}, part by part."
        notes.append(f"Below, the same over step {report.memory.step:,}; the dashed line is what the GPU has.")
        figure = memory_over_step_figure(report.memory, *memory_over_step(plan, report.memory))
        charts.append(Chart("memory-over-step-chart", words, {"": figure}))
    return Section("memory", "Memory of the fullest GPU", notes, charts=charts)


def numbers_section(plan: Plan, report: PlanReport) -> Section:
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
    rows = overview_rows(report.summary, plan.manifest, report.memory)
    whole = Table("The plan in numbers", ("of the whole plan", "value"), rows, texts=("value",))
    tables = [whole, *plan_tables(report, _MOST_RANKS)]
    return Section("numbers", "All of the plan", notes, tables=tables)
