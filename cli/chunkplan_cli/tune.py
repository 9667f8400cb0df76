"""`chunkplan tune`: chooses ChunkSize and K for a model on GPUs, without any."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from chunkplan_cli.completion import SCHEDULES, some_of
from chunkplan_cli.machine_options import (
    GpuMemory,
    Gpus,
    HardwareName,
    ModelConfig,
    PrecisionOption,
    ShardingOption,
    TensorParallel,
    parse_numbers,
    tune_options,
)
from chunkplan_cli.plan_warnings import warn_of_positions
from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import note, print_json, stdout, warn


def tune(
    analysis: Annotated[
        Path | None,
        typer.Argument(
            metavar="ANALYSIS",
            help="An analysis, or a .parquet/.npy file with one column of lengths. Default: WORKSPACE/analysis.",
            show_default=False,
        ),
    ] = None,
    model_config: ModelConfig = None,
    hardware: HardwareName = None,
    gpu_memory: GpuMemory = None,
    gpus: Gpus = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Data-parallel ranks. Default: 1.")] = None,
    tp: TensorParallel = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", help="Pipeline stages. Default: 1.")] = None,
    precision: PrecisionOption = None,
    sharding: ShardingOption = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences a step. Default: 256.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the shuffle. Default: 0.")] = None,
    chunk_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="ChunkSizes to try. Default: 20 from 1024 to 131072.")
    ] = None,
    ks: Annotated[
        str | None, typer.Option("--ks", metavar="N,N,...", help="Ks to try. Default: 1,2,4,8,16,32.")
    ] = None,
    schedules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Schedules to try on a pipeline. Default: 1f1b,zero-bubble.",
            autocompletion=some_of(SCHEDULES),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what was found, for `build --auto --from FILE`.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the report.")] = False,
) -> None:
    """Choose ChunkSize, K, schedule and memory options for a model on GPUs, by simulating steps of the data.

    Shows what people run today under the same memory first, then every choice worth looking at. `build --auto` builds a
    plan with the one it recommends; `simulate` plays one step through and shows where its time goes.

    Example: chunkplan tune --model-config Qwen2.5-7B/ --hardware h200 --gpus 16
    """
    from chunkplan.cost.model_config import config_file
    from chunkplan.errors import UsageError
    from chunkplan.planfile.load import load_analysis
    from chunkplan.tuning.document import tuning_document, write_tuning
    from chunkplan.tuning.tune import tune as run
    from chunkplan.whole_file import refuse_overwriting
    from chunkplan.workspace import Workspace
    from chunkplan_cli.compilation import note_compilation
    from chunkplan_cli.tune_report import print_tuning

    options = tune_options(
        model_config=model_config,
        hardware=hardware,
        gpu_memory=gpu_memory,
        gpus=gpus,
        dp=dp,
        tp=tp,
        pp=pp,
        precision=precision,
        sharding=sharding,
        global_batch=global_batch,
        seed=seed,
        chunk_sizes=parse_numbers(chunk_sizes, "--chunk-sizes"),
        ks=parse_numbers(ks, "--ks"),
        schedules=None if schedules is None else tuple(name.strip() for name in schedules.split(",")),
    )
    place = Workspace.find(workspace)
    source = analysis or place.analysis
    if analysis is None and not source.exists():
        raise UsageError(
            f"there is no analysis in the workspace {place.root}", hint="run `chunkplan analyze DATA`, or give ANALYSIS"
        )
    if output is not None:
        refuse_overwriting(output, (source, model_config and config_file(model_config), hardware))
    loaded = load_analysis(source)
    with note_compilation(), progress("simulating", "runs") as report_progress:
        tuning = run(loaded, options, progress=report_progress)
    if output is not None:
        write_tuning(tuning, output)
    if as_json:
        print_json(tuning_document(tuning))
    else:
        print_tuning(stdout(), tuning)
    warn_of_positions(tuning.positions, options.shape.name)
    if not loaded.is_exact:
        warn("the lengths are estimated from bytes: times and memory are, too")
    if output is not None:
        note(f"tuning in {output}")
        where = [str(analysis)] if analysis else []
        where += ["--workspace", str(workspace)] if workspace else []
        note("next: " + shlex.join(["chunkplan", "build", *where, "--auto", "--from", str(output)]))
