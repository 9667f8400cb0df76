"""Charts of all steps: time, fill, balance, of which runs are one point where there are many; and of peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from chunkplan.cost.durations import Float64Array
from chunkplan.cost.memory import StageMemory
from chunkplan.quantities import gibibytes, percent, seconds
from chunkplan.reporting.page.parts import BLUE, GREEN, GREY, ORANGE, PINK, PURPLE, RED, axis, layout, narrowest, within
from chunkplan.reporting.plan_memory import PlanMemory
from chunkplan.reporting.plan_words import part_sizes
from chunkplan.reporting.tables import Table

#: More points cannot be distinguished.
_MOST_POINTS = 1000
#: So many points are marked each, and so many each have a tick.
_MARKED, _FEW = 60, 12
#: Of the heaviest rank over the mean: less is not worth a look, and none has ticks.
_LEAST_RANGE = 0.01

#: Of what takes memory, most first.
_MEMORY_COLORS = (BLUE, ORANGE, GREEN, PURPLE, PINK, GREY, RED)

_VALUES = ("predicted_us", "lower_bound_us", "fill", "heaviest_over_mean", "recompute_share")


def points(steps: pl.DataFrame) -> pl.DataFrame:
    """Join `steps`, as `per_step` has them, to runs of equally many.

    A run has its `first` and `last` step, and of each value the mean, the least (`_low`) and the most (`_high`). It is
    one step where there are no more steps than points that a chart can show.
    """
    run = -(-steps.height // _MOST_POINTS)
    return (
        steps.with_row_index("place")
        .group_by(pl.col("place") // run, maintain_order=True)
        .agg(
            pl.col("step").min().alias("first"),
            pl.col("step").max().alias("last"),
            *(pl.col(name).mean() for name in _VALUES),
            *(pl.col(name).min().name.suffix("_low") for name in _VALUES),
            *(pl.col(name).max().name.suffix("_high") for name in _VALUES),
        )
    )


def over_steps_figure(runs: pl.DataFrame) -> go.Figure:
    """Draw panels over the steps: time and its lower bound, fill, and where it is not always 1, heaviest over mean."""
    num_panels = 3 if has_balance(runs) else 2
    figure = make_subplots(rows=num_panels, cols=1, shared_xaxes=True, vertical_spacing=0.18 / num_panels)
    scaled = runs.with_columns(pl.col("^(predicted|lower_bound)_us.*$") / 1e6, pl.col("^fill.*$") * 100)
    for name, words, say, colour, row in (
        ("lower_bound_us", "lower bound", "%{y:.4~f} s", GREY, 1),
        ("predicted_us", "predicted time", "%{y:.4~f} s", BLUE, 1),
        ("fill", "fill", "%{y:.1f}%", GREEN, 2),
        ("heaviest_over_mean", "heaviest rank over the mean", "%{y:.4f}", PURPLE, 3),
    )[: num_panels + 1]:
        if _num_steps_a_point(runs) > 1 and name != "lower_bound_us":
            figure.add_traces(_band(scaled, name, colour), rows=row, cols=1)
        mean = go.Scatter(
            x=runs["first"],
            y=scaled[name],
            name=words,
            mode="lines+markers" if runs.height <= _MARKED else "lines",
            line={"color": colour, "width": 2},
            marker={"size": 6},
            hovertemplate=f"{words} {say}<extra></extra>",
        )
        figure.add_trace(mean, row=row, col=1)
    figure.update_yaxes(axis("seconds", rangemode="tozero"), row=1, col=1)
    figure.update_yaxes(axis("fill", ticksuffix="%", range=[-5, 105]), row=2, col=1)
    if has_balance(runs):
        most = max(float(runs["heaviest_over_mean_high"].max()) - 1, _LEAST_RANGE)  # type: ignore[arg-type]
        figure.update_yaxes(axis("heaviest / mean", range=[1 - most / 20, 1 + most * 1.05]), row=3, col=1)
    figure.update_yaxes(fixedrange=True)
    ends = within(int(runs["first"][0]) - 0.5, int(runs["last"][-1]) + 0.5)
    figure.update_xaxes(axis("", **ends, tickformat=",", dtick=1 if runs.height <= _FEW else None))
    figure.update_xaxes(axis("step"), row=num_panels, col=1)
    figure.update_layout(layout(180 * num_panels + 20, hovermode="x", **narrowest(_num_steps_a_point(runs))))
    return figure


def memory_figure(memory: PlanMemory) -> go.Figure:
    """Draw one bar of what takes the memory of a GPU at its peak, most first, and a line at what it has."""
    figure = go.Figure()
    for (name, size), color in zip(part_sizes(memory.memory), _MEMORY_COLORS * 2, strict=False):
        said = f"{name}: {gibibytes(size)}"
        figure.add_bar(
            orientation="h",
            x=[size / 2**30],
            y=[0],
            name=said,
            marker={"color": color},
            hovertemplate=f"{said}<extra></extra>",
        )
    limit = memory.gpu_bytes / 2**30
    figure.add_vline(x=limit, line={"color": GREY, "width": 1.5, "dash": "dash"})
    x_axis = axis(f"GiB, of {limit:,.1f}", range=[0, 1.03 * max(limit, memory.memory.total / 2**30)])
    figure.update_layout(layout(150, barmode="stack", showlegend=True, xaxis=x_axis, yaxis={"visible": False}))
    return figure


def memory_over_step_figure(memory: PlanMemory, times: Float64Array, held: Sequence[StageMemory]) -> go.Figure:
    """Draw what takes the memory of a GPU from each of `times` on, seconds of a step, what changes least lowest."""
    figure = go.Figure()
    colors = dict(
        zip((*(name for name, _ in part_sizes(memory.memory)[:6]), "other"), _MEMORY_COLORS * 2, strict=False)
    )
    moments = [dict(part_sizes(each)) for each in held]
    for moment, each in zip(moments, held, strict=True):
        moment["other"] = each.total - sum(moment.get(name, 0) for name in colors)
    lines = {name: [each.get(name, 0) / 2**30 for each in moments] for name in colors}
    for name, sizes in sorted(lines.items(), key=lambda line: max(line[1]) - min(line[1])):
        figure.add_scatter(
            x=times,
            y=sizes,
            name=name,
            mode="lines",
            stackgroup="memory",
            line={"shape": "hv", "width": 0, "color": colors[name]},
            fillcolor=colors[name],
            hovertemplate=f"{name}: %{{y:.2f}} GiB<extra></extra>",
        )
    limit = memory.gpu_bytes / 2**30
    figure.add_hline(y=limit, line={"color": GREY, "width": 1.5, "dash": "dash"})
    most = max(limit, max(each.total for each in held) / 2**30)
    y_axis = axis("GiB", range=[-0.06 * most, 1.03 * most], fixedrange=True)
    x_axis = axis("seconds of the step", **within(0.0, float(times[-1])))
    figure.update_layout(layout(300, hovermode="x", xaxis=x_axis, yaxis=y_axis))
    return figure


def has_balance(runs: pl.DataFrame) -> bool:
    """True if the work of ranks differs in any step."""
    return bool((runs["heaviest_over_mean_high"] != 1).any())


def _band(runs: pl.DataFrame, name: str, colour: str) -> list[go.Scatter]:
    """Draw a band from the least to the most of each run."""
    line = {"width": 0, "color": colour}
    shared = {"x": runs["first"], "mode": "lines", "line": line, "hoverinfo": "skip", "showlegend": False}
    return [go.Scatter(y=runs[f"{name}_low"], **shared), go.Scatter(y=runs[f"{name}_high"], fill="tonexty", **shared)]


def points_note(runs: pl.DataFrame) -> list[str]:
    """Explain the points of a chart, where one stands for several steps."""
    run = _num_steps_a_point(runs)
    if run == 1:
        return []
    return [f"A point is the mean of {run:,} steps in a row; bands reach from the least to the most of them."]


def over_steps_table(runs: pl.DataFrame) -> Table:
    """List the numbers behind the panels."""
    several = _num_steps_a_point(runs) > 1
    head = ("step", "predicted", "lower bound", "fill", "heaviest rank over mean", "recomputed")
    rows = []
    for row in runs.iter_rows(named=True):
        name = f"{row['first']:,} to {row['last']:,}" if several else f"{row['first']:,}"
        words = (seconds, seconds, percent, "{:.4f}".format, percent)
        rows.append((name, *(_with_range(row, value, say) for value, say in zip(_VALUES, words, strict=True))))
    caption = "Steps in runs: mean, and in brackets the least and the most" if several else "Steps"
    return Table(caption, head, rows)


def _num_steps_a_point(runs: pl.DataFrame) -> int:
    return int(runs["last"][0]) - int(runs["first"][0]) + 1


def _with_range(row: dict[str, float], name: str, say: Callable[[float], str]) -> str:
    """Return the mean in words, with the minimum and maximum where these differ."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return say(row[name]) + ("" if low == high else f" [{say(low)} to {say(high)}]")
