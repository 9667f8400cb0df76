"""Reads a `TrainConfig` from flags and a TOML file. Both are made from its fields: same names, flags win."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from chunkplan.errors import ChunkplanError, DataError, UsageError
from chunkplan_runtime.training.config import TrainConfig, flag

_TITLES = {
    "data": "what to train on",
    "model": "what to train",
    "LoRA": "adapters",
    "learning": "how to learn",
    "length": "how long",
    "log": "what is kept",
}

_EXAMPLE = """Example: torchrun --nproc-per-node 8 -m chunkplan_runtime.train \\
  --plan chunkplan-out/plan --model NAME --output chunkplan-out/run"""

_PLURALS = {str: "list of names", int: "list of whole numbers"}


def read_options(arguments: list[str] | None, report: Callable[[ChunkplanError], int]) -> TrainConfig:
    """The configuration that `arguments` (default: those of the process) and the file of their `--config` say.

    `report` is called with what does not parse, and gives the exit code to leave with.

    Raises:
        UsageError: an option is missing, or not what it may be; the TOML file is not there.
        DataError: the TOML file is damaged, or an entry is unknown or of another type.
    """
    given = vars(make_parser(report).parse_args(arguments))
    file = given.pop("config", None)
    values = {**(_read_toml(file) if file is not None else {}), **given}
    for option in fields(TrainConfig):
        if option.default is MISSING and option.name not in values:
            raise UsageError(f"{flag(option.name)} is missing", hint="give it as a flag, or in the file of --config")
    return TrainConfig(**values)


def make_parser(report: Callable[[ChunkplanError], int]) -> argparse.ArgumentParser:
    """All flags, as `read_options` reads them; `report` is called with what does not parse."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            """As every other mistake is told, rather than with all options."""
            sys.exit(report(UsageError(message, hint=f"`{self.prog} --help` shows what it takes")))

    parser = Parser(
        prog="python -m chunkplan_runtime.train",
        usage="%(prog)s --plan DIR (--model NAME | --model-config FILE) --output DIR [options]",
        description="Train a model with a plan: gradients equal to those of whole sequences, in chunks.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # an example that is broken elsewhere cannot be pasted
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with options; flags win")
    groups = {name: parser.add_argument_group(title) for name, title in _TITLES.items()}
    for option in fields(TrainConfig):
        _add(groups[option.metadata["group"]], option)
    return parser


def _add(group: Any, option: Field[Any]) -> None:
    kind, metadata = _kind(option.name), option.metadata
    words = metadata["help"]
    if kind is bool:
        group.add_argument(flag(option.name), action=argparse.BooleanOptionalAction, help=words)
        return
    if option.default not in (MISSING, None):
        words += f" (default: {_in_words(option.default)})"
    convert = _list_of(_item_kind(option.name)) if kind is tuple else kind
    choices, metavar = metadata["choices"], metadata["metavar"]
    group.add_argument(flag(option.name), type=convert, choices=choices, metavar=metavar, help=words)


def _kind(name: str) -> type:
    """The type of a field, without the None that it may also be."""
    hint = get_type_hints(TrainConfig)[name]
    if get_origin(hint) is UnionType:
        [hint] = [part for part in get_args(hint) if part is not NoneType]
    kind: type = get_origin(hint) or hint
    return kind


def _item_kind(name: str) -> type:
    """Of a field that is a tuple, the type of what is in it."""
    hint = get_type_hints(TrainConfig)[name]
    parts = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kind: type = next(get_args(part)[0] for part in parts if get_origin(part) is tuple)
    return kind


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _list_of(kind: type) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(item.strip()) for item in text.split(",") if item.strip())

    parse.__name__ = _PLURALS[kind]  # for argparse: "invalid list of whole numbers value"
    return parse


def _read_toml(path: Path) -> dict[str, Any]:
    """Values by field; names in the file are those of the flags, paths are as if they were given there."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}", hint="give a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"not TOML: {error}", where=str(path), hint="lines such as max-steps = 100") from error
    names = {flag(option.name).removeprefix("--"): option.name for option in fields(TrainConfig)}
    values = {}
    for entry, value in entries.items():
        if entry not in names:
            near = entry.replace("_", "-")
            hint = (
                f"it is spelled {near}" if near in names else "names are those of the flags, without the dashes before"
            )
            raise DataError(f"unknown entry `{entry}`", where=str(path), hint=hint)
        name, where = names[entry], f"{path}: {entry}"
        kind = _kind(name)
        is_list = kind is tuple
        values[name] = _list_from_toml(value, _item_kind(name), where) if is_list else _from_toml(value, kind, where)
    return values


def _list_from_toml(value: Any, kind: type, where: str) -> tuple[Any, ...]:
    if isinstance(value, list) and all(type(item) is kind for item in value):
        return tuple(value)
    example = {str: '["q_proj", "v_proj"]', int: "[7, 7, 6]"}[kind]
    raise DataError(f"found {value!r}, expected a {_PLURALS[kind]}", where=where, hint=f"such as {example}")


def _from_toml(value: Any, kind: type, where: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    written = str if kind is Path else kind
    if type(value) is not written:
        expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a string in quotes"}[written]
        raise DataError(f"found {value!r}, expected {expected}", where=where, hint="mend this entry")
    return kind(value)
