"""`chunkplan tune`: chooses ChunkSize and K for a model on GPUs, without any."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.declared import (
    AnalysisArgument,
    CliValues,
    JsonOption,
    WorkspaceOption,
    files_read,
    find_analysis,
    output_option,
    takes,
    tune_options,
)
from chunkplan_cli.plan_report import warn_of_positions
from chunkplan_cli.progress import note_compilation, tuning_progress
from chunkplan_cli.terminal import note, print_json, stdout, warn


@takes(asked=TuneOptions)
def tune(
    analysis: AnalysisArgument = None,
    *,
    asked: CliValues,
    output: Annotated[
        Path | None, output_option("Where to write what was found. Default: WORKSPACE/tuning.json.", metavar="FILE")
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose ChunkSize, K, schedule and memory options for a model on GPUs, by simulating steps of the data.

    Shows first baselines in the same memory, then the choices that are worth a look. `build --auto` builds
    a plan with the recommended one; `simulate` shows where the time of one step goes.

    Example: chunkplan tune --model-config Qwen2.5-7B/ --hardware h200 --gpus 16
    """
    from chunkplan.files.writing import refuse_overwriting
    from chunkplan.planfile.load import load_analysis
    from chunkplan.tuning.document import tuning_document, write_tuning
    from chunkplan.tuning.tune import tune as run
    from chunkplan.workspace import Workspace
    from chunkplan_cli.tune_report import print_tuning

    options = tune_options(asked)
    place = Workspace.find(workspace)
    source = find_analysis(analysis, place)
    target = output or place.tuning
    refuse_overwriting(target, (source, *files_read(asked)))
    loaded = load_analysis(source)
    with note_compilation(), tuning_progress() as report_progress:
        tuning = run(loaded, options, progress=report_progress)
    if as_json:
        print_json(tuning_document(tuning))
    else:
        print_tuning(stdout(), tuning)
    warn_of_positions(tuning.positions, options.shape.name)
    if not loaded.is_exact:
        warn("the lengths are estimated from bytes: times and memory are, too")
    if output is None:
        place.root.mkdir(parents=True, exist_ok=True)
    write_tuning(tuning, target)
    note(f"tuning in {target}")
    where = [str(analysis)] if analysis else []
    where += ["--workspace", str(workspace)] if workspace else []
    where += ["--auto", *(["--from", str(output)] if output else [])]
    note("next: " + shlex.join(["chunkplan", "build", *where]))
