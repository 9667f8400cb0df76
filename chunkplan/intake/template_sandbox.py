"""Where chat templates run: Jinja's immutable sandbox with what transformers adds to it, and nothing else.

A template is a program somebody else wrote. The shortcuts here give, for plain dicts, strings and loops, what the
sandbox would have given after its checks; everything else goes through them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from chunkplan.intake.template_nulls import Null

#: Stand around the body of a generation block while it is rendered. No data can contain what is drawn at every start.
GENERATION_START = f"\ue000{secrets.token_hex(16)}\ue001"
GENERATION_END = f"\ue002{secrets.token_hex(16)}\ue003"

_DICT_NAMES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_VALUES = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length", "depth", "depth0"})


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template; `now` is the moment that `strftime_now` prints."""

    def __init__(self, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = now.strftime
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.tests["none"] = _is_none

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox does it: the attribute, else the item, else undefined."""
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
        """As the sandbox does it: methods of strings are called, other things if they are safe."""
        if type(function) is BuiltinMethodType and type(function.__self__) is str:
            kwargs.pop("_block_vars", None)  # what Jinja hands on to itself
            kwargs.pop("_loop_vars", None)
            return function(*args, **kwargs)
        return super().call(context, function, *args, **kwargs)


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


def _is_none(value: Any) -> bool:
    return value is None or type(value) is Null


class _Generation(Extension):
    """`{% generation %}`...`{% endgeneration %}`: what the assistant says, between marks."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        marked = [text_node(GENERATION_START, line), *body, text_node(GENERATION_END, line)]
        return nodes.Scope(marked, lineno=line)


def text_node(text: str, line: int) -> nodes.Output:
    """A node that puts out `text`, as a piece of its own."""
    return nodes.Output([nodes.TemplateData(text, lineno=line)], lineno=line)


#: What a template is given, by the names that it knows them by.
Variables = dict[str, Any]

#: A template as a function: its variables -> the pieces it puts out, one after another.
Pieces = Callable[[Variables], Iterator[str]]


def compile_tree(environment: TemplateEnvironment, tree: nodes.Template) -> Pieces:
    """The template of a syntax tree."""
    tree.set_environment(environment)
    template = environment.from_string(tree)
    template.globals = dict(template.globals)  # in one piece: they are copied for every rendering

    def pieces(variables: Variables) -> Iterator[str]:
        return template.root_render_func(template.new_context(variables))

    return pieces


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
