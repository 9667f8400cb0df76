"""Draws planner.svg: one step of a small plan, as `chunkplan.build` makes it, from its sequences to its actions.

The same plan gives the same bytes. Run it after a change of the planner: python docs/draw_planner.py [FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable

from drawing import ACTIONS, FAINT, INK, LANE, LINE, SHORT, SPLIT, WIDTH, Drawing, draw_legend, planned, write_pictures

import chunkplan
from chunkplan.planfile.plan import Action, Chunk, PlanStep

LENGTHS = [27500, 12000, 7400, 5200, 4700, 3900, 3100, 2600, 2100, 1700, 1300, 1000, 800, 600]
CONFIG = chunkplan.PlanConfig(chunk_size=8192, k=2, dp=2, cp="off")

# Everything is measured in units of the view box.
STEP_X, RANK_X, CHUNK_X, ORDER_X = 14, 166, 322, 534
BAR_WIDTH, CHUNK_WIDTH, ACTION_WIDTH = 110, 180, 17.5
TOP, BAR_PITCH, BAR_HEIGHT, CHUNK_PITCH, CHUNK_HEIGHT = 86, 17, 12, 29, 22
LANE_HEAD, LANE_GAP = 27, 14


def letter(sequence: int) -> str:
    """The name of a sequence in the picture."""
    return chr(ord("A") + sequence)


def colour(sequence: int) -> str:
    """The colour of a whole sequence."""
    return SPLIT[sequence][0] if LENGTHS[sequence] > CONFIG.chunk_size else SHORT


def draw_bar(drawing: Drawing, x: float, y: float, sequence: int, *, count: bool) -> None:
    """Draw one sequence: its letter, and a bar as long as its tokens; y is the bar's top."""
    width = LENGTHS[sequence] / LENGTHS[0] * BAR_WIDTH
    drawing.text(x + 5, y + BAR_HEIGHT - 2, letter(sequence), anchor="middle")
    drawing.box(x + 14, y, width, BAR_HEIGHT, fill=colour(sequence), stroke=LINE if colour(sequence) == SHORT else "")
    if count:
        inside = width > BAR_WIDTH / 2
        place = (x + 14 + width - 4, "end", "#ffffff") if inside else (x + 14 + width + 4, "", FAINT)
        drawing.text(place[0], y + BAR_HEIGHT - 2, f"{LENGTHS[sequence]:,}", size=11, anchor=place[1], fill=place[2])


def draw_chunk(drawing: Drawing, y: float, chunk: Chunk) -> None:
    """Draw one chunk: its number, the room it has, its segments."""
    drawing.text(CHUNK_X - 7, y + 16, str(chunk.chunk_id), fill=FAINT, anchor="end")
    drawing.box(CHUNK_X, y, CHUNK_WIDTH, CHUNK_HEIGHT, fill="none", stroke=LINE, dashed=True)
    x = float(CHUNK_X)
    for segment in chunk.segments:
        sequence = segment.sequence_id
        width = (segment.end - segment.start) / CONFIG.chunk_size * CHUNK_WIDTH
        if LENGTHS[sequence] > CONFIG.chunk_size:
            dark, pale = SPLIT[sequence]
            fill, stroke, ink = (dark, dark, "#ffffff") if chunk.keeps_activations else (pale, dark, INK)
            words = f"{letter(sequence)} {chunk.group_index + 1}/{chunk.group_size}"
        else:
            fill, stroke, ink, words = SHORT, LINE, INK, letter(sequence)
        drawing.box(x, y, width, CHUNK_HEIGHT, fill=fill, stroke=stroke)
        drawing.text(x + width / 2, y + 16, words, fill=ink, anchor="middle")
        x += width


def draw_actions(drawing: Drawing, rows: Callable[[int], float], chunks: list[Chunk], actions: list[Action]) -> None:
    """Draw what a rank does from left to right, each action in the row of its chunk; `rows` gives their tops."""
    for chunk in chunks:
        y = rows(chunk.chunk_id) + CHUNK_HEIGHT / 2
        drawing.box(ORDER_X, y, ACTION_WIDTH * len(actions), 0.5, fill=LINE)
    for place, action in enumerate(actions):
        words, fill, ink = ACTIONS[action.op]
        x, y = ORDER_X + place * ACTION_WIDTH, rows(action.chunk_id)
        drawing.box(x + 0.5, y, ACTION_WIDTH - 1, CHUNK_HEIGHT, fill=fill)
        drawing.text(x + ACTION_WIDTH / 2, y + 16, words, fill=ink, bold=True, anchor="middle")


def draw_rank(drawing: Drawing, rank: int, top: float, step: PlanStep) -> float:
    """Draw the lane of one rank: its sequences, chunks and actions; returns where it ends."""
    chunks = step.chunks[rank]
    sequences = sorted({segment.sequence_id for chunk in chunks for segment in chunk.segments})
    height = LANE_HEAD + 6 + max(len(sequences) * BAR_PITCH, len(chunks) * CHUNK_PITCH)
    first = top + LANE_HEAD
    drawing.box(RANK_X - 10, top, WIDTH - RANK_X, height, fill=LANE, stroke="#cbd2d9")
    drawing.text(RANK_X, top + 18, f"Rank {rank}", bold=True)
    tokens = sum(chunk.num_tokens for chunk in chunks)
    seconds = step.schedule_us[rank, 0] / 1e6
    drawing.text(RANK_X + 52, top + 18, f"{tokens:,} tokens, {seconds:.2f} s predicted", fill=FAINT)
    for row, sequence in enumerate(sequences):
        draw_bar(drawing, RANK_X, first + 4 + row * BAR_PITCH, sequence, count=False)
    for chunk in chunks:
        draw_chunk(drawing, first + chunk.chunk_id * CHUNK_PITCH, chunk)
    draw_actions(drawing, lambda chunk: first + chunk * CHUNK_PITCH, chunks, step.actions[rank, 0])
    return top + height


def draw_heads(drawing: Drawing) -> None:
    """Draw the heading of each column."""
    heads = [
        (STEP_X, "1  Take a step", f"{len(LENGTHS)} sequences,", f"{sum(LENGTHS):,} tokens"),
        (RANK_X, "2  Assign", "by predicted time,", f"to {CONFIG.dp} ranks"),
        (CHUNK_X, "3  Split and pack", "into chunks of at", f"most {CONFIG.chunk_size:,} tokens"),
        (ORDER_X, "4  Order", f"at most K = {CONFIG.k} chunks of a", "sequence hold activations"),
    ]
    for index, (x, title, *lines) in enumerate(heads):
        if index:
            drawing.arrow(x - 24, 26)
        drawing.text(x, 31, title, size=15, bold=True)
        for row, line in enumerate(lines):
            drawing.text(x, 50 + 16 * row, line, fill=FAINT)


def draw() -> str:
    """Draw the whole picture, as SVG."""
    with planned(LENGTHS, CONFIG) as plan:
        [step] = plan.iter_steps()
    drawing = Drawing()
    draw_heads(drawing)
    for sequence in range(len(LENGTHS)):
        draw_bar(drawing, STEP_X, TOP + 4 + sequence * BAR_PITCH, sequence, count=True)
    end = float(TOP)
    for rank in range(CONFIG.dp):
        end = draw_rank(drawing, rank, end, step) + LANE_GAP
    draw_legend(drawing, STEP_X, end + 12, ("forward", "forward, leaves keys and values only", "recompute", "backward"))
    words = "Blue and orange: split sequences, whose pale parts leave keys and values only. Grey: whole ones."
    drawing.text(STEP_X, end + 36, words)
    chunks = "; ".join(
        f"rank {rank} has {len(own)} chunks, {sum(chunk.group_id is not None for chunk in own)} of them parts"
        for rank, own in step.chunks.items()
    )
    return drawing.svg(
        end + 50,
        "How a step becomes chunks and actions",
        f"From left to right: the {len(LENGTHS)} sequences of a step; the same assigned to {CONFIG.dp} ranks whose "
        f"predicted times are alike; their chunks ({chunks} of split sequences, short ones in the room at their ends); "
        "what each rank does with its chunks in order: parts forward ascending, backward descending, recomputed where "
        "only keys and values were kept.",
    )


if __name__ == "__main__":
    write_pictures({"planner": draw})
