"""Where the numbers of baselines stand in the chart of choices: in their points, or beside points that hide others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: The plot on a narrow screen, and a baseline's point on it, in pixels.
WIDTH, HEIGHT = 250, 330
_POINT = 18
#: A digit of a number, and its height.
_DIGIT, _LINE = 7, 12

#: A point in the plot, both from 0 to 1.
Place = tuple[float, float]

#: Where a number can stand beside its point, by plotly's names: to which side.
_SIDES = {"middle right": (1, 0), "middle left": (-1, 0), "bottom center": (0, -1), "top center": (0, 1)}


class Label(NamedTuple):
    """What stands at a baseline ("" for nothing), and where, as `textposition` of plotly: in its point or beside it."""

    text: str
    position: str


def baseline_labels(baselines: Sequence[Place], others: Sequence[Place]) -> list[Label]:
    """Label `baselines`, which are numbered from 1, so that every number can be read on the narrowest screen.

    Of points that lie on each other, one has the numbers of all beside it, such as "1, 4"; so has one on which a point
    of `others` lies.
    """
    labels = [Label(str(number), "middle center") for number in range(1, len(baselines) + 1)]
    points = [*baselines, *others]
    for together in _groups(baselines):
        if len(together) == 1 and not any(_overlap(baselines[together[0]], other) for other in others):
            continue
        text = ", ".join(str(place + 1) for place in together)
        first = together[0]
        side = max(_SIDES, key=lambda side: _room(text, baselines[first], side, points))
        for place in together:
            labels[place] = Label(text, side) if place == first else Label("", "middle center")
    return labels


def _groups(baselines: Sequence[Place]) -> list[list[int]]:
    """Put points together that lie on each other, or are linked by others that do; ascending."""
    groups: list[list[int]] = []
    for place, point in enumerate(baselines):
        touched = [group for group in groups if any(_overlap(point, baselines[other]) for other in group)]
        groups = [group for group in groups if group not in touched]
        groups.append(sorted([place, *(other for group in touched for other in group)]))
    return sorted(groups)


def _overlap(one: Place, other: Place) -> bool:
    return max(_apart(one, other)) < _POINT


def _apart(one: Place, other: Place) -> tuple[float, float]:
    return abs(one[0] - other[0]) * WIDTH, abs(one[1] - other[1]) * HEIGHT


def _room(text: str, point: Place, side: str, points: Sequence[Place]) -> int:
    """How far a label on a side of `point` is from the nearest point or border, in pixels; below 0 it is on it."""
    width = _DIGIT * len(text)
    right, up = _SIDES[side]
    x = point[0] * WIDTH + right * (_POINT + width) / 2
    y = point[1] * HEIGHT + up * (_POINT + _LINE) / 2
    borders = [x - width / 2, WIDTH - x - width / 2, y - _LINE / 2, HEIGHT - y - _LINE / 2]
    centre = x / WIDTH, y / HEIGHT
    gaps = [
        max(across - (_POINT + width) / 2, along - (_POINT + _LINE) / 2)
        for across, along in (_apart(centre, other) for other in points)
    ]
    return round(min(*borders, *gaps))
