"""What lies behind a plan's overview, in tables: fill, kinds of chunks, ranks, slow steps, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import counted, gibibytes, percent, seconds, sharding_words
from chunkplan_cli.tables import bar, titled_table

if TYPE_CHECKING:
    from chunkplan.reporting.plan_memory import PlanMemory
    from chunkplan.reporting.plan_report import FillBand, KindRow, PlanReport, RankRow
    from chunkplan.reporting.plan_words import PlanHeader
    from chunkplan.reporting.shared_sequences import SharedRow
    from chunkplan.reporting.slow_steps import StepTimeSummary

_MAX_BAR = 30

#: Of more ranks than twice that many, the heaviest and the lightest are shown.
_MOST_RANKS = 3


def print_plan_tables(console: Console, report: PlanReport, header: PlanHeader) -> None:
    """Print the tables of a report; those of which there is nothing to say are left out."""
    from chunkplan.reporting.plan_words import machine_words

    parts = [_fill(console, report.fill), _kinds(report.kinds)]
    if report.shared:
        parts.append(_shared(report.shared))
    if report.summary.dp > 1:
        parts += [_ranks(console, report.ranks), _time_of_ranks(report.ranks)]
    if report.times.slowest:
        parts.append(_times(report.times))
    for part in parts:
        console.print()
        console.print(part)
    console.print()
    console.print(_memory(report.memory, report.summary.longest_sequence))
    console.print()
    machine = machine_words(header.cost_model)
    reduced = " Slowest steps are without their reduction." if report.summary.reduction_us else ""
    words = f"* pairs of a query and a key. Times and memory are predictions, of {machine}.{reduced}"
    console.print(Text(words, style="dim"))


def _fill(console: Console, bands: tuple[FillBand, ...]) -> Table:
    table = titled_table("Fill, of ChunkSize")
    table.add_column("")
    for name in ("chunks", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    num_chunks = sum(band.num_chunks for band in bands)
    most = max(band.num_chunks for band in bands)
    for band in bands:
        table.add_row(
            f"{100 * band.low:3.0f} - {100 * band.high:3.0f}%",
            f"{band.num_chunks:,}",
            percent(band.num_chunks / max(num_chunks, 1)),
            bar(console, band.num_chunks, most, _MAX_BAR),
        )
    return table


def _kinds(kinds: tuple[KindRow, ...]) -> Table:
    table = titled_table("Chunks by kind")
    table.add_column("")
    for name in ("chunks", "tokens", "fill", "of tokens", "of attention*", "of work"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in kinds:
        shares = (row.fill, row.token_share, row.attention_share, row.cost_share)
        table.add_row(row.kind, f"{row.num_chunks:,}", f"{row.num_tokens:,}", *map(percent, shares))
    return table


def _shared(shared: tuple[SharedRow, ...]) -> Table:
    from chunkplan.reporting.shared_sequences import way_words

    table = titled_table("Shared sequences, by number of ranks")
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("share", no_wrap=True)
    for name in ("sequences", "tokens", "of work", "exchange"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shared:
        exchange = "?" if row.exchange_share is None else percent(row.exchange_share)
        table.add_row(
            str(row.num_ranks),
            way_words(row.num_ranks, row.num_heads),
            f"{row.num_sequences:,}",
            f"{row.num_tokens:,}",
            percent(row.work_share),
            exchange,
        )
    return table


def _ranks(console: Console, ranks: tuple[RankRow, ...]) -> Table:
    table = titled_table("Ranks, over all steps")
    for name in ("rank", "chunks", "tokens", "work", "of mean", "last done in"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    by_work = sorted(ranks, key=lambda row: -row.cost_us)
    few = len(ranks) <= 2 * _MOST_RANKS
    for row in ranks if few else [*by_work[:_MOST_RANKS], *by_work[-_MOST_RANKS:]]:
        table.add_row(
            str(row.dp_rank),
            f"{row.num_chunks:,}",
            f"{row.num_tokens:,}",
            seconds(row.cost_us),
            f"{row.over_mean:.4f}",
            counted(row.num_steps_slowest, "step"),
            bar(console, row.cost_us, by_work[0].cost_us, _MAX_BAR // 3),
        )
    if not few:
        table.title = Text(f"Ranks, over all steps: the heaviest and the lightest of {len(ranks):,}", style="bold")
    return table


def _time_of_ranks(ranks: tuple[RankRow, ...]) -> Table:
    from chunkplan.reporting.plan_words import rank_time_words

    table = titled_table("Time of the ranks")
    for name in ("rank", "busy", "exchange", "waiting", "reduction"):
        table.add_column(name, justify="right", no_wrap=True)
    by_work = sorted(ranks, key=lambda row: -row.cost_us)
    for row in ranks if len(ranks) <= 2 * _MOST_RANKS else [*by_work[:_MOST_RANKS], *by_work[-_MOST_RANKS:]]:
        table.add_row(str(row.dp_rank), *rank_time_words(row))
    return table


def _times(times: StepTimeSummary) -> Table:
    table = titled_table("Slowest steps")
    for name in ("step", "time", "of median"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mostly because of", overflow="fold")
    for step in times.slowest:
        table.add_row(str(step.step), seconds(step.predicted_us), f"{step.over_median:.2f}", Text(step.why))
    table.add_row(str(times.median_step), seconds(times.median_us), "1.00", "the median step")
    return table


def _memory(memory: PlanMemory | None, longest_sequence: int) -> Text:
    from chunkplan.reporting.plan_words import longest_words, memory_parts

    if memory is None:
        return Text("Memory: the plan does not describe the model and the GPU it was made for.")
    parts = memory_parts(memory.memory)
    words = ", ".join(f"{name} {gibibytes(num_bytes).removesuffix(' GiB')}" for name, num_bytes in parts)
    place = f"stage {memory.stage} of rank {memory.dp_rank} in step {memory.step}"
    total = f"{gibibytes(memory.memory.total)} of {gibibytes(memory.gpu_bytes)}"
    fits = "" if memory.fits else ", does not fit; `chunkplan tune ANALYSIS --gpus N` finds what does"
    of_plan = f"the longest here, of {counted(longest_sequence, 'token')}, fits" if memory.fits else ""
    longest = "; ".join(filter(None, (of_plan, longest_words(memory.longest))))
    shared = sharding_words(memory.sharding, memory.dp) if memory.dp > 1 else ""
    lines = (words, shared, f"{longest[:1].upper()}{longest[1:]}")
    return Text.assemble(
        ("Memory", "bold"), f" on {place}: {total}", (fits, "bold"), *(f"\n{line}" for line in lines if line)
    )
