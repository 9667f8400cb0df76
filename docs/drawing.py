"""What the programs that draw the pictures share: a plan, colours, an SVG under construction, arrows, the legend."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

import chunkplan
from chunkplan.planfile.plan import Plan

#: The pictures' width in units of the view box, which is as wide as a page of text.
WIDTH = 760

INK, FAINT, LINE, PAPER, LANE = "#1f2933", "#52606d", "#9aa5b1", "#f7f8fa", "#ffffff"
SHORT = "#dfe4ea"
#: Split sequences, longest first: the colour of what holds activations, and of what leaves keys and values only.
SPLIT = [("#1d5fa8", "#bcd5f0"), ("#a6480f", "#f3cdb3")]
#: An op's letter, its colour and that of the letter.
ACTIONS = {
    "forward": ("F", "#276749", "#ffffff"),
    "forward_kv": ("f", "#bfe3cd", INK),
    "recompute": ("R", "#dcc6f7", INK),
    "backward": ("B", "#52606d", "#ffffff"),
}


@contextmanager
def planned(lengths: list[int], config: chunkplan.PlanConfig) -> Iterator[Plan]:
    """Build the plan of sequences of `lengths`; within the block its folder is there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lengths.npy"
        np.save(file, np.array(lengths))
        yield chunkplan.build(file, Path(folder) / "plan", config)


class Drawing:
    """A picture of SVG elements, one after another."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, fill: str = INK, bold: bool = False, anchor: str = ""
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        align = f' text-anchor="{anchor}"' if anchor else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{weight}{align}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, stroke: str = "", dashed: bool = False
    ) -> None:
        line = (f' stroke="{stroke}"' if stroke else "") + (' stroke-dasharray="3 3"' if dashed else "")
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{fill}"{line}/>'
        )

    def arrow(self, x: float, y: float) -> None:
        path = f"M{x:g} {y:g}h14m-5 -5l5 5l-5 5"
        self.elements.append(f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="2"/>')

    def svg(self, height: float, title: str, description: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'aria-labelledby="title description" font-family="sans-serif">'
        )
        described = f'<title id="title">{escape(title)}</title>\n<desc id="description">{escape(description)}</desc>'
        paper = f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{PAPER}"/>'
        return "\n".join([head, described, paper, *self.elements, "</svg>"]) + "\n"


def arrow(drawing: Drawing, points: tuple[float, float, float, float], colour: str, *, both: bool = False) -> None:
    """Draw an arrow from x, y to x, y, straight along one of the axes, with a head at the end or at both."""
    x, y, to_x, to_y = points
    right, down = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    path = f"M{x:g} {y:g}L{to_x:g} {to_y:g}"
    for tip_x, tip_y, sign in ((to_x, to_y, 1), (x, y, -1))[: 1 + both]:
        back_x, back_y = tip_x - 5 * sign * right, tip_y - 5 * sign * down
        path += f"M{back_x - 4 * down:g} {back_y - 4 * right:g}L{tip_x:g} {tip_y:g}"
        path += f"L{back_x + 4 * down:g} {back_y + 4 * right:g}"
    drawing.elements.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')


def draw_legend(drawing: Drawing, x: float, y: float, words: tuple[str, ...]) -> None:
    """Draw what the letters of the actions mean: `words` for each of them, in their order."""
    for (name, fill, ink), label in zip(ACTIONS.values(), words, strict=True):
        drawing.box(x, y - 14, 17, 18, fill=fill)
        drawing.text(x + 8.5, y, name, fill=ink, bold=True, anchor="middle")
        drawing.text(x + 23, y, label)
        x += 42 + 6.1 * len(label)


def write_pictures(pictures: dict[str, Callable[[], str]]) -> None:
    """Write each as NAME.svg into the folder that the command line names, or else beside this file."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in pictures.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8", newline="\n")
