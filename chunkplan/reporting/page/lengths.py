"""Histograms of lengths: of sequences before and chunks after, on the same axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count, pairwise

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
from plotly.subplots import make_subplots

from chunkplan.arrays import Int32Array, Int64Array, IntArray
from chunkplan.errors import DataError
from chunkplan.planfile.analysis import Analysis
from chunkplan.planfile.plan import VALIDATE_HINT, Plan
from chunkplan.planfile.schema import CHUNKS, to_numpy
from chunkplan.planfile.tables import conform, open_parquet
from chunkplan.quantities import percent, power_of_two
from chunkplan.reporting.page.parts import BLUE, GREY, ORANGE, PlotlyEntries, axis, layout
from chunkplan.reporting.tables import Table

_SEGMENTS = pa.schema([CHUNKS.field("segments")])


def holds_all_once(plan: Plan) -> bool:
    """True if the plan holds every sequence of its analysis exactly once."""
    config = plan.config
    num_left_out = plan.manifest["selection"]["num_held_out"] + plan.manifest["totals"]["num_dropped_sequences"]
    return not num_left_out and not config.mix and config.epochs == 1


def planned_lengths(plan: Plan, analysis: Analysis) -> Int32Array:
    """Return the tokens of each sequence of `plan` as often as it holds it, int32 [n]; `analysis` is the plan's.

    Raises:
        DataError: chunks.parquet is damaged, or does not hold as many sequences of the analysis as the manifest says.
    """
    if holds_all_once(plan):
        return analysis.num_tokens
    path = plan.path / "chunks.parquet"
    with open_parquet(path) as file:
        tables = (file.read_row_group(group, _SEGMENTS.names) for group in range(file.num_row_groups))
        begun = np.concatenate([_begun(conform(table, _SEGMENTS, path)) for table in tables])
    wrong = begun[(begun < 0) | (begun >= analysis.num_sequences)]
    num_sequences = plan.manifest["totals"]["num_sequences"]
    if wrong.size or not begun.size == num_sequences > 0:
        found = f"{begun.size:,} sequences begin in its chunks, expected {num_sequences:,}"
        raise DataError(
            f"the analysis has no sequence {wrong[0]}" if wrong.size else found, where=str(path), hint=VALIDATE_HINT
        )
    lengths: Int32Array = analysis.num_tokens[begun]
    return lengths


def _begun(chunks: pa.Table) -> IntArray:
    """Return the ids of sequences whose first tokens are in `chunks`: each is there as often as the plan holds it."""
    segments = chunks.column("segments").combine_chunks().flatten()
    sequence_id, start = (to_numpy(segments.field(name)) for name in ("sequence_id", "start"))
    begun: IntArray = sequence_id[start == 0]
    return begun


#: Half a power of two is a bar.
_BARS = 2
#: Between ticks there are at most so many spaces: words of more would touch on a narrow screen.
_MOST_SPACES = 9


@dataclass(frozen=True)
class LengthHistogram:
    """Histogram by length: the number of sequences or chunks, and the tokens in them; int64 [bars].

    Bar i has those of more than 2^((first + i - 1) / 2) tokens, and at most 2^((first + i) / 2): chunks that are full
    of a power of two end the bar below it.
    """

    first: int
    counts: Int64Array
    tokens: Int64Array

    def edge(self, bar: int) -> float:
        """Return the most tokens that are counted in a bar."""
        return float(2 ** ((self.first + bar) / _BARS))


def histogram(num_tokens: IntArray) -> LengthHistogram:
    """Count `num_tokens`, which has no zeros, [n]."""
    values, counts = np.unique(num_tokens, return_counts=True)
    bars = np.ceil(np.round(np.log2(values) * _BARS, 9)).astype(np.int64)
    first = int(bars.min())
    return LengthHistogram(
        first,
        np.bincount(bars - first, counts).astype(np.int64),
        np.bincount(bars - first, counts * values.astype(np.float64)).astype(np.int64),
    )


def lengths_figure(before: LengthHistogram | None, after: LengthHistogram | None, chunk_size: int | None) -> go.Figure:
    """Draw shares of sequences and of their tokens by length; below, the same of chunks, with ChunkSize marked."""
    panels = [(title, each) for title, each in (("sequences", before), ("chunks", after)) if each is not None]
    counted = "share of " + " and ".join(name for name, _ in panels)
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, (name, each) in enumerate(panels, 1):
        for legend, what, values, colour in (
            (counted, name, each.counts, BLUE),
            ("share of tokens", "tokens", each.tokens, ORANGE),
        ):
            bars = go.Bar(
                x=np.arange(values.size) + each.first - 0.5,
                y=100 * values / values.sum(),
                customdata=_bounds(each),
                name=legend,
                legendgroup=legend,
                showlegend=row == 1,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate="%{y:.1f}% of " + what + "<br>%{customdata} tokens<extra></extra>",
            )
            figure.add_trace(bars, row=row, col=1)
        when = {"sequences": "before: sequences", "chunks": "after: chunks"}[name] if len(panels) > 1 else "share"
        figure.update_yaxes(axis(when, ticksuffix="%", rangemode="tozero"), row=row, col=1)
    figure.update_xaxes(axis("", showticklabels=True, tickangle=0, **_ticks([each for _, each in panels], chunk_size)))
    figure.update_xaxes(axis("tokens (8K is 8,192), log scale"), row=len(panels), col=1)
    if chunk_size is not None:
        _mark(figure, chunk_size, len(panels))
    figure.update_layout(layout(220 * len(panels) + 60, bargap=0.08, bargroupgap=0))
    return figure


def _ticks(panels: list[LengthHistogram], chunk_size: int | None) -> PlotlyEntries:
    """Make entries of an axis on which a bar is one wide, with room for ChunkSize.

    Ticks are at powers of two around all bars, all equally far apart.
    """
    marked = [] if chunk_size is None else [math.ceil(math.log2(chunk_size) * _BARS)]
    first = min([each.first - 1 for each in panels] + marked)
    last = max([each.first + each.counts.size - 1 for each in panels] + marked)
    spaces = count(_BARS, _BARS)
    space = next(each for each in spaces if -(-last // each) - first // each <= _MOST_SPACES)
    ticks = [space * place for place in range(max(first // space, 0), -(-last // space) + 1)]  # whole numbers of tokens
    words = [power_of_two(2 ** (place // _BARS)) for place in ticks]
    return {"range": [min(first, ticks[0]) - 0.5, ticks[-1] + 0.5], "tickvals": ticks, "ticktext": words}


def _mark(figure: go.Figure, chunk_size: int, num_panels: int) -> None:
    """Draw a line at ChunkSize through all panels, named in the legend: beside the line it would lie on bars."""
    for row in range(1, num_panels + 1):
        figure.add_vline(
            x=float(np.log2(chunk_size)) * _BARS,
            line={"color": GREY, "width": 1.5, "dash": "dash"},
            name=f"ChunkSize {chunk_size:,}",
            legendgroup="ChunkSize",
            showlegend=row == 1,
            row=row,
            col=1,
        )


def lengths_table(name: str, counted: LengthHistogram) -> Table:
    """List the numbers behind a panel; `name` is "sequences" or "chunks"."""
    rows = [
        (
            bounds,
            f"{count:,}",
            percent(count / counted.counts.sum()),
            f"{tokens:,}",
            percent(tokens / counted.tokens.sum()),
        )
        for bounds, count, tokens in zip(
            _bounds(counted), counted.counts.tolist(), counted.tokens.tolist(), strict=True
        )
    ]
    head = ("length", name, f"share of {name}", "tokens", "share of tokens")
    return Table(f"{name.capitalize()} by their number of tokens", head, rows)


def _bounds(counted: LengthHistogram) -> list[str]:
    """Return the smallest and largest length of each bar in words."""
    edges = [int(counted.edge(bar) + 1e-9) for bar in range(-1, counted.counts.size)]
    return [f"{low + 1:,} to {high:,}" for low, high in pairwise(edges)]
