"""Tables of a plan for the terminal and for pages: slow steps, kinds of chunks, shared sequences, fill, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chunkplan.quantities import counted, percent, seconds
from chunkplan.reporting.plan_report import FillBand, KindRow, RankRow
from chunkplan.reporting.plan_words import rank_time_words
from chunkplan.reporting.shared_sequences import SharedRow, way_words
from chunkplan.reporting.slow_steps import StepTimeSummary


@dataclass(frozen=True)
class Table:
    """Numbers under a caption. The first cell of a row heads it; columns named in `texts` are words, not numbers.

    `bars`: of each row the length of the bar that the terminal draws behind it; empty for none.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]] = field(repr=False)
    texts: Sequence[str] = ()
    bars: Sequence[float] = ()


def times_table(times: StepTimeSummary) -> Table:
    """List the slowest steps, each with its reason, and the median step."""
    rows = [
        (f"{step.step:,}", seconds(step.predicted_us), f"{step.over_median:.2f}", step.why) for step in times.slowest
    ]
    usual = (f"{times.median_step:,}", seconds(times.median_us), "1.00", "the median step")
    why = "mostly because of"
    return Table("Slowest steps", ("step", "time", "of median", why), [*rows, usual], texts=(why,))


def kinds_table(kinds: Sequence[KindRow]) -> Table:
    """List chunks by kind. Of attention: of pairs of a query and a key."""
    head = ("kind", "chunks", "tokens", "fill", "of tokens", "of attention", "of work")
    rows = []
    for row in kinds:
        shares = map(percent, (row.fill, row.token_share, row.attention_share, row.cost_share))
        rows.append((row.kind, f"{row.num_chunks:,}", f"{row.num_tokens:,}", *shares))
    return Table("Chunks by kind", head, rows, texts=("kind",))


def shared_table(shared: Sequence[SharedRow]) -> Table:
    """List the sequences that ranks share, by how many ranks share them and how."""
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


def fill_table(bands: Sequence[FillBand]) -> Table:
    """List chunks by their tokens over ChunkSize."""
    num_chunks = max(sum(band.num_chunks for band in bands), 1)
    rows = [
        (f"{band.low:.0%} to {band.high:.0%}", f"{band.num_chunks:,}", percent(band.num_chunks / num_chunks))
        for band in bands
    ]
    return Table("Chunks by fill", ("of ChunkSize", "chunks", "share"), rows, bars=[band.num_chunks for band in bands])


def ranks_tables(ranks: Sequence[RankRow], most: int) -> list[Table]:
    """List the work of ranks, and their time; of more than `most` the heaviest and the lightest, half of each."""
    shown, which = ranks, ""
    if len(ranks) > most:
        by_work = sorted(ranks, key=lambda row: -row.cost_us)
        shown, which = [*by_work[: most // 2], *by_work[-most // 2 :]], f": {most // 2} heaviest and lightest"
        which += f" of {len(ranks):,}"
    work = [
        (
            f"{row.dp_rank:,}",
            f"{row.num_chunks:,}",
            f"{row.num_tokens:,}",
            seconds(row.cost_us),
            f"{row.over_mean:.4f}",
            counted(row.num_steps_slowest, "step"),
        )
        for row in shown
    ]
    head, bars = ("rank", "chunks", "tokens", "work", "of mean", "last done in"), [row.cost_us for row in shown]
    time_of = "Time of these ranks" if which else "Time of the ranks"
    times = [(f"{row.dp_rank:,}", *rank_time_words(row)) for row in shown]
    return [
        Table(f"Ranks, over all steps{which}", head, work, bars=bars),
        Table(
            time_of,
            ("rank", "busy", "exchange", "waiting", "reduction"),
            times,
        ),
    ]
