"""Gantt charts of a page: which steps and ranks are drawn, a row a stage, a bar an action."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go
import polars as pl

from chunkplan.arrays import Int8Array, Int64Array
from chunkplan.cost.durations import Float64Array
from chunkplan.operations import KEPT_ATTENTION, OPS
from chunkplan.planfile.plan import Plan, PlanStep, find_step
from chunkplan.quantities import kept_words, percent, seconds
from chunkplan.reporting.page.parts import BLUE, GREEN, GREY, ORANGE, PINK, PURPLE, RED, axis, layout, narrowest, within
from chunkplan.reporting.tables import Table
from chunkplan.schedule.timeline import Simulation
from chunkplan.simulation import simulate_ranks

# Which steps of a plan a page draws, and which of their ranks: enough to see what there is, few enough to look at.


#: Stages of ranks of a step; its actions: one rank is there even if it has more, of which the first are drawn.
_MOST_ROWS, MOST_ACTIONS = 64, 5_000

#: Of so few steps all are drawn.
_FEW_STEPS = 8


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

#: Kinds of chunks, and how bars of them are hatched: of whole sequences, parts of a split one, those that ranks share.
_WHOLE, _PART, _SHARED = range(3)
_HATCHES = ("", "/", "x")


class _Actions(NamedTuple):
    """What the ranks of a step do: [n] each, `chunk` [n, 11]; times are seconds.

    `chunk`: its id, tokens, tokens before it, which part it is of how many, the model stage that runs it; of one that
    ranks share the first and the last of these, how many share heads and how many pages, and the exchange, in ns.
    `wait`: for these ranks, before it starts. `kept`: where the chunk keeps attention, its place in `KEPT_ATTENTION`.
    """

    row: Int64Array
    op: Int64Array
    kind: Int64Array
    start: Float64Array
    duration: Float64Array
    wait: Float64Array
    kept: Int8Array
    chunk: Int64Array


def gantt_figure(drawn: DrawnStep) -> go.Figure:
    """Draw a trace for each op and kind of chunks, and of waiting for other ranks, the bubble and the critical path."""
    ranks = list(drawn.ranks.values())
    per_rank = [_actions(simulation, place * simulation.pp) for place, simulation in enumerate(ranks)]
    actions = _first(_Actions._make(np.concatenate(columns) for columns in zip(*per_rank, strict=True)))
    with_model_stage, is_narrow = ranks[0].virtual_stages > 1, bool(np.bincount(actions.row).max() > MOST_HATCHED)
    figure = go.Figure()
    for op, (words, colour) in _STYLES.items():
        is_named = False
        for kind, kept in product((_WHOLE, _PART, _SHARED), range(len(KEPT_ATTENTION))):
            is_alike = (actions.op == OPS.index(op)) & (actions.kind == kind) & (actions.kept == kept)
            chosen = np.flatnonzero(is_alike)
            if chosen.size:
                bars = _Actions._make(column[chosen] for column in actions)
                bar = _bars(bars, words, colour, kind, with_model_stage=with_model_stage, is_narrow=is_narrow)
                figure.add_trace(bar.update(legendgroup=op, showlegend=not is_named))
                is_named = True
    end = float((actions.start + actions.duration).max())
    long = _LEAST_SHOWN * end
    if (actions.wait > long).any():
        figure.add_trace(_waits(actions, long, has_slots=ranks[0].has_slots))
    idle = _idle(drawn, long, end)
    figure.add_traces([*([idle] if idle.x.size else []), _critical(drawn, end)])
    labels = [_row_name(rank, stage, drawn) for rank in drawn.ranks for stage in range(ranks[0].pp)]
    for row in range(ranks[0].pp, len(labels), ranks[0].pp):
        figure.add_hline(y=row - 0.5, line={"color": GREY, "width": 0.5})
    rows = {
        "tickvals": list(range(len(labels))),
        "ticktext": labels,
        "ticklabelstandoff": 4,
        "range": [len(labels) - 0.5, -0.5],
        "fixedrange": True,
        "automargin": True,
        "zeroline": False,
        "showgrid": False,
    }
    figure.update_layout(
        layout(
            _ROW_HEIGHT * len(labels) + _AROUND,
            barmode="overlay",
            bargap=0,  # so that ends of bars are whole pixels; the gap is in their widths
            uniformtext={"mode": "hide", "minsize": _SMALLEST_TEXT},
            hovermode="closest",
            xaxis=axis("seconds from the start of the step", **within(0, end)),
            yaxis=rows,
            **narrowest(
                max(float(actions.duration.min()), _LEAST_SHOWN * end),
                step=drawn.step.step,
                ranks=[rank for rank in drawn.ranks for _ in range(ranks[0].pp)],
            ),
        )
    )
    return figure


def _first(actions: _Actions) -> _Actions:
    """Keep as many actions as are drawn, those that begin first."""
    chosen = np.sort(np.argsort(actions.start, kind="stable")[:MOST_ACTIONS])
    return _Actions._make(column[chosen] for column in actions)


def _row_name(rank: int, stage: int, drawn: DrawnStep) -> str:
    return f"stage {stage}" if len(drawn.step.chunks) == 1 else f"rank {rank} stage {stage}"


def _actions(simulation: Simulation, first_row: int) -> _Actions:
    """List what the stages of a rank do; its first stage is drawn in `first_row`."""
    chunks = [
        (chunk.chunk_id, chunk.num_tokens, chunk.prefix_tokens, chunk.group_index + 1, chunk.group_size)
        for chunk in simulation.chunks
    ]
    shares = [
        (chunk.cp_first_rank, chunk.cp_first_rank + chunk.cp_size - 1, chunk.cp_heads, chunk.cp_size // chunk.cp_heads)
        for chunk in simulation.chunks
    ]
    kinds = [
        _SHARED if chunk.cp_size > 1 else _PART if chunk.group_id is not None else _WHOLE for chunk in simulation.chunks
    ]
    actions = simulation.actions
    scale = simulation.ticks * _US_A_SECOND
    return _Actions(
        first_row + simulation.stage_of,
        actions.ops.astype(np.int64),
        np.array(kinds)[actions.chunk_ids],
        simulation.starts / scale,
        (simulation.ends - simulation.starts) / scale,
        simulation.waits / scale,
        simulation.table.kept_attention[actions.chunk_ids],
        np.column_stack(
            [
                np.array(chunks, np.int64)[actions.chunk_ids],
                simulation.model_stages,
                np.array(shares, np.int64)[actions.chunk_ids],
                simulation.exchange_of_actions,
            ]
        ),
    )


def _bars(actions: _Actions, words: str, colour: str, kind: int, *, with_model_stage: bool, is_narrow: bool) -> go.Bar:
    lines = [f"<b>{words}</b>: chunk %{{customdata[0]}}", "%{customdata[1]:,} tokens"]
    if kind != _WHOLE:
        lines.insert(1, "part %{customdata[3]} of %{customdata[4]}, after %{customdata[2]:,} tokens")
    shown = actions.chunk[:, :6].astype(np.int32)
    if kind == _SHARED:
        exchange = actions.chunk[:, 10:] / _NS_A_SECOND
        shown = np.column_stack([actions.chunk[:, :10], exchange])  # [n, 11]
        lines[2] += " of this rank"
        lines.append("shared by ranks %{customdata[6]} to %{customdata[7]}:")
        lines.append("%{customdata[8]} by heads x %{customdata[9]} by pages")
        lines.append("exchange %{customdata[10]:.4f} s of it")
    lines += ["model stage %{customdata[5]}"] if with_model_stage else []
    where = kept_words(KEPT_ATTENTION[actions.kept[0]])
    lines += [f"attention kept {where}"] if where else []
    pattern = {"fillmode": "overlay", "solidity": 0.12, "size": 7, "fgcolor": "white"}
    pattern["shape"] = "" if is_narrow else _HATCHES[kind]
    outline = {"width": 0 if is_narrow else 0.5, "color": "rgba(255,255,255,0.7)"}
    # Wholly opaque bars are drawn a pixel wide, however narrow they are, and hide what lies before them.
    fill = f"rgba{(*(int(colour[place : place + 2], 16) for place in (1, 3, 5)), 0.99)}" if is_narrow else colour
    return go.Bar(
        orientation="h",
        width=0.85,
        name=words,
        y=actions.row.astype(np.int16),
        base=actions.start,
        x=actions.duration,
        text=actions.chunk[:, 0].astype(np.int32),
        customdata=shown,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        insidetextfont={"color": "white"},
        marker={"color": fill, "line": outline, "pattern": pattern},
        hovertemplate="<br>".join([*lines, "%{base:.4f} s to %{x:.4f} s<extra>%{y}</extra>"]),
    )


def _waits(actions: _Actions, least: float, *, has_slots: bool) -> go.Bar:
    """Draw where stages wait longer than `least` seconds for ranks that share a chunk, or meet in a slot."""
    chosen = np.flatnonzero(actions.wait > least)
    waits = _Actions._make(column[chosen] for column in actions)
    lines = ["<b>waiting</b> for other ranks", "before chunk %{customdata[0]}"]
    if not has_slots:
        lines = ["<b>waiting</b> for ranks %{customdata[1]} to %{customdata[2]}", "that share chunk %{customdata[0]}"]
    return go.Bar(
        orientation="h",
        width=0.35,
        name="waiting for ranks" if has_slots else "waiting for ranks that share",
        y=waits.row.astype(np.int16),
        base=waits.start - waits.wait,
        x=waits.wait,
        customdata=waits.chunk[:, [0, 6, 7]].astype(np.int32),
        marker={"color": RED},
        hovertemplate="<br>".join([*lines, "%{base:.4f} s to %{x:.4f} s<extra>%{y}</extra>"]),
    )


def _idle(drawn: DrawnStep, least: float, end: float) -> go.Bar:
    """Draw where stages have nothing to do for longer than `least` seconds, until their rank is done or until `end`."""
    rows, starts, stops = [], [], []
    for place, simulation in enumerate(drawn.ranks.values()):
        scale = simulation.ticks * _US_A_SECOND
        for stage in range(simulation.pp):
            own = slice(*simulation.actions.stages[stage : stage + 2])
            begins = (simulation.starts - simulation.waits)[own] / scale
            ends = simulation.ends[own] / scale
            starts.append(np.append(0.0, ends))
            stops.append(np.minimum(np.append(begins, float(simulation.ends.max()) / scale), end))
            rows.append(np.full(begins.size + 1, place * simulation.pp + stage))
    row, start, stop = np.concatenate(rows), np.concatenate(starts), np.concatenate(stops)
    chosen = stop - start > least
    return go.Bar(
        orientation="h",
        width=0.85,
        name="bubble: nothing to do",
        y=row[chosen].astype(np.int16),
        base=start[chosen],
        x=(stop - start)[chosen],
        marker={"color": "rgba(128,140,155,0.22)", "line": {"width": 0}},
        hovertemplate="<b>bubble</b>: nothing to do<br>%{base:.4f} s to %{x:.4f} s<extra>%{y}</extra>",
    )


def _critical(drawn: DrawnStep, end: float) -> go.Bar:
    """Draw a line below what is on the critical path of the rank that is done last, up to `end` in seconds.

    Where it is on ranks that are not drawn, it has a gap.
    """
    last = max(drawn.ranks.values(), key=lambda each: each.ends.max())
    scale = last.ticks * _US_A_SECOND
    row_of = {rank: place * last.pp for place, rank in enumerate(drawn.ranks)}
    path = [each for each in last.critical_actions if each.rank in row_of and each.start / scale < end]
    return go.Bar(
        orientation="h",
        width=0.16,
        offset=0.36,
        name="critical path",
        y=np.array([row_of[each.rank] + each.stage for each in path], np.int16),
        base=np.array([each.start / scale for each in path]),
        x=np.array([(each.end - each.start) / scale for each in path]),
        marker={"color": PINK, "line": {"width": 0}},
        hoverinfo="skip",
    )


def gantt_table(drawn: list[DrawnStep]) -> Table:
    """List of each stage that is drawn how much it does, how busy it is and when it is done.

    Where ranks meet, also what of its work is exchange, and how long it waits for them.
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
