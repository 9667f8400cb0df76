"""`chunkplan calibrate`: a hardware profile from times of chunks on the machine at hand."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import median as median_of
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.text import Text

from chunkplan.quantities import percent, seconds
from chunkplan.reporting.tables import Table
from chunkplan_cli.declared import CliValues, JsonOption, make, output_option, takes
from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import drawn_table, note, print_json, stdout, warn
from chunkplan_runtime.calibration import CalibrationOptions

if TYPE_CHECKING:
    from chunkplan.cost.calibrate import Calibration


@takes(asked=CalibrationOptions)
def calibrate(
    *,
    asked: CliValues,
    output: Annotated[Path, output_option("The profile to write, such as h200-here.toml.", metavar="FILE")],
    as_json: JsonOption = False,
) -> None:
    """Time chunks on this machine and fit a hardware profile for `tune` and `build` to them.

    A third of the chunks is held out of the fit, to test it. An earlier profile of the same name is replaced. Nothing
    else should run on the device.

    Example: chunkplan calibrate --model Qwen/Qwen2.5-7B --output mine.toml
    """
    from chunkplan.cost.calibrate import calibration_document, refuse_other_profile, write_profile
    from chunkplan.cost.model_config import config_file
    from chunkplan.files.writing import refuse_overwriting
    from chunkplan_runtime import require_torch

    options = make(CalibrationOptions, CliValues({**asked, "name": output.stem}))
    refuse_other_profile(output)
    refuse_overwriting(output, (config_file(Path(options.model)), options.base))
    require_torch()
    import torch

    from chunkplan_runtime.calibration.calibrate import calibrate as run

    with progress("measuring", "chunks") as report_progress:
        calibration, left_out = run(options, report_progress)
    write_profile(calibration, output, torch_version=torch.__version__)
    if as_json:
        left = [{"segments": list(probe.segments), "prefix_tokens": probe.prefix_tokens} for probe in left_out]
        print_json({**calibration_document(calibration), "left_out": left, "profile": str(output)})
    else:
        _print(stdout(), calibration)
    if left_out:
        chunks = "; ".join(_chunk_words(probe.segments, probe.prefix_tokens) for probe in left_out)
        warn(f"left out, as they do not fit the memory of {calibration.rates.device}: {chunks}")
    note(f"profile in {output}")
    for command in ("tune", "build --auto"):
        words = ["chunkplan", *command.split(), "--model", str(options.model), "--hardware", str(output)]
        words += ["--precision", calibration.cost.precision]
        note(f"next: {shlex.join(words)}")


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


def _print(console: Console, calibration: Calibration) -> None:
    """Print every chunk measured and predicted, the rates of the profile, and how far off it is."""
    console.print(f"{calibration.rates.device}: {calibration.what}")
    console.print()
    console.print(drawn_table(console, _chunks(calibration)))
    legend = "* held out of the fit   + backward: both, with the head\noff by: predicted over measured time, less 1"
    console.print(Text(legend, style="dim"))
    console.print()
    console.print(drawn_table(console, _rates(calibration)))
    console.print()
    for line in _verdict(calibration):
        console.print(line)


def _chunk_words(segments: tuple[int, ...], prefix_tokens: int) -> str:
    """Return the tokens of a chunk, with its number of segments or the prefix it comes after."""
    if prefix_tokens:
        return f"{segments[0]:,} after {prefix_tokens:,}"
    return f"{sum(segments):,}" if len(segments) == 1 else f"{sum(segments):,} of {len(segments)}"


def _chunks(calibration: Calibration) -> Table:
    rows = [
        (
            *("*" if held_out else "", _chunk_words(chunk.segments, chunk.prefix_tokens)),
            *(seconds(chunk.forward_kv_ns / 1e3), f"{forward_error:+.1%}"),
            *(seconds(chunk.train_ns / 1e3), seconds(train_ns / 1e3), f"{train_error:+.1%}"),
        )
        for chunk, held_out, train_ns, (forward_error, train_error) in zip(
            calibration.chunks, calibration.held_out, calibration.train_ns, calibration.errors, strict=True
        )
    ]
    head = ("", "chunk", "forward", "off by", "+ backward", "predicted", "off by")
    return Table("Chunks, in tokens", head, rows, texts=("", "chunk"))


def _rates(calibration: Calibration) -> Table:
    rows = []
    for name, (unit, word) in _UNITS.items():
        here, there = (getattr(hardware, name) / unit for hardware in (calibration.hardware, calibration.base))
        rows.append((name, _three_digits(here), _three_digits(there), word))
    for each in calibration.hardware.attention:
        rows.append((f"{each.kernel}, heads of {each.head_size}", "", "", ""))
        for name in ("forward_blocks", "forward_squares", "backward_blocks", "backward_squares"):
            rows.append((f"  {name}", _three_digits(getattr(each, name) / 1e12), "", "TFLOP/s"))
    return Table("Profile", ("", "here", calibration.base.name, ""), rows, texts=("",))


def _verdict(calibration: Calibration) -> list[Text]:
    errors, rates = calibration.held_out_errors, calibration.rates
    median, worst = percent(median_of(errors.ravel().tolist())), percent(float(errors.max()))
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


def _three_digits(value: float) -> str:
    """Print three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
