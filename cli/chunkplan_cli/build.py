"""`chunkplan build`: plans the latest analysis and leaves the plan in the workspace."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from chunkplan_cli.build_options import describe_old, k_and_k_by_length, number, plan_config, resolve, weights_by_source
from chunkplan_cli.completion import PACKERS, SCHEDULES, one_of
from chunkplan_cli.machine_options import (
    GpuMemory,
    Gpus,
    HardwareName,
    ModelConfig,
    PrecisionOption,
    ShardingOption,
    TensorParallel,
    cost_model,
)
from chunkplan_cli.plan_warnings import warn_of_chunk_size, warn_of_memory, warn_of_positions
from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import note, print_json, stdout, warn


class LastBatch(StrEnum):
    """What becomes of an epoch's last batch when it is short."""

    KEEP = "keep"
    DROP = "drop"


class Split(StrEnum):
    """Where a sequence over ChunkSize is cut."""

    FULL = "full"
    EVEN = "even"
    COST = "cost"
    NONE = "none"


class Checkpointing(StrEnum):
    """What a chunk keeps of its layers."""

    NONE = "none"
    FULL = "full"


class Balance(StrEnum):
    """How sequences are spread over ranks."""

    SPREAD = "spread"
    SEARCH = "search"


def build(
    analysis: Annotated[
        Path | None,
        typer.Argument(
            metavar="ANALYSIS",
            help="An analysis, or a .parquet/.npy file with one column of lengths. Default: WORKSPACE/analysis.",
            show_default=False,
        ),
    ] = None,
    chunk_size: Annotated[int | None, typer.Option(metavar="TOKENS", help="Most tokens in a chunk. Required.")] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            metavar="N",
            help="Chunks of a sequence that hold activations; 8,131072:2 is 8, and 2 over 131072 tokens. Required.",
        ),
    ] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences a step. Default: 256.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data. Default: 1.")] = None,
    last_batch: Annotated[
        LastBatch | None,
        typer.Option(help="A short last batch of an epoch. Default: keep."),
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Data-parallel ranks. Default: 1.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", help="Pipeline stages. Default: 1.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Order on a pipeline: 1f1b, interleaved, zero-bubble, or search (slow). Default: 1f1b.",
            autocompletion=one_of(SCHEDULES),
        ),
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(metavar="N", help="Model parts of a stage, for interleaved. Default: 2.")
    ] = None,
    memory_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens whose activations a stage may hold. Default: no bound.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the shuffle. Default: 0.")] = None,
    split: Annotated[
        Split | None,
        typer.Option(
            metavar="HOW",
            help="Cut a long sequence at ChunkSize (full), into parts of equal length (even), or of equal predicted "
            "time (cost), or refuse it (none). Default: full.",
        ),
    ] = None,
    no_split: Annotated[
        bool, typer.Option("--no-split", help="The same as --split none: pack only, for models that are not causal.")
    ] = False,
    tail_sharing: Annotated[
        bool | None,
        typer.Option(
            help="Fill the free room in the chunks of split sequences with short ones. Default: on one stage."
        ),
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For ranks that best-fit decreasing is not proved to pack best: auto, bfd (leave them), mbs, "
            "column-generation or exact. Default: auto.",
            autocompletion=one_of(PACKERS),
        ),
    ] = None,
    balance: Annotated[
        Balance | None,
        typer.Option(
            metavar="HOW",
            help="search: look for a better spread of every step with CP-SAT, slowly. Default: spread.",
        ),
    ] = None,
    equal_chunks: Annotated[
        bool | None,
        typer.Option(help="The same number of chunks on every rank, as ZeRO-3 needs it."),
    ] = None,
    holdout: Annotated[
        str | None,
        typer.Option(metavar="SHARE|N", help="Hold out a share (0.01) or a number of sequences: a plan of their own."),
    ] = None,
    mix: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE=X", help="How often an epoch takes a source: 2 twice, 0.5 half. Repeatable."),
    ] = None,
    model_config: ModelConfig = None,
    hardware: HardwareName = None,
    tp: TensorParallel = None,
    precision: PrecisionOption = None,
    checkpointing: Annotated[
        Checkpointing | None, typer.Option(help="Whether layers are recomputed in a chunk's backward. Default: none.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Choose what is not given for this model and hardware, as `tune` does.")
    ] = False,
    from_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="With --auto: what `tune --output FILE` found.")
    ] = None,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    sharding: ShardingOption = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="These options as `chunk-size = 8192`; options given win.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write the plan. Default: WORKSPACE/plan.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Threads that plan; the plan is the same. Default: processors."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and report, write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the report.")] = False,
) -> None:
    """Split and pack the sequences of each step into chunks, spread them over ranks, order them, and write the plan.

    `tune` finds ChunkSize and K for it, as `--auto` does here; `export` turns the plan into rows for other trainers.

    Example: chunkplan build --chunk-size 8192 --k 4 --dp 8 --pp 2
    """
    from chunkplan.building import build_plans, is_evaluation
    from chunkplan.errors import UsageError
    from chunkplan.lengths import Positions
    from chunkplan.planfile.load import evaluation_folder, load_analysis
    from chunkplan.reporting.plan_memory import memory_at
    from chunkplan.summary import summarize_plan
    from chunkplan.workspace import Workspace
    from chunkplan_cli.build_auto import choose
    from chunkplan_cli.compilation import note_compilation
    from chunkplan_cli.plan_report import print_plan_report

    if split not in (None, Split.NONE) and no_split:
        raise UsageError("--split and --no-split exclude each other", hint="leave one of them out")
    given: dict[str, Any] = {
        "chunk_size": chunk_size,
        "k": None,
        "k_by_length": None,
        "global_batch": global_batch,
        "epochs": epochs,
        "last_batch": last_batch.value if last_batch else None,
        "dp": dp,
        "pp": pp,
        "schedule": schedule,
        "virtual_stages": virtual_stages,
        "memory_tokens": memory_tokens,
        "seed": seed,
        "split": "none" if no_split else split.value if split else None,
        "tail_sharing": tail_sharing,
        "packing": packing,
        "balance": balance.value if balance else None,
        "equal_chunks": equal_chunks,
        "holdout": number(holdout) if holdout is not None else None,
        "mix": weights_by_source(mix) if mix is not None else None,
    }
    if k is not None:
        given["k"], given["k_by_length"] = k_and_k_by_length(k)
    values = resolve(given, config)
    machine: dict[str, Any] = {
        "model_config": model_config,
        "hardware": hardware,
        "tp": tp,
        "precision": precision,
    }
    only_auto = {"gpus": gpus, "gpu_memory": gpu_memory, "sharding": sharding}
    place = Workspace.find(workspace)
    source = analysis or place.analysis
    if analysis is None and not source.exists():
        raise UsageError(
            f"there is no analysis in the workspace {place.root}", hint="run `chunkplan analyze DATA`, or give ANALYSIS"
        )
    target = output or place.plan
    replaced = describe_old(target)
    loaded = load_analysis(source)
    with note_compilation():
        if auto:
            if checkpointing is not None:
                raise UsageError("--checkpointing and --auto exclude each other", hint="--auto chooses it")
            found = choose(loaded, values, machine | only_auto, from_file)
            values, cost = found.settings, found.cost
            held_by: dict[str, Any] = {"sharding": found.sharding, "gpu_bytes": found.gpu_memory}
        else:
            _refuse_without_auto(only_auto | {"from": from_file})
            cost, held_by = cost_model(**machine, checkpointing=checkpointing), {}
        settings = plan_config(values)
        with progress("planning", "steps") as report_progress:
            plans = build_plans(
                loaded, target, settings, cost=cost, workers=workers, progress=report_progress, dry_run=dry_run
            )

    built = plans[target]
    manifest = built.manifest
    summary = summarize_plan(built.steps, built.chunks, manifest)
    memory = memory_at(built.moments, built.ranks, settings, cost, **held_by)
    positions = Positions.of(loaded.num_tokens, cost.shape.max_positions)
    if as_json:
        document = {"plan": None if dry_run else str(target), "manifest": manifest, "summary": summary.to_dict()}
        print_json({**document, "memory": memory.to_dict(), "positions": positions and asdict(positions)})
    else:
        print_plan_report(stdout(), summary, manifest, memory)
    if not auto and settings.split != "none":
        warn_of_chunk_size(settings.chunk_size, summary.longest_sequence)
    tune = [*([str(analysis)] if analysis else []), *(["--workspace", str(workspace)] if workspace else [])]
    for name in ("model_config", "hardware", "gpu_memory", "precision", "sharding"):
        if (value := (machine | only_auto)[name]) is not None:
            tune += ["--" + name.replace("_", "-"), str(value)]
    warn_of_memory(memory, cost, settings, None if from_file else ["chunkplan", "tune", *tune])
    warn_of_positions(positions, cost.shape.name)
    if not manifest["analysis"]["exact"]:
        warn("the lengths are estimated from bytes: this plan shows what to expect, it cannot be trained")
    if manifest["analysis"]["sample"]:
        warn("the data is a sample: this plan shows what to expect, it cannot be trained")
    evaluation = evaluation_folder(target)
    if evaluation in plans:
        note(f"plan of the {manifest['selection']['num_held_out']:,} sequences held out in {evaluation}")
    if dry_run:
        note("dry run: nothing was written")
        return
    if evaluation not in plans and evaluation.is_dir() and is_evaluation(evaluation):
        warn(f"{evaluation} is of an earlier build: what it holds out, this plan trains on")
    note(f"plan in {target}" + (f" (replaced {replaced})" if replaced else ""))
    flags = [str(target)] if output else ["--workspace", str(workspace)] if workspace else []
    note(f"next: {shlex.join(['chunkplan', 'inspect', *flags, '--step', '0'])}")


def _refuse_without_auto(given: dict[str, Any]) -> None:
    from chunkplan.errors import UsageError

    for name, value in given.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for --auto", hint="add --auto, or leave it out")
