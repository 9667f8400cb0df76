"""`chunkplan build`: plans the latest analysis and leaves the plan in the workspace."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import options_of
from chunkplan.quantities import gibibytes, ratio, seconds
from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.build_options import (
    AUTO,
    BuildOptions,
    choose,
    describe_old,
    fitting_levels,
    open_like,
    plan_config,
    resolve,
)
from chunkplan_cli.declared import (
    AnalysisArgument,
    CliValues,
    JsonOption,
    WorkspaceOption,
    find_analysis,
    output_option,
    takes,
)
from chunkplan_cli.plan_report import note_loss, warn_of_chunk_size, warn_of_memory, warn_of_positions, warn_of_weights
from chunkplan_cli.progress import note_compilation, planning_progress
from chunkplan_cli.terminal import note, print_json, stdout, warn

if TYPE_CHECKING:
    from chunkplan.building import BuiltPlan
    from chunkplan.lengths import Positions
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.reporting.plan_memory import PlanMemory


_TRAINED = ("lora_rank", "load_in_4bit", "optimizer", "fused_kernels", "compile")
_MACHINE = ("shape", "hardware", "tp", "precision", "sharding", *_TRAINED)


@takes(plan=PlanConfig, machine=(CostModel, _MACHINE), tuning=(TuneOptions, ("gpus", "gpu_memory")), how=BuildOptions)
def build(
    analysis: AnalysisArgument = None,
    *,
    auto: Annotated[
        bool, typer.Option("--auto", help="Take what is not given from the result of `tune`, or tune now.")
    ] = False,
    plan: CliValues,
    machine: CliValues,
    tuning: CliValues,
    how: CliValues,
    output: Annotated[Path | None, output_option("Where to write the plan. Default: WORKSPACE/plan.")] = None,
    workspace: WorkspaceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and report, write nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Split and pack the sequences of each step into chunks, balance them over ranks, order them, and write the plan.

    `tune` finds ChunkSize and K, as `--auto` does here.

    Example: chunkplan build --chunk-size 8192 --k 4 --dp 8 --pp 2
    """
    from chunkplan.building import build_plans
    from chunkplan.lengths import Positions
    from chunkplan.planfile.load import load_analysis
    from chunkplan.planfile.manifest import unread_words
    from chunkplan.reporting.plan_memory import memory_at
    from chunkplan.workspace import Workspace

    options = BuildOptions(**how)
    if "checkpointing" in how and (auto or options.checkpointing != AUTO):
        machine["checkpointing"] = options.checkpointing
    values, machine = resolve(plan, machine, options.config)
    place = Workspace.find(workspace)
    target = output or place.plan
    replaced = describe_old(target)
    if options.like:
        _check_like(options.like, auto=auto, has_output=dry_run or output is not None)
        loaded, cost, values = open_like(options.like, output, analysis, values, machine)
    else:
        loaded = load_analysis(find_analysis(analysis, place))
    if not options.like:
        note_loss(loaded, values)
    if keys := unread_words(loaded.manifest.get("sources", ())):
        note(f"not read of the data: {keys}")
    with note_compilation():
        if auto:
            if "shape" in machine:
                warn_of_positions(loaded, machine["shape"])
            asked = CliValues(machine | tuning)
            settings, found = choose(loaded, values, asked, file=options.from_file, saved=place.tuning)
            cost = found.cost
        else:
            _refuse_without_auto(tuning, options)
            cost = cost if options.like else CostModel(**machine)
            settings = _settings(values, cost)
            _refuse_in_vain(machine, cost, settings)
            cost = cost.on_stages(settings.pp)
            if options.checkpointing == AUTO:
                cost = fitting_levels(cost, settings, loaded)
            _warn_of_plan_only(machine, cost, settings)
        if not (auto and "shape" in machine):
            warn_of_positions(loaded, cost.shape)
        with planning_progress() as bar:
            keep = partial(_refuse_misfit, None if options.force or dry_run else target, settings, cost)
            plans = build_plans(
                loaded, target, settings, cost=cost, workers=options.workers, progress=bar, dry_run=dry_run, check=keep
            )
    positions = Positions.of(loaded.num_tokens, cost.shape.max_positions)
    built = plans[target]
    memory = memory_at(built.peaks, built.ranks, settings, cost)
    _show(built, loaded, None if dry_run else target, memory, positions, as_json=as_json)
    warn_of_weights(plan.get("mix", {}))
    tune = _tune_command(analysis, workspace, (machine, tuning, plan))
    if not auto and not options.like and settings.split != "none":
        warn_of_chunk_size(settings.chunk_size, built.manifest["totals"], settings.dp, fits=memory.fits, tune=tune)
    _compare_unshared(built, loaded, target, settings, cost, values)
    warn_of_memory(memory, cost, settings, None if options.from_file or options.like else tune)
    _say_what_was_written(plans, loaded, target, replaced, dry_run=dry_run)
    if not dry_run:
        _say_next(output, workspace, can_be_trained=_can_be_trained(built.manifest, settings, cost))


def _compare_unshared(
    built: BuiltPlan, analysis: Analysis, target: Path, settings: PlanConfig, cost: CostModel, values: CliValues
) -> None:
    """Print the time of the plan without shared prefixes, where it has any: warn if that is less.

    There settings that depend on sharing, such as the schedule, are as given in `values`, or by default.
    """
    from chunkplan.building import build_plans
    from chunkplan.planfile.manifest import reduction_us_of

    if not settings.share_prefixes:
        return
    depend = ("share_prefixes", "schedule", "cp", "tail_sharing")
    kept = {name: getattr(settings, name) for name in options_of(PlanConfig) if name not in depend}
    given = {name: values[name] for name in depend[1:] if name in values}
    try:
        with note_compilation():
            alone = build_plans(analysis, target, PlanConfig(**{**kept, **given}), cost=cost, dry_run=True)[target]
    except ChunkplanError:  # within --max-activation-tokens, say, there may be no such plan
        return
    after_us = (reduction_us_of(built.manifest) or 0) * built.manifest["totals"]["num_steps"]
    took_us, alone_us = (each.manifest["predictions"]["predicted_us"] + after_us for each in (built, alone))
    words = f"predicted without --share-prefixes: {seconds(alone_us)}; with it {ratio(took_us / alone_us)} times that"
    if took_us > alone_us:
        warn(words)
        note("hint: leave it out: orders, ranks and chunks without trees save more here")
    else:
        note(words)


def _say_next(output: Path | None, workspace: Path | None, *, can_be_trained: bool) -> None:
    flags = [str(output)] if output else ["--workspace", str(workspace)] if workspace else []
    note(f"next: {shlex.join(['chunkplan', 'inspect', *flags, '--step', '0'])}")
    if can_be_trained:
        flags = ["--plan", *flags] if output else flags
        note(f"to train: {shlex.join(['chunkplan', 'train', *flags, '--model', 'NAME'])}")


def _refuse_misfit(target: Path | None, config: PlanConfig, cost: CostModel, built: BuiltPlan) -> None:
    """Refuse to replace the plan in `target`, if it fits its GPU, by one that does not."""
    from chunkplan.planfile.load import load_plan
    from chunkplan.reporting.per_step import plan_chunks
    from chunkplan.reporting.plan_memory import memory_at, plan_memory

    memory = memory_at(built.peaks, built.ranks, config, cost)
    if memory.fits or target is None or not (target / "manifest.json").is_file():
        return
    try:
        old = load_plan(target)
        before = plan_memory(old, plan_chunks(old).table)
    except ChunkplanError:
        return
    if before is not None and before.fits:
        raise UsageError(
            f"the new plan takes {gibibytes(memory.memory.total)} of the {gibibytes(memory.gpu_bytes)} of a GPU, and "
            f"{target} is a plan that fits: it was not replaced",
            hint="--dry-run shows where the memory goes; write it elsewhere with --output, or replace it with --force",
        )


def _settings(values: CliValues, cost: CostModel) -> PlanConfig:
    """The options of a plan; ranks share no sequences of a recurrent model unless that is asked for."""
    settings = plan_config(values)
    if cost.shape.is_recurrent and settings.cp != "off" and "cp" not in values:
        note(f"ranks share no sequences: layers of {cost.shape.name} keep a state, which ranks cannot pass on")
        return replace(settings, cp="off")
    return settings


def _refuse_in_vain(machine: CliValues, cost: CostModel, config: PlanConfig) -> None:
    """Refuse what would do nothing in the trainer."""
    if machine.get("compile") and config.pp > 1:
        raise UsageError(
            f"--compile with {config.pp} pipeline stages, which are not compiled: a compiler waits for the device",
            hint="leave it out, or build for one stage: --pp 1",
        )
    if "sharding" in machine and cost.shares("gradients") and config.dp == 1:
        raise UsageError(
            f"--sharding {cost.sharding} with one data-parallel rank, which shares nothing with others",
            hint="leave it out, or give more data-parallel ranks, for example --dp 2",
        )


def _warn_of_plan_only(machine: CliValues, cost: CostModel, config: PlanConfig) -> None:
    """Warn of settings that the runtime cannot run."""
    from chunkplan.tuning.trial import why_plan_only

    is_asked = not machine.keys().isdisjoint({"sharding", "optimizer"})
    is_asked |= cost.load_in_4bit or cost.shape.is_recurrent
    if is_asked and (plan_only := why_plan_only(config, cost)):
        warn(f"plan only: the runtime cannot run {plan_only} yet")


def _can_be_trained(manifest: dict[str, Any], config: PlanConfig, cost: CostModel) -> bool:
    from chunkplan.tuning.trial import why_plan_only

    described = manifest["analysis"]
    return described["exact"] and described["sample"] is None and why_plan_only(config, cost) is None


#: Options of the `tune` command suggested for a plan that does not fit.
_OF_TUNE = ("shape", "hardware", "gpus", "gpu_memory", "precision", "sharding", *_TRAINED, "global_batch", "cp")


def _tune_command(analysis: Path | None, workspace: Path | None, options: Sequence[CliValues]) -> list[str]:
    """Return the words of `chunkplan tune` for the same data, batches, model and GPUs."""
    words = [str(analysis)] if analysis else []
    words += ["--workspace", str(workspace)] if workspace else []
    for given in options:
        for name in given:
            if name in _OF_TUNE and (name in given.typed or isinstance(given[name], bool)):  # a flag has no text
                words += [options_of(TuneOptions)[name].flag, *([given.typed[name]] if name in given.typed else [])]
    return ["chunkplan", "tune", *words]


def _show(
    built: BuiltPlan,
    analysis: Analysis,
    target: Path | None,
    memory: PlanMemory,
    positions: Positions | None,
    *,
    as_json: bool,
) -> None:
    """Print the report of what was written to `target`, or of a dry run."""
    from chunkplan.planning.selection import describe_mix
    from chunkplan.summary import summary_of
    from chunkplan_cli.plan_report import print_mix, print_plan_report

    manifest = built.manifest
    summary = summary_of(built.steps, built.chunks, manifest)
    config = PlanConfig.from_entries(manifest["config"])
    shares = describe_mix(analysis, config) if config.mix else []
    if as_json:
        document = {"plan": target and str(target), "manifest": manifest, "summary": summary.to_dict()}
        mix = {"mix": [asdict(share) for share in shares]} if shares else {}
        print_json({**document, "memory": memory.to_dict(), "positions": positions and asdict(positions), **mix})
    else:
        print_plan_report(stdout(), summary, manifest, memory)
        if shares:
            print_mix(stdout(), shares)


def _say_what_was_written(
    plans: dict[Path, BuiltPlan], analysis: Analysis, target: Path, replaced: str | None, *, dry_run: bool
) -> None:
    from chunkplan.building import is_evaluation
    from chunkplan.planfile.load import evaluation_folder
    from chunkplan.planning.selection import whole_groups

    described = plans[target].manifest["analysis"]
    if not described["exact"]:
        warn("the lengths are estimated from bytes: this plan shows what to expect, it cannot be trained")
    if described["sample"]:
        warn("the data is a sample: this plan shows what to expect, it cannot be trained")
    evaluation = evaluation_folder(target)
    if evaluation in plans:
        held_out = plans[target].manifest["selection"]["num_held_out"]
        note(f"plan of the {held_out:,} sequences held out in {evaluation}")
    if num_elsewhere := int(whole_groups(analysis, analysis.is_evaluated_elsewhere).sum()):
        verbs = ("has", "is") if num_elsewhere == 1 else ("have", "are")
        kept = ", or come with one that has," if analysis.group is not None else ","
        note(f"{num_elsewhere:,} more {verbs[0]} the tokens of one of these{kept} and {verbs[1]} in neither plan")
    if dry_run:
        note("dry run: nothing was written")
        return
    if evaluation not in plans and evaluation.is_dir() and is_evaluation(evaluation):
        warn(f"{evaluation} is of an earlier build: what it holds out, this plan trains on")
    note(f"plan in {target}" + (f" (replaced {replaced})" if replaced else ""))


def _check_like(like: Path, *, auto: bool, has_output: bool) -> None:
    if auto:
        raise UsageError("--like and --auto exclude each other", hint="leave one of them out")
    if not has_output:
        raise UsageError(
            "--like without --output could replace the plan itself",
            hint=f"say where the new one goes, for example --output {shlex.quote(f'{like}-2')}",
        )


def _refuse_without_auto(tuning: CliValues, options: BuildOptions) -> None:
    flags = [options_of(TuneOptions)[name].flag for name in tuning] + (["--from"] if options.from_file else [])
    if flags and options.like:
        raise UsageError(
            f"{flags[0]} is for --auto, which --like excludes", hint="leave it out; --dp and --pp say for which ranks"
        )
    if flags:
        raise UsageError(f"{flags[0]} is for --auto", hint="add --auto, or leave it out")
