"""Draws context-parallel.svg: one step on four ranks without and with context-parallel groups, as it is planned.

The same plan gives the same bytes. Run it after a change of the planner: python docs/draw_context_parallel.py [FOLDER]
"""

from __future__ import annotations

from dataclasses import replace

from drawing import FAINT, INK, LANE, LINE, SHORT, SPLIT, WIDTH, Drawing, planned, write_pictures

import chunkplan
from chunkplan.planfile.plan import Chunk, PlanStep

LENGTHS = [30000, 20000, 12000, 8000, 7000, 6000, 5000, 4000, 3000]
CONFIG = chunkplan.PlanConfig(chunk_size=8192, k=2, dp=4, cp="off")

# Everything is measured in units of the view box.
LEFT, RIGHT, GAP = 72, WIDTH - 14, 26
TOP, PITCH, HEIGHT = 74, 40, 32
STRIP_HEIGHT = 26

#: Dark and pale colours of the longest sequences, longest first; others are grey.
COLOURS = [*SPLIT, ("#276749", "#bfe3cd"), ("#6b3fa0", "#dcc6f7")]


def letter(sequence: int) -> str:
    """The name of a sequence in the picture."""
    return chr(ord("A") + sequence)


def draw_frame(drawing: Drawing, x: float, y: float, width: float, chunk: Chunk) -> None:
    """Draw what lies behind a shared chunk on all ranks that share it; x, y is where it is on the first of them."""
    pale = COLOURS[chunk.segments[0].sequence_id][1]
    drawing.box(x + 0.5, y - 4, width - 1, PITCH * (chunk.cp_size - 1) + HEIGHT + 8, fill=pale)


def draw_chunk(drawing: Drawing, x: float, y: float, width: float, chunk: Chunk) -> None:
    """Draw a chunk as long as it takes, with the sequences in it."""
    sequence = chunk.segments[0].sequence_id
    is_long = sequence < len(COLOURS)
    fill, ink = (COLOURS[sequence][0], "#ffffff") if is_long else (SHORT, INK)
    drawing.box(x + 0.5, y, width - 1, HEIGHT, fill=fill, stroke="" if is_long else LINE)
    words = ", ".join(dict.fromkeys(letter(segment.sequence_id) for segment in chunk.segments))
    if chunk.group_size > 1:
        words += f" {chunk.group_index + 1}/{chunk.group_size}"
    drawing.text(x + width / 2, y + 21, words, size=11, fill=ink, anchor="middle")


def draw_lanes(drawing: Drawing, x: float, scale: float, step: PlanStep) -> None:
    """Draw what each rank does over time, from `x` on, `scale` units a microsecond."""
    places = []  # of each chunk: left, top, width
    for rank, chunks in step.chunks.items():
        y = TOP + PITCH * rank
        drawing.box(x, y, max(step.schedule_us.values()) * scale, HEIGHT, fill=LANE, stroke="#cbd2d9")
        left = x
        for chunk in chunks:
            places.append((left, y, chunk.cost * scale, chunk))
            left += chunk.cost * scale
            if chunk.cp_size > 1 and chunk.cp_first_rank == rank:
                draw_frame(drawing, *places[-1])
    for place in places:
        draw_chunk(drawing, *place)


def draw_strip(drawing: Drawing, y: float, sequence: int, step: PlanStep) -> None:
    """Draw the tokens of a shared sequence, cut into chunks and slices, each with the rank that has it."""
    scale = (RIGHT - LEFT) / LENGTHS[0]
    dark, pale = COLOURS[sequence]
    drawing.text(14, y + 18, letter(sequence), bold=True)
    drawing.text(28, y + 18, f"{LENGTHS[sequence]:,}", size=11, fill=FAINT)
    for rank, chunks in step.chunks.items():
        for chunk in chunks:
            fill, ink = (dark, "#ffffff") if chunk.group_index % 2 == 0 else (pale, INK)
            for segment in chunk.segments:
                if segment.sequence_id != sequence:
                    continue
                x, width = LEFT + segment.start * scale, (segment.end - segment.start) * scale
                drawing.box(x + 0.5, y, width - 1, STRIP_HEIGHT, fill=fill)
                drawing.text(x + width / 2, y + 17, f"rank {rank}", size=11, fill=ink, anchor="middle")


def draw() -> str:
    """Draw the whole picture, as SVG."""
    steps = []
    for cp in ("off", "auto"):
        with planned(LENGTHS, replace(CONFIG, cp=cp)) as plan:
            steps += plan.iter_steps()
    slowest = [max(step.schedule_us.values()) for step in steps]
    scale = (RIGHT - LEFT - GAP) / sum(slowest)
    shared = sorted(
        {chunk.segments[0].sequence_id for own in steps[1].chunks.values() for chunk in own if chunk.cp_size > 1}
    )
    names = " and ".join([", ".join(map(letter, shared[:-1])), letter(shared[-1])])
    drawing, x = Drawing(), float(LEFT)
    for rank in range(CONFIG.dp):
        drawing.text(14, TOP + PITCH * rank + 21, f"rank {rank}")
    heads = (
        ("Without groups", "Every sequence is on one rank: all wait for A."),
        ("With groups", f"Ranks share {names}."),
    )
    for step, time, (title, words) in zip(steps, slowest, heads, strict=True):
        drawing.text(x, 31, f"{title}: {time / 1e6:.2f} s", size=15, bold=True)
        drawing.text(x, 52, words, fill=FAINT)
        draw_lanes(drawing, x, scale, step)
        x += time * scale + GAP
    y = TOP + PITCH * CONFIG.dp + 10
    drawing.text(LEFT, y + 4, "A box is a chunk, as long as its forward and backward take.", fill=FAINT)
    drawing.arrow(RIGHT - 14, y)
    drawing.text(RIGHT - 20, y + 4, "time", fill=FAINT, anchor="end")
    y += 44
    drawing.text(14, y, "Which tokens each rank has of them", size=15, bold=True)
    words = "A chunk is cut into two slices a rank, one from either end. The second chunk of a sequence is pale."
    drawing.text(14, y + 21, words, fill=FAINT)
    y += 36
    for sequence in shared:
        draw_strip(drawing, y, sequence, steps[1])
        y += STRIP_HEIGHT + 8
    return drawing.svg(
        y + 6,
        "A step without and with context-parallel groups",
        f"Two timelines of {CONFIG.dp} ranks. Without groups sequence A is on rank 0 alone, and the step takes "
        f"{slowest[0] / 1e6:.2f} s; with groups blocks of ranks begin with what they share, {names}, the widest block "
        f"first, then each does its own sequences, and the step takes {slowest[1] / 1e6:.2f} s. Below, the tokens of "
        "the shared sequences: each chunk is cut into slices, of which a rank has one from the front and one from the "
        "back.",
    )


if __name__ == "__main__":
    write_pictures({"context-parallel": draw})
