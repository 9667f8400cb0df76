"""What `tune` tried: time against memory, with what people run today beside it."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from chunkplan.quantities import gibibytes, k_words, percent, seconds
from chunkplan.reporting.page.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, axis, layout, plain
from chunkplan.reporting.page.parts import Table

#: Rows of the table: the choices that fit, fastest first.
_MOST_ROWS = 100

#: Powers of ten, on an axis of fewer of which more ticks have room.
_SHORT = 1.2


def candidates_figure(document: dict[str, Any]) -> go.Figure:
    """Each choice and baseline of a tuning (see `tuning_document`) by memory and time of a step, both on log axes."""
    figure = go.Figure()
    fitting = [choice for choice in document["choices"] if choice["fits"]]
    runnable = [choice for choice in fitting if choice["plan_only"] is None]
    others = [choice for choice in fitting if choice["plan_only"] is not None]
    rest = [choice for choice in document["choices"] if not choice["fits"]]
    front = [document["choices"][place] for place in document["pareto"]]
    _add(figure, "does not fit", rest, {"color": GREY, "size": 5, "opacity": 0.5})
    _add(figure, "fits, plan only", others, {"color": PURPLE, "size": 5, "opacity": 0.55})
    _add(figure, "fits", runnable, {"color": BLUE, "size": 6})
    _add(figure, "Pareto front", front, {"color": BLUE, "size": 8}, line={"color": BLUE, "width": 2, "shape": "vh"})
    _add(figure, "today", document["baselines"], {"color": ORANGE, "size": 11, "symbol": "diamond"})
    _add(figure, "chosen", [document["chosen"]], {"color": GREEN, "size": 17, "symbol": "star"})
    rows = [*document["choices"], *document["baselines"]]
    limit = document["options"]["gpu_memory"] / 2**30
    figure.add_vline(x=limit, line={"color": GREY, "width": 1.5, "dash": "dash"})
    figure.add_annotation(
        text=f"{gibibytes(document['options']['gpu_memory'])} a GPU",
        x=math.log10(limit),  # where annotations of log axes are
        xref="x",
        xanchor="right",
        y=1,
        yref="y domain",
        textangle=-90,
        showarrow=False,
    )
    figure.update_layout(
        layout(
            460,
            hovermode="closest",
            xaxis=axis(
                "memory of the fullest stage, GiB", **_log_ticks([row["memory"]["total"] / 2**30 for row in rows])
            ),
            yaxis=axis("seconds a step", **_log_ticks([row["step_seconds"] for row in rows])),
        )
    )
    return figure


def _log_ticks(values: list[float]) -> dict[str, Any]:
    """Entries of a log axis for `values`, with ticks at round numbers."""
    low, high = math.log10(min(values)), math.log10(max(values))
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high - low < _SHORT else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,.4g}" for tick in ticks]}


def _add(
    figure: go.Figure, name: str, rows: list[dict[str, Any]], marker: dict[str, Any], line: dict[str, Any] | None = None
) -> None:
    if rows:
        figure.add_scatter(
            name=name,
            x=[row["memory"]["total"] / 2**30 for row in rows],
            y=[row["step_seconds"] for row in rows],
            text=[plain(_words(row)) for row in rows],
            mode="markers" if line is None else "lines+markers",
            marker=marker,
            line=line,
            hovertemplate="%{text}<br>%{y:.3f} s, %{x:.1f} GiB<extra>" + name + "</extra>",
        )


def _words(row: dict[str, Any]) -> str:
    """What a choice, or a baseline, is."""
    if "name" in row:
        return str(row["name"])
    return f"ChunkSize {row['chunk_size']:,}, K {k_words(row['k'], row['k_by_length'])}, {_how(row)}"


def _how(row: dict[str, Any]) -> str:
    """The schedule and layout of a choice, and how memory is saved."""
    words = [row["schedule"], f"dp {row['dp']}, tp {row['tp']}, pp {row['pp']}"]
    words += ["checkpoints"] if row["checkpointing"] == "full" else []
    return ", ".join(words + (["KV offload"] if row["kv_offload"] else []))


def candidates_tables(document: dict[str, Any]) -> list[Table]:
    """What people run today, and the choices that fit: those on the Pareto front, and the fastest."""
    today = [
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
    shown = [place for place, row in enumerate(choices) if row["fits"] and (place < _MOST_ROWS or place in front)]
    rows = [_choice_row(choices[place], place in front, choices[place] == document["chosen"]) for place in shown]
    num_fitting = sum(row["fits"] for row in choices)
    caption = f"Choices: {len(rows):,} of the {num_fitting:,} that fit, of {len(choices):,} in all"
    return [
        Table("What people run today", ("way", "step", "memory", "fits", "tokens lost"), today),
        Table(
            caption,
            ("ChunkSize", "K", "how", "step", "memory", "MFU", "bubble", "recomputed", "notes"),
            rows,
            texts=("K", "how", "notes"),
        ),
    ]


def _choice_row(row: dict[str, Any], on_front: bool, is_chosen: bool) -> tuple[str, ...]:
    notes = ["chosen"] if is_chosen else []
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
