"""What lies behind a plan's overview as tables: kinds of chunks, slow steps, memory, fill, ranks."""

from __future__ import annotations

from chunkplan.quantities import counted, gibibytes, percent, seconds, sharding_words
from chunkplan.reporting.page.parts import Table
from chunkplan.reporting.plan_memory import PlanMemory
from chunkplan.reporting.plan_report import FillBand, KindRow, PlanReport, RankRow
from chunkplan.reporting.plan_words import memory_parts, rank_time_words, tokens_words
from chunkplan.reporting.shared_sequences import SharedRow, way_words
from chunkplan.reporting.slow_steps import StepTimeSummary

#: Of more ranks the heaviest and the lightest, half of each.
_MOST_RANKS = 100


def plan_tables(report: PlanReport) -> list[Table]:
    """Make the tables of a report; those of which there is nothing to say are left out."""
    tables = [_times(report.times)] if report.times.slowest else []
    tables += [_kinds(report.kinds)]
    tables += [_shared(report.shared)] if report.shared else []
    if report.memory is not None:
        tables += [_memory(report.memory), *([_longest(report.memory)] if report.memory.longest else [])]
    tables += [_fill(report.fill)]
    return tables + ([_ranks(report.ranks), _time_of_ranks(report.ranks)] if report.summary.dp > 1 else [])


def _times(times: StepTimeSummary) -> Table:
    rows = [
        (f"{step.step:,}", seconds(step.predicted_us), f"{step.over_median:.2f}", step.why) for step in times.slowest
    ]
    usual = (f"{times.median_step:,}", seconds(times.median_us), "1.00", "the median step")
    why = "mostly because of"
    return Table("Slowest steps", ("step", "time", "of median", why), [*rows, usual], texts=(why,))


def _kinds(kinds: tuple[KindRow, ...]) -> Table:
    head = ("kind", "chunks", "tokens", "fill", "of tokens", "of attention", "of work")
    rows = [
        (
            row.kind,
            f"{row.num_chunks:,}",
            f"{row.num_tokens:,}",
            *map(percent, (row.fill, row.token_share, row.attention_share, row.cost_share)),
        )
        for row in kinds
    ]
    return Table("Chunks by kind", head, rows)


def _shared(shared: tuple[SharedRow, ...]) -> Table:
    head = ("ranks", "share", "sequences", "tokens", "of work", "exchange")
    rows = [
        (
            f"{row.num_ranks:,}",
            way_words(row.num_ranks, row.num_heads),
            f"{row.num_sequences:,}",
            f"{row.num_tokens:,}",
            percent(row.work_share),
            "?" if row.exchange_share is None else percent(row.exchange_share),
        )
        for row in shared
    ]
    return Table("Shared sequences, by number of ranks", head, rows, texts=("share",))


def _memory(memory: PlanMemory) -> Table:
    place = f"stage {memory.stage} of rank {memory.dp_rank} in step {memory.step:,}"
    total = memory.memory.total
    rows = [(name, gibibytes(num_bytes), percent(num_bytes / total)) for name, num_bytes in memory_parts(memory.memory)]
    rows.append(("all of it", gibibytes(total), percent(1.0)))
    rows.append(("the GPU has", gibibytes(memory.gpu_bytes), ""))
    shared = f", {sharding_words(memory.sharding, memory.dp)}" if memory.dp > 1 else ""
    return Table(f"Memory of the fullest stage: {place}{shared}", ("part", "memory", "share"), rows)


def _longest(memory: PlanMemory) -> Table:
    rows = [(f"{each.num_ranks:,}", tokens_words(each.num_tokens)) for each in memory.longest]
    return Table("Longest sequence that fits, by ranks that share it", ("ranks", "tokens"), rows)


def _fill(bands: tuple[FillBand, ...]) -> Table:
    num_chunks = max(sum(band.num_chunks for band in bands), 1)
    rows = [
        (f"{band.low:.0%} to {band.high:.0%}", f"{band.num_chunks:,}", percent(band.num_chunks / num_chunks))
        for band in bands
    ]
    return Table("Chunks by fill", ("tokens over ChunkSize", "chunks", "share"), rows)


def _ranks(ranks: tuple[RankRow, ...]) -> Table:
    head = ("rank", "chunks", "tokens", "work", "of mean", "last done in")
    rows = [
        (
            f"{row.dp_rank:,}",
            f"{row.num_chunks:,}",
            f"{row.num_tokens:,}",
            seconds(row.cost_us),
            f"{row.over_mean:.4f}",
            counted(row.num_steps_slowest, "step"),
        )
        for row in _shown(ranks)
    ]
    return Table("Ranks, over all steps" + _which(ranks), head, rows)


def _time_of_ranks(ranks: tuple[RankRow, ...]) -> Table:
    rows = [(f"{row.dp_rank:,}", *rank_time_words(row)) for row in _shown(ranks)]
    return Table("Time of the ranks" + _which(ranks), ("rank", "busy", "exchange", "waiting", "reduction"), rows)


def _shown(ranks: tuple[RankRow, ...]) -> list[RankRow]:
    if len(ranks) <= _MOST_RANKS:
        return list(ranks)
    by_work = sorted(ranks, key=lambda row: -row.cost_us)
    return [*by_work[: _MOST_RANKS // 2], *by_work[-_MOST_RANKS // 2 :]]


def _which(ranks: tuple[RankRow, ...]) -> str:
    return f": the {_MOST_RANKS // 2} heaviest and lightest of {len(ranks):,}" if len(ranks) > _MOST_RANKS else ""
