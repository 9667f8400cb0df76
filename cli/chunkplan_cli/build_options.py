"""The options of a plan: those given, those of a TOML file, those that a tuning found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.fused import fused_words
from chunkplan.cost.model import CostModel
from chunkplan.domains import FLAG, or_word, path, whole
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import Advanced, Options, in_words, option, options_of, read_entries, read_settings, same
from chunkplan.quantities import counted, gibibytes, k_words, layout_words, percent, trained_words
from chunkplan.reporting.way_row import how_words
from chunkplan.tuning.options import TuneOptions
from chunkplan_cli.declared import OPTIONS, CliValues, tune_options
from chunkplan_cli.progress import tuning_progress
from chunkplan_cli.terminal import note, warn

if TYPE_CHECKING:
    from chunkplan.planfile.analysis import Analysis
    from chunkplan.tuning.document import Tuned

#: Of `--checkpointing`: what fits and runs least again, layer by layer.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """Sources of a plan's options beside the command line, and how much of the machine plans.

    `checkpointing`: of the model as it is run, which is not a field of a plan.
    """

    checkpointing: str = same(
        CostModel,
        "checkpointing",
        domain=or_word(AUTO, options_of(CostModel)["checkpointing"].domain),
        help=f"{options_of(CostModel)['checkpointing'].help[:-1]}; auto: the least that fits.",
    )

    like: Path | None = option(
        path("PLAN"),
        "Build a plan of the same steps and samples for other ranks: what is not given is as in PLAN.",
        group=Advanced(OPTIONS),
        default=None,
    )
    from_file: Path | None = option(
        path("FILE"),
        "With --auto: the result of `tune`.",
        group=Advanced(OPTIONS),
        default=None,
        flag="--from",
        default_words="WORKSPACE/tuning.json, if it is for this model and hardware",
    )
    config: Path | None = option(
        path("FILE"),
        "A TOML or YAML file with these options, such as recipes/qwen2.5-7b.yaml; the command line wins.",
        group=Advanced(OPTIONS),
        default=None,
    )
    force: bool = option(
        FLAG, "Replace a plan that fits its GPU by one that does not.", group=Advanced(OPTIONS), default=False
    )
    workers: int | None = option(
        whole(1),
        "Threads; the plan is the same with any number.",
        group=Advanced(OPTIONS),
        default=None,
        default_words="one for each processor",
    )


def resolve(plan: CliValues, machine: CliValues, config: Path | None) -> tuple[CliValues, CliValues]:
    """Join the options of a plan, of a model and of its GPUs in a file with those given, which win."""
    if config is None:
        return plan, machine
    in_file = read_settings(config, PlanConfig, CostModel, section="build")
    of_plan = options_of(PlanConfig).keys()
    values = CliValues({name: value for name, value in in_file.items() if name in of_plan} | plan)
    found = CliValues({name: value for name, value in in_file.items() if name not in of_plan} | machine)
    written = {name.replace("_", "-"): in_words(value) for name, value in read_entries(config, "build").items()}
    called = {name: options_of(CostModel)[name].called for name, value in found.items() if not isinstance(value, bool)}
    found.typed = {name: written[called[name]] for name in called if called[name] in written} | machine.typed
    return values, found


def plan_config(values: CliValues) -> PlanConfig:
    """Make a plan's configuration; what is missing takes its default."""
    for name, one in options_of(PlanConfig).items():
        if one.is_required and name not in values:
            raise UsageError(
                f"{one.flag} is missing",
                hint="for example: chunkplan build --chunk-size 8192 --k 4; or let --auto choose",
            )
    return PlanConfig(**values)


def open_like(
    plan: Path, output: Path | None, analysis: Path | None, given: CliValues, machine: CliValues
) -> tuple[Analysis, CostModel, CliValues]:
    """The analysis, the cost model and the options of a plan like `plan`, of which only the manifest is read.

    `machine` has the given options of the cost model. Settings of `plan` that cannot hold for the new one are printed.

    Raises:
        UsageError: one is missing, `analysis` is another one, the `given` options would change the samples of steps or
            exclude each other, or `output` is `plan`.
        DataError: one is damaged, or was replaced.
    """
    from chunkplan.building import with_sources
    from chunkplan.planfile.likeness import refuse_to_replace, values_like
    from chunkplan.planfile.load import load_analysis, load_plan, load_same_analysis

    like = load_plan(plan)
    if output is not None:
        refuse_to_replace(plan, output)
    found = load_same_analysis(like, option="ANALYSIS") if analysis is None else load_analysis(analysis)
    if found.content_hash != like.manifest["analysis"]["content_hash"]:
        raise UsageError(
            f"{analysis} is not the analysis of the plan {plan}: --like keeps which samples each step has",
            hint="leave it out; or leave --like out, for a plan of its own",
        )
    cost = replace(like.cost, **machine)
    values, fallen = values_like(like.config, with_sources(found, given, like.config.holdout), cost.shape)
    if fallen:
        options = options_of(PlanConfig)
        words = ", ".join(f"{options[name].spelled} {in_words(getattr(like.config, name))}" for name in fallen)
        note(f"left to the default, as what {plan} has cannot hold here: {words}")
    return found, cost, CliValues(values)


def fitting_levels(cost: CostModel, config: PlanConfig, analysis: Analysis) -> CostModel:
    """`cost` with the levels of activation checkpointing that fit the GPU on the heaviest steps and run least again."""
    from chunkplan.planning.batches import SampleGroups
    from chunkplan.tuning.mixing import fastest_fitting
    from chunkplan.tuning.tune import heaviest_steps

    config.check_layers(cost.shape.num_layers, cost.shape.name)
    heaviest = heaviest_steps(analysis.num_tokens, config, cost, SampleGroups.of(analysis.group))
    found = fastest_fitting(heaviest, config, cost, cost.hardware.memory_bytes)
    note(f"chosen: --checkpointing {found.checkpointing}")
    return found


def describe_old(target: Path) -> str | None:
    """Describe what `target` holds now, if it is something that the new plan replaces."""
    from chunkplan.planfile.load import load_plan

    if not target.is_dir() or not any(target.iterdir()):
        return None
    try:
        config = load_plan(target).config
    except ChunkplanError:
        return "something that is no plan this version can read"
    return f"a plan with ChunkSize {config.chunk_size:,}, K {config.k}, dp {config.dp}, pp {config.pp}"


#: Options of a plan of which a tuning tries several, by what these are called.
_TRIED = {"chunk_size": "chunk_sizes", "k": "ks", "schedule": "schedules"}

#: Options of a plan that a tuning has too.
_SHARED = ("dp", "cp", "pp", "global_batch", "seed", "keep_attention", "loss")


def choose(
    analysis: Analysis, values: CliValues, machine: CliValues, *, file: Path | None, saved: Path
) -> tuple[PlanConfig, Tuned]:
    """Choose the options that `values` leave open: tuned for `machine` (fields of `TuneOptions`), or as in `file`.

    The configuration that is returned has `values`, and the tuning's choice for the rest. Without `file`, the tuning
    `saved` is used, if it is of this machine or none is given.
    """
    from chunkplan.tuning.document import read_tuning, tuned
    from chunkplan.tuning.document_entries import PLAN_ENTRIES
    from chunkplan.tuning.trial import why_plan_only
    from chunkplan.tuning.tune import tune

    if "checkpointing" in machine:
        raise UsageError("--checkpointing and --auto exclude each other", hint="--auto chooses it")
    for name in ("memory_tokens", "virtual_stages"):
        if name in values:
            raise UsageError(
                f"{options_of(PlanConfig)[name].flag} and --auto exclude each other",
                hint="--auto looks at the memory of the GPUs instead; leave one of them out",
            )
    if file is not None:
        _refuse_machine(machine)
    elif saved.is_file() and _is_tuned_for(saved, values, machine):
        file = saved
    if file is not None:
        found = read_tuning(file)
    else:
        tried = {many: (values[one],) for one, many in _TRIED.items() if one in values}
        shared = {name: values[name] for name in _SHARED if name in values}
        options = tune_options(_with_those_asked(saved, CliValues(machine | shared | tried)))
        with tuning_progress() as report_progress:
            found = tuned(tune(analysis, options, progress=report_progress))
    settings = CliValues({name: getattr(found.config, name) for name in (*PLAN_ENTRIES, "global_batch", "seed")})
    if "k" in values:
        del settings["k_by_length"]
    if any(values.get(name, settings[name]) != settings[name] for name in ("pp", "schedule", "virtual_stages")):
        del settings["stage_layers"]  # of other stages than these
    settings |= values
    words = [f"ChunkSize {settings['chunk_size']:,}", f"K {k_words(settings['k'], settings.get('k_by_length'))}"]
    words += [layout_words(settings["dp"], found.cost.tp, settings["pp"])]
    words += [trained_words(rank, found.cost.load_in_4bit)] if (rank := found.cost.lora_rank) else []
    words += [found.cost.optimizer] if found.cost.optimizer != "adamw" else []
    words += fused_words(found.cost.fused_kernels, found.cost.compile)
    words += how_words(found.cost.to_dict() | settings)
    note(f"chosen{f' as in {file}' if file else ''}: {', '.join(words)}")
    config = plan_config(settings)
    config.check_layers(found.cost.shape.num_layers, found.cost.shape.name)
    if plan_only := why_plan_only(config, found.cost):
        warn(f"plan only: the runtime cannot run {plan_only} yet")
    if file is not None:
        _compare(analysis, found, config)
    return config, found


def _is_tuned_for(saved: Path, values: CliValues, machine: CliValues) -> bool:
    """True if a tuning is for the given machine, or none is given; a note says if it is not."""
    from chunkplan.tuning.document import answers, read_tuning_document

    if not machine:
        return True
    if not values.keys().isdisjoint(_TRIED):
        return False
    given = CliValues(machine | {name: values[name] for name in _SHARED if name in values})
    if answers(read_tuning_document(saved), tune_options(given), given):
        return True
    note(f"{saved} was found with other options than these: tuning again")
    return False


def _with_those_asked(saved: Path, given: CliValues) -> CliValues:
    """The options `given`, and for the rest those of the tuning in `saved`, if there is one."""
    from chunkplan.tuning.document import options_asked, read_tuning_document

    if not saved.is_file():
        return given
    replaced = {"gpu_memory"} if "hardware" in given else set[str]()
    replaced |= set() if given.keys().isdisjoint({"gpus", "dp", "pp"}) else {"gpus", "dp", "pp"}
    asked = options_asked(read_tuning_document(saved))
    return CliValues({name: value for name, value in asked.items() if name not in replaced} | given)


def _refuse_machine(machine: CliValues) -> None:
    if machine:
        flag = options_of(TuneOptions)[next(iter(machine))].flag
        raise UsageError(
            f"{flag} and --from exclude each other: the file says what it was tuned for", hint="leave one of them out"
        )


def _compare(analysis: Analysis, found: Tuned, config: PlanConfig) -> None:
    """Warn if the data differ from those tuned for; refuse what would no longer fit."""
    from chunkplan.planning.batches import SampleGroups
    from chunkplan.tuning.drift import find_drift

    drift = find_drift(analysis.num_tokens, found, config, SampleGroups.of(analysis.group))
    if drift.has_drifted:
        warn(
            f"the lengths have drifted: {percent(drift.moved)} of the tokens are in other length classes than when "
            f"tuned, the longest sequence has {drift.longest_now:,} tokens (then {drift.longest_before:,}); tune again"
        )
    if not drift.fits and drift.longest_now <= drift.longest_before:
        raise UsageError(
            f"with these options it would take {gibibytes(drift.memory.total)} a GPU, tuned for "
            f"{gibibytes(drift.gpu_memory)}",
            hint="leave out the options that were not tuned, or run `chunkplan tune` again with them",
        )
    if not drift.fits:
        num_longer = int((analysis.num_tokens > drift.longest_before).sum())
        raise UsageError(
            f"with these lengths it would take {gibibytes(drift.memory.total)} a GPU, tuned for "
            f"{gibibytes(drift.gpu_memory)}: the longest sequence has {drift.longest_now:,} tokens, then "
            f"{drift.longest_before:,}",
            hint=f"run `chunkplan tune` again, or `chunkplan analyze` with --max-length {drift.longest_before}, which "
            f"cuts the end off {counted(num_longer, 'sequence')}",
        )
