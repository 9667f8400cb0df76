"""The length report in the terminal, used wherever an analysis is shown. Readable at 80 columns and without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import power_of_two
from chunkplan_cli.terminal import bar, titled_table

if TYPE_CHECKING:
    from chunkplan.lengths import Estimate, LengthReport, Quantile, Tail
    from chunkplan.planfile.analysis import Analysis

_MAX_BAR = 30
#: Columns of the histogram that are not bars, and the space between all of them.
_BESIDE_BARS = 52


def print_length_report(console: Console, report: LengthReport, analysis: Analysis) -> None:
    """Print `report`, and what `analysis`, which it is of, says of records rejected and sequences cut."""
    if report.sample is not None:
        message = f"A SAMPLE of {100 * report.sample:g}% of the records; ranges hold in 95 of 100 samples."
        console.print(Text(message, style="bold yellow"))
        console.print()
    if not report.exact:
        message = "ESTIMATED from bytes, no tokenizer: every 4 bytes are taken for one token."
        console.print(Text(message, style="bold yellow"))
        console.print()
    for part in (_totals(report, analysis), _cumulative(report), _histogram(report, console), _tails(report)):
        console.print(part)
        console.print()
    console.print("* attention: the sum of squared lengths")
    console.print(f"Padded to the longest, {_share(report.padding_share)} of what is computed would be padding.")


def _totals(report: LengthReport, analysis: Analysis) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    estimated = "" if report.exact else "estimated"
    table.add_row(
        "sequences", f"{report.num_sequences:,}", _join(_in_all(report.all_sequences), _dropped(report, analysis))
    )
    table.add_row("tokens", f"{report.num_tokens:,}", _join(_in_all(report.all_tokens), estimated))
    if analysis.has_tokens or not report.exact:
        targets = _share(report.num_target_tokens / report.num_tokens)
        table.add_row("target tokens", f"{report.num_target_tokens:,}", estimated or f"{targets} of the tokens")
    evaluated = [source for source in analysis.manifest.get("sources", []) if source.get("part") == "eval"]
    if evaluated:
        number, num_tokens = (sum(source[name] for source in evaluated) for name in ("num_sequences", "num_tokens"))
        table.add_row("evaluation", f"{number:,}", f"of these sequences, with {num_tokens:,} tokens, are not trained")
    table.add_row("mean length", f"{report.mean_tokens:,.0f}", estimated)
    return table


def _in_all(estimate: Estimate | None) -> str:
    """Say what a sample means for all data."""
    return f"in all {estimate.value:,} ({estimate.low:,}-{estimate.high:,})" if estimate else ""


def _join(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def _dropped(report: LengthReport, analysis: Analysis) -> str:
    """Say what a reader should know before trusting the number of sequences."""
    rejected: dict[str, int] = analysis.manifest.get("rejected", {})
    reasons = [f"{count:,} {reason}" for reason, count in rejected.items()] if len(rejected) > 1 else rejected
    notes = [f"{sum(rejected.values()):,} rejected: {', '.join(reasons)}"] if rejected else []
    truncated: dict[str, int] = analysis.manifest.get("truncated", {"num_sequences": 0})
    if truncated["num_sequences"]:
        notes.append(f"{truncated['num_sequences']:,} cut by {truncated['num_tokens']:,} tokens")
    if report.num_without_target:
        notes.append(f"{report.num_without_target:,} without a target token")
    return "; ".join(notes)


def _cumulative(report: LengthReport) -> Table:
    """List quantiles beside the share of sequences below round lengths: two views of one curve, so one table."""
    table = _table(report, "Lengths")
    between = "" if report.sample is None else "between"
    for name in ("quantile", "tokens", between, "shorter than", "of sequences", "of tokens"):
        table.add_column(name, justify="right")
    for quantile, band in zip(report.quantiles, report.cumulative, strict=True):
        table.add_row(
            "longest" if quantile.share == 1 else f"{100 * quantile.share:g}%",
            f"{quantile.num_tokens:,}",
            _range(quantile, report.sample),
            power_of_two(band.high),
            _share(band.num_sequences / report.num_sequences),
            _share(band.num_tokens / report.num_tokens),
        )
    return table


def _range(quantile: Quantile, sample: float | None) -> str:
    """Say between which lengths a quantile of all data lies; nothing of the longest but that it is no shorter."""
    if sample is None:
        return ""
    low = quantile.num_tokens if quantile.share == 1 else quantile.low
    return f"{'?' if low is None else f'{low:,}'}-{'?' if quantile.high is None else f'{quantile.high:,}'}"


def _histogram(report: LengthReport, console: Console) -> Table:
    table = _table(report, "Histogram")
    width = max(1, min(_MAX_BAR, (console.width - _BESIDE_BARS) // 2))
    for name in ("from", "below", "sequences", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=width)
    table.add_column("of tokens", justify="right", no_wrap=True)
    table.add_column("", width=width)
    most_sequences = max(band.num_sequences for band in report.histogram)
    most_tokens = max(band.num_tokens for band in report.histogram)
    for band in report.histogram:
        table.add_row(
            power_of_two(band.low),
            power_of_two(band.high),
            f"{band.num_sequences:,}",
            _share(band.num_sequences / report.num_sequences),
            bar(console, band.num_sequences, most_sequences, width),
            _share(band.num_tokens / report.num_tokens),
            bar(console, band.num_tokens, most_tokens, width),
        )
    return table


def _tails(report: LengthReport) -> Table:
    table = _table(report, "The tail")
    table.add_column("")
    for name in ("from", "sequences", "share", "of tokens", "of attention*"):
        table.add_column(name, justify="right", no_wrap=True)

    def add(name: str, tail: Tail) -> None:
        shares = (tail.sequence_share, tail.token_share, tail.attention_share)
        table.add_row(name, f"{tail.low:,}", f"{tail.num_sequences:,}", *map(_share, shares))

    add("over 8K", report.over_8k)
    add("longest 1%", report.longest_1_percent)
    return table


def _table(report: LengthReport, title: str) -> Table:
    """Make a table whose title says so when the lengths in it are estimated."""
    return titled_table(title if report.exact else f"{title} (estimated)")


def _share(share: float) -> str:
    """Print a percentage; what is not all or nothing is never rounded to it."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.1f}%"
