"""Renderings of the beginnings of a conversation, most of them read off the rendering of the whole.

Most chat templates walk over the messages once and end with the generation prompt:

    {% for message in messages %} ... {% endfor %}{% if add_generation_prompt %} ... {% endif %}

Such a template does the same for the first k messages as for the whole before it looks at what comes after them. So the
messages are watched while the whole is rendered: where the loop, at the end of its body for message k - 1, asks for the
next one and nothing has looked that far before, what was put out until then is how the rendering of the first k
messages begins; and what follows the loop does not depend on messages. Wherever this does not hold, a beginning is
rendered.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

from jinja2 import nodes

from chunkplan.intake.records import JsonObject
from chunkplan.intake.rejection import RecordError
from chunkplan.intake.template_sandbox import TemplateEnvironment, Variables, compile_tree, text_node

#: Put out where the loop may ask on: before it and at the end of its body; and where its body begins.
_MARK = f"\ue004{secrets.token_hex(16)}\ue005"
_BODY = f"\ue006{secrets.token_hex(16)}\ue007"

#: (number of messages, with the generation prompt) -> the rendering of that beginning.
Render = Callable[[int, bool], str]


class WatchedTemplate:
    """A template of the form above, made so that its loop can be watched. It takes `tree` for itself."""

    def __init__(self, environment: TemplateEnvironment, tree: nodes.Template, loop: int) -> None:
        environment.filters["watched_loop"] = _Loop
        node = tree.body[loop]
        assert isinstance(node, nodes.For)
        node.iter = nodes.Filter(node.iter, "watched_loop", [], [], None, None, lineno=node.lineno)
        node.body = [text_node(_BODY, node.lineno), *node.body, text_node(_MARK, node.lineno)]
        tree.body.insert(loop + 1, text_node(_MARK, node.lineno))
        tree.body.insert(loop, text_node(_MARK, node.lineno))
        self._pieces = compile_tree(environment, tree)
        self._prompt: str | None = None  # what follows the loop where there is a generation prompt
        self._is_watchable = True

    def render(self, messages: list[JsonObject], variables: Variables, render: Render) -> Beginnings:
        """Render all of `messages`; `render` is asked for what cannot be read off that."""
        watch = _Watch(messages)
        pieces, num_looped = watch.pieces, 0
        try:
            if self._is_watchable:
                for piece in self._pieces({**variables, "messages": _Messages(watch)}):
                    if piece == _MARK:
                        watch.marked = num_looped = len(pieces)
                    elif piece == _BODY:
                        watch.marked = -1
                    else:
                        pieces.append(piece)
        except Exception as error:  # whatever it is, it is reported as what becomes of the messages themselves
            self._is_watchable = not isinstance(error, _UnwatchableError)
            pieces.clear()
        if not pieces:
            return Beginnings(render(len(messages), False), render)
        looped, tail = "".join(pieces[:num_looped]), "".join(pieces[num_looped:])
        if self._prompt is None:
            try:
                prompted = render(len(messages), True)
            except RecordError:
                return Beginnings(looped + tail, render)
            self._prompt = prompted[len(looped) :]
        positions = list(accumulate(map(len, pieces), initial=0))
        stops = {count: positions[num_pieces] for count, num_pieces in watch.stops}
        return Beginnings(looped + tail, render, stops, (tail, self._prompt))


class Beginnings:
    """The rendering of a whole conversation, and those of its beginnings when they are asked for.

    `stops` has, for numbers of messages, where in `full` the loop over that many stops, and `tails` what then follows
    without and with the generation prompt.
    """

    def __init__(
        self, full: str, render: Render, stops: dict[int, int] | None = None, tails: tuple[str, str] = ("", "")
    ) -> None:
        self.full = full
        self._render = render
        self._stops = stops or {}
        self._tails = tails

    def text(self, count: int, prompt: bool) -> str:
        """The rendering of the first `count` messages, and with `prompt` of the generation prompt after them."""
        stop = self._stops.get(count)
        return self._render(count, prompt) if stop is None else self.full[:stop] + self._tails[prompt]

    def length(self, count: int, prompt: bool) -> int | None:
        """The length of that rendering where it is how `full` begins, else None."""
        stop = self._stops.get(count)
        if stop is None:
            part = self._render(count, prompt)
            return len(part) if self.full.startswith(part) else None
        tail = self._tails[prompt]
        return stop + len(tail) if self.full.startswith(tail, stop) else None


def find_loop(tree: nodes.Template) -> int | None:
    """Which node of a template is the loop over its messages, if the template has the form that can be watched.

    After the loop nothing may be read that the template has set or that messages can reach; before its end nothing may
    depend on whether the generation prompt is asked for.
    """
    if any(True for _ in tree.find_all((nodes.Import, nodes.FromImport, nodes.Include, nodes.Extends, nodes.Block))):
        return None
    names = list(tree.find_all(nodes.Name))
    changing = {name.name for name in names if name.ctx != "load"} | {"messages", "tools"}
    changing |= {macro.name for macro in tree.find_all(nodes.Macro)}
    for index in reversed(range(len(tree.body))):
        node = tree.body[index]
        used = [name.name for name in _names(node)]
        if isinstance(node, nodes.For):
            before = [name for earlier in tree.body[: index + 1] for name in _names(earlier)]
            is_plain = node.test is None and not node.else_ and not node.recursive
            return index if is_plain and all(name.name != "add_generation_prompt" for name in before) else None
        if changing.intersection(used):
            return None
    return None


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name):
        yield node
    yield from node.find_all(nodes.Name)


class _UnwatchableError(Exception):
    """A template does with its messages what is not watched."""


class _Watch:
    """What has been seen of the messages, and what was put out meanwhile.

    `marked` is how many pieces there were at the mark where the loop now may ask on, or -1 within its body; `stops` has
    (number of messages, number of pieces) where it asked on after that many and nothing else had looked for more.
    """

    def __init__(self, messages: list[JsonObject]) -> None:
        self.messages = messages
        self.pieces: list[str] = []
        self.marked = -1
        self.stops: list[tuple[int, int]] = []
        self._num_seen = 0

    def see(self, index: int) -> None:
        """Something looks whether there is a message `index`."""
        if index >= self._num_seen:
            self._num_seen = index + 1

    def ask(self, index: int) -> None:
        """The loop asks for message `index`: at the end of its body, or when the body itself asks what comes next."""
        if index >= self._num_seen:
            self._num_seen = index + 1
            if self.marked >= 0:
                self.stops.append((index, self.marked))


class _Messages:
    """The messages from `start` on, watched. What else a list can do raises `_UnwatchableError` or TypeError."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, watch: _Watch, start: int = 0) -> None:
        self._watch = watch
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return self._walk(self._watch.see)

    def _walk(self, see: Callable[[int], None]) -> Iterator[Any]:
        messages = self._watch.messages
        for index in range(self._start, len(messages)):
            see(index)
            yield messages[index]
        see(len(messages))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= 0:
            self._watch.see(self._start + index)
            return self._watch.messages[self._start + index]
        if isinstance(index, slice) and index.stop is None and index.step is None and (index.start or 0) >= 0:
            return _Messages(self._watch, self._start + (index.start or 0))
        self._watch.see(len(self._watch.messages))
        return self._watch.messages[self._start :][index]

    def __len__(self) -> int:
        self._watch.see(len(self._watch.messages))
        return max(len(self._watch.messages) - self._start, 0)

    def __bool__(self) -> bool:
        self._watch.see(self._start)
        return len(self._watch.messages) > self._start

    def _refuse(self, *_: Any) -> Any:
        raise _UnwatchableError

    __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __str__ = __repr__ = __format__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __contains__ = __reversed__ = __getattr__ = _refuse


class _Loop:
    """The messages, as the loop takes them: anything else it runs over is not watched."""

    def __init__(self, messages: Any) -> None:
        if type(messages) is not _Messages:
            raise _UnwatchableError
        self._messages = messages

    def __iter__(self) -> Iterator[Any]:
        return self._messages._walk(self._messages._watch.ask)

    def __len__(self) -> int:
        return len(self._messages)
