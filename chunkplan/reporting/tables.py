"""Tables that the terminal and pages show, and those of a plan: chunks, shared sequences, ranks, slow steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chunkplan.quantities import counted, percent, seconds

if TYPE_CHECKING:
    from chunkplan.reporting.plan_report import PlanReport, RankRow


@dataclass(frozen=True)
class Table:
    """Numbers under a caption. The first cell of a row heads it; columns named in `texts` are words, not numbers, which
    are folded where a line is full.

    The terminal draws `bars` behind columns, of such a length for each row, and gives rows their `styles`.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]] = field(repr=False)
    texts: Sequence[str] = ()
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    styles: Sequence[str] = ()


def way_words(num_ranks: int, num_heads: int) -> str:
    """Return how ranks divide a sequence: by heads, by pages, or by both."""
    if num_heads == num_ranks:
        return "heads"
    return "pages" if num_heads == 1 else f"{num_heads} heads x {num_ranks // num_heads} pages"


def plan_tables(report: PlanReport, most_ranks: int) -> list[Table]:
    """Make the tables of a report; those of which there is nothing to say are left out.

    Attention is counted in pairs of a query and a key. Of more than `most_ranks` the heaviest and the lightest are
    listed, half of each.
    """
    num_chunks = max(sum(band.num_chunks for band in report.fill), 1)
    fill = [
        (f"{band.low:.0%} to {band.high:.0%}", f"{band.num_chunks:,}", percent(band.num_chunks / num_chunks))
        for band in report.fill
    ]
    kinds = [
        (
            *(row.kind, f"{row.num_chunks:,}", f"{row.num_tokens:,}"),
            *map(percent, (row.fill, row.token_share, row.attention_share, row.cost_share)),
        )
        for row in report.kinds
    ]
    head = ("kind", "chunks", "tokens", "fill", "of tokens", "of attention", "of work")
    bars = {"share": [band.num_chunks for band in report.fill]}
    tables = [Table("Chunks by fill", ("fill", "chunks", "share"), fill, bars=bars)]
    tables += [Table("Chunks by kind", head, kinds, texts=("kind",))]
    if report.shared:
        shared = [
            (
                *(f"{row.num_ranks:,}", way_words(row.num_ranks, row.num_heads), f"{row.num_sequences:,}"),
                *(f"{row.num_tokens:,}", percent(row.work_share), _share(row.exchange_share)),
            )
            for row in report.shared
        ]
        of_shared = ("ranks", "share", "sequences", "tokens", "of work", "exchange")
        tables.append(Table("Shared sequences, by number of ranks", of_shared, shared, texts=("share",)))
    if report.summary.dp > 1:
        tables += _ranks_tables(report.ranks, most_ranks)
    if report.times.slowest:
        rows = [
            (f"{step.step:,}", seconds(step.predicted_us), f"{step.over_median:.2f}", step.why)
            for step in report.times.slowest
        ]
        rows.append((f"{report.times.median_step:,}", seconds(report.times.median_us), "1.00", "the median step"))
        why = "mostly because of"
        tables.append(Table("Slowest steps", ("step", "time", "of median", why), rows, texts=(why,)))
    return tables


def _ranks_tables(ranks: Sequence[RankRow], most: int) -> list[Table]:
    which, those = "", "the"
    if len(ranks) > most:
        by_work = sorted(ranks, key=lambda row: -row.cost_us)
        which, those = f": {most // 2} heaviest and lightest of {len(ranks):,}", "these"
        ranks = [*by_work[: most // 2], *by_work[-most // 2 :]]
    work, times = [], []
    for row in ranks:
        name, last = f"{row.dp_rank:,}", counted(row.num_steps_slowest, "step")
        sizes = (name, f"{row.num_chunks:,}", f"{row.num_tokens:,}")
        work.append((*sizes, seconds(row.cost_us), f"{row.over_mean:.4f}", last))
        parts = (row.busy_us, row.exchange_us, row.waiting_us, row.reduction_us)
        whole = max(sum(each or 0.0 for each in parts), 1e-30)
        times.append((name, *(_share(None if each is None else each / whole) for each in parts)))
    head = ("rank", "chunks", "tokens", "work", "over mean", "slowest in")
    bars = {"slowest in": [row.cost_us for row in ranks]}
    return [
        Table(f"Ranks, over all steps{which}", head, work, bars=bars),
        Table(f"Time of {those} ranks", ("rank", "busy", "exchange", "waiting", "summing gradients"), times),
    ]


def _share(share: float | None) -> str:
    return "?" if share is None else percent(share)
