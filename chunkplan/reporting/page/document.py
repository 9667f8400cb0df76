"""Sections as one HTML file that fetches nothing: styles, scripts and plotly.js are in it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from chunkplan.reporting.page.parts import Section

#: What a script block of JSON must not hold as it is.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(
    title: str,
    warnings: Sequence[str],
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    command: str | None = None,
) -> str:
    """Return the page. All words are escaped; equal arguments give equal text. `command`: what to type next.

    Its Content-Security-Policy allows nothing from elsewhere, and of scripts only those that are meant, by their hash.
    """
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_resource("page.html"))
    scripts = [get_plotlyjs(), _resource("page.js")]
    return template.render(
        title=title,
        warnings=warnings,
        facts=facts,
        command=command,
        sections=sections,
        style=_resource("page.css"),
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        charts=_charts_json(sections),
    )


def _charts_json(sections: Sequence[Section]) -> str:
    """Return JSON of {chart: {label: figure}} that is harmless inside a script block."""
    figures = {
        chart.name: {
            label: json.loads(to_json_plotly(figure, engine="json")) for label, figure in chart.figures.items()
        }
        for section in sections
        for chart in section.charts
    }
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _resource(name: str) -> str:
    return (files("chunkplan.reporting.page") / name).read_text(encoding="utf-8")
