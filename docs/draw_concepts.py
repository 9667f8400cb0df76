"""Draws concepts-chunks.svg, -attention.svg, -order.svg and -pipeline.svg: one small step, as the planner makes it.

The same chunks give the same bytes. Run it after a change of the planner: python docs/draw_concepts.py [FOLDER]
"""

from __future__ import annotations

from itertools import chain

from drawing import (
    ACTIONS,
    FAINT,
    INK,
    LANE,
    LINE,
    SHORT,
    SPLIT,
    WIDTH,
    Drawing,
    arrow,
    draw_legend,
    planned,
    write_pictures,
)

import chunkplan
from chunkplan.operations import OPS
from chunkplan.planfile.plan import Chunk
from chunkplan.reporting.gantt import bars_of
from chunkplan.schedule.timeline import Simulation

LENGTHS = [20000, 5200, 3900, 3100, 2600, 2100, 1700, 1100, 700]
CHUNK_SIZE = 8192
#: A sequence of five parts, whose order is drawn for several K.
PARTS, KS = 5, (1, 2, 5)
STAGES = 3

LEFT, RIGHT = 14, WIDTH - 14
DARK, PALE = SPLIT[0]


def name_of(sequence: int) -> str:
    """The name of a sequence in the pictures."""
    return chr(ord("A") + sequence)


def simulated(lengths: list[int], *, k: int, pp: int) -> Simulation:
    """A step of sequences of `lengths` as the planner chunks and orders it; a token's forward takes a unit of time."""
    return chunkplan.simulate_lengths(lengths, chunk_size=CHUNK_SIZE, k=k, pp=pp, cost="unit")


def is_split(sequence: int) -> bool:
    """Whether a sequence has parts."""
    return LENGTHS[sequence] > CHUNK_SIZE


def draw_chunks() -> str:
    """Draw sequences on the left, their chunks on the right, and below them the segments of the split one."""
    drawing, chunks = Drawing(), simulated(LENGTHS, k=2, pp=1).chunks
    drawing.text(LEFT, 30, "The sequences of a step", size=15, bold=True)
    for sequence, length in enumerate(LENGTHS):
        y, width = 48 + 22 * sequence, length / LENGTHS[0] * 205
        drawing.text(LEFT + 5, y + 13, name_of(sequence), anchor="middle")
        drawing.box(LEFT + 16, y, width, 16, fill=DARK if is_split(sequence) else SHORT, stroke=LINE)
        inside = is_split(sequence)
        x, anchor = (LEFT + 10 + width, "end") if inside else (LEFT + 22 + width, "")
        drawing.text(x, y + 13, f"{length:,}", size=11, fill="#ffffff" if inside else FAINT, anchor=anchor)
    drawing.arrow(256, 25)
    drawing.text(290, 30, f"Its chunks, of at most {CHUNK_SIZE:,} tokens", size=15, bold=True)
    for chunk in chunks:
        draw_chunk(drawing, 306, 48 + 38 * chunk.chunk_id, 240, chunk)
    draw_kinds(drawing, 560, chunks)
    end = draw_parts(drawing, 282, chunks)
    return drawing.svg(
        end,
        "Sequences, chunks and segments",
        f"{len(LENGTHS)} sequences become {len(chunks)} chunks. Two are standalone: whole short sequences. Three are "
        "the group of sequence A, which is longer than a chunk; the last is mixed: a part of A, and short ones.",
    )


def draw_chunk(drawing: Drawing, x: float, y: float, width: float, chunk: Chunk) -> None:
    """Draw one chunk: its number, its segments, and dashed the room that is left."""
    drawing.text(x - 8, y + 18, str(chunk.chunk_id), fill=FAINT, anchor="end")
    drawing.box(x, y, width, 26, fill="none", stroke=LINE, dashed=True)
    for segment in chunk.segments:
        wide = (segment.end - segment.start) / CHUNK_SIZE * width
        part = is_split(segment.sequence_id)
        words = name_of(segment.sequence_id) + (f" {chunk.group_index + 1}/{chunk.group_size}" if part else "")
        drawing.box(x, y, wide, 26, fill=DARK if part else SHORT, stroke=LINE)
        drawing.text(x + wide / 2, y + 18, words, fill="#ffffff" if part else INK, anchor="middle")
        x += wide


def draw_kinds(drawing: Drawing, x: float, chunks: tuple[Chunk, ...]) -> None:
    """Label each chunk, and mark which of them are a group."""
    for chunk in chunks:
        y = 48 + 38 * chunk.chunk_id
        if chunk.kind == "standalone":
            lines = ("standalone:", "whole sequences")
        elif chunk.kind == "dependent":
            lines = ("a part of A, which is", "one segment of it")
        else:
            lines = ("mixed: a part of A,", "and whole short ones")
        for row, line in enumerate(lines):
            drawing.text(x, y + 11 + 15 * row, line, fill=FAINT)
    group = [chunk.chunk_id for chunk in chunks if chunk.group_id is not None]
    top, bottom = 48 + 38 * group[0], 48 + 38 * group[-1] + 26
    drawing.box(694, top, 2, bottom - top, fill=DARK)
    for row, line in enumerate(("group:", "chunks", "of A")):
        drawing.text(702, (top + bottom) / 2 - 11 + 15 * row, line, fill=DARK, bold=True)


def draw_parts(drawing: Drawing, top: float, chunks: tuple[Chunk, ...]) -> float:
    """Draw the split sequence as one bar of its segments, and the prefix of the last; returns where it ends."""
    drawing.text(LEFT, top, "The segments of A", size=15, bold=True)
    scale, y = (RIGHT - LEFT) / LENGTHS[0], top + 14
    parts = [chunk for chunk in chunks if chunk.group_id is not None]
    for chunk in parts:
        segment = chunk.segments[0]
        x, wide = LEFT + segment.start * scale, (segment.end - segment.start) * scale
        drawing.box(x, y, wide, 26, fill=DARK, stroke="#ffffff")
        words = f"{segment.start:,} to {segment.end:,}"
        drawing.text(x + wide / 2, y + 18, words, size=11, fill="#ffffff", anchor="middle")
    border = LEFT + parts[-1].prefix_tokens * scale
    drawing.box(LEFT, y + 33, border - LEFT - 2, 20, fill=PALE, stroke=DARK)
    words = f"prefix of part {len(parts)}: the {parts[-1].prefix_tokens:,} tokens before it, which it attends to"
    drawing.text((LEFT + border) / 2, y + 47, words, anchor="middle")
    return y + 68


def draw_block(drawing: Drawing, x: float, y: float, width: float, height: float, words: str) -> None:
    """Draw the attention of some queries to keys that all lie before them."""
    drawing.box(x, y, width, height, fill=PALE, stroke="#ffffff")
    drawing.text(x + width / 2, y + height / 2 + 4, words, size=11, anchor="middle")


def draw_triangle(drawing: Drawing, x: float, y: float, side: float, fill: str) -> None:
    """Draw the attention of tokens to themselves and those before them."""
    drawing.elements.append(f'<path d="M{x:g} {y:g}v{side:g}h{side:g}z" fill="{fill}"/>')


def draw_attention() -> str:
    """Draw three squares of queries (down) and keys (right): forward, backward, and inside of a mixed chunk."""
    drawing, chunks = Drawing(), simulated(LENGTHS, k=2, pp=1).chunks
    parts = [chunk.segments[0] for chunk in chunks if chunk.group_id is not None]
    others = " and ".join(name_of(segment.sequence_id) for segment in chunks[-1].segments[1:])
    scale, top = 186 / LENGTHS[0], 96
    titles = (
        (40, "Forward, ascending", "Part 3 reads the keys and", "values of parts 1 and 2."),
        (300, "Backward, descending", "Keys and values of part 1 get", "gradients from all three."),
        (546, "In a mixed chunk", f"{others}, which share it,", "see themselves only."),
    )
    for x, title, *lines in titles:
        drawing.text(x, 30, title, size=15, bold=True)
        for row, line in enumerate(lines):
            drawing.text(x, 50 + 16 * row, line, fill=FAINT)
    for left in (40, 300):
        for row, queries in enumerate(parts):
            y, high = top + queries.start * scale, (queries.end - queries.start) * scale
            drawing.text(left - 8, y + high / 2 + 4, str(row + 1), fill=FAINT, anchor="end")
            for column, keys in enumerate(parts[:row]):
                wide = (keys.end - keys.start) * scale
                words = f"{row + 1} reads {column + 1}" if left == 40 else f"{row + 1} to {column + 1}"
                draw_block(drawing, left + keys.start * scale, y, wide, high, words)
            draw_triangle(drawing, left + queries.start * scale, y, high, DARK)
    down = top + LENGTHS[0] * scale
    arrow(drawing, (244, top, 244, down), ACTIONS["forward"][1])
    arrow(drawing, (504, down, 504, top), ACTIONS["backward"][1])
    drawing.elements.append(
        f'<path d="M300 {top}h{parts[0].end * scale:g}v{down - top:g}h-{parts[0].end * scale:g}z" fill="none" '
        f'stroke="{SPLIT[1][0]}" stroke-width="2" stroke-dasharray="5 3"/>'
    )
    drawing.text(300, down + 20, "their sum: complete when 3,", fill=SPLIT[1][0])
    drawing.text(300, down + 36, "2 and 1 have run backward", fill=SPLIT[1][0])
    drawing.text(40, down + 20, "down: queries, right: keys", fill=FAINT)
    draw_mixed(drawing, 546, top, chunks[-1])
    return drawing.svg(
        down + 52,
        "Who attends to whom",
        "A part of a sequence attends to itself and all parts before it, so that parts go forward in ascending order. "
        "The keys and values of a part get gradients from itself and all parts after it, so that parts go backward in "
        "descending order. Short sequences in the same chunk see themselves only.",
    )


def draw_mixed(drawing: Drawing, x: float, y: float, chunk: Chunk) -> None:
    """Draw the attention of a mixed chunk, whose first segment is a part: its prefix is drawn shorter than it is."""
    prefix, own = 60, 104
    scale = own / chunk.num_tokens
    drawing.box(x + prefix, y, own, own, fill=LANE, stroke=LINE)
    draw_block(drawing, x, y, prefix, (chunk.segments[0].end - chunk.segments[0].start) * scale, "prefix")
    corner = float(x + prefix)
    for segment in chunk.segments:
        side = (segment.end - segment.start) * scale
        part = is_split(segment.sequence_id)
        draw_triangle(drawing, corner, y, side, DARK if part else FAINT)
        words = name_of(segment.sequence_id) + (f" {chunk.group_index + 1}/{chunk.group_size}" if part else "")
        drawing.text(x + prefix + own + 6, y + side / 2 + 5, words, fill=FAINT)
        corner, y = corner + side, y + side


def draw_order() -> str:
    """Draw the order of a group's actions for several K, and below each action what is held then."""
    drawing, wide, top = Drawing(), 46.0, 66.0
    drawing.text(LEFT, 30, f"A sequence of {PARTS} parts", size=15, bold=True)
    words = "Below each action: which parts hold activations then, and which keys and values only."
    drawing.text(LEFT, 50, words, fill=FAINT)
    for k in KS:
        simulation = simulated([PARTS * CHUNK_SIZE], k=k, pp=1)
        drawing.text(LEFT, top + 20, f"K = {k}", bold=True)
        for place, (op, part) in enumerate(zip(simulation.actions.ops, simulation.actions.chunk_ids, strict=True)):
            name, fill, ink = ACTIONS[OPS[op]]
            drawing.box(LEFT + 70 + place * wide, top, wide - 4, 26, fill=fill)
            x = LEFT + 70 + place * wide + wide / 2 - 2
            drawing.text(x, top + 18, f"{name}{part + 1}", fill=ink, bold=True, anchor="middle")
        drawing.text(LEFT, top + 44, f"part {PARTS}", size=11, fill=FAINT)
        drawing.text(LEFT, top + 30 + 14 * PARTS, "part 1", size=11, fill=FAINT)
        for place, held in enumerate(held_parts(simulation)):
            for part, state in enumerate(held):
                y = top + 34 + 14 * (PARTS - 1 - part)
                fill = {"activations": DARK, "keys and values": PALE, "": LANE}[state]
                drawing.box(LEFT + 70 + place * wide, y, wide - 4, 11, fill=fill, stroke="" if state else "#e4e7eb")
        top += 34 + 14 * PARTS + 24
    draw_legend(drawing, LEFT, top + 6, ("forward", "forward, leaves keys and values only", "recompute", "backward"))
    for x, fill, words in ((LEFT, DARK, "holds activations"), (LEFT + 160, PALE, "holds keys and values only")):
        drawing.box(x, top + 22, 17, 11, fill=fill)
        drawing.text(x + 23, top + 32, words)
    return drawing.svg(
        top + 50,
        "The order of a group, and what is held",
        f"A sequence of {PARTS} parts with K = {', '.join(map(str, KS))}. Parts go forward ascending and backward "
        "descending. At no time more than K of them hold activations; the others hold keys and values only and are "
        "recomputed directly before their backward.",
    )


def held_parts(simulation: Simulation) -> list[list[str]]:
    """List for each action of a group on one stage what each part holds while it runs."""
    states, during = [""] * PARTS, []
    for op, part in zip(simulation.actions.ops, simulation.actions.chunk_ids, strict=True):
        states[part] = "keys and values" if OPS[op] == "forward_kv" else "activations"
        during.append(states.copy())
        if OPS[op] == "backward":
            states[part] = ""
    return during


def draw_pipeline() -> str:
    """Draw what each stage does when with the chunks of the step."""
    # The chunks of the first picture: on a pipeline only `tail_sharing` mixes parts and short sequences.
    config = chunkplan.PlanConfig(chunk_size=CHUNK_SIZE, k=2, pp=STAGES, tail_sharing=True, keep_attention="off")
    with planned(LENGTHS, config) as plan:
        simulation = chunkplan.simulate_plan(plan)
    assert simulation.chunks == simulated(LENGTHS, k=2, pp=1).chunks
    drawing, top = Drawing(), 70.0
    drawing.text(LEFT, 30, f"The same chunks on {STAGES} pipeline stages", size=15, bold=True)
    words = "A box is an action: an op, and the number of a chunk. Where a lane is empty, the stage waits: the bubble."
    drawing.text(LEFT, 50, words, fill=FAINT)
    left, scale = 76, (RIGHT - 76) / simulation.ends.max()
    for stage in range(STAGES):
        y = top + 40 * stage
        drawing.text(LEFT, y + 19, f"stage {stage}")
        drawing.box(left, y, RIGHT - left, 30, fill=LANE, stroke="#cbd2d9")
    for bar in chain.from_iterable(bars_of({simulation.rank: simulation})):
        name, fill, ink = ACTIONS[OPS[bar.op]]
        x, y, wide = left + bar.start * scale, top + 40 * bar.row, (bar.end - bar.start) * scale
        drawing.box(x + 0.5, y + 1, wide - 1, 22, fill=fill)
        if bar.chunk.group_id is not None:
            drawing.box(x + 0.5, y + 25, wide - 1, 3, fill=DARK)
        drawing.text(x + wide / 2, y + 16, f"{name}{bar.chunk.chunk_id}", size=11, fill=ink, bold=True, anchor="middle")
    end = top + 40 * STAGES + 12
    drawing.arrow(RIGHT - 14, end)
    drawing.text(RIGHT - 20, end + 4, "time", fill=FAINT, anchor="end")
    draw_legend(drawing, LEFT, end + 30, ("forward", "forward, leaves keys and values only", "recompute", "backward"))
    drawing.box(LEFT, end + 50, 17, 3, fill=DARK)
    drawing.text(LEFT + 23, end + 56, "a chunk of the group of A; its parts are the last three chunks")
    return drawing.svg(
        end + 74,
        "A step on a pipeline",
        f"{STAGES} stages do forwards, recomputes and backwards of {len(simulation.chunks)} chunks. Each chunk goes "
        "forward from the first stage to the last and backward from the last to the first; the parts of the split "
        "sequence go forward ascending and backward descending on every stage.",
    )


if __name__ == "__main__":
    write_pictures(
        {
            "concepts-chunks": draw_chunks,
            "concepts-attention": draw_attention,
            "concepts-order": draw_order,
            "concepts-pipeline": draw_pipeline,
        }
    )
