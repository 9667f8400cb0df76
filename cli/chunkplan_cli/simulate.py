"""`chunkplan simulate`: one step of a plan played through, or of what a plan for some lengths would be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from chunkplan.config.plan import SCHEDULE, SCHEDULES, PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.domains import MOST, one_of, read_tokens, several, tokens, whole
from chunkplan.errors import UsageError
from chunkplan.options import Options, option, options_of, same
from chunkplan_cli.declared import CliValues, JsonOption, WorkspaceOption, files_read, ranks, steps, takes
from chunkplan_cli.progress import note_compilation
from chunkplan_cli.run_report import show_run
from chunkplan_cli.terminal import note, print_json, stdout

if TYPE_CHECKING:
    from chunkplan.planfile.plan import Plan
    from chunkplan.schedule.timeline import Simulation

_LENGTHS, _ORDER = "Lengths in place of a plan", "Order on a pipeline"
_MACHINE = ("shape", "hardware", "tp")

#: Or None: every sequence is a chunk.
_CHUNK_SIZE = replace(
    tokens(),
    expected="a number of tokens such as 8192 or 8K, or none",
    read=lambda typed: None if typed == "none" else read_tokens(typed),
    metavar="TOKENS|none",
)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """What is played through in place of a plan, and in which order."""

    lengths: tuple[int, ...] | None = option(
        several(tokens(), metavar="N,N,...", example="900,9000"),
        "In place of a plan: a step of sequences of these lengths.",
        group=_LENGTHS,
        default=None,
    )
    chunk_size: int | None = option(
        _CHUNK_SIZE, "Most tokens in a chunk; none: whole sequences.", group=_LENGTHS, default=None
    )
    k: int | None = option(whole(1, MOST), "Chunks of a sequence that hold activations.", group=_LENGTHS, default=None)
    pp: int = same(PlanConfig, "pp", group=_LENGTHS)
    cost: Literal["model", "unit"] = option(
        one_of("model", "unit"),
        "Times of a model (model), or forward 1 and backward 2 a token and stage, links free (unit).",
        group=_LENGTHS,
        default="model",
    )
    schedule: str = same(
        PlanConfig,
        "schedule",
        help=f"algorithm2 (one stage), {', '.join(SCHEDULES[1:-1])} or {SCHEDULES[-1]}.",
        group=_ORDER,
        default_words="the plan's; for lengths algorithm2 or auto",
    )
    compare: tuple[str, ...] = option(
        several(SCHEDULE), "Compare the same chunks under each of these schedules.", group=_ORDER, default=()
    )
    virtual_stages: int = same(PlanConfig, "virtual_stages", group=_ORDER)
    memory_tokens: int | None = same(PlanConfig, "memory_tokens", group=_ORDER, default_words="")


RunOption = Annotated[
    Path | None,
    typer.Option(metavar="RUN", help="In place of a plan: the largest step of this training run, as measured."),
]


@takes(asked=SimulateOptions, machine=(CostModel, _MACHINE))
def simulate(
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="The plan. Default: WORKSPACE/plan.", show_default=False)
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
    *,
    asked: CliValues,
    machine: CliValues,
    run: RunOption = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a Chrome trace, which Perfetto opens.")
    ] = None,
    workspace: WorkspaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play a step through: what every stage does and when, how long it waits, what it holds.

    `inspect --step` shows the chunks of a step; `tune` simulates many choices and recommends one.

    Example: chunkplan simulate --lengths 900,9000 --chunk-size 2048 --k 2 --pp 4
    """
    from chunkplan.files.writing import refuse_overwriting
    from chunkplan.planfile.plan import find_step
    from chunkplan.schedule.trace import write_trace
    from chunkplan.simulation import compare_schedules, simulate_lengths, simulate_plan, simulate_ranks

    if run is not None:
        alone = not any((plan, step is not None, rank is not None, workspace, asked, machine))
        show_run(run, trace, alone=alone, as_json=as_json)
        return
    lengths = asked.get("lengths")
    of_plan = (("PLAN", plan), ("--step", step), ("--rank", rank), ("--workspace", workspace))
    _refuse_others(lengths is None, [name for name, value in of_plan if value is not None], asked, machine)
    names = asked.get("compare", ())
    options = {name: asked[name] for name in ("virtual_stages", "memory_tokens") if name in asked}
    changed = {} if names else options | ({"schedule": asked["schedule"]} if "schedule" in asked else {})
    loaded = _load(plan, workspace, asked.get("pp")) if lengths is None else None
    if loaded is None and "chunk_size" not in asked:
        raise UsageError("--chunk-size is missing", hint="for example: --chunk-size 8192 --k 4, or --chunk-size none")
    if trace is not None:
        refuse_overwriting(trace, files_read(machine) if loaded is None else (loaded.path,))
    with note_compilation():
        if loaded is not None:
            found = simulate_plan(loaded, step or 0, rank=rank, **changed)
        else:
            found = simulate_lengths(
                asked["lengths"],
                chunk_size=asked["chunk_size"],
                k=asked.get("k"),
                pp=asked.get("pp", 1),
                cost="unit" if asked.get("cost") == "unit" else CostModel(**machine).on_stages(asked.get("pp", 1)),
                **changed,
            )
        compared = compare_schedules(found, names, **options) if names else []
        traced = compared or [found]
        if (
            loaded is not None
            and found.step is not None
            and trace is not None
            and rank is None
            and not (changed or names)
        ):
            # Ranks that share chunks wait for each other, which one alone does not show.
            traced = [*simulate_ranks(loaded, find_step(loaded, step or 0), range(loaded.config.dp)).values()]
    if trace is not None:
        write_trace(trace, traced, content_hash=None if loaded is None else loaded.content_hash)
    _show(found, compared, loaded, as_json=as_json)
    if trace is not None:
        note(f"trace in {trace}: open it at https://ui.perfetto.dev")


def _show(found: Simulation, compared: list[Simulation], plan: Plan | None, *, as_json: bool) -> None:
    """Print one simulation, or several of the same chunks side by side; `plan` is None where lengths were given."""
    from chunkplan_cli.plan_report import print_estimated
    from chunkplan_cli.simulation_report import print_comparison, print_simulation

    if as_json:
        source = {} if plan is None else {"plan": str(plan.path), "exact": plan.manifest["analysis"]["exact"]}
        documents = [one.to_dict() for one in compared or [found]]
        print_json({**source, **({"schedules": documents} if compared else documents[0])})
        return
    console = stdout()
    if plan is not None:
        print_estimated(console, plan.manifest)
    if compared:
        print_comparison(console, compared)
    else:
        print_simulation(console, found)


def _refuse_others(is_plan: bool, of_plan: list[str], asked: CliValues, machine: CliValues) -> None:
    """Refuse options of lengths for a plan, which has its own, and options `of_plan` that were given for lengths."""
    declared = options_of(SimulateOptions)
    of_lengths = [declared[name].flag for name in ("chunk_size", "k", "cost") if name in asked]
    of_lengths += [options_of(CostModel)[name].flag for name in machine]
    if is_plan and of_lengths:
        raise UsageError(
            f"{of_lengths[0]} is for --lengths; a plan has its own", hint="give --lengths, or leave it out"
        )
    if of_plan and not is_plan:
        raise UsageError(
            f"{of_plan[0]} is for plans, --lengths needs none", hint=f"leave out {of_plan[0]} or --lengths"
        )
    if asked.get("cost") == "unit" and machine:
        raise UsageError("--cost unit knows no model and no hardware", hint="leave it out, or what it does not know")
    if "compare" in asked and "schedule" in asked:
        raise UsageError("--schedule and --compare exclude each other", hint="leave one of them out")


def _load(path: Path | None, workspace: Path | None, pp: int | None) -> Plan:
    from chunkplan.planfile.load import load_plan
    from chunkplan.workspace import Workspace
    from chunkplan_cli.declared import find_plan

    plan = load_plan(find_plan(path, Workspace.find(workspace), "PLAN or --lengths"))
    if pp not in (None, plan.config.pp):
        raise UsageError(
            f"the plan is for {plan.config.pp} pipeline stages, --pp is {pp}",
            hint="leave --pp out, or build the plan again with it",
        )
    return plan
