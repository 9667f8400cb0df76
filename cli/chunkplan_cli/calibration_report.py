"""A calibration in the terminal: every chunk measured and predicted, the rates, how far off. Readable at 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chunkplan.quantities import percent, seconds

if TYPE_CHECKING:
    from chunkplan.cost.calibrate import Calibration

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
        table.add_row(name, _number(here), _number(there), word)
    for each in calibration.hardware.attention:
        table.add_row(f"{each.kernel}, heads of {each.head_size}", "", "", "")
        for name in ("forward_blocks", "forward_squares", "backward_blocks", "backward_squares"):
            table.add_row(f"  {name}", _number(getattr(each, name) / 1e12), "", "TFLOP/s")
    return table


def _verdict(calibration: Calibration) -> list[Text]:
    errors, rates = calibration.held_out_errors, calibration.rates
    median, worst = percent(float(np.median(errors))), percent(float(errors.max()))
    apart = f"; the times of a chunk are {percent(calibration.spread)} apart" if calibration.spread else ""
    own = rates.flops if calibration.cost.precision == "bf16" else rates.fp32_flops
    return [
        Text.assemble(
            ("Held-out error: ", "bold"),
            f"median {median}, worst {worst}, of {len(errors)} chunks{apart}.",
        ),
        Text(
            f"A large product alone reaches {_number(own / 1e12)} TFLOP/s; a layer without work takes "
            f"{_number(rates.layer_overhead_ns / 1e3)} us."
        ),
        *[Text(f"Too fast for these chunks to tell: {', '.join(names)}.") for names in [calibration.untold] if names],
        Text(f"What one device cannot tell is that of {calibration.base.name}: links, peak_flops, reserved_bytes."),
    ]


def _signed(error: float) -> str:
    return f"{error:+.1%}"


def _number(value: float) -> str:
    """Print three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
