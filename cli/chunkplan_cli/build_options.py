"""The options of a plan: those given, those of a TOML file, those that a tuning found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from chunkplan.config.plan import PlanConfig
from chunkplan.domains import path, whole
from chunkplan.errors import ChunkplanError, UsageError
from chunkplan.options import Options, option, options_of, read_toml
from chunkplan_cli.declared import OPTIONS, Given


@dataclass(frozen=True, kw_only=True)
class BuildOptions(Options):
    """Where the options of a plan come from beside the command line, and how much of the machine plans."""

    from_file: Path | None = option(
        path("FILE"),
        "With --auto: what `tune` found.",
        group=OPTIONS,
        default=None,
        flag="--from",
        default_words="WORKSPACE/tuning.json, where it is of this model and hardware",
    )
    config: Path | None = option(
        path("FILE.toml"), "These options as `chunk-size = 8192`; options given win.", group=OPTIONS, default=None
    )
    workers: int | None = option(
        whole(1),
        "Threads that plan; the plan is the same.",
        group=OPTIONS,
        default=None,
        default_words="processors",
    )


def resolve(given: Given, config: Path | None) -> Given:
    """Join the options of a plan in the TOML file with those given, which win."""
    return Given((read_toml(config, PlanConfig) if config is not None else {}) | given)


def plan_config(values: Given) -> PlanConfig:
    """Make a plan's configuration; what is missing takes its default."""
    for name, one in options_of(PlanConfig).items():
        if one.is_required and name not in values:
            raise UsageError(
                f"{one.flag} is missing",
                hint="for example: chunkplan build --chunk-size 8192 --k 4; or let --auto choose",
            )
    return PlanConfig(**values)


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
