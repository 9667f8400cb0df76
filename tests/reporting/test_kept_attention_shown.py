"""Which chunks keep attention for their recompute is shown wherever chunks are; nothing is where none keeps any."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import chunkplan
from chunkplan.planfile.plan import Chunk, Plan
from chunkplan.quantities import percent
from chunkplan.reporting.page.gantt import drawn_steps, gantt_figure
from chunkplan.reporting.per_step import per_step
from tests.support.command_line import Run
from tests.support.page_cases import write_and_read
from tests.support.plan_rows import Rows, tamper
from tests.support.small_plans import built

#: More sequences than one are split.
LENGTHS = [9000, 300, 200, 7000, 100, 40]
WORDS = {"gpu": "on the GPU", "host": "in host memory"}


def keeping(plan: Plan, *places: str) -> Plan:
    """The same plan whose chunks that are run again keep attention in `places`, in turn."""

    def change(rows: Rows) -> None:
        again = [row for row in rows["chunks"] if not row["keeps_activations"]]
        for number, row in enumerate(again):
            row["kept_attention"] = places[number % len(places)]

    tamper(plan.path, change)
    return chunkplan.load_plan(plan.path)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    made = built(tmp_path, LENGTHS, chunk_size=1000, k=1, dp=2, pp=2, global_batch=6, epochs=1)
    return keeping(made, "gpu", "host", "")


def chunks_of(plan: Plan) -> list[tuple[int, Chunk]]:
    [step] = plan.iter_steps()
    return [(rank, chunk) for rank, chunks in step.chunks.items() for chunk in chunks]


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_says_how_many_keep_it_and_where(command: Run, plan: Plan, width: int) -> None:
    counts = Counter(chunk.kept_attention for _, chunk in chunks_of(plan) if not chunk.keeps_activations)
    assert min(counts[where] for where in ("", "gpu", "host")) > 2
    summary = json.loads(command("inspect", plan.path, "--json").out)["summary"]
    assert summary["num_recomputed"] == counts.total()
    assert summary["num_kept"] == {where: counts[where] for where in WORDS}
    shown = command("inspect", plan.path, width=width).out
    said = (
        f"{percent(summary['recompute_share'])} of the work: {counts.total()} chunks run forward twice, of which "
        f"{counts['gpu']} keep attention on the GPU and {counts['host']} in host memory"
    )
    assert said in " ".join(shown.replace("│", " ").split())
    assert max(map(len, shown.splitlines())) <= width


def test_the_page_says_it_in_numbers_of_chunks_and_of_bars(plan: Plan, tmp_path: Path) -> None:
    made = write_and_read(tmp_path / "page.html", plan)
    again = [chunk for _, chunk in chunks_of(plan) if not chunk.keeps_activations]
    counts = Counter(chunk.kept_attention for chunk in again)
    rows = dict(made.tables["The plan in numbers"])
    assert f"{len(again)} chunks run forward twice, of which " in rows["recomputed"]
    for where, words in WORDS.items():
        assert rows["recomputed"].replace(" keep attention", "").count(f" {counts[where]} {words}") == 1
        assert made.text.count(f"It is run again, with its attention kept {words}.") == counts[where]
    [drawn] = drawn_steps(plan, per_step(plan), 0, None)
    drawn_as: Counter[str] = Counter()
    for trace in gantt_figure(drawn).data:
        if trace.name == "recompute":
            said = [where for where, words in WORDS.items() if f"attention kept {words}<br>" in trace.hovertemplate]
            assert ("attention kept" in trace.hovertemplate) == bool(said)
            drawn_as[said[0] if said else ""] += len(trace.x) // plan.config.pp
    assert drawn_as == counts
    named = [trace.name for trace in gantt_figure(drawn).data if trace.showlegend is not False]
    assert len(named) == len(set(named))


@pytest.mark.parametrize("words", ["disk", "\x1b[31m"])
def test_a_place_that_there_is_not_neither_stops_a_screen_nor_reaches_the_terminal(
    command: Run, plan: Plan, words: str
) -> None:
    """`validate` names it."""
    plan = keeping(plan, words)
    for options in ([], ["--step", 0], ["--step", 0, "--rank", 0, "--chunk", 0]):
        ran: Any = command("inspect", plan.path, *options)
        assert ran.code == 0 and words not in ran.out
    assert command("validate", plan.path).code == 4
