"""`chunkplan calibrate`: a hardware profile from times of chunks on the machine at hand."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from chunkplan_cli.declared import CliValues, JsonOption, make, output_option, takes
from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import note, print_json, stdout, warn
from chunkplan_runtime.calibration import CalibrationOptions


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
    from chunkplan_cli.difference_report import chunk_words, print_calibration
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
        print_calibration(stdout(), calibration)
    if left_out:
        chunks = "; ".join(chunk_words(probe.segments, probe.prefix_tokens) for probe in left_out)
        warn(f"left out, as they do not fit the memory of {calibration.rates.device}: {chunks}")
    note(f"profile in {output}")
    for command in ("tune", "build --auto"):
        words = ["chunkplan", *command.split(), "--model", str(options.model), "--hardware", str(output)]
        words += ["--precision", calibration.cost.precision]
        note(f"next: {shlex.join(words)}")
