"""`chunkplan simulate`: one step of a plan played through, or of what a plan for some lengths would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from chunkplan.config.plan import SCHEDULE, SCHEDULES, PlanConfig
from chunkplan.cost.model import CostModel
from chunkplan.domains import MOST, one_of, read_tokens, several, tokens, whole
from chunkplan.errors import UsageError
from chunkplan.options import Options, option, options_of, same
from chunkplan.quantities import counted, kept_words, percent, seconds
from chunkplan.reporting.tables import Table
from chunkplan_cli.declared import CliValues, JsonOption, WorkspaceOption, files_read, ranks, steps, takes
from chunkplan_cli.progress import note_compilation
from chunkplan_cli.terminal import drawn_table, facts_grid, note, print_json, stdout

if TYPE_CHECKING:
    from chunkplan.planfile.plan import Chunk, Plan
    from chunkplan.schedule.timeline import Simulation

#: In the folder of a run: what its processes measured, and a trace of it.
MEASURED, TIMELINE = "measured.json", "timeline.json"

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
    """Options of what is simulated in place of a plan, and in which order."""

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


@takes("machine", asked=SimulateOptions, machine=(CostModel, _MACHINE))
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


def show_run(run: Path, trace: Path | None, *, alone: bool = True, as_json: bool = False) -> None:
    """Print a table of the step that a run on several processes has measured; `trace`: where a Chrome trace goes.

    `run`: its folder, or the file in it. `alone`: true if no other options are given, which do not apply here.

    Raises:
        UsageError: it is not alone, the run has measured none, its plan is gone, or `trace` cannot be written.
        DataError: a file is damaged.
    """
    from chunkplan.planfile.measured import read_measured
    from chunkplan.reporting.replay import describe_replays, replay_step, replays_to_dict, write_timeline

    if not alone:
        raise UsageError(
            "--run is for the step that was measured, as it was", hint="beside it give --trace or --json alone"
        )
    measured = read_measured(run if run.is_file() else run / MEASURED)
    with note_compilation():
        replays = replay_step(measured)
    step, planned = measured.times[0].step, measured.planned
    if as_json:
        document = {"plan": str(measured.plan.path), "step": step, "dp": measured.dp}
        print_json(document | replays_to_dict(replays, measured.dp, planned=planned))
    else:
        for line in describe_replays(replays, measured.dp, step, planned=planned):
            print(line)
    if trace is not None:
        write_timeline(trace, replays, planned=planned, content_hash=measured.plan.content_hash)
        note(f"trace in {trace}: open it at https://ui.perfetto.dev")


#: What-ifs with more chunks than these say what they are with --json.
_MAX_CHUNKS = 12

#: Number of ranks of a critical path that are named.
_MAX_RANKS = 3

_UNITS = (("s", 1e6), ("ms", 1e3), ("us", 1.0))


def print_simulation(console: Console, simulation: Simulation) -> None:
    """Print when stages do what, and what it comes to."""
    from chunkplan_cli.gantt import print_gantt

    console.print(Text(f"{_what(simulation)}: {_name(simulation)} on {_stages_of(simulation)}", style="bold"))
    console.print()
    print_gantt(console, simulation, lambda time: _axis_time(simulation, time))
    console.print()
    console.print(_totals(simulation))
    console.print()
    console.print(drawn_table(console, _stages(simulation)))
    held = "held at most: with activations, and with keys and values (KV)"
    if simulation.step is not None:
        why = "meet in a slot" if simulation.has_slots else "share a chunk"
        held += f"; for ranks: waiting for those that {why}"
    console.print(Text(held, style="dim"))
    if len(simulation.chunks) <= _MAX_CHUNKS:
        console.print()
        console.print(drawn_table(console, _chunks(simulation)))
    _print_unit(console, simulation)


def print_comparison(console: Console, simulations: Sequence[Simulation]) -> None:
    """Print a row for each schedule; the fastest ones are marked."""
    first = simulations[0]
    console.print(f"{_what(first)}, on {_stages_of(first)}")
    console.print()
    best = min(simulation.makespan for simulation in simulations)
    rows = [
        (
            *("*" if each.makespan == best else "", _name(each)),
            *(_time(each, each.makespan), _time(each, each.lower_bound), percent(each.bubble)),
            *(percent(each.recompute_share), f"{max(each.peak_retained_tokens):,}"),
        )
        for each in simulations
    ]
    head = ("", "schedule", "time", "lower bound", "bubble", "recompute", "tokens held")
    styles = ["bold" if each.makespan == best else "" for each in simulations]
    console.print(drawn_table(console, Table("", head, rows, texts=("", "schedule"), styles=styles)))
    console.print()
    if first.extra_forward:
        more = _time(first, first.extra_forward)
        console.print(Text(f"forwards for the loss of the plan take {more} before each of them", style="dim"))
    cut = {each.stage_layers for each in simulations}
    if len(cut) > 1:
        [layers] = cut - {None}
        even = ", ".join(each.schedule for each in simulations if each.stage_layers is None)
        given = ",".join(map(str, layers or ()))
        console.print(Text(f"layers {given}, but as even as they come in {even}, which has other stages", style="dim"))
    console.print(Text("* fastest  tokens held: with activations, at once, on the fullest stage", style="dim"))
    _print_unit(console, first)


def _totals(simulation: Simulation) -> RichTable:
    rows = []
    makespan = _time(simulation, simulation.makespan)
    rows.append(("time", f"{makespan}; no order takes less than {_bound(simulation)}"))
    if simulation.extra_forward:
        rows.append(("loss", f"{_time(simulation, simulation.extra_forward)} more before it, of forwards for its loss"))
    if simulation.reduction:
        after = "more to sum gradients, partly hidden behind the last backwards"
        rows.append(("gradients", f"{_time(simulation, simulation.reduction)} {after}"))
    rows.append(("bubble", f"{percent(simulation.bubble)} of the stages' time, waiting or recomputing"))
    if simulation.shares_chunks:
        rows.append(("shared chunks", _shared(simulation)))
    if simulation.has_slots:
        waiting = sum(simulation.waiting_for_ranks_per_stage) / simulation.pp
        rows.append(("slots", f"waiting for other ranks in them {_share(simulation, waiting)} of the stages' time"))
    if simulation.recompute_share > 0:
        rows.append(("recomputed", f"{percent(simulation.recompute_share)} of the work"))
    rows.append(("critical path", _critical_path(simulation)))
    return facts_grid(rows)


def _critical_path(simulation: Simulation) -> str:
    times = dict(simulation.critical_path)
    times["forward"] += times.pop("forward_kv")
    shares = [f"{name.replace('_', ' ')} {_share(simulation, time)}" for name, time in times.items() if time]
    return f"{', '.join(shares)}; {len(simulation.critical_actions):,} actions{_ranks_of_path(simulation)}"


def _ranks_of_path(simulation: Simulation) -> str:
    """Return the ranks that are longest on the critical path, where it leaves the rank that is shown."""
    longest = sorted(simulation.critical_ranks.items(), key=lambda each: -each[1])
    if all(rank == simulation.rank for rank, _ in longest):
        return ""
    shown = [f"{_share(simulation, time)} on rank {rank}" for rank, time in longest[:_MAX_RANKS]]
    rest = [time for _, time in longest[_MAX_RANKS:]]
    shown += [f"{_share(simulation, sum(rest))} on {counted(len(rest), 'other rank')}"] if rest else []
    return f", {', '.join(shown)}"


def _shared(simulation: Simulation) -> str:
    """Return what shared chunks cost the stages beside their work."""
    num_shared = int((simulation.table.cp_size > 1).sum())
    waiting, exchange = (
        sum(times) / simulation.pp for times in (simulation.waiting_for_ranks_per_stage, simulation.exchange_per_stage)
    )
    ranks = (
        "" if simulation.has_slots else f"waiting for their ranks {_share(simulation, waiting)} of the stages' time, "
    )
    return (
        f"{num_shared:,} of {len(simulation.chunks):,}: {ranks}exchange {_share(simulation, exchange)} (part of busy)"
    )


def _stages(simulation: Simulation) -> Table:
    """Make a table that fits 80 columns: where ranks share chunks, idle times are one column."""
    waiting = [list(times.values()) for times in simulation.waiting_per_stage]
    names = ["idle before", "between", "after"]
    if simulation.step is not None:
        of_ranks = zip(simulation.exchange_per_stage, simulation.waiting_for_ranks_per_stage, strict=True)
        waiting = [[*times, sum(idle)] for times, idle in zip(of_ranks, waiting, strict=True)]
        names = ["exchange", "for ranks", "idle"]
    columns = (
        simulation.bubble_per_stage,
        simulation.busy_per_stage,
        waiting,
        simulation.peak_retained_tokens,
        simulation.peak_kv_tokens,
    )
    rows = []
    for stage, (bubble, busy, times, held, kept) in enumerate(zip(*columns, strict=True)):
        shares = (_share(simulation, time) for time in times)
        rows.append((str(stage), percent(bubble), percent(busy), *shares, f"{held:,}", f"{kept:,}"))
    return Table("", ("stage", "bubble", "busy", *names, "tokens held", "KV held"), rows)


def _chunks(simulation: Simulation) -> Table:
    rows = [
        (
            f"{each.chunk_id}",
            f"{each.num_tokens:,}",
            f"{each.prefix_tokens:,}" * bool(each.prefix_tokens),
            _contents(each),
        )
        for each in simulation.chunks
    ]
    return Table("", ("chunk", "tokens", "prefix", ""), rows, texts=("",))


def _contents(chunk: Chunk) -> str:
    from chunkplan.schedule.trace import ranks_of

    ids = [str(each) for each in dict.fromkeys(segment.sequence_id for segment in chunk.segments)]
    shown = ", ".join(ids[:6]) + (f" and {len(ids) - 6} more" if len(ids) > 6 else "")
    what = f"sequence{'s' if len(ids) > 1 else ''} {shown}" if ids else f"nothing: a {chunk.kind} chunk"
    if chunk.group_id is None:
        return what
    kept = "" if chunk.keeps_activations else ", recomputed"
    if words := kept_words(chunk.kept_attention):
        kept += f" with attention kept {words}"
    shared = f", shared by ranks {ranks_of(chunk)}" if chunk.cp_size > 1 else ""
    return f"part {chunk.group_index + 1} of {chunk.group_size}{kept}{shared}: {what}"


def _print_unit(console: Console, simulation: Simulation) -> None:
    console.print()
    if simulation.cost is None:
        words = "times: 1 a token for a stage's forward, 2 for its backward, 0 between stages"
    else:
        cost = simulation.cost
        words = f"times: {cost.shape.name} on {cost.hardware.name}, {counted(cost.tp, 'GPU')} a stage, predicted"
    console.print(Text(words, style="dim"))


def _what(simulation: Simulation) -> str:
    return f"{simulation.title}, {counted(len(simulation.chunks), 'chunk')}"


def _name(simulation: Simulation) -> str:
    return simulation.schedule + (
        f", {simulation.virtual_stages} virtual stages" if simulation.virtual_stages > 1 else ""
    )


def _stages_of(simulation: Simulation) -> str:
    return counted(simulation.pp, "stage")


def _bound(simulation: Simulation) -> str:
    return f"{_time(simulation, simulation.lower_bound)} ({_share(simulation, simulation.lower_bound)})"


def _share(simulation: Simulation, time: float) -> str:
    """Return a time as a share of the makespan, which is 0 where a rank has only zero-loss chunks."""
    return percent(time / simulation.makespan if simulation.makespan else 0.0)


def _time(simulation: Simulation, time: float) -> str:
    if simulation.unit == "tokens":
        return f"{time:,.0f}"
    return seconds(time) if time == 0 or time >= 1000 else f"{time:.0f} us"


def _axis_time(simulation: Simulation, time: float) -> str:
    """Return a time of the axis in words: all in one unit, with as many digits as the makespan needs."""
    if simulation.unit == "tokens":
        return f"{time:,.0f}"
    name, size = next((unit for unit in _UNITS if simulation.makespan >= unit[1]), _UNITS[-1])
    return f"{time / size:.{0 if simulation.makespan >= 100 * size else 2}f} {name}"
