"""`chunkplan build`: plans the latest analysis and leaves the plan in the workspace."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkplan_cli.progress import progress
from chunkplan_cli.terminal import note, print_json, stdout, warn

if TYPE_CHECKING:
    from chunkplan.planning.config import PlanConfig

_CONFIG_HINT = "a config holds lines such as chunk-size = 8192"


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
        int | None,
        typer.Option("--k", metavar="N", help="Chunks of a sequence that hold activations. Required."),
    ] = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="Sequences a step. Default: 256.")] = None,
    epochs: Annotated[int | None, typer.Option(metavar="N", help="Passes over the data. Default: 1.")] = None,
    last_batch: Annotated[
        LastBatch | None,
        typer.Option(help="A short last batch of an epoch. Default: keep."),
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Data-parallel ranks. Default: 1.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", metavar="N", help="Pipeline stages. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of the shuffle. Default: 0.")] = None,
    split: Annotated[
        Split | None,
        typer.Option(
            help="Cut a long sequence at ChunkSize (full), into parts of equal length (even), or of equal predicted "
            "time (cost), or refuse it (none). Default: full."
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
        ),
    ] = None,
    balance: Annotated[
        Balance | None,
        typer.Option(help="search: look for a better spread of every step with CP-SAT, slowly. Default: spread."),
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
        typer.Option(metavar="SOURCE=WEIGHT", help="How often an epoch takes a source: 2 twice, 0.5 half. Repeatable."),
    ] = None,
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

    Example: chunkplan build --chunk-size 8192 --k 4 --dp 8 --pp 2
    """
    from chunkplan.building import build_plans, evaluation_folder, is_evaluation
    from chunkplan.errors import UsageError
    from chunkplan.summary import summarize_plan
    from chunkplan.workspace import Workspace
    from chunkplan_cli.compilation import note_compilation
    from chunkplan_cli.plan_report import print_plan_report

    if split not in (None, Split.NONE) and no_split:
        raise UsageError("--split and --no-split exclude each other", hint="leave one of them out")
    given = {
        "chunk_size": chunk_size,
        "k": k,
        "global_batch": global_batch,
        "epochs": epochs,
        "last_batch": last_batch.value if last_batch else None,
        "dp": dp,
        "pp": pp,
        "seed": seed,
        "split": "none" if no_split else split.value if split else None,
        "tail_sharing": tail_sharing,
        "packing": packing,
        "balance": balance.value if balance else None,
        "equal_chunks": equal_chunks,
        "holdout": _number(holdout) if holdout is not None else None,
        "mix": _weights(mix) if mix is not None else None,
    }
    plan_config = _resolve(given, config)
    place = Workspace.find(workspace)
    source = analysis or place.analysis
    if analysis is None and not source.exists():
        raise UsageError(
            f"there is no analysis in the workspace {place.root}", hint="run `chunkplan analyze DATA`, or give ANALYSIS"
        )
    target = output or place.plan
    replaced = _describe_old(target)
    with note_compilation(), progress("planning", "steps") as report_progress:
        plans = build_plans(source, target, plan_config, workers=workers, progress=report_progress, dry_run=dry_run)

    manifest = plans[target].manifest
    summary = summarize_plan(plans[target].steps, plans[target].chunks, manifest)
    if as_json:
        print_json({"plan": None if dry_run else str(target), "manifest": manifest, "summary": summary.to_dict()})
    else:
        print_plan_report(stdout(), summary, manifest)
    if not manifest["analysis"]["exact"]:
        warn("the lengths are estimated from bytes: this plan shows what to expect, it cannot be trained")
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


def _number(text: str) -> int | float:
    """A whole number where it is written as one."""
    from chunkplan.errors import UsageError

    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number", hint="for example: --holdout 0.01 --mix code.jsonl=2") from None


def _weights(mix: list[str]) -> dict[str, int | float]:
    from chunkplan.errors import UsageError

    weights = {}
    for text in mix:
        source, equals, weight = text.rpartition("=")
        if not equals or not source:
            raise UsageError(f"--mix {text!r}, expected SOURCE=WEIGHT", hint="for example: --mix code.jsonl=2")
        if source in weights:
            raise UsageError(f"{source} has two weights", hint="name every source at most once")
        weights[source] = _number(weight)
    return weights


def _resolve(given: dict[str, Any], config: Path | None) -> PlanConfig:
    """The options given, then those of the TOML file, then the defaults."""
    import tomllib

    from chunkplan.errors import DataError, UsageError
    from chunkplan.planning.config import PlanConfig

    values: dict[str, Any] = {}
    if config is not None:
        if not config.is_file():
            raise UsageError(f"there is no file {config}", hint=_CONFIG_HINT)
        try:
            stated = tomllib.loads(config.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DataError(f"not TOML: {error}", where=str(config), hint=_CONFIG_HINT) from error
        for key, value in stated.items():
            name = key.replace("-", "_")
            if name not in given:
                known = ", ".join(option.replace("_", "-") for option in given)
                raise UsageError(f"unknown option `{key}`", where=str(config), hint=f"known are {known}")
            values[name] = value
    values |= {name: value for name, value in given.items() if value is not None}
    for name in ("chunk_size", "k"):
        if name not in values:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} is missing", hint="for example: chunkplan build --chunk-size 8192 --k 4")
    return PlanConfig(**values)


def _describe_old(target: Path) -> str | None:
    """What `target` holds now, in words, if it is something that the new plan replaces."""
    from chunkplan.errors import ChunkplanError
    from chunkplan.planfile.load import load_plan

    if not target.is_dir() or not any(target.iterdir()):
        return None
    try:
        old = load_plan(target)
    except ChunkplanError:
        return "something that is no plan this version can read"
    config = old.config
    return f"a plan with chunk size {config['chunk_size']:,}, K {config['k']}, dp {config['dp']}, pp {config['pp']}"
