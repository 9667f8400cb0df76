"""Bars and tables of ways to train: those of today beside the choice of a tuning, and what else the search timed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from chunkplan.cost.hardware import ERRORS, source_of
from chunkplan.cost.model import CostModel
from chunkplan.quantities import gibibytes, layout_words, seconds
from chunkplan.reporting.page.parts import BLUE, GREEN, GREY, ORANGE, axis, layout, plain
from chunkplan.reporting.tables import Table
from chunkplan.reporting.way_row import WayRow, way_row
from chunkplan.tuning.document_entries import BaselineEntry, ChoiceEntry, TuningDocument


class _Bar(NamedTuple):
    """A labelled bar; what does not fit has no `step_seconds`, and says why."""

    name: str
    step_seconds: float | None
    color: str
    why_not: str = ""


def ways_figure(document: TuningDocument) -> go.Figure:
    """Draw a bar for the time of a step with each way that fits, fastest first, the choice of a tuning among them."""
    bars = []
    for way in _ways(document):
        row = _row(document, way)
        name = f"{row.name}, {row.lost} lost" if row.lost != "none" else row.name
        color = ORANGE if "name" in way else GREEN
        bars.append(_Bar(name, way["step_seconds"] if way["fits"] else None, color, row.memory))
    return _bars_figure(bars)


def ways_table(document: TuningDocument) -> Table:
    """List what a step and an epoch take with each way, in the order of the bars."""
    rows = []
    for way in _ways(document):
        name, step, rate, hours, lost, memory, how = _row(document, way)
        notes = ", ".join(how) if way["fits"] else f"{how[0]}; does not fit: {memory}"
        cells = (step, rate or "-", hours or "-", gibibytes(way["memory"]["total"]), lost, notes)
        rows.append((name if "name" in way else f"{name} (recommended)", *cells))
    head = ("way", "step", "tokens/s", "GPU-hours", "memory a GPU", "tokens lost", "how")
    return Table("Ways to train", head, rows, texts=("how",))


def chunk_sizes_figure(document: TuningDocument) -> go.Figure:
    """Draw a bar for the fastest choice that fits with each ChunkSize, the chosen one marked."""
    bars = []
    for size, choice in best_by_chunk_size(document).items():
        color = GREEN if size == document["chosen"]["chunk_size"] else BLUE
        bars.append(_Bar(f"ChunkSize {size:,}", choice["step_seconds"], color))
    return _bars_figure(bars)


def layouts_figure(document: TuningDocument) -> go.Figure:
    """Draw a bar for the fastest step on each layout that was compared, the chosen one marked."""
    bars = []
    for entry in document["layouts"]:
        is_chosen = all(entry[axis] == document["chosen"][axis] for axis in ("dp", "tp", "pp"))
        name = layout_words(entry["dp"], entry["tp"], entry["pp"])
        bars.append(_Bar(name, entry["step_seconds"], GREEN if is_chosen else BLUE, "nothing fits"))
    return _bars_figure(bars)


def best_by_chunk_size(document: TuningDocument) -> dict[int, ChoiceEntry]:
    """Return the fastest choice that fits of each ChunkSize, ascending, of those that are run as the chosen one is."""
    is_plan_only = not document["recommended"]
    rivals = [row for row in document["choices"] if row["fits"] and (is_plan_only or row["plan_only"] is None)]
    best: dict[int, ChoiceEntry] = {}
    for row in sorted([document["chosen"], *rivals], key=lambda row: row["step_seconds"]):
        best.setdefault(row["chunk_size"], row)
    return dict(sorted(best.items()))


def time_error(document: TuningDocument) -> float:
    """Return the share by which the times of a tuning may be off."""
    return ERRORS[source_of(CostModel.from_dict(document["cost_model"], where="the tuning").hardware)]


def _ways(document: TuningDocument) -> list[ChoiceEntry | BaselineEntry]:
    """All ways of a tuning: those that fit, fastest first, then the others."""
    ways: list[ChoiceEntry | BaselineEntry] = [document["chosen"], *document["baselines"]]
    return sorted(ways, key=lambda way: (not way["fits"], way["step_seconds"]))


def _row(document: TuningDocument, way: ChoiceEntry | BaselineEntry) -> WayRow:
    return way_row(way, document["options"]["global_batch"], document["data"]["num_sequences"])


def _bars_figure(bars: Sequence[_Bar]) -> go.Figure:
    """Draw bars with their labels above them, which fit on whatever screen."""
    figure = go.Figure()
    steps = [None if bar.step_seconds is None else seconds(bar.step_seconds * 1e6) for bar in bars]
    labels = [f"{plain(bar.name)}: {step or 'does not fit'}" for bar, step in zip(bars, steps, strict=True)]
    drawn = [place for place, bar in enumerate(bars) if bar.step_seconds is not None]
    figure.add_bar(
        orientation="h",
        x=[bars[place].step_seconds for place in drawn],
        y=drawn,
        marker={"color": [bars[place].color for place in drawn]},
        text=[labels[place] for place in drawn],
        textposition="none",
        hovertemplate="%{text}<extra></extra>",
        width=0.36,
    )
    for place, (bar, label) in enumerate(zip(bars, labels, strict=True)):
        text = f"<b>{label}</b>" if bar.color == GREEN else label
        figure.add_annotation(x=0, y=place, text=text, showarrow=False, xanchor="left", yshift=16)
        why = {"text": plain(bar.why_not) if bar.step_seconds is None else "", "font": {"color": GREY}}
        figure.add_annotation(x=0, y=place, showarrow=False, xanchor="left", **why)
    y_axis = {"visible": False, "range": [len(bars) - 0.5, -0.8]}
    figure.update_layout(layout(60 + 48 * len(bars), xaxis=axis("seconds a step", rangemode="tozero"), yaxis=y_axis))
    return figure
