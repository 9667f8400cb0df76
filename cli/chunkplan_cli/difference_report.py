"""Two plans, two analyses, a run or a calibration beside what was predicted, in the terminal at 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import gibibytes, percent, ratio, seconds
from chunkplan_cli.terminal import titled_table, visible

if TYPE_CHECKING:
    from chunkplan.cost.calibrate import Calibration
    from chunkplan.reporting.difference import Difference, Entry, Number, SameSteps, SourceChange

# A calibration in the terminal: every chunk measured and predicted, the rates, how far off. Readable at 80 columns.


#: Entries of a profile that are fitted or measured, with the unit they are shown in.
_UNITS = {
    "flops": (1e12, "TFLOP/s"),
    "fp32_flops": (1e12, "TFLOP/s"),
    "attention_flops": (1e12, "TFLOP/s"),
    "copy_bytes": (1e9, "GB/s"),
    "host_bytes": (1e9, "GB/s"),
    "ramp_tokens": (1.0, "tokens"),
    "kernel_ns": (1e3, "us"),
    "launch_ns": (1e3, "us"),
    "memory_bytes": (2**30, "GiB"),
}


def print_calibration(console: Console, calibration: Calibration) -> None:
    """Print every chunk measured and predicted, the rates of the profile, and how far off it is."""
    console.print(f"{calibration.rates.device}: {calibration.what}")
    console.print()
    console.print(_chunks(calibration))
    legend = "* held out of the fit   + backward: both, with the head\noff by: predicted over measured time, less 1"
    console.print(Text(legend, style="dim"))
    console.print()
    console.print(_rates(calibration))
    console.print()
    for line in _verdict(calibration):
        console.print(line)


def chunk_words(segments: tuple[int, ...], prefix_tokens: int) -> str:
    """Say how many tokens a chunk has, in how many segments or after which prefix."""
    if prefix_tokens:
        return f"{segments[0]:,} after {prefix_tokens:,}"
    return f"{sum(segments):,}" if len(segments) == 1 else f"{sum(segments):,} of {len(segments)}"


def _chunks(calibration: Calibration) -> Table:
    table = Table(title=Text("Chunks, in tokens", style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("chunk", header_style="dim", no_wrap=True)
    for name in ("forward", "off by", "+ backward", "predicted", "off by"):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    rows = zip(calibration.chunks, calibration.held_out, calibration.train_ns, calibration.errors, strict=True)
    for chunk, held_out, train_ns, (forward_error, train_error) in rows:
        table.add_row(
            "*" if held_out else "",
            chunk_words(chunk.segments, chunk.prefix_tokens),
            seconds(chunk.forward_kv_ns / 1e3),
            _signed(forward_error),
            seconds(chunk.train_ns / 1e3),
            seconds(train_ns / 1e3),
            _signed(train_error),
        )
    return table


def _rates(calibration: Calibration) -> Table:
    table = Table(title=Text("Profile", style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("here", calibration.base.name):
        table.add_column(name, justify="right", header_style="dim", no_wrap=True)
    table.add_column("")
    for name, (unit, word) in _UNITS.items():
        here, there = (getattr(hardware, name) / unit for hardware in (calibration.hardware, calibration.base))
        table.add_row(name, _three_digits(here), _three_digits(there), word)
    for each in calibration.hardware.attention:
        table.add_row(f"{each.kernel}, heads of {each.head_size}", "", "", "")
        for name in ("forward_blocks", "forward_squares", "backward_blocks", "backward_squares"):
            table.add_row(f"  {name}", _three_digits(getattr(each, name) / 1e12), "", "TFLOP/s")
    return table


def _verdict(calibration: Calibration) -> list[Text]:
    errors, rates = calibration.held_out_errors, calibration.rates
    median, worst = percent(float(np.median(errors))), percent(float(errors.max()))
    apart = f"; the times of a chunk are {percent(calibration.spread)} apart" if calibration.spread else ""
    own = rates.flops if calibration.cost.precision == "bf16" else rates.fp32_flops
    return [
        Text.assemble(("Held-out error: ", "bold"), f"median {median}, worst {worst}, of {len(errors)} chunks{apart}."),
        Text(
            f"A large product alone reaches {_three_digits(own / 1e12)} TFLOP/s; a layer without work takes "
            f"{_three_digits(rates.layer_overhead_ns / 1e3)} us."
        ),
        *[
            Text(f"Too fast for these chunks to tell: {', '.join(names)}.")
            for names in [calibration.unidentifiable]
            if names
        ],
        Text(f"What one device cannot tell is that of {calibration.base.name}: links, peak_flops, reserved_bytes."),
    ]


def _signed(error: float) -> str:
    return f"{error:+.1%}"


def _three_digits(value: float) -> str:
    """Print three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# What processes of a run did in its largest step, beside what the simulator makes of their times.


#: Sources that are listed one by one.
_LISTED = 20

#: Characters of a content hash that are shown.
_SHOWN = 16

_STYLES = {"identical": "bold green", "different": "bold yellow"}

#: What a number is called where its name is not words enough.
_NAMES = {
    "token_fill": "token fill",
    "heaviest_over_mean": "heaviest rank over mean",
    "heaviest_over_work": "the same over work / dp",
    "num_optimal_steps": "steps proved optimal",
    "num_exceeding_steps": "too long a sequence, steps",
    "exceeding_share": "imbalance in these",
    "num_zero_loss": "zero-loss chunks",
    "num_shared_sequences": "sequences that ranks share",
    "shared_work_share": "their share of the work",
    "recompute_share": "recomputed, of the work",
    "peak_retained_tokens": "activations held, of tokens",
    "total_us": "predicted time",
    "reduction_us": "of it adding up gradients",
    "total_lower_bound_us": "at least",
    "memory_bytes": "memory of the fullest GPU",
    "num_without_target": "without a target token",
    "truncated_num_sequences": "sequences cut",
    "truncated_num_tokens": "tokens cut off",
    "quantile_100": "the longest",
}


def print_difference(console: Console, difference: Difference) -> None:
    """Print one word first, then what differs, then the numbers."""
    console.print(Text(difference.verdict, style=_STYLES.get(difference.verdict, "bold")))
    console.print()
    console.print(_sides(console, difference))
    sections = dict.fromkeys(entry.section for entry in difference.entries)
    for section in sections:
        console.print()
        console.print(_entries(console, section, [entry for entry in difference.entries if entry.section == section]))
    if difference.sources:
        console.print()
        console.print(_sources(console, difference.sources[:_LISTED]))
        if len(difference.sources) > _LISTED:
            console.print(f"... and {len(difference.sources) - _LISTED:,} more (--json shows all)")
    for title, numbers in (("Numbers", difference.numbers), ("Rejected records", difference.rejected)):
        if numbers:
            console.print()
            console.print(_numbers(console, title, numbers))
    if difference.kind == "plan":
        console.print()
        console.print(_same_steps(difference.same_steps))


def _sides(console: Console, difference: Difference) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold yellow")
    for name, side in (("before", difference.before), ("after", difference.after)):
        doubts = [] if side.exact else ["ESTIMATED"]
        doubts += [f"A SAMPLE of {100 * side.sample:g}%"] if side.sample else []
        table.add_row(name, Text(visible(side.path, console)), side.content_hash[:_SHOWN], ", ".join(doubts))
    return table


def _entries(console: Console, section: str, entries: list[Entry]) -> Table:
    table = titled_table(section.capitalize())
    for name in ("", "before", "after"):
        table.add_column(name, overflow="fold")
    for entry in _worth_showing(entries):
        table.add_row(Text(visible(entry.name, console)), _value(console, entry.before), _value(console, entry.after))
    return table


def _worth_showing(entries: list[Entry]) -> list[Entry]:
    """Keep only the name of a model or GPU that is another one: it says enough, and --json has all that follows."""
    renamed = {entry.name.removesuffix("name") for entry in entries if entry.name.endswith(".name")}
    return [
        entry
        for entry in entries
        if entry.name.endswith(".name") or not any(entry.name.startswith(prefix) for prefix in renamed)
    ]


def _value(console: Console, value: object) -> Text:
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if value is None:
        return Text("none", style="dim")
    if isinstance(value, int):
        return Text(f"{value:,}")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return Text(text[:_SHOWN] if len(text) == 64 and text.isalnum() else visible(text, console))


def _sources(console: Console, changes: tuple[SourceChange, ...]) -> Table:
    table = titled_table("Sources")
    for name in ("path", ""):
        table.add_column(name, overflow="fold")
    for name in ("sequences", "tokens"):
        table.add_column(name, justify="right", overflow="fold")
    for change in changes:
        before, after = change.before, change.after
        paths = [side["path"] for side in (before, after) if side is not None]
        path = " -> ".join(paths) if change.change == "moved" else paths[-1]
        sequences = _from_to(before and before["num_sequences"], after and after["num_sequences"])
        tokens = _from_to(before and before["num_tokens"], after and after["num_tokens"])
        table.add_row(Text(visible(path, console)), change.change, sequences, tokens)
    return table


def _from_to(before: int | None, after: int | None) -> str:
    if before is None or after is None or before == after:
        only = before if after is None else after
        return "" if only is None else f"{only:,}"
    return f"{before:,} -> {after:,}"


def _numbers(console: Console, title: str, numbers: tuple[Number, ...]) -> Table:
    table = titled_table(title)
    table.add_column("", overflow="fold")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    for number in numbers:
        if number.before or number.after:
            table.add_row(
                Text(visible(_name(number.name), console)),
                _number(number.before, number),
                _number(number.after, number),
                _change(number),
            )
    return table


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
    """Say how much a number changed: shares in points, everything else in percent."""
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
