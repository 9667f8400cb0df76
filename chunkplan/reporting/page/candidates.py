"""Chart of the choices that `tune` tried: time against memory, with the baselines beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle

import plotly.graph_objects as go

from chunkplan.planfile.plan import Plan
from chunkplan.quantities import gibibytes, k_words, percent, seconds
from chunkplan.reporting.page.parts import BLUE, GREEN, GREY, ORANGE, PURPLE, PlotlyEntries, axis, layout, plain
from chunkplan.reporting.tables import Table
from chunkplan.reporting.way_row import way_row
from chunkplan.tuning.document_entries import (
    PLAN_ENTRIES,
    BaselineEntry,
    ChoiceEntry,
    CostModelEntry,
    PlanEntries,
    TuningDocument,
)

#: Symbols of baselines: open ones, which can be told apart where they lie on each other.
_SYMBOLS = ("diamond", "square", "triangle-up", "triangle-down", "cross", "x", "pentagon", "hexagram")

#: Rows of the table: the choices that fit, fastest first.
_MOST_ROWS = 100

#: The most over the least of an axis: less is shown on a linear one.
_FAR_APART = 3
#: Powers of ten on an axis, and those of ten times each that have a tick.
_TICKS = ((0.8, (1, 1.5, 2, 3, 4, 5, 7)), (1.2, (1, 2, 3, 5)), (3.0, (1, 2, 5)), (math.inf, (1,)))
#: Room around what is drawn, of the range.
_ROOM = 0.06

#: A point of the chart.
Row = ChoiceEntry | BaselineEntry


def choice_of_plan(document: TuningDocument, plan: Plan) -> ChoiceEntry | None:
    """Find the choice of a tuning (see `tuning_document`) with the layout and all settings of `plan` or None."""
    wanted = _settings(plan.manifest["config"], plan.manifest["predictions"]["cost_model"])
    return next((choice for choice in document["choices"] if _settings(choice, choice) == wanted), None)


def _settings(config: PlanEntries, cost_model: CostModelEntry | ChoiceEntry) -> list[object]:
    """List what sets a choice apart from others; K by length is a tuple, or a list where it was read from a file."""
    by_length = [list(pair) for pair in config["k_by_length"] or ()]
    left_out = {"split": "full"}  # what a document does not say and a manifest does
    entries = [config.get(name, left_out.get(name)) for name in PLAN_ENTRIES if name != "k_by_length"]
    machine = [cost_model["tp"], cost_model["checkpointing"], cost_model["kv_offload"]]
    return [*entries, by_length, *machine, cost_model.get("sharding", "optimizer")]


def candidates_figure(document: TuningDocument, own: ChoiceEntry | None) -> go.Figure:
    """Draw the choices and baselines of a tuning that fit by memory and time of a step; `own` is a plan's choice."""
    figure = go.Figure()
    fitting = [choice for choice in document["choices"] if choice["fits"]]
    runnable = [choice for choice in fitting if choice["plan_only"] is None]
    others = [choice for choice in fitting if choice["plan_only"] is not None]
    front = [document["choices"][place] for place in document["pareto"]]
    own_rows = [] if own is None else [own]
    _add(figure, "fits, plan only", others, {"color": PURPLE, "size": 5, "opacity": 0.55})
    _add(figure, "fits", runnable, {"color": BLUE, "size": 6})
    _add(figure, "Pareto front", front, {"color": BLUE, "size": 8}, line={"color": BLUE, "width": 2, "shape": "vh"})
    memory = _memory(_rows(document, own))
    limit = document["options"]["gpu_memory"] / 2**30
    is_near = _is_near(limit, memory)
    x_axis = _axis("memory of the fullest stage, GiB", [*memory, limit] if is_near else memory)
    y_axis = _axis("seconds a step", [row["step_seconds"] for row in _rows(document, own)])
    rivals = [row for row in document["baselines"] if row["fits"]]
    for row, symbol in zip(rivals, cycle(_SYMBOLS), strict=False):
        _add(
            figure, row["name"], [row], {"color": ORANGE, "size": 13, "symbol": f"{symbol}-open", "line": {"width": 2}}
        )
    _add(figure, "this plan", own_rows, {"color": GREEN, "size": 24, "symbol": "circle-open", "line": {"width": 2}})
    _add(
        figure,
        "chosen",
        [document["chosen"]],
        {"color": GREEN, "size": 19, "symbol": "star-open", "line": {"width": 2}},
    )
    if is_near:
        figure.add_vline(x=limit, line={"color": GREY, "width": 1.5, "dash": "dash"})
    figure.update_layout(layout(460, hovermode="closest", xaxis=x_axis, yaxis=y_axis))
    return figure


def limit_words(document: TuningDocument, own: ChoiceEntry | None) -> str:
    """Return the memory of a GPU in words, and where the chart of a tuning and a plan's `own` choice has it."""
    limit = document["options"]["gpu_memory"]
    memory = _memory(_rows(document, own))
    where = "the dashed line" if _is_near(limit / 2**30, memory) else "beyond the chart"
    return f"A GPU has {gibibytes(limit)}, {where}; what is drawn takes {min(memory):,.1f} to {max(memory):,.1f}."


def _rows(document: TuningDocument, own: ChoiceEntry | None) -> list[Row]:
    """Return what is drawn: all that fits, and what is marked."""
    every: list[Row] = [*document["choices"], *document["baselines"]]
    fitting = [row for row in every if row["fits"]]
    return [*fitting, document["chosen"], *([] if own is None else [own])]


def _memory(rows: Sequence[Row]) -> list[float]:
    """Return the memory of `rows`, in GiB."""
    return [row["memory"]["total"] / 2**30 for row in rows]


def _is_near(limit: float, memory: list[float]) -> bool:
    """True if a chart of `memory` can show the limit without squeezing everything else into a corner."""
    return min(memory) / 2 <= limit <= max(memory) * 2


def _axis(title: str, values: list[float]) -> PlotlyEntries:
    """Make an axis with all `values`: a log one with ticks at round numbers where they are far apart."""
    low, high = min(values), max(values)
    if high < _FAR_APART * low:
        room = _ROOM * ((high - low) or high)
        return axis(title, range=[low - room, high + room], tickangle=0)
    low, high = math.log10(low), math.log10(high)
    room = _ROOM * (high - low)
    steps = next(steps for decades, steps in _TICKS if high - low < decades)
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    words = [f"{tick:,.4g}" for tick in ticks]
    return axis(
        f"{title}, log scale", type="log", range=[low - room, high + room], tickvals=ticks, ticktext=words, tickangle=0
    )


def _add(
    figure: go.Figure, name: str, rows: Sequence[Row], marker: PlotlyEntries, *, line: PlotlyEntries | None = None
) -> None:
    """Add points, where there are any."""
    if rows:
        figure.add_scatter(
            name=plain(name),
            x=_memory(rows),
            y=[row["step_seconds"] for row in rows],
            hovertext=[plain(_words(row)) for row in rows],
            mode="markers" if line is None else "lines+markers",
            marker=marker,
            line=line,
            hovertemplate=f"%{{hovertext}}<br>%{{y:.3f}} s, %{{x:.1f}} GiB<extra>{plain(name)}</extra>",
        )


def _words(row: Row) -> str:
    """Return a choice or a baseline in words."""
    if "name" in row:
        return row["name"]
    return f"ChunkSize {row['chunk_size']:,}, K {k_words(row['k'], row['k_by_length'])}, {_how(row)}"


def _how(row: ChoiceEntry) -> str:
    """Return the schedule, layout and memory savings of a choice in words."""
    return ", ".join([row["schedule"], *way_row(row, 1, 1).how])


def candidates_table(document: TuningDocument, own: ChoiceEntry | None) -> Table:
    """List the choices that fit: those on the Pareto front, the fastest, and a plan's `own`."""
    choices, front = document["choices"], set(document["pareto"])
    shown = [
        place
        for place, row in enumerate(choices)
        if row["fits"] and (place < _MOST_ROWS or place in front or row == own)
    ]
    rows = [_choice_row(choices[place], place in front, document["chosen"], own) for place in shown]
    num_fitting = sum(row["fits"] for row in choices)
    caption = f"Choices: {len(rows):,} of the {num_fitting:,} that fit, of {len(choices):,} in all"
    head = ("ChunkSize", "K", "how", "step", "memory", "MFU", "bubble", "recomputed", "notes")
    return Table(caption, head, rows, texts=("K", "how", "notes"))


def _choice_row(row: ChoiceEntry, on_front: bool, chosen: ChoiceEntry, own: ChoiceEntry | None) -> tuple[str, ...]:
    notes = ["this plan"] if row == own else []
    notes += ["chosen"] if row == chosen else []
    notes += ["Pareto front"] if on_front else []
    notes += [f"plan only: {row['plan_only']}"] if row["plan_only"] is not None else []
    return (
        f"{row['chunk_size']:,}",
        k_words(row["k"], row["k_by_length"]),
        _how(row),
        seconds(row["step_seconds"] * 1e6),
        gibibytes(row["memory"]["total"]),
        percent(row["mfu"]),
        percent(row["bubble"]),
        percent(row["recompute_share"]),
        ", ".join(notes),
    )
