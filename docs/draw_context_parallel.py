"""Draws context-parallel.svg: one step on four ranks without and with context-parallel groups, as it is planned.

The same plan gives the same bytes. Run it after a change of the planner: python docs/draw_context_parallel.py [FOLDER]
"""

from __future__ import annotations

from dataclasses import replace

from drawing import FAINT, INK, LANE, LINE, SHORT, SPLIT, WIDTH, Drawing, planned, write_pictures

import chunkplan
from chunkplan.planfile.plan import Chunk, PlanStep

LENGTHS = [30000, 20000, 12000, 7400, 6800, 6100, 5200, 4700]
CONFIG = chunkplan.PlanConfig(chunk_size=8192, k=2, dp=4)

LEFT, RIGHT, GAP = 62, WIDTH - 14, 26
TOP, PITCH, HEIGHT = 82, 40, 32
STRIP_LEFT, STRIP_HEIGHT = 62, 26

#: Of each sequence that is in several chunks or on several ranks, longest first: dark, and pale for recomputing.
COLOURS = [*SPLIT, ("#276749", "#bfe3cd"), ("#6b3fa0", "#dcc6f7")]


def letter(sequence: int) -> str:
    """The name of a sequence in the picture."""
    return chr(ord("A") + sequence)


def colour(chunk: Chunk) -> tuple[str, str]:
    """The fill of a chunk, and the colour of its letters."""
    sequence = chunk.segments[0].sequence_id
    if sequence >= len(COLOURS) or chunk.group_id is None:
        return SHORT, INK
    return COLOURS[sequence][0], "#ffffff"


def draw_lanes(drawing: Drawing, x: float, scale: float, step: PlanStep) -> None:
    """Draw what each rank does over time, from `x` on, `scale` units a microsecond: a box for each chunk."""
    slowest = max(step.schedule_us.values())
    for rank, chunks in step.chunks.items():
        y = TOP + PITCH * rank
        drawing.box(x, y, slowest * scale, HEIGHT, fill=LANE, stroke="#cbd2d9")
        left = x
        for chunk in chunks:
            width = chunk.cost * scale
            fill, ink = colour(chunk)
            drawing.box(left + 0.5, y, width - 1, HEIGHT, fill=fill, stroke=LINE if fill == SHORT else "")
            words = ", ".join(dict.fromkeys(letter(segment.sequence_id) for segment in chunk.segments))
            if chunk.group_size > 1:
                words += f" {chunk.group_index + 1}/{chunk.group_size}"
            drawing.text(left + width / 2, y + 21, words, size=11, fill=ink, anchor="middle")
            left += width


def draw_brackets(drawing: Drawing, x: float, scale: float, step: PlanStep) -> None:
    """Draw below the lanes nothing, and around each shared chunk a frame over all ranks that share it."""
    for rank, chunks in step.chunks.items():
        left = x
        for chunk in chunks:
            width = chunk.cost * scale
            if chunk.cp_size > 1 and chunk.cp_first_rank == rank:
                y, height = TOP + PITCH * rank - 3, PITCH * (chunk.cp_size - 1) + HEIGHT + 6
                fill = COLOURS[chunk.segments[0].sequence_id][1]
                drawing.box(left + 0.5, y, width - 1, height, fill=fill)
            left += width


def draw_strip(drawing: Drawing, y: float, sequence: int, step: PlanStep) -> None:
    """Draw the tokens of a shared sequence, cut into chunks and slices, each with the rank that holds it."""
    scale = (RIGHT - STRIP_LEFT) / LENGTHS[0]
    dark, pale = COLOURS[sequence]
    drawing.text(14, y + 18, letter(sequence), bold=True)
    drawing.text(28, y + 18, f"{LENGTHS[sequence]:,}"[:-4] + "K", fill=FAINT)
    slices = sorted(
        (segment.start, segment.end, rank, chunk.group_index)
        for rank, chunks in step.chunks.items()
        for chunk in chunks
        for segment in chunk.segments
        if segment.sequence_id == sequence
    )
    for start, end, rank, index in slices:
        x, width = STRIP_LEFT + start * scale, (end - start) * scale
        fill, ink = (dark, "#ffffff") if index % 2 == 0 else (pale, INK)
        drawing.box(x + 0.5, y, width - 1, STRIP_HEIGHT, fill=fill)
        drawing.text(x + width / 2, y + 17, f"rank {rank}" if width > 40 else str(rank), fill=ink, anchor="middle")


def draw() -> str:
    """Draw the whole picture, as SVG."""
    steps = []
    for cp in ("off", "auto"):
        with planned(LENGTHS, replace(CONFIG, cp=cp)) as plan:
            steps += plan.iter_steps()
    slowest = [max(step.schedule_us.values()) for step in steps]
    scale = (RIGHT - LEFT - GAP) / sum(slowest)
    drawing, lefts = Drawing(), (LEFT, LEFT + slowest[0] * scale + GAP)
    for rank in range(CONFIG.dp):
        drawing.text(14, TOP + PITCH * rank + 21, f"rank {rank}")
    heads = (("Without groups", "A sequence is on one rank. The others wait for A."), ("With groups", "Blocks of ranks share A, B and D."))
    for x, step, time, (title, words) in zip(lefts, steps, slowest, heads, strict=True):
        drawing.text(x, 31, f"{title}: {time / 1e6:.2f} s", size=15, bold=True)
        drawing.text(x, 52, words, fill=FAINT)
        draw_brackets(drawing, x, scale, step)
        draw_lanes(drawing, x, scale, step)
    y = TOP + PITCH * CONFIG.dp + 8
    drawing.arrow(lefts[0] + slowest[0] * scale - 14, y)
    drawing.text(lefts[0] + slowest[0] * scale - 20, y + 4, "time", fill=FAINT, anchor="end")
    y += 36
    drawing.text(14, y, "Who has which tokens of a shared sequence", size=15, bold=True)
    y += 14
    shared = sorted({chunk.segments[0].sequence_id for own in steps[1].chunks.values() for chunk in own if chunk.cp_size > 1})
    for sequence in shared:
        draw_strip(drawing, y, sequence, steps[1])
        y += STRIP_HEIGHT + 8
    return drawing.svg(
        y + 6,
        "A step without and with context-parallel groups",
        "..."
    )


if __name__ == "__main__":
    write_pictures({"context-parallel": draw})
