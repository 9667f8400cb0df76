"""The options of a plan: those given, those of a TOML file, those that a tuning found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chunkplan.config.plan import PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.domains import or_word, path, whole
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import Options, in_words, option, options_of, read_toml, same
from chunkplan_cli.declared import OPTIONS, CliValues
from chunkplan_cli.terminal import note

if TYPE_CHECKING:
    from chunkplan.planfile.analysis import Analysis

#: Of `--checkpointing`: what fits and runs least again, layer by layer.
AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """Where the options of a plan come from beside the command line, and how much of the machine plans.

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
        group=OPTIONS,
        default=None,
    )
    from_file: Path | None = option(
        path("FILE"),
        "With --auto: the result of `tune`.",
        group=OPTIONS,
        default=None,
        flag="--from",
        default_words="WORKSPACE/tuning.json, if it is for this model and hardware",
    )
    config: Path | None = option(
        path("FILE.toml"),
        "A file with these options, such as `chunk-size = 8192`; the command line wins.",
        group=OPTIONS,
        default=None,
    )
    workers: int | None = option(
        whole(1),
        "Threads; the plan is the same with any number.",
        group=OPTIONS,
        default=None,
        default_words="one for each processor",
    )


def resolve(given: CliValues, config: Path | None) -> CliValues:
    """Join the options of a plan in the TOML file with those given, which win."""
    return CliValues((read_toml(config, PlanConfig) if config is not None else {}) | given)


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

    `machine` is what was given of the cost model. What of `plan` cannot hold for the new one is said.

    Raises:
        UsageError: one is not there, or `analysis` is another one, what is `given` would give steps other samples or
            does not go together, or `output` is `plan`.
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
    from chunkplan.tuning.mixing import fastest_fitting
    from chunkplan.tuning.tune import heaviest_steps

    config.check_layers(cost.shape.num_layers, cost.shape.name)
    heaviest = heaviest_steps(analysis.num_tokens, config, cost)
    found = fastest_fitting(heaviest, config, cost, cost.hardware.memory_bytes)
    note(f"chosen: --checkpointing {found.checkpointing}")
    return found


def describe_old(target: Path) -> str | None:
    """Say what `target` holds now, if it is something that the new plan replaces."""
    from chunkplan.planfile.load import load_plan

    if not target.is_dir() or not any(target.iterdir()):
        return None
    try:
        config = load_plan(target).config
    except ChunkplanError:
        return "something that is no plan this version can read"
    return f"a plan with ChunkSize {config.chunk_size:,}, K {config.k}, dp {config.dp}, pp {config.pp}"
