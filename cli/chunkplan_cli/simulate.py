"""`chunkplan simulate`: one step of a plan played through, or of what a plan for some lengths would be."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chunkplan_cli.completion import SCHEDULES, one_of, ranks, some_of, steps
from chunkplan_cli.machine_options import HardwareName, ModelConfig, TensorParallel, cost_model, parse_numbers
from chunkplan_cli.terminal import note, print_json, stdout

if TYPE_CHECKING:
    from chunkplan.planfile.plan import Plan


class Cost(StrEnum):
    """What times are."""

    MODEL = "model"
    UNIT = "unit"


def simulate(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="Default: WORKSPACE/plan.", show_default=False)
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The step to simulate. Default: 0.", autocompletion=steps)
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="R", help="The data-parallel rank. Default: the one that is done last.", autocompletion=ranks
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Instead of a plan: a step of sequences of these lengths.")
    ] = None,
    chunk_size: Annotated[
        str | None,
        typer.Option(metavar="TOKENS|none", help="With --lengths: most tokens in a chunk; none: whole sequences."),
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", metavar="N", help="With --lengths: chunks of a sequence that hold activations.")
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", metavar="N", help="With --lengths: pipeline stages. Default: 1.")
    ] = None,
    cost: Annotated[
        Cost | None,
        typer.Option(
            help="With --lengths: times of a model (the default), or a unit: forward 1 and backward 2 a token and "
            "stage, nothing between stages."
        ),
    ] = None,
    model_config: ModelConfig = None,
    hardware: HardwareName = None,
    tp: TensorParallel = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="algorithm2 (one stage), 1f1b, interleaved, zero-bubble or search. Default: the plan's; for lengths "
            "algorithm2 or 1f1b.",
            autocompletion=one_of(SCHEDULES),
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,...",
            help="The same chunks under each of these schedules.",
            autocompletion=some_of(SCHEDULES),
        ),
    ] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(metavar="N", help="Model parts of a stage, for interleaved. Default: 2.")
    ] = None,
    memory_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens whose activations a stage may hold, for search.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace as well, which Perfetto opens.")
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Default: CHUNKPLAN_WORKSPACE, then ./chunkplan-out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Play a step through: what every stage does when, how much of it is waiting, what it holds.

    `inspect --step` shows the chunks of a step of a plan; `tune` simulates many choices and recommends one.

    Example: chunkplan simulate --lengths 900,9000 --chunk-size 2048 --k 2 --pp 4
    """
    from chunkplan.cost.model_config import config_file
    from chunkplan.errors import UsageError
    from chunkplan.schedule.trace import write_trace
    from chunkplan.simulation import compare_schedules, simulate_lengths, simulate_plan
    from chunkplan.whole_file import refuse_overwriting
    from chunkplan_cli.compilation import note_compilation
    from chunkplan_cli.plan_report import print_estimated
    from chunkplan_cli.simulation_report import print_comparison, print_simulation

    of_plan: dict[str, object] = {"PLAN": plan, "--step": step, "--rank": rank, "--workspace": workspace}
    of_lengths: dict[str, object] = {
        "--chunk-size": chunk_size,
        "--k": k,
        "--cost": cost,
        "--model-config": model_config,
    }
    of_lengths |= {"--hardware": hardware, "--tp": tp}
    _refuse_others(lengths is None, of_plan, of_lengths)
    if cost is Cost.UNIT and not (model_config is None and hardware is None and tp is None):
        raise UsageError("--cost unit knows no model and no hardware", hint="leave it out, or what it does not know")
    if compare is not None and schedule is not None:
        raise UsageError("--schedule and --compare exclude each other", hint="leave one of them out")
    names = [] if compare is None else [name.strip() for name in compare.split(",")]
    options: dict[str, Any] = {"virtual_stages": virtual_stages, "memory_tokens": memory_tokens}
    alone = {} if names else {"schedule": schedule, **options}
    if lengths is None:
        loaded = _load(plan, workspace, pp)
    if trace is not None:
        read = (loaded.path,) if lengths is None else (model_config and config_file(model_config), hardware)
        refuse_overwriting(trace, read)
    with note_compilation():
        if lengths is None:
            found = simulate_plan(loaded, step or 0, rank=rank, **alone)
        else:
            found = simulate_lengths(
                parse_numbers(lengths, "--lengths") or (),
                chunk_size=_chunk_size(chunk_size),
                k=k,
                pp=1 if pp is None else pp,
                cost="unit" if cost is Cost.UNIT else cost_model(model_config=model_config, hardware=hardware, tp=tp),
                **alone,
            )
        compared = compare_schedules(found, names, **options) if names else []
    if trace is not None:
        write_trace(trace, compared or [found])
    source = {"plan": str(loaded.path), "exact": loaded.manifest["analysis"]["exact"]} if lengths is None else {}
    if as_json:
        documents = [one.to_dict() for one in compared or [found]]
        print_json({**source, **({"schedules": documents} if compared else documents[0])})
    else:
        console = stdout()
        if lengths is None:
            print_estimated(console, loaded.manifest)
        if compared:
            print_comparison(console, compared)
        else:
            print_simulation(console, found)
    if trace is not None:
        note(f"trace in {trace}: open it at https://ui.perfetto.dev")


def _refuse_others(is_plan: bool, of_plan: dict[str, object], of_lengths: dict[str, object]) -> None:
    """A plan has its chunks and its costs; lengths have neither a step nor ranks."""
    from chunkplan.errors import UsageError

    given = [name for name, value in (of_lengths if is_plan else of_plan).items() if value is not None]
    if given and is_plan:
        raise UsageError(f"{given[0]} is for --lengths; a plan has its own", hint="give --lengths, or leave it out")
    if given:
        raise UsageError(f"{given[0]} is for plans, --lengths needs none", hint=f"leave out {given[0]} or --lengths")


def _load(path: Path | None, workspace: Path | None, pp: int | None) -> Plan:
    from chunkplan.errors import UsageError
    from chunkplan.planfile.load import load_plan
    from chunkplan.workspace import Workspace

    place = Workspace.find(workspace)
    if path is None and not place.plan.exists():
        raise UsageError(
            f"there is no plan in the workspace {place.root}", hint="run `chunkplan build`, or give PLAN or --lengths"
        )
    plan = load_plan(path or place.plan)
    if pp not in (None, plan.config["pp"]):
        raise UsageError(
            f"the plan is for {plan.config['pp']} pipeline stages, --pp is {pp}",
            hint="leave --pp out, or build the plan again with it",
        )
    return plan


def _chunk_size(text: str | None) -> int | None:
    from chunkplan.errors import UsageError

    if text is None:
        raise UsageError("--chunk-size is missing", hint="for example: --chunk-size 8192 --k 4, or --chunk-size none")
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise UsageError(
            f"--chunk-size is {text!r}, expected a whole number or none", hint="for example: --chunk-size 8192"
        ) from None
