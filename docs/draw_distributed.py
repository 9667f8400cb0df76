"""Draws distributed.svg: one step of a small plan, as `chunkplan.build` makes it, on four processes.

The same plan gives the same bytes. Run it after a change of the planner: python docs/draw_distributed.py [FOLDER]
"""

from __future__ import annotations

from drawing import ACTIONS, FAINT, INK, LANE, LINE, Drawing, arrow, draw_legend, planned, write_pictures

import chunkplan
from chunkplan.planfile.plan import Action, PlanStep
from chunkplan_runtime.layout import RankLayout

LENGTHS = [20000, 13000, 9000, 8000, 7900, 6000, 5000, 4000, 3000, 2000, 1500, 900, 700, 500, 300]
CONFIG = chunkplan.PlanConfig(chunk_size=8192, k=2, dp=4, pp=2, cp="off")
PROCESSES = 4

# Everything is measured in units of the view box.
PLAN_X, CELL_X, CELL_WIDTH, CELL_HEIGHT, CELL_PITCH = 14, 62, 68, 26, 32
STAGE_X, BOX_WIDTH, ACTION_WIDTH, ACTION_HEIGHT = (236, 534), 212, 19.5, 22
TOP, HEAD, ROW_PITCH, BETWEEN = 92, 28, 28, 64
BOX_HEIGHT = HEAD + 12 + 2 * ROW_PITCH

#: By rank of the process: its colour and that of the letters on it. Hues are stages.
COLOURS = [("#1d5fa8", "#ffffff"), ("#bcd5f0", INK), ("#a6480f", "#ffffff"), ("#f3cdb3", INK)]
ACTIVATIONS, GRADIENTS, REPLICAS = ACTIONS["forward"][1], ACTIONS["backward"][1], "#6b46c1"


def layouts() -> list[RankLayout]:
    """The processes, by rank."""
    return [RankLayout(PROCESSES // CONFIG.pp, CONFIG.pp, rank) for rank in range(PROCESSES)]


def box_place(layout: RankLayout) -> tuple[float, float]:
    """Where the box of a process begins: left and top."""
    return STAGE_X[layout.stage], TOP + layout.replica * (BOX_HEIGHT + BETWEEN)


def draw_plan(drawing: Drawing) -> None:
    """Draw the plan's grid of data-parallel ranks and stages, in the colours of the processes that serve them."""
    for stage in range(CONFIG.pp):
        x = CELL_X + stage * (CELL_WIDTH + 4)
        drawing.text(x + CELL_WIDTH / 2, TOP + 18, f"stage {stage}", fill=FAINT, anchor="middle")
    for layout in layouts():
        fill, ink = COLOURS[layout.process]
        for dp_rank in layout.dp_ranks(CONFIG.dp):
            x, y = CELL_X + layout.stage * (CELL_WIDTH + 4), TOP + HEAD + dp_rank * CELL_PITCH
            drawing.box(x, y, CELL_WIDTH, CELL_HEIGHT, fill=fill)
            drawing.text(x + CELL_WIDTH / 2, y + 17, f"process {layout.process}", fill=ink, anchor="middle")
            if layout.is_first:
                drawing.text(PLAN_X, y + 17, f"rank {dp_rank}", fill=FAINT)
    for row, line in enumerate(("A process does its rows", "one after another.")):
        drawing.text(PLAN_X, TOP + HEAD + CONFIG.dp * CELL_PITCH + 20 + 16 * row, line, fill=FAINT)


def draw_actions(drawing: Drawing, x: float, y: float, actions: list[Action]) -> None:
    """Draw a row of the plan: its actions in order, each with its chunk."""
    for place, action in enumerate(actions):
        letter, fill, ink = ACTIONS[action.op]
        left = x + place * ACTION_WIDTH
        drawing.box(left + 0.5, y, ACTION_WIDTH - 1, ACTION_HEIGHT, fill=fill)
        words = f"{letter}{action.chunk_id}"
        drawing.text(left + ACTION_WIDTH / 2, y + 15, words, size=11, fill=ink, bold=True, anchor="middle")


def draw_process(drawing: Drawing, layout: RankLayout, step: PlanStep) -> None:
    """Draw the box of a process: its place, and what it does."""
    x, y = box_place(layout)
    fill, ink = COLOURS[layout.process]
    drawing.box(x, y, BOX_WIDTH, BOX_HEIGHT, fill=LANE, stroke=LINE)
    drawing.box(x, y, BOX_WIDTH, HEAD - 4, fill=fill)
    drawing.text(x + 8, y + 17, f"Process {layout.process}", fill=ink, bold=True)
    drawing.text(
        x + BOX_WIDTH - 8, y + 17, f"stage {layout.stage} of pipeline {layout.replica}", fill=ink, anchor="end"
    )
    for row, dp_rank in enumerate(layout.dp_ranks(CONFIG.dp)):
        top = y + HEAD + 6 + row * ROW_PITCH
        drawing.text(x + 8, top + 15, f"rank {dp_rank}", fill=FAINT)
        draw_actions(drawing, x + 48, top, step.actions[dp_rank, layout.stage])


def draw_links(drawing: Drawing) -> None:
    """Draw what goes from stage to stage, and between the replicas of a stage."""
    right, left = STAGE_X[0] + BOX_WIDTH + 6, STAGE_X[1] - 6
    for layout in layouts():
        x, y = box_place(layout)
        if layout.is_first:
            arrow(drawing, (right, y + 52, left, y + 52), ACTIVATIONS)
            arrow(drawing, (left, y + 76, right, y + 76), GRADIENTS)
        if layout.replica:
            middle = x + 30
            arrow(drawing, (middle, y - 6, middle, y - BETWEEN + 6), REPLICAS, both=True)
            for row, words in enumerate(("weights, before a step", "gradients, after it")):
                drawing.text(middle + 12, y - BETWEEN / 2 - 3 + 15 * row, words, fill=FAINT)
    middle = (right + left) / 2
    drawing.text(middle, TOP + 40, "activations", size=11, fill=ACTIVATIONS, anchor="middle")
    drawing.text(middle, TOP + 94, "gradients", size=11, fill=GRADIENTS, anchor="middle")


def draw_heads(drawing: Drawing) -> None:
    """Draw the heading of each column."""
    drawing.text(PLAN_X, 31, "1  The plan", size=15, bold=True)
    drawing.text(PLAN_X, 50, f"--dp {CONFIG.dp} --pp {CONFIG.pp}:", fill=FAINT)
    drawing.text(PLAN_X, 66, f"{CONFIG.dp} rows of {CONFIG.pp} stages", fill=FAINT)
    drawing.arrow(STAGE_X[0] - 26, 26)
    drawing.text(STAGE_X[0], 31, "2  The processes", size=15, bold=True)
    words = f"torchrun --nproc-per-node {PROCESSES}: {PROCESSES // CONFIG.pp} pipelines of {CONFIG.pp} stages"
    drawing.text(STAGE_X[0], 50, words, fill=FAINT)
    for stage, words in enumerate(("embeddings and the first layers", "the last layers and the head")):
        drawing.text(STAGE_X[stage] + BOX_WIDTH / 2, TOP - 8, words, fill=FAINT, anchor="middle")


def draw() -> str:
    """Draw the whole picture, as SVG."""
    with planned(LENGTHS, CONFIG) as plan:
        [step] = plan.iter_steps()
    drawing = Drawing()
    draw_heads(drawing)
    draw_plan(drawing)
    for layout in layouts():
        draw_process(drawing, layout, step)
    draw_links(drawing)
    end = TOP + 2 * BOX_HEIGHT + BETWEEN
    words = ("forward", "forward, leaves keys and values only", "recompute, from the stage's own input", "backward")
    draw_legend(drawing, PLAN_X, end + 34, words)
    served = "; ".join(
        f"process {layout.process} is {layout.describe().partition('(')[2].rstrip(')')} and does ranks "
        + " and ".join(map(str, layout.dp_ranks(CONFIG.dp)))
        for layout in layouts()
    )
    return drawing.svg(
        end + 52,
        "How a plan is laid over processes",
        f"On the left the plan: {CONFIG.dp} data-parallel ranks of {CONFIG.pp} stages. On the right {PROCESSES} "
        f"processes: {served}. Each does the actions of its ranks one after another. Activations go from the first "
        "stage to the last, their gradients back. The two replicas of a stage gather their weights before a step and "
        "sum their gradients once after it.",
    )


if __name__ == "__main__":
    write_pictures({"distributed": draw})
