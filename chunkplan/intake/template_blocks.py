"""Generation blocks of a chat template: how they are found in its tree, and in what it puts out.

The template puts marks around them (see `template_sandbox`). What stands between marks is known where a block goes
straight into the rendering; where a macro, a filter or a variable takes it up, it may be changed on its way.
"""

from __future__ import annotations

import re

from jinja2 import nodes

from chunkplan.intake.template_sandbox import GENERATION_END, GENERATION_START
from chunkplan.intake.template_spans import Span

_MARKS = re.compile(f"({GENERATION_START}|{GENERATION_END})")
#: What may be around a generation block for it to be put out as it is rendered, untouched by filters.
_DIRECT = (nodes.Template, nodes.If, nodes.For, nodes.Scope, nodes.With)


def num_marks(tree: nodes.Template) -> int:
    """How many generation blocks a template has."""
    return sum(data.data == GENERATION_START for data in tree.find_all(nodes.TemplateData))


def num_direct_marks(node: nodes.Node) -> int:
    """How many generation blocks under `node` are put out as they are rendered, not kept in a variable or a macro."""
    if isinstance(node, nodes.Output):
        return sum(isinstance(child, nodes.TemplateData) and child.data == GENERATION_START for child in node.nodes)
    if not isinstance(node, _DIRECT) or (isinstance(node, nodes.For) and node.recursive):
        return 0
    return sum(map(num_direct_marks, node.iter_child_nodes()))


def without_marks(tree: nodes.Template) -> nodes.Template:
    """The template `tree`, which is changed, without the marks around its generation blocks."""
    for data in tree.find_all(nodes.TemplateData):
        if data.data in (GENERATION_START, GENERATION_END):
            data.data = ""
    return tree


def split_marks(marked: str) -> tuple[str, list[Span]]:
    """What was rendered, and [start, stop) of every generation block in it, in the order in which they begin."""
    texts: list[str] = []
    spans: list[Span] = []
    open_spans: list[int] = []
    position = 0
    for part in _MARKS.split(marked):
        if part == GENERATION_START:
            open_spans.append(len(spans))
            spans.append((position, position))
        elif part == GENERATION_END:
            if open_spans:
                index = open_spans.pop()
                spans[index] = (spans[index][0], position)
        else:
            texts.append(part)
            position += len(part)
    return "".join(texts), spans
