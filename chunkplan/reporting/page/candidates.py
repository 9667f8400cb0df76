"""Chart of the choices that `tune` tried: time against memory, with the baselines beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from chunkplan.cost.checkpointing import checkpointing_words
from chunkplan.planfile.plan import Plan
from chunkplan.quantities import ZERO, gibibytes, k_words, percent, seconds
from chunkplan.reporting.page.parts import BLUE, GREEN, GREY, ORANGE, PURPLE, PlotlyEntries, axis, layout, plain
from chunkplan.reporting.tables import Table
from chunkplan.tuning.document_entries import (
    PLAN_ENTRIES,
    BaselineEntry,
    ChoiceEntry,
    CostModelEntry,
    PlanEntries,
    TuningDocument,
)

#: The plot on a narrow screen, and a baseline's point on it, in pixels.
WIDTH, HEIGHT = 250, 330
_POINT = 18
#: A digit of a number, and its height.
_DIGIT, _LINE = 7, 12

#: A point in the plot, both from 0 to 1.
Place = tuple[float, float]

#: Sides of a point that a label can be on, by plotly's names.
_SIDES = {"middle right": (1, 0), "middle left": (-1, 0), "bottom center": (0, -1), "top center": (0, 1)}


class Label(NamedTuple):
    """Label of a baseline ("" for none) and its `textposition` in plotly: in its point or beside it."""

    text: str
    position: str


def baseline_labels(baselines: Sequence[Place], others: Sequence[Place]) -> list[Label]:
    """Label `baselines`, which are numbered from 1, so that every number can be read on the narrowest screen.

    Of points that lie on each other, one has the numbers of all beside it, such as "1, 4"; so has one on which a point
    of `others` lies.
    """
    labels = [Label(str(number), "middle center") for number in range(1, len(baselines) + 1)]
    points = [*baselines, *others]
    for together in _groups(baselines):
        if len(together) == 1 and not any(_overlap(baselines[together[0]], other) for other in others):
            continue
        text = ", ".join(str(place + 1) for place in together)
        first = together[0]
        side = max(_SIDES, key=lambda side: _room(text, baselines[first], side, points))
        for place in together:
            labels[place] = Label(text, side) if place == first else Label("", "middle center")
    return labels


def _groups(baselines: Sequence[Place]) -> list[list[int]]:
    """Put points together that lie on each other, or are linked by others that do; ascending."""
    groups: list[list[int]] = []
    for place, point in enumerate(baselines):
        touched = [group for group in groups if any(_overlap(point, baselines[other]) for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append(sorted([place, *(other for group in touched for other in group)]))
    return sorted(groups)


def _overlap(one: Place, other: Place) -> bool:
    return max(_apart(one, other)) < _POINT


def _apart(one: Place, other: Place) -> tuple[float, float]:
    return abs(one[0] - other[0]) * WIDTH, abs(one[1] - other[1]) * HEIGHT


def _room(text: str, point: Place, side: str, points: Sequence[Place]) -> int:
    """Distance in pixels of a label on a side of `point` to the nearest point or border; below 0 they overlap."""
    width = _DIGIT * len(text)
    right, up = _SIDES[side]
    x = point[0] * WIDTH + right * (_POINT + width) / 2
    y = point[1] * HEIGHT + up * (_POINT + _LINE) / 2
    borders = [x - width / 2, WIDTH - x - width / 2, y - _LINE / 2, HEIGHT - y - _LINE / 2]
    centre = x / WIDTH, y / HEIGHT
    gaps = [
        max(across - (_POINT + width) / 2, along - (_POINT + _LINE) / 2)
        for across, along in (_apart(centre, other) for other in points)
    ]
    return round(min(*borders, *gaps))


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
    """Draw each choice and baseline of a tuning by memory and time of a step; `own` is the choice of a plan."""
    figure = go.Figure()
    fitting = [choice for choice in document["choices"] if choice["fits"]]
    runnable = [choice for choice in fitting if choice["plan_only"] is None]
    others = [choice for choice in fitting if choice["plan_only"] is not None]
    rest = [choice for choice in document["choices"] if not choice["fits"]]
    front = [document["choices"][place] for place in document["pareto"]]
    own_rows = [] if own is None else [own]
    _add(figure, "does not fit", rest, {"color": GREY, "size": 5, "opacity": 0.5})
    _add(figure, "fits, plan only", others, {"color": PURPLE, "size": 5, "opacity": 0.55})
    _add(figure, "fits", runnable, {"color": BLUE, "size": 6})
    _add(figure, "Pareto front", front, {"color": BLUE, "size": 8}, line={"color": BLUE, "width": 2, "shape": "vh"})
    memory = _memory(document)
    limit = document["options"]["gpu_memory"] / 2**30
    is_near = _is_near(limit, memory)
    x_axis = _axis("memory of the fullest stage, GiB", [*memory, limit] if is_near else memory)
    y_axis = _axis("seconds a step", [row["step_seconds"] for row in _rows(document)])
    marked = [_place(row, x_axis, y_axis) for row in (*own_rows, document["chosen"])]
    labels = baseline_labels([_place(row, x_axis, y_axis) for row in document["baselines"]], marked)
    for number, (row, label) in enumerate(zip(document["baselines"], labels, strict=True), 1):
        _add(figure, f"{number}: {row['name']}", [row], {"color": ORANGE, "size": 17, "symbol": "diamond"}, label=label)
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


def ways_figure(document: TuningDocument) -> go.Figure:
    """Draw a bar for the time of a step with the choice of a tuning, and below it one for each baseline."""
    rows = [("chunkplan", document["chosen"]["step_seconds"], GREEN)]
    for row in document["baselines"]:
        more = f", {percent(row['lost_tokens'])} lost" if row["lost_tokens"] else ""
        color = ORANGE if row["fits"] else GREY
        rows.append((row["name"] + (more if row["fits"] else ", no fit"), row["step_seconds"], color))
    names, times, colors = (list(column) for column in zip(*rows, strict=True))
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        x=times,
        y=list(range(len(rows))),
        marker={"color": colors},
        text=[f"{plain(name)}: {seconds(time * 1e6)}" for name, time in zip(names, times, strict=True)],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
    )
    for place, (name, time) in enumerate(zip(names, times, strict=True)):  # above its bar, on whatever screen
        label = {"text": f"{plain(name)}: {seconds(time * 1e6)}", "showarrow": False, "xanchor": "left", "yshift": 16}
        figure.add_annotation(x=0, y=place, **label)
    y_axis = {"visible": False, "range": [len(rows) - 0.5, -0.8]}
    figure.update_traces(width=0.36)
    figure.update_layout(layout(60 + 48 * len(rows), xaxis=axis("seconds a step", rangemode="tozero"), yaxis=y_axis))
    return figure


def limit_words(document: TuningDocument) -> str:
    """Return the memory of a GPU in words, and where the chart has it."""
    limit = document["options"]["gpu_memory"]
    memory = _memory(document)
    where = "the dashed line" if _is_near(limit / 2**30, memory) else "beyond the chart"
    return f"A GPU has {gibibytes(limit)}, {where}; what is drawn takes {min(memory):,.1f} to {max(memory):,.1f}."


def _rows(document: TuningDocument) -> list[Row]:
    return [*document["choices"], *document["baselines"]]


def _memory(document: TuningDocument) -> list[float]:
    """Return the memory of all that is drawn, in GiB."""
    return [row["memory"]["total"] / 2**30 for row in _rows(document)]


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


def _place(row: Row, x_axis: PlotlyEntries, y_axis: PlotlyEntries) -> Place:
    """Position of a choice or a baseline in the plot, as fractions of its axes."""
    return _share(row["memory"]["total"] / 2**30, x_axis), _share(row["step_seconds"], y_axis)


def _share(value: float, along: PlotlyEntries) -> float:
    low, high = map(float, along["range"])
    return ((math.log10(value) if along.get("type") == "log" else value) - low) / (high - low)


def _add(
    figure: go.Figure,
    name: str,
    rows: Sequence[Row],
    marker: PlotlyEntries,
    *,
    line: PlotlyEntries | None = None,
    label: Label | None = None,
) -> None:
    """Add points; a baseline has a `label`, which is its number, and its name in the legend."""
    if rows:
        figure.add_scatter(
            name=plain(name),
            x=[row["memory"]["total"] / 2**30 for row in rows],
            y=[row["step_seconds"] for row in rows],
            text=[plain(_words(row)) for row in rows] if label is None else label.text,
            textposition=None if label is None else label.position,
            hovertext=[plain(_words(row)) for row in rows],
            textfont={"size": 11} | ({"color": "white"} if label and label.position == "middle center" else {}),
            mode="markers+text" if label is not None else "markers" if line is None else "lines+markers",
            marker=marker,
            line=line,
            hovertemplate="%{hovertext}<br>%{y:.3f} s, %{x:.1f} GiB<extra>" + _kind(name, label) + "</extra>",
        )


def _kind(name: str, label: Label | None) -> str:
    """Return what kind of point it is; the words of a baseline say its name already."""
    return name if label is None else "baseline"


def _words(row: Row) -> str:
    """Return a choice or a baseline in words."""
    if "name" in row:
        return row["name"]
    return f"ChunkSize {row['chunk_size']:,}, K {k_words(row['k'], row['k_by_length'])}, {_how(row)}"


def _how(row: ChoiceEntry) -> str:
    """Return the schedule, layout and memory savings of a choice in words."""
    words = [row["schedule"], f"dp {row['dp']}, tp {row['tp']}, pp {row['pp']}"]
    words += checkpointing_words(row["checkpointing"])
    words += ["KV offload"] if row["kv_offload"] else []
    shared = row.get("sharding", "optimizer")
    return ", ".join(words + ([ZERO[shared]] if shared != "optimizer" and row["dp"] > 1 else []))


def candidates_tables(document: TuningDocument, own: ChoiceEntry | None) -> list[Table]:
    """List the baselines, and the choices that fit: those on the Pareto front, the fastest, and a plan's `own`."""
    baselines = [
        (
            row["name"],
            seconds(row["step_seconds"] * 1e6),
            gibibytes(row["memory"]["total"]),
            "yes" if row["fits"] else "no",
            percent(row["lost_tokens"]),
        )
        for row in document["baselines"]
    ]
    choices, front = document["choices"], set(document["pareto"])
    shown = [
        place
        for place, row in enumerate(choices)
        if row["fits"] and (place < _MOST_ROWS or place in front or row == own)
    ]
    rows = [_choice_row(choices[place], place in front, document["chosen"], own) for place in shown]
    num_fitting = sum(row["fits"] for row in choices)
    caption = f"Choices: {len(rows):,} of the {num_fitting:,} that fit, of {len(choices):,} in all"
    return [
        Table("Baselines", ("way", "step", "memory", "fits", "tokens lost"), baselines),
        Table(
            caption,
            ("ChunkSize", "K", "how", "step", "memory", "MFU", "bubble", "recomputed", "notes"),
            rows,
            texts=("K", "how", "notes"),
        ),
    ]


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
