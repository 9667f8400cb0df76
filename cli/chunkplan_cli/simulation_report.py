"""A simulation in the terminal, and several of the same chunks side by side. Readable at 80 columns, without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from chunkplan.planfile.plan import Chunk
from chunkplan.quantities import counted, kept_words, percent, seconds
from chunkplan.schedule.timeline import Simulation
from chunkplan.schedule.trace import ranks_of
from chunkplan_cli.gantt import print_gantt
from chunkplan_cli.terminal import facts_grid

#: What-ifs with more chunks than these say what they are with --json.
_MAX_CHUNKS = 12

#: Of the ranks that a critical path is on, how many are named.
_MAX_RANKS = 3

_UNITS = (("s", 1e6), ("ms", 1e3), ("us", 1.0))


def print_simulation(console: Console, simulation: Simulation) -> None:
    """Print when stages do what, and what it comes to."""
    console.print(Text(f"{_what(simulation)}: {_name(simulation)} on {_stages_of(simulation)}", style="bold"))
    console.print()
    print_gantt(console, simulation, lambda time: _axis_time(simulation, time))
    console.print()
    console.print(_totals(simulation))
    console.print()
    console.print(_stages(simulation))
    held = "held: of that many tokens at once"
    if simulation.step is not None:
        why = "meet in a slot" if simulation.has_slots else "share a chunk"
        held += f"; for ranks: waiting for those that {why}"
    console.print(Text(held, style="dim"))
    if len(simulation.chunks) <= _MAX_CHUNKS:
        console.print()
        console.print(_chunks(simulation))
    _print_unit(console, simulation)


def print_comparison(console: Console, simulations: Sequence[Simulation]) -> None:
    """Print a row for each schedule; the fastest ones are marked."""
    first = simulations[0]
    console.print(f"{_what(first)}, on {_stages_of(first)}")
    console.print()
    table = _table("", "schedule", *("makespan", "at least", "bubble", "recompute", "activations held"))
    best = min(simulation.makespan for simulation in simulations)
    for simulation in simulations:
        is_best = simulation.makespan == best
        table.add_row(
            "*" if is_best else "",
            _name(simulation),
            _time(simulation, simulation.makespan),
            _time(simulation, simulation.lower_bound),
            percent(simulation.bubble),
            percent(simulation.recompute_share),
            f"{max(simulation.peak_retained_tokens):,}",
            style="bold" if is_best else "",
        )
    console.print(table)
    console.print()
    cut = {each.stage_layers for each in simulations}
    if len(cut) > 1:
        [layers] = cut - {None}
        even = ", ".join(each.schedule for each in simulations if each.stage_layers is None)
        given = ",".join(map(str, layers or ()))
        console.print(Text(f"layers {given}, but as even as they come in {even}, which has other stages", style="dim"))
    console.print(Text("* fastest  activations held: of tokens at once, on the stage that holds most", style="dim"))
    _print_unit(console, first)


def _totals(simulation: Simulation) -> Table:
    rows = []
    makespan = _time(simulation, simulation.makespan)
    rows.append(("makespan", f"{makespan}; in any order at least {_bound(simulation)}"))
    if simulation.reduction:
        after = "then; the trainer hides some of it behind last backwards"
        rows.append(("reduction", f"{_time(simulation, simulation.reduction)} {after}"))
    rows.append(("bubble", f"{percent(simulation.bubble)} of the stages' time: waiting, or recompute"))
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
    """Say on which ranks the critical path is, where not all of it is on the one that is shown: those longest on it."""
    longest = sorted(simulation.critical_ranks.items(), key=lambda each: -each[1])
    if all(rank == simulation.rank for rank, _ in longest):
        return ""
    shown = [f"{_share(simulation, time)} on rank {rank}" for rank, time in longest[:_MAX_RANKS]]
    rest = [time for _, time in longest[_MAX_RANKS:]]
    shown += [f"{_share(simulation, sum(rest))} on {counted(len(rest), 'other rank')}"] if rest else []
    return f", {', '.join(shown)}"


def _shared(simulation: Simulation) -> str:
    """Say what the chunks that ranks share cost the stages beside their work."""
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
    table = _table("stage", "bubble", "busy", *names, "activations held", "KV held")
    columns = (
        simulation.bubble_per_stage,
        simulation.busy_per_stage,
        waiting,
        simulation.peak_retained_tokens,
        simulation.peak_kv_tokens,
    )
    for stage, (bubble, busy, times, held, kept) in enumerate(zip(*columns, strict=True)):
        shares = (_share(simulation, time) for time in times)
        table.add_row(str(stage), percent(bubble), percent(busy), *shares, f"{held:,}", f"{kept:,}")
    return table


def _chunks(simulation: Simulation) -> Table:
    table = _table("chunk", "tokens", "prefix")
    table.add_column("", header_style="dim", overflow="fold")
    for chunk in simulation.chunks:
        prefix = f"{chunk.prefix_tokens:,}" if chunk.prefix_tokens else ""
        table.add_row(str(chunk.chunk_id), f"{chunk.num_tokens:,}", prefix, _contents(chunk))
    return table


def _contents(chunk: Chunk) -> str:
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
    """Say which share of the makespan a time is; the makespan is 0 where a rank has only zero-loss chunks."""
    return percent(time / simulation.makespan if simulation.makespan else 0.0)


def _time(simulation: Simulation, time: float) -> str:
    if simulation.unit == "tokens":
        return f"{time:,.0f}"
    return seconds(time) if time == 0 or time >= 1000 else f"{time:.0f} us"


def _axis_time(simulation: Simulation, time: float) -> str:
    """Say a time of the axis: all in one unit, with as many digits as the makespan needs."""
    if simulation.unit == "tokens":
        return f"{time:,.0f}"
    name, size = next((unit for unit in _UNITS if simulation.makespan >= unit[1]), _UNITS[-1])
    return f"{time / size:.{0 if simulation.makespan >= 100 * size else 2}f} {name}"


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        is_schedule = name == "schedule"
        justify: JustifyMethod = "left" if is_schedule else "right"
        table.add_column(name, justify=justify, no_wrap=not is_schedule, header_style="dim")
    return table
