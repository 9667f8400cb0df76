"""Gantt charts of a page: which steps and ranks are drawn, a row a stage, a bar an action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import polars as pl

from chunkplan.operations import OPS
from chunkplan.planfile.plan import Chunk, Plan, PlanStep, find_step
from chunkplan.quantities import kept_words, percent, seconds
from chunkplan.reporting.gantt import Bar, bars_of, gaps_of
from chunkplan.reporting.page.parts import BLUE, GREEN, GREY, ORANGE, PINK, PURPLE, RED, axis, layout, narrowest, within
from chunkplan.reporting.tables import Table
from chunkplan.schedule.timeline import Simulation
from chunkplan.simulation import simulate_ranks

# Choice of the steps and ranks that a page draws: enough for an overview, few enough to look at.


#: Stages of ranks of a step; its actions: one rank is there even if it has more, of which the first are drawn.
_MOST_ROWS, MOST_ACTIONS = 64, 5_000

#: Of so few steps all are drawn; so few ranks have a tick each.
_FEW_STEPS, _FEW_RANKS = 8, 16


@dataclass(frozen=True, eq=False)
class DrawnStep:
    """A step with what its ranks do, by dp_rank; of many ranks those that are done last. `why` it is drawn, if there is
    more to say than that it is one of few."""

    step: PlanStep
    why: str
    ranks: dict[int, Simulation]

    @property
    def label(self) -> str:
        """Name the step by its number and why it is drawn."""
        return f"step {self.step.step:,}" + (f": {self.why}" if self.why else "")

    @property
    def num_actions(self) -> int:
        """Count the actions of all ranks that are here; see `MOST_ACTIONS`."""
        return sum(int(simulation.actions.ops.size) for simulation in self.ranks.values())


def drawn_steps(plan: Plan, steps: pl.DataFrame, median: int, first: int | None) -> list[DrawnStep]:
    """Choose the steps to draw.

    `steps` is `per_step` of the plan, `median` its `StepTimeSummary.median_step`. `first` is a step to draw before all
    others, whatever it is like.

    Raises:
        UsageError: there is no step `first`.
        DataError: the plan is damaged.
    """
    drawn = []
    for number, reasons in _worth_a_look(steps, median, first).items():
        step = find_step(plan, number)
        simulated = simulate_ranks(plan, step, _ranks(step, plan.config.pp))
        drawn.append(DrawnStep(step, ", ".join(reasons), simulated))
    return drawn


def _worth_a_look(steps: pl.DataFrame, median: int, first: int | None) -> dict[int, list[str]]:
    """Return numbers of steps, those first that should be there by all means, and what is special about each."""
    time = pl.col("predicted_us")
    candidates = [("first", pl.col("step")), ("slowest", -time), ("median time", pl.col("step") != median)]
    candidates += [("fastest", time), ("least full", pl.col("fill"))]
    if steps["heaviest_over_mean"].max() != 1:
        candidates.append(("least balanced", -pl.col("heaviest_over_mean")))
    if steps["recompute_share"].max() != 0:
        candidates.append(("most recomputed", -pl.col("recompute_share")))
    reasons: dict[int, list[str]] = {} if first is None else {first: ["asked for"]}
    for why, key in candidates if steps.height > 1 else ():
        number = int(steps.sort(key, "step")["step"][0])
        reasons.setdefault(number, []).append(why)
    if steps.height <= _FEW_STEPS:
        for number in steps["step"].to_list():
            reasons.setdefault(number, [])
    return reasons


def _ranks(step: PlanStep, pp: int) -> list[int]:
    """Choose the ranks to draw, ascending: as many of those that are done last as there is room for, one at least."""
    ends = {rank: max(step.schedule_us[rank, stage] for stage in range(pp)) for rank in step.chunks}
    taken: list[int] = []
    num_actions = 0
    for rank in sorted(ends, key=lambda rank: (-ends[rank], rank)):
        num_actions += sum(len(step.actions[rank, stage]) for stage in range(pp))
        if taken and ((len(taken) + 1) * pp > _MOST_ROWS or num_actions > MOST_ACTIONS):
            break
        taken.append(rank)
    return sorted(taken)


_STYLES = {
    "forward": ("forward", BLUE),
    "forward_kv": ("forward, keeps KV only", GREY),
    "recompute": ("recompute", ORANGE),
    "backward": ("backward", GREEN),
    "backward_input": ("backward of inputs", GREEN),
    "backward_weight": ("backward of weights", PURPLE),
}

#: Pixels of a row and of all that is not rows; of the numbers in bars, below which they are not shown.
_ROW_HEIGHT, _AROUND, _SMALLEST_TEXT = 26, 120, 11

#: Actions of a stage: bars of more are so narrow that outlines and hatches hide their colours.
MOST_HATCHED = 80

#: Of a step, the least that is worth a look; of longer actions, the shortest.
_LEAST_SHOWN = 1e-3

_US_A_SECOND, _NS_A_SECOND = 1e6, 1e9

#: The last line of what is shown beside a bar.
_WHEN = "%{base:.4f} s to %{x:.4f} s<extra>%{y}</extra>"
_BUBBLE = {
    "width": 0.85,
    "name": "bubble: nothing to do",
    "marker": {"color": "rgba(128,140,155,0.22)", "line": {"width": 0}},
    "hovertemplate": f"<b>bubble</b>: nothing to do<br>{_WHEN}",
}
#: Below the bars; where the path is on ranks that are not drawn, it has a gap.
_CRITICAL = {
    "width": 0.16,
    "offset": 0.36,
    "name": "critical path",
    "marker": {"color": PINK, "line": {"width": 0}},
    "hoverinfo": "skip",
}

#: Kinds of chunks, and how bars of them are hatched: of whole sequences, parts of a split one, those that ranks share.
_WHOLE, _PART, _SHARED = range(3)
_HATCHES = ("", "/", "x")


def gantt_figure(drawn: DrawnStep) -> go.Figure:
    """Draw a trace for each op and kind of chunks, and of waiting for other ranks, the bubble and the critical path."""
    ranks = list(drawn.ranks.values())
    rows, pp = bars_of(drawn.ranks), ranks[0].pp
    bars = sorted((bar for row in rows for bar in row), key=lambda bar: bar.start)[:MOST_ACTIONS]
    scale = ranks[0].ticks * _US_A_SECOND
    most = max(Counter(bar.row for bar in bars).values())
    alike: dict[tuple[int, int, str], list[Bar]] = {}
    for bar in sorted(bars, key=lambda bar: bar.row):
        alike.setdefault((bar.op, _kind(bar.chunk), bar.chunk.kept_attention), []).append(bar)
    figure, named = go.Figure(), set()
    for (op, kind, kept), own in sorted(alike.items()):
        lines = _lines(op, kind, kept, with_model_stage=ranks[0].virtual_stages > 1)
        trace = _bars(own, scale, lines, kind, is_narrow=most > MOST_HATCHED)
        words, colour = _STYLES[OPS[op]]
        trace.update(name=words, legendgroup=OPS[op], showlegend=op not in named)
        # Wholly opaque bars are drawn a pixel wide, however narrow they are, and hide what lies before them.
        rgb = ", ".join(str(int(colour[place : place + 2], 16)) for place in (1, 3, 5))
        figure.add_trace(trace.update(marker_color=f"rgba({rgb}, 0.99)" if most > MOST_HATCHED else colour))
        named.add(op)
    end = max(bar.end for bar in bars)
    long = _LEAST_SHOWN * end
    if waits := [bar for bar in bars if bar.wait > long]:
        figure.add_trace(_waits(waits, scale, has_slots=ranks[0].has_slots))
    if idle := _idle(drawn, rows, end):
        figure.add_trace(_spans(idle, scale).update(**_BUBBLE))
    path = [(bar.row, bar.start, bar.end) for row in rows for bar in row if bar.is_critical and bar.start < end]
    figure.add_trace(_spans(path, scale).update(**_CRITICAL))
    labels = [_row_name(rank, stage, drawn) for rank in drawn.ranks for stage in range(pp)]
    for row in range(pp, len(labels), pp):
        figure.add_hline(y=row - 0.5, line={"color": GREY, "width": 0.5})
    y_axis = {
        "tickvals": list(range(len(labels))),
        "ticktext": labels,
        "ticklabelstandoff": 4,
        "range": [len(labels) - 0.5, -0.5],
        "fixedrange": True,
        "automargin": True,
        "zeroline": False,
        "showgrid": False,
    }
    shortest = max(min(bar.end - bar.start for bar in bars), long) / scale
    figure.update_layout(
        layout(
            _ROW_HEIGHT * len(labels) + _AROUND,
            barmode="overlay",
            bargap=0,  # so that ends of bars are whole pixels; the gap is in their widths
            uniformtext={"mode": "hide", "minsize": _SMALLEST_TEXT},
            hovermode="closest",
            xaxis=axis("seconds from the start of the step", **within(0, end / scale)),
            yaxis=y_axis,
            **narrowest(shortest, step=drawn.step.step, ranks=[rank for rank in drawn.ranks for _ in range(pp)]),
        )
    )
    return figure


def _kind(chunk: Chunk) -> int:
    return _SHARED if chunk.cp_size > 1 else _WHOLE if chunk.group_id is None else _PART


def _row_name(rank: int, stage: int, drawn: DrawnStep) -> str:
    return f"stage {stage}" if len(drawn.step.chunks) == 1 else f"rank {rank} stage {stage}"


def _spans(spans: Sequence[tuple[int, int, int]], scale: float) -> go.Bar:
    """Draw bars of a row, a start and an end each; `scale` ticks are a second."""
    row, start, end = np.array(spans, np.int64).reshape(-1, 3).T
    return go.Bar(orientation="h", y=row.astype(np.int16), base=start / scale, x=(end - start) / scale)


def _lines(op: int, kind: int, kept: str, *, with_model_stage: bool) -> list[str]:
    """Return the hover text of the bars of a trace; the customdata indices are those of the rows of `_shown`."""
    lines = [f"<b>{_STYLES[OPS[op]][0]}</b>: chunk %{{customdata[0]}}", "%{customdata[1]:,} tokens"]
    if kind != _WHOLE:
        lines.insert(1, "part %{customdata[3]} of %{customdata[4]}, after %{customdata[2]:,} tokens")
    if kind == _SHARED:
        lines[2] += " of this rank"
        lines.append("shared by ranks %{customdata[6]} to %{customdata[7]}:")
        lines.append("%{customdata[8]} by heads x %{customdata[9]} by pages")
        lines.append("exchange %{customdata[10]:.4f} s of it")
    lines += ["model stage %{customdata[5]}"] if with_model_stage else []
    return lines + ([f"attention kept {words}"] if (words := kept_words(kept)) else [])


def _shown(bar: Bar) -> list[float]:
    """List the numbers of a bar that are shown beside it; of a chunk that ranks share, which and how."""
    chunk = bar.chunk
    numbers: list[float] = [chunk.chunk_id, chunk.num_tokens, chunk.prefix_tokens]
    numbers += [chunk.group_index + 1, chunk.group_size, bar.model_stage]
    if chunk.cp_size == 1:
        return numbers
    ranks = (chunk.cp_first_rank, chunk.cp_first_rank + chunk.cp_size - 1)
    return [*numbers, *ranks, chunk.cp_heads, chunk.cp_size // chunk.cp_heads, bar.exchange / _NS_A_SECOND]


def _bars(bars: Sequence[Bar], scale: float, lines: Sequence[str], kind: int, *, is_narrow: bool) -> go.Bar:
    pattern = {"fillmode": "overlay", "solidity": 0.12, "size": 7, "fgcolor": "white"}
    pattern["shape"] = "" if is_narrow else _HATCHES[kind]
    outline = {"width": 0 if is_narrow else 0.5, "color": "rgba(255,255,255,0.7)"}
    shown = np.array([_shown(bar) for bar in bars])
    return _spans([(bar.row, bar.start, bar.end) for bar in bars], scale).update(
        width=0.85,
        text=np.array([bar.chunk.chunk_id for bar in bars], np.int32),
        customdata=shown if kind == _SHARED else shown.astype(np.int32),
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": "white"},
        marker={"line": outline, "pattern": pattern},
        hovertemplate="<br>".join([*lines, _WHEN]),
    )


def _waits(bars: Sequence[Bar], scale: float, *, has_slots: bool) -> go.Bar:
    """Draw where stages wait before `bars` for ranks that share a chunk, or meet in a slot."""
    lines = ["<b>waiting</b> for other ranks", "before chunk %{customdata[0]}"]
    if not has_slots:
        lines = ["<b>waiting</b> for ranks %{customdata[1]} to %{customdata[2]}", "that share chunk %{customdata[0]}"]
    chunks = [bar.chunk for bar in bars]
    shown = [(each.chunk_id, each.cp_first_rank, each.cp_first_rank + each.cp_size - 1) for each in chunks]
    return _spans([(bar.row, bar.start - bar.wait, bar.start) for bar in bars], scale).update(
        width=0.35,
        name="waiting for ranks" if has_slots else "waiting for ranks that share",
        customdata=np.array(shown, np.int32),
        marker={"color": RED},
        hovertemplate="<br>".join([*lines, _WHEN]),
    )


def _idle(drawn: DrawnStep, rows: Sequence[Sequence[Bar]], end: int) -> list[tuple[int, int, int]]:
    """List where stages have nothing to do for long, until their rank is done or until `end`."""
    until = [min(int(each.ends.max()), end) for each in drawn.ranks.values() for _ in range(each.pp)]
    gaps = [(row, *gap) for row, bars in enumerate(rows) for gap in gaps_of(bars, until[row])]
    cut = [(row, start, min(stop, end)) for row, start, stop in gaps]
    return [(row, start, stop) for row, start, stop in cut if stop - start > _LEAST_SHOWN * end]


def gantt_table(drawn: list[DrawnStep]) -> Table:
    """List the work, utilization and end of each stage that is drawn.

    If ranks share chunks, also the part of its work that is exchange, and the time it waits for them.
    """
    shares = any(simulation.step is not None for each in drawn for simulation in each.ranks.values())
    head = ("stage", "actions", "busy", "bubble", "done after", *(("exchange", "waiting for ranks") if shares else ()))
    rows = [
        (
            f"step {each.step.step:,}, rank {rank}, stage {stage}",
            f"{len(each.step.actions[rank, stage]):,}",
            percent(simulation.busy_per_stage[stage]),
            percent(simulation.bubble_per_stage[stage]),
            seconds(simulation.in_unit(simulation.ends[simulation.actions.stages[stage + 1] - 1])),
            *(
                seconds(times[stage])
                for times in (simulation.exchange_per_stage, simulation.waiting_for_ranks_per_stage)
                if shares
            ),
        )
        for each in drawn
        for rank, simulation in each.ranks.items()
        for stage in range(simulation.pp)
    ]
    return Table("Stages of the steps that are drawn", head, rows)


def ranks_figure(step: PlanStep) -> go.Figure:
    """Draw a bar for each rank of a step: the time until the last of its stages is done."""
    ends: dict[int, float] = {}
    for (rank, _), end in sorted(step.schedule_us.items()):
        ends[rank] = max(ends.get(rank, 0.0), end / 1e6)
    last = max(ends.values())
    figure = go.Figure()
    figure.add_bar(
        x=list(ends),
        y=list(ends.values()),
        marker={"color": [ORANGE if end == last else BLUE for end in ends.values()]},
        hovertemplate="rank %{x}: done after %{y:.4~f} s<extra></extra>",
    )
    x_axis = axis("rank, the last one in orange", dtick=1 if len(ends) <= _FEW_RANKS else None)
    figure.update_layout(layout(220, xaxis=x_axis, yaxis=axis("seconds", rangemode="tozero"), bargap=0.3))
    return figure
