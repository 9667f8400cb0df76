"""`chunkplan diff`: what two plans, or two analyses, have in common and what not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from chunkplan.quantities import gibibytes, percent, ratio, seconds
from chunkplan.reporting.tables import Table
from chunkplan_cli.declared import JsonOption
from chunkplan_cli.terminal import drawn_table, print_json, stdout

if TYPE_CHECKING:
    from chunkplan.reporting.difference import Difference, Entry, Number, SameSteps, SourceChange


def diff(
    before: Annotated[
        Path, typer.Argument(metavar="BEFORE", help="A plan, or an analysis: its folder or a file of lengths.")
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="What to compare it with, of the same kind.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two plans, or two analyses: settings, data and results, side by side.

    The exit code is 0 also where they differ. `inspect` shows one of them; `validate` checks its content hash.

    Example: chunkplan diff chunkplan-out/plan other/plan
    """
    from chunkplan.reporting.difference import diff as run

    difference = run(before, after)
    if as_json:
        print_json(difference.to_dict())
    else:
        _print(stdout(), difference)


#: Sources that are listed one by one.
_LISTED = 20

#: Characters of a content hash that are shown.
_SHOWN = 16

_STYLES = {"identical": "bold green", "different": "bold yellow"}

#: Words for numbers whose names do not explain themselves.
_NAMES = {
    "token_fill": "token fill",
    "heaviest_over_mean": "slowest rank over mean",
    "num_exceeding_steps": "too long a sequence, steps",
    "exceeding_share": "imbalance in these",
    "num_zero_loss": "zero-loss chunks",
    "num_shared_sequences": "sequences that ranks share",
    "shared_work_share": "their share of the work",
    "recompute_share": "recomputed, of the work",
    "peak_retained_tokens": "tokens held with activations",
    "total_us": "predicted time",
    "reduction_us": "of it to sum gradients",
    "memory_bytes": "memory of the fullest GPU",
    "num_without_target": "without a target token",
    "truncated_num_sequences": "sequences cut",
    "truncated_num_tokens": "tokens cut off",
    "quantile_100": "the longest",
}


#: Numbers that only `--json` has.
_LEFT_OUT = ("heaviest_over_work", "num_optimal_steps", "total_lower_bound_us")


def _print(console: Console, difference: Difference) -> None:
    """Print one word first, then what differs, then the numbers."""
    console.print(Text(difference.verdict, style=_STYLES.get(difference.verdict, "bold")))
    tables = [_sides(difference)]
    for section in dict.fromkeys(entry.section for entry in difference.entries):
        tables.append(_entries(section, [entry for entry in difference.entries if entry.section == section]))
    tables += [_sources(difference.sources[:_LISTED])] if difference.sources else []
    for table in tables:
        console.print()
        console.print(drawn_table(console, table))
    if len(difference.sources) > _LISTED:
        console.print(f"... and {len(difference.sources) - _LISTED:,} more (--json shows all)")
    for title, numbers in (("Numbers", difference.numbers), ("Rejected records", difference.rejected)):
        if numbers:
            console.print()
            console.print(drawn_table(console, _numbers(title, numbers)))
    if difference.kind == "plan":
        console.print()
        console.print(_same_steps(difference.same_steps))


def _sides(difference: Difference) -> Table:
    rows = []
    for name, side in (("before", difference.before), ("after", difference.after)):
        doubts = [] if side.exact else ["ESTIMATED"]
        doubts += [f"A SAMPLE of {100 * side.sample:g}%"] if side.sample else []
        rows.append((name, side.path, side.content_hash[:_SHOWN], ", ".join(doubts)))
    return Table("", ("", "", "", ""), rows, texts=("",))


def _entries(section: str, entries: list[Entry]) -> Table:
    head = ("", "before", "after")
    rows = [(entry.name, _value(entry.before), _value(entry.after)) for entry in _worth_showing(entries)]
    return Table(section.capitalize(), head, rows, texts=head)


def _worth_showing(entries: list[Entry]) -> list[Entry]:
    """Keep only the name of a model or GPU that is another one: it says enough, and --json has all that follows."""
    renamed = {entry.name.removesuffix("name") for entry in entries if entry.name.endswith(".name")}
    return [
        entry
        for entry in entries
        if entry.name.endswith(".name") or not any(entry.name.startswith(prefix) for prefix in renamed)
    ]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text[:_SHOWN] if len(text) == 64 and text.isalnum() else text


def _sources(changes: tuple[SourceChange, ...]) -> Table:
    rows = []
    for change in changes:
        before, after = change.before, change.after
        paths = [side["path"] for side in (before, after) if side is not None]
        sequences = _from_to(before and before["num_sequences"], after and after["num_sequences"])
        tokens = _from_to(before and before["num_tokens"], after and after["num_tokens"])
        path = " -> ".join(paths) if change.change == "moved" else paths[-1]
        rows.append((path, change.change, sequences, tokens))
    return Table("Sources", ("path", "", "sequences", "tokens"), rows, texts=("path", ""))


def _from_to(before: int | None, after: int | None) -> str:
    if before is None or after is None or before == after:
        only = before if after is None else after
        return "" if only is None else f"{only:,}"
    return f"{before:,} -> {after:,}"


def _numbers(title: str, numbers: tuple[Number, ...]) -> Table:
    rows = [
        (_name(each.name), _number(each.before, each), _number(each.after, each), _change(each))
        for each in numbers
        if (each.before or each.after) and each.name not in _LEFT_OUT
    ]
    return Table(title, ("", "before", "after", "change"), rows, texts=("",))


def _name(name: str) -> str:
    if name.startswith("quantile_") and name not in _NAMES:
        return f"{name.removeprefix('quantile_')}% are no longer than"
    return _NAMES.get(name, name.removeprefix("num_").replace("_", " "))


def _number(value: float | None, number: Number) -> str:
    if value is None:
        return ""
    if number.unit == "share":
        return percent(value)
    if number.unit == "us":
        return seconds(value)
    if number.unit == "bytes":
        return gibibytes(int(value))
    return ratio(value) if number.unit == "ratio" else f"{value:,.0f}"


def _change(number: Number) -> str:
    """Return the change of a number: shares in points, everything else in percent."""
    before, after = number.before, number.after
    if before is None or after is None or _number(before, number) == _number(after, number):
        return ""
    if number.unit == "share":
        return f"{100 * (after - before):+.1f} points"
    return f"{100 * (after / before - 1):+,.1f}%" if before else "new"


def _same_steps(same: SameSteps | None) -> str:
    if same is None:
        return "The plans are of other data: their steps are not compared."
    return f"{same.num_same:,} of {same.num_steps:,} steps hold the same sequences."
