"""Draws tune.svg: what `chunkplan tune` prints for the sample data, at 100 columns.

The same data give the same bytes. Run it after a change of the screen or the planner:
python docs/draw_screens.py [FOLDER]
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from drawing import FAINT, INK, LANE, LINE, WIDTH, Drawing, write_pictures
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

import chunkplan

SAMPLE = Path(__file__).parent.parent / "sample_data"
COMMAND = "chunkplan tune --gpus 8 --global-batch 128 --chunk-sizes 7168,14336 --ks 1 --schedules auto"
COLUMNS = 100

# Everything is measured in units of the view box.
SIZE, LINE_HEIGHT, LEFT, TOP = 12, 16.5, 20, 30
COLUMN = (WIDTH - 2 * LEFT) / COLUMNS


def printed() -> str:
    """What the command prints on stdout, with codes for bold and dim."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        chunkplan.analyze([SAMPLE], workspace / "analysis", tokenizer=SAMPLE / "tokenizer")
        kept = {name: os.environ[name] for name in ("NUMBA_CACHE_DIR", "HOME") if name in os.environ}
        program = [str(Path(sys.executable).parent / "chunkplan"), *shlex.split(COMMAND)[1:]]
        ran = subprocess.run(
            [*program, "--workspace", folder],
            env={**kept, "PATH": "", "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm"},
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout


def draw_line(drawing: Drawing, y: float, line: str) -> None:
    """Draw a line of the screen: every word group at its own column, so that columns stay straight in any font."""
    column = 0
    for segment in Text.from_ansi(line).render(Console()):
        for group in re.finditer(r"\S+(?: \S+)*", segment.text):
            draw_words(drawing, column + group.start(), y, group[0], segment)
        column += len(segment.text)


def draw_words(drawing: Drawing, column: int, y: float, words: str, segment: Segment) -> None:
    """Draw words that begin at a column, as wide as they are on the screen."""
    bold = ' font-weight="bold"' if segment.style and segment.style.bold else ""
    fill = FAINT if segment.style and segment.style.dim else INK
    place = f'x="{LEFT + column * COLUMN:g}" y="{y:g}" textLength="{len(words) * COLUMN:g}"'
    style = f'font-size="{SIZE}" fill="{fill}"{bold} font-family="monospace" lengthAdjust="spacingAndGlyphs"'
    drawing.elements.append(f"<text {place} {style}>{escape(words)}</text>")


def draw_tune() -> str:
    """Draw the screen with the command above it."""
    drawing = Drawing()
    lines = printed().rstrip().splitlines()
    height = TOP + (len(lines) + 2) * LINE_HEIGHT + 8
    drawing.box(8, 8, WIDTH - 16, height - 16, fill=LANE, stroke=LINE)
    for row, line in enumerate((f"\x1b[1m$ {COMMAND}\x1b[0m", "", *lines)):
        draw_line(drawing, TOP + row * LINE_HEIGHT, line)
    words = "\n".join(Text.from_ansi(line).plain.rstrip() for line in lines)
    return drawing.svg(height, f"What `{COMMAND}` prints for the sample data", words)


if __name__ == "__main__":
    write_pictures({"tune": draw_tune})
