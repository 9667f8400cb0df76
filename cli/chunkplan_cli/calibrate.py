"""`chunkplan calibrate`: a hardware profile from times of chunks on the machine at hand."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from chunkplan_cli.completion import ATTENTION, DEVICES, HARDWARE, one_of
from chunkplan_cli.machine_options import Precision, parse_numbers
from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import note, print_json, stdout, warn


def calibrate(
    model_config: Annotated[
        Path, typer.Option(metavar="FILE", help="The model's config.json, or its folder. Its weights are not needed.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The profile to write, such as h200-here.toml.")],
    device: Annotated[
        str,
        typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.", autocompletion=one_of(DEVICES)),
    ] = "auto",
    precision: Annotated[
        Precision | None, typer.Option("--precision", help="Default: bf16, on a CPU fp32.", show_default=False)
    ] = None,
    chunk_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Three or more. Default: 1024 to 32768, on a CPU 256 to 2048.")
    ] = None,
    prefixes: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Earlier tokens of a chunk. Default: 8192 to 262144, on a CPU to 8192."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Measure the model's first N layers. Default: all that fit, on a CPU two at most."
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Times that each chunk is measured.")] = 3,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="The profile of what one device cannot tell. Default: by the GPU's name, or h100.",
            autocompletion=one_of(HARDWARE),
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(metavar="KERNEL", help="Attention kernel of the runtime.", autocompletion=one_of(ATTENTION)),
    ] = "auto",
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of weights, tokens and held-out chunks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the report.")] = False,
) -> None:
    """Time chunks on this machine and fit a hardware profile for `tune` and `build` to them.

    A third of the chunks is held out of the fit, and says how good it is. An earlier calibration of the same name is
    replaced. Nothing else should run on the device.

    Example: chunkplan calibrate --model-config Qwen2.5-7B/ --output mine.toml
    """
    from chunkplan.cost.calibration_file import calibration_document, refuse_other_profile, write_profile
    from chunkplan.cost.model_config import config_file
    from chunkplan.whole_file import refuse_overwriting
    from chunkplan_cli.calibration_report import chunk_words, print_calibration
    from chunkplan_runtime.requirements import require_torch

    refuse_other_profile(output)
    refuse_overwriting(output, (config_file(model_config), base))
    sizes, earlier = parse_numbers(chunk_sizes, "--chunk-sizes"), parse_numbers(prefixes, "--prefixes")
    require_torch()
    import torch

    from chunkplan_runtime.calibration.calibrate import CalibrationOptions
    from chunkplan_runtime.calibration.calibrate import calibrate as run

    options = CalibrationOptions(
        model_config=model_config,
        name=output.stem,
        device=device,
        precision=precision.value if precision else None,
        chunk_sizes=sizes,
        prefixes=earlier,
        layers=layers,
        repeats=repeats,
        base=base,
        attention=attention,
        seed=seed,
    )
    with progress("measuring", "chunks") as report_progress:
        calibration, left_out = run(options, report_progress)
    write_profile(calibration, output, torch_version=torch.__version__)
    if as_json:
        left = [{"segments": list(probe.segments), "prefix_tokens": probe.prefix_tokens} for probe in left_out]
        print_json({**calibration_document(calibration), "left_out": left, "profile": str(output)})
    else:
        print_calibration(stdout(), calibration)
    if left_out:
        chunks = "; ".join(chunk_words(probe.segments, probe.prefix_tokens) for probe in left_out)
        warn(f"left out, as they do not fit the memory of {calibration.rates.device}: {chunks}")
    note(f"profile in {output}")
    for command in ("tune", "build --auto"):
        words = ["chunkplan", *command.split(), "--model-config", str(model_config), "--hardware", str(output)]
        words += ["--precision", calibration.cost.precision]
        note(f"next: {shlex.join(words)}")
