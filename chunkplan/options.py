"""Options, declared once: a field of a configuration says what its value may be, how it is typed and what it does.

From the field come the flag of a command and its help, the entry of a TOML file, what a shell completes, the check of a
manifest's configuration, the reference in docs/cli.md, and the words of errors. Nothing here is heavy to import: the
help of a command needs it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from chunkplan.domains import Domain, or_null
from chunkplan.errors import HELP_HINT, UsageError

#: Letters of a value in an error.
_LETTERS = 80

#: Stands for a default that follows from other options, until the configuration is made.
UNSET: Any = type("Unset", (), {"__repr__": lambda self: "UNSET"})()


@dataclass(frozen=True)
class Option:
    """What the field `name` of a configuration declares.

    Attributes:
        help: what it does, in sentences that end with a point; the default is not among them.
        group: the panel of the help it stands in.
        flag: how it is typed; "" for what is an entry of files only.
        default: MISSING where a value has to be given.
        default_words: the default as the help says it, "" where it is not said.
        depends: of a default of `UNSET`, the value for a configuration that has all fields before this one.
        also: further flags, each with the value that it stands for.
        fills: of a flag that says several fields, those.
    """

    name: str
    domain: Domain
    help: str
    group: str
    flag: str
    default: Any
    default_words: str
    depends: Callable[[Any], Any] | None
    also: Mapping[str, Any]
    fills: tuple[str, ...]

    @property
    def is_required(self) -> bool:
        """Whether it has to be given, as it has no default."""
        return self.default is MISSING

    @property
    def may_be_none(self) -> bool:
        """Whether None is a value, which only the default is."""
        return self.default is None

    def resolved(self, config: Any) -> Any:
        """The default for a configuration that has all fields before this one."""
        assert self.depends is not None
        return self.depends(config)

    def check(self, value: Any) -> None:
        """Raises UsageError where `value` is not what it may be."""
        if not (value is None and self.may_be_none) and not self.domain.holds(value):
            raise self.refusal(value)

    def refusal(self, value: Any) -> UsageError:
        """The error of a value that it may not have."""
        is_list = isinstance(value, tuple) and value and not isinstance(value[0], tuple)
        shown = ",".join(map(str, value)) if is_list else repr(value)  # a list as it is typed
        return UsageError(f"{self.spelled} is {shown}, expected {self.domain.expected}", hint=self.hint)

    def read(self, typed: Any) -> Any:
        """The value of what was typed after the flag.

        Raises:
            UsageError: there is none.
        """
        try:
            return self.domain.read(typed)
        except (ValueError, OverflowError):
            words = typed if isinstance(typed, str) else " ".join(typed)
            expected = self.domain.typed or self.domain.expected
            raise UsageError(f"{self.spelled} is {words!r}, expected {expected}", hint=self.hint) from None

    @property
    def spelled(self) -> str:
        """The name that users know it by."""
        return self.flag or self.name.replace("_", "-")

    @property
    def hint(self) -> str:
        """A hint with an example, or with how to get help."""
        return f"for example {self.spelled} {self.domain.example}" if self.domain.example else HELP_HINT


def option(
    domain: Domain,
    help: str,
    *,
    group: str,
    default: Any = MISSING,
    default_words: str | None = None,
    depends: Callable[[Any], Any] | None = None,
    flag: str | None = None,
    also: Mapping[str, Any] | None = None,
    fills: tuple[str, ...] = (),
) -> Any:
    """A field of a configuration, see `Option`; the flag is its name where none is given."""
    declared = {
        "domain": domain,
        "help": help,
        "group": group,
        "flag": flag,
        "default": UNSET if depends is not None else default,
        "default_words": default_words,
        "depends": depends,
        "also": also or {},
        "fills": fills,
    }
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=declared)
    return field(default=declared["default"], metadata=declared)


Config = TypeVar("Config", bound="Options")


#: What `options_of` has found, by class.
_found: dict[type[Options], dict[str, Option]] = {}


def options_of(config: type[Options]) -> dict[str, Option]:
    """What the fields of a configuration declare, by name, in their order."""
    if config not in _found:
        _found[config] = {entry.name: _option(entry.name, entry.metadata) for entry in fields(config) if entry.metadata}
    return _found[config]


def _option(name: str, declared: Mapping[str, Any]) -> Option:
    values = {key: value for key, value in declared.items() if key not in ("flag", "default_words")}
    flag, words = declared["flag"], declared["default_words"]
    if words is None:
        default = declared["default"]
        words = "" if any(default is none for none in (MISSING, None, False)) else in_words(default)
    return Option(name, flag="--" + name.replace("_", "-") if flag is None else flag, default_words=words, **values)


def given(**values: Any) -> dict[str, Any]:
    """Those of `values` that are not None: what is left takes its default."""
    return {name: value for name, value in values.items() if value is not None}


def same(config: type[Options], name: str, **changed: Any) -> Any:
    """A field that is declared as that of another configuration, but for what is `changed`."""
    [declared] = [dict(entry.metadata) for entry in fields(config) if entry.name == name]
    if declared["depends"] is not None:
        declared.pop("default")
    return option(**(declared | changed))


def in_words(value: Any) -> str:
    """A value as it is typed."""
    if value is None:
        return "not given"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={in_words(one)}" for name, one in value.items())
    if isinstance(value, (tuple, list)):
        return ",".join(map(in_words, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A configuration whose fields are declared by `option`: each is loaded, resolved and checked when it is made.

    Raises:
        UsageError: a value is not what it may be; the message names its flag.
    """

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            value = getattr(self, name)
            if value is UNSET:
                value = declared.resolved(self)
            value = declared.domain.load(value)
            declared.check(value)
            object.__setattr__(self, name, value)
        self.check_together()

    def check_together(self) -> None:
        """Raise UsageError where options that are right by themselves do not go together."""

    @classmethod
    def from_entries(cls: type[Config], entries: dict[str, Any]) -> Config:
        """The configuration that a file states, whose entries are each what they may be (see `entries_of`).

        They are taken as they are: whether they go together is not asked. Missing ones have their defaults.
        """
        config = object.__new__(cls)
        for name, one in options_of(cls).items():
            value = entries.get(name, one.default)
            object.__setattr__(config, name, one.resolved(config) if value is UNSET else one.domain.load(value))
        return config


def entries_of(config: type[Options]) -> dict[str, Domain]:
    """What the entries of a configuration may be in a manifest, by name."""
    return {name: or_null(one.domain) if one.may_be_none else one.domain for name, one in options_of(config).items()}


def read_toml(path: Path, *configs: type[Options]) -> dict[str, Any]:
    """Values by field, of a file whose entries are the fields of configurations, with dashes between words.

    What no flag says is no entry either; where a flag says several fields, each of these is one.

    Raises:
        UsageError: the file cannot be read or is not TOML, or an entry is unknown or not what it may be.
    """
    options = [one for config in configs for one in options_of(config).values()]
    typed = {name for one in options if one.flag for name in one.fills or (one.name,)}
    declared = {one.name.replace("_", "-"): one for one in options if one.name in typed}
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint="give a TOML file") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"not TOML: {error}", where=str(path), hint=f"lines such as {_example(declared)}") from error
    values = {}
    for entry, value in entries.items():
        name = entry.replace("_", "-")
        found = declared.get(name)
        if found is None:
            hint = f"it is one of {', '.join(declared)}; what else there is is given in the command, not in a file"
            for one in options:
                if one.flag == f"--{name}":  # which says something else than a field of that name
                    hint = (
                        f"what {one.flag} says is {' or '.join(one.fills or (one.name,)).replace('_', '-')} in a file"
                    )
            raise UsageError(f"unknown entry `{entry}`", where=str(path), hint=hint)
        loaded = found.domain.load(value)
        if found.domain.is_written_too and isinstance(value, str):
            loaded = _read_written(found, value)
        if not found.domain.holds(loaded):
            name, wrong = _wrong_entry(found.domain, entry, value)
            raise UsageError(
                f"`{name}` is {_shown(wrong)}, expected {found.domain.expected}",
                where=str(path),
                hint="fix this entry",
            )
        values[found.name] = loaded
    return values


def _example(declared: Mapping[str, Option]) -> str:
    """A line that a file of these entries may have."""
    for name, one in declared.items():
        value = one.domain.completed[0] if one.domain.completed else one.default
        if type(value) in (int, str):
            return f"{name} = {json.dumps(value)}"
    return ", ".join(declared)


def _read_written(option: Option, value: str) -> Any:
    """What is written as it is typed; where that is none, the text as it is."""
    try:
        return option.read(value)
    except UsageError:
        return value


def _wrong_entry(domain: Domain, entry: str, value: Any) -> tuple[str, Any]:
    """The name of what is wrong in an entry, and its value: of tables what would be wrong if it stood there alone."""
    keys, wrong = [entry], value
    while isinstance(wrong, Mapping):
        bad = next(
            (key for key, one in wrong.items() if not domain.holds(domain.load(_nested([*keys[1:], key], one)))), ""
        )
        if not bad:
            break
        keys, wrong = [*keys, bad], wrong[bad]
    return toml_name(*keys), wrong


def _nested(keys: list[str], value: Any) -> Any:
    """`value` in a table for each of `keys`, the first being the outermost."""
    for key in reversed(keys):
        value = {key: value}
    return value


def toml_name(*keys: str) -> str:
    """The name of an entry in tables of TOML: columns."a.jsonl".text."""
    return ".".join(key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key) for key in keys)


def _shown(value: Any) -> str:
    """A value for an error, as it is written: a long one is cut."""
    return shorten(json.dumps(value, default=str, ensure_ascii=False), _LETTERS, placeholder=" ...")
