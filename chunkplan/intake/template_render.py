"""Runs chat templates, and maps every stretch of a rendering to its message.

A template is foreign code: it runs in Jinja's immutable sandbox with the additions of transformers and nothing else.
The shortcuts here return, for plain dicts, strings and loops, what the sandbox would return after its checks;
everything else goes through those checks.

A chat template loops over the messages. Its output while the loop variable is a message is that message's *fragment* of
the one full rendering, whatever the template makes of the same message when others follow. So every such loop is given
filters that note the current message:

    {{ "" | enter }}{% for message in messages %}{{ message | at }} ... {% endfor %}{{ "" | leave }}

A template yields its output piece by piece, and each piece belongs to the message that is current then. The filters are
placed only where output goes straight into the rendering, not into a macro, a filter or a variable. Likewise, the
position of a generation block is known if it goes straight into the rendering.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from chunkplan.intake.records import JsonObject

#: [start, stop) in characters.
Span = tuple[int, int]

#: What a template is given, by the names that it knows them by.
Variables = dict[str, Any]

#: A template as a function: its variables -> the pieces it puts out, one after another.
Pieces = Callable[[Variables], Iterator[str]]

#: The message at hand where there is none.
NOBODY = -1

#: What no data and no template can contain, as it is drawn at every start: marks around the body of a generation block,
#: a mark of a null, with its number in it and no letters, which a template might change; and names of filters.
_KEY = secrets.token_hex(16)
_GENERATION_START, _GENERATION_END = f"\ue000{_KEY}\ue001", f"\ue002{_KEY}\ue003"
_NULL = f"\ue008{secrets.randbelow(10**30):030d}\ue00a%s\ue009"
_ENTER, _AT, _LEAVE = (f"{name}_{_KEY}" for name in ("enter", "at", "leave"))
_MARKS = re.compile(f"({_GENERATION_START}|{_GENERATION_END})")

#: What may be around a generation block for it to be put out as it is rendered, untouched by filters.
_DIRECT = (nodes.Template, nodes.If, nodes.For, nodes.Scope, nodes.With)

_DICT_NAMES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_VALUES = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length", "depth", "depth0"})

#: Methods of strings that look for their argument.
_ASKING = {"startswith", "endswith", "find", "rfind", "index", "count", "replace", "split", "rsplit", "partition"}


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template; `now` is the moment that `strftime_now` prints."""

    def __init__(self, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": now.strftime}
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}
        self.tests["none"] = lambda value: value is None or type(value) is Null

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up like the sandbox: the attribute, else the item, else undefined."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_NAMES:  # so it is no attribute
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif (kind is str and attribute in _STR_METHODS) or (kind is LoopContext and attribute in _LOOP_VALUES):
            return getattr(obj, attribute)
        elif kind is _Namespace and attribute[:1] != "_":  # it has nothing but what the template has put into it
            try:
                return getattr(obj, attribute)
            except AttributeError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call like the sandbox: methods of strings are called, other things if they are safe."""
        if type(function) is BuiltinMethodType and type(function.__self__) is str:
            kwargs.pop("_block_vars", None)  # what Jinja hands on to itself
            kwargs.pop("_loop_vars", None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)

    def compile_tree(self, tree: nodes.Template) -> Pieces:
        """The template of a syntax tree."""
        tree.set_environment(self)
        template = self.from_string(tree)
        template.globals = dict(template.globals)  # in one piece: they are copied for every rendering
        return lambda variables: template.root_render_func(template.new_context(variables))


class _Dict:
    """`dict` without the methods of the class, which change the dict that they are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore, which transformers refuses."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name that a template sets
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes HTML, which no model has seen in training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_plain_null
    )


def _plain_null(value: Any) -> None:
    if type(value) is not Null:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class Null:
    """A null that is None to everything a template asks, and prints as a mark, not as the word None."""

    def __init__(self, number: int) -> None:
        self._mark = _NULL % number

    def __str__(self) -> str:
        return self._mark

    __repr__ = __str__

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __hash__(self) -> int:
        return hash(None)


def mark_nulls(value: Any, path: str, paths: list[str]) -> Any:
    """A copy of JSON `value`, found at `path`, with marked nulls in it; their paths are added to `paths`."""

    def mark(inner: Any, inside: str) -> Any:
        if inner is not None:
            return mark_nulls(inner, inside, paths)
        paths.append(inside)
        return Null(len(paths) - 1)

    if isinstance(value, dict):
        return {key: mark(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mark(item, f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def printed_null(texts: Iterable[str]) -> int | None:
    """The number of the first marked null that is printed in `texts`, or None."""
    found = next(filter(None, (re.search(_NULL % "([0-9]+)", text) for text in texts)), None)
    return None if found is None else int(found[1])


class _Generation(Extension):
    """`{% generation %}`...`{% endgeneration %}`: what the assistant says, between marks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            nodes.Output([nodes.TemplateData(text, lineno=line)], lineno=line)
            for text in (_GENERATION_START, _GENERATION_END)
        )
        return nodes.Scope([start, *body, end], lineno=line)


def num_generation_blocks(tree: nodes.Template) -> int:
    """Count the generation blocks of a template."""
    return sum(data.data == _GENERATION_START for data in tree.find_all(nodes.TemplateData))


def num_direct_blocks(node: nodes.Node) -> int:
    """Count the blocks under `node` that are put out as they are rendered, not kept in a variable or a macro."""
    if isinstance(node, nodes.Output):
        return sum(isinstance(child, nodes.TemplateData) and child.data == _GENERATION_START for child in node.nodes)
    if not isinstance(node, _DIRECT) or (isinstance(node, nodes.For) and node.recursive):
        return 0
    return sum(map(num_direct_blocks, node.iter_child_nodes()))


def split_blocks(marked: str) -> tuple[str, list[Span]]:
    """Return the rendering without marks, and [start, stop) of every generation block, in order of their begin."""
    texts: list[str] = []
    spans: list[Span] = []
    open_spans: list[int] = []
    position = 0
    for part in _MARKS.split(marked):
        if part == _GENERATION_START:
            open_spans.append(len(spans))
            spans.append((position, position))
        elif part == _GENERATION_END:
            if open_spans:
                index = open_spans.pop()
                spans[index] = (spans[index][0], position)
        else:
            texts.append(part)
            position += len(part)
    return "".join(texts), spans


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
        """The end of the last fragment of any message."""
        return max((fragment.stop for fragment in self.fragments if fragment.message != NOBODY), default=0)

    def of_message(self, index: int) -> list[Span]:
        """The fragments of one message, in order."""
        return [(start, stop) for message, start, stop in self.fragments if message == index]

    def by_message(self) -> dict[int, str]:
        """Return the text that was put out for each message, by its index."""
        found: dict[int, str] = {}
        for message, start, stop in self.fragments:
            found[message] = found.get(message, "") + self.text[start:stop]
        return found

    def joined(self, spans: Iterable[Span]) -> str:
        """Return the texts of `spans` as one."""
        return "".join(self.text[start:stop] for start, stop in spans)


class WatchedTemplate:
    """A template whose loops over messages are watched, without generation blocks; it takes over `tree`.

    `has_fixed_prompt` says that what is put out behind its last loop is the same for every conversation, and that
    nothing before asks for the generation prompt. `asked` are the words that it looks for in texts.
    """

    def __init__(self, environment: TemplateEnvironment, tree: nodes.Template) -> None:
        for data in tree.find_all(nodes.TemplateData):
            data.data = _MARKS.sub("", data.data)
        watch = self._watch = _Watch()
        environment.filters |= {_ENTER: watch.enter, _AT: watch.at, _LEAVE: watch.leave}
        self.has_fixed_prompt = _has_fixed_prompt(tree)
        self.asked = _words_asked(tree)
        tree.body = _watch_loops(tree.body)
        self._pieces = environment.compile_tree(tree)

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
        return {name.name for name in nodes.Template(body).find_all(nodes.Name)}

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


class _Watch:
    """The message at hand while a template runs.

    In a loop within that of a message only a later message that is not of the assistant comes to hand, such as the
    answer of a tool that is rendered with the call.
    """

    def begin(self, messages: Sequence[JsonObject]) -> None:
        """A rendering of `messages` begins."""
        self._messages = messages
        self._index_of = {id(message): index for index, message in enumerate(messages)}
        self._outside: list[int] = []
        self.at_hand = NOBODY
        self.num_changes = 0

    @pass_context  # so that it is called every time
    def enter(self, _: Context, nothing: str) -> str:
        """A loop begins."""
        self._outside.append(self.at_hand)
        return nothing

    def at(self, value: Any) -> str:
        """A loop has come to `value`, which may be a message."""
        index = self._index_of.get(id(value))
        if index is not None:
            around = self._outside[-1]
            is_part = around != NOBODY and (index < around or self._messages[index]["role"] == "assistant")
            self._change(around if is_part else index)
        return ""

    @pass_context
    def leave(self, _: Context, nothing: str) -> str:
        """The loop has ended: the message at hand is again that of the loop around it."""
        self._change(self._outside.pop())
        return nothing

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
                match node.iter:
                    case nodes.Call(node=nodes.Name(name="range")):
                        pass  # its items are no messages; some are run for every message
                    case _:
                        node.body.insert(0, _note(_AT, node, name))
                watched[-1:] = [_note(_ENTER, node), node, _note(_LEAVE, node)]
            case nodes.If():
                for branch in (node, *node.elif_):
                    branch.body = _watch_loops(branch.body)
                node.else_ = _watch_loops(node.else_)
            case nodes.For() | nodes.Scope() | nodes.With():
                node.body = _watch_loops(node.body)
    return watched


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
