"""Which message every stretch of a rendering belongs to, noted while the template runs.

A chat template walks over the messages in a loop. What it puts out while its loop variable is a message is that
message's *fragment* of the one full rendering, whatever the template makes of the same message when others follow. So
every such loop is given filters that note the message at hand:

    {{ "" | enter }}{% for message in messages %}{{ message | at }} ... {% endfor %}{{ "" | leave }}

A template puts out piece after piece, and each is of the message that is at hand when it comes. The filters stand only
where output goes straight into the rendering, not where a macro, a filter or a variable takes it up.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jinja2 import nodes, pass_context

from chunkplan.intake.records import JsonObject
from chunkplan.intake.template_sandbox import TemplateEnvironment, Variables, compile_tree

#: The message at hand where there is none.
NOBODY = -1

#: Names that no template has.
_KEY = secrets.token_hex(16)
_ENTER, _AT, _LEAVE = (f"{name}_{_KEY}" for name in ("enter", "at", "leave"))

#: Methods of strings that look for their argument.
_ASKING = {"startswith", "endswith", "find", "rfind", "index", "count", "replace", "split", "rsplit", "partition"}


class Fragment(NamedTuple):
    """The characters [start, stop) of a rendering that were put out for the message with this index, or NOBODY."""

    message: int
    start: int
    stop: int


class Rendered(NamedTuple):
    """A rendering and its fragments, which lie side by side and cover it; none is empty."""

    text: str
    fragments: list[Fragment]

    @property
    def stop_of_messages(self) -> int:
        """Where the last fragment of any message ends."""
        return max((fragment.stop for fragment in self.fragments if fragment.message != NOBODY), default=0)

    def of_message(self, index: int) -> list[Fragment]:
        """The fragments of one message, in order."""
        return [fragment for fragment in self.fragments if fragment.message == index]


class WatchedTemplate:
    """A template whose loops over messages are watched. It takes `tree` for itself.

    `has_fixed_prompt`: nothing before the end of its last loop asks for the generation prompt, and nothing behind it
    reads what the template has set or what a conversation can reach: what is put out behind it is always the same.
    `asked`: the words that it looks for in texts.
    """

    def __init__(self, environment: TemplateEnvironment, tree: nodes.Template) -> None:
        watch = self._watch = _Watch()

        @pass_context  # so that they are called every time
        def enter(_: Any, nothing: str) -> str:
            watch.enter()
            return nothing

        @pass_context
        def leave(_: Any, nothing: str) -> str:
            watch.leave()
            return nothing

        environment.filters |= {_ENTER: enter, _AT: watch.at, _LEAVE: leave}
        self.has_fixed_prompt = _has_fixed_prompt(tree)
        self.asked = _words_asked(tree)
        tree.body = _watch_loops(tree.body)
        self._pieces = compile_tree(environment, tree)

    def render(self, messages: Sequence[JsonObject], variables: Variables) -> Rendered:
        """Render `messages`. Raises whatever the template raises."""
        watch = self._watch
        watch.begin(messages)
        texts: list[str] = []
        fragments: list[Fragment] = []
        length = start = 0
        change, message = watch.num_changes, NOBODY
        for text in self._pieces({**variables, "messages": list(messages)}):
            if not text:
                continue
            if change != watch.num_changes:
                if length > start:
                    fragments.append(Fragment(message, start, length))
                start, change, message = length, watch.num_changes, watch.at_hand
            texts.append(text)
            length += len(text)
        if length > start:
            fragments.append(Fragment(message, start, length))
        return Rendered("".join(texts), fragments)


def _has_fixed_prompt(tree: nodes.Template) -> bool:
    names = list(tree.find_all(nodes.Name))
    changing = {name.name for name in names if name.ctx != "load"} | {"messages", "tools"}
    changing |= {macro.name for macro in tree.find_all(nodes.Macro)}
    loops = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    behind = loops[-1] + 1 if loops else 0

    def used(body: list[nodes.Node]) -> set[str]:
        return {name.name for node in body for name in _names(node)}

    return not changing & used(tree.body[behind:]) and "add_generation_prompt" not in used(tree.body[:behind])


def _words_asked(tree: nodes.Template) -> set[str]:
    """The constants of `word in text` and of calls such as `text.startswith(word)`."""
    asked = [compare.expr for compare in tree.find_all(nodes.Compare) if compare.ops[0].op in ("in", "notin")]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _ASKING:
            asked += call.args[:1]
    return {
        word.value for word in asked if isinstance(word, nodes.Const) and isinstance(word.value, str) and word.value
    }


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name):
        yield node
    yield from node.find_all(nodes.Name)


class _Watch:
    """The message at hand while a template runs.

    In a loop within that of a message only a later message that is not of the assistant comes to hand, such as the
    answer of a tool that is rendered with the call: what else such a loop puts out is part of the message around it.
    """

    def __init__(self) -> None:
        self._messages: Sequence[JsonObject] = ()
        self._index_of: dict[int, int] = {}
        self._outside: list[int] = []
        self.at_hand = NOBODY
        self.num_changes = 0

    def begin(self, messages: Sequence[JsonObject]) -> None:
        """A rendering of `messages` begins."""
        self._messages = messages
        self._index_of = {id(message): index for index, message in enumerate(messages)}
        self._outside.clear()
        self.at_hand = NOBODY

    def enter(self) -> None:
        """A loop begins."""
        self._outside.append(self.at_hand)

    def at(self, value: Any) -> str:
        """A loop has come to `value`, which may be a message."""
        index = self._index_of.get(id(value))
        if index is not None:
            around = self._outside[-1]
            is_part = around != NOBODY and (index < around or self._messages[index]["role"] == "assistant")
            self._change(around if is_part else index)
        return ""

    def leave(self) -> None:
        """The loop has ended: the message at hand is again that of the loop around it."""
        self._change(self._outside.pop())

    def _change(self, index: int) -> None:
        if index != self.at_hand:
            self.at_hand = index
            self.num_changes += 1


def _watch_loops(body: list[nodes.Node]) -> list[nodes.Node]:
    """`body` with filters around its loops and in them."""
    watched: list[nodes.Node] = []
    for node in body:
        watched.append(node)
        match node:
            case nodes.For(recursive=False, target=nodes.Name(name=name)):
                node.body = _watch_items(_watch_loops(node.body), name)
                if not _is_over_numbers(node):
                    node.body.insert(0, _note(_AT, node, name))
                watched[-1:] = [_note(_ENTER, node), node, _note(_LEAVE, node)]
            case nodes.If():
                for branch in (node, *node.elif_):
                    branch.body = _watch_loops(branch.body)
                node.else_ = _watch_loops(node.else_)
            case nodes.For() | nodes.Scope() | nodes.With():
                node.body = _watch_loops(node.body)
    return watched


def _is_over_numbers(loop: nodes.For) -> bool:
    """Whether it is `for ... in range(...)`, the items of which are no messages; some are run for every message."""
    return (
        isinstance(loop.iter, nodes.Call) and isinstance(loop.iter.node, nodes.Name) and loop.iter.node.name == "range"
    )


def _watch_items(body: list[nodes.Node], index: str) -> list[nodes.Node]:
    """`body` of a loop over numbers, with a filter where `{% set item = messages[index] %}` takes up a message."""
    watched: list[nodes.Node] = []
    for node in body:
        watched.append(node)
        match node:
            case nodes.Assign(target=nodes.Name(name=name), node=nodes.Getitem(arg=nodes.Name(name=place))) if (
                place == index
            ):
                watched.append(_note(_AT, node, name))
            case nodes.If():
                for branch in (node, *node.elif_):
                    branch.body = _watch_items(branch.body, index)
                node.else_ = _watch_items(node.else_, index)
    return watched


def _note(name: str, place: nodes.Node, variable: str | None = None) -> nodes.Output:
    """A filter at `place`, of a variable or of nothing."""
    line = place.lineno
    value = nodes.Const("", lineno=line) if variable is None else nodes.Name(variable, "load", lineno=line)
    return nodes.Output([nodes.Filter(value, name, [], [], None, None, lineno=line)], lineno=line)
