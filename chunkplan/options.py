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
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

from chunkplan.domains import Domain, or_null
from chunkplan.errors import HELP_HINT, UsageError

#: Longest value shown in an error, in characters.
_MAX_SHOWN = 80

#: Stands for a default that follows from other options, until the configuration is made.
UNSET: Any = type("Unset", (), {"__repr__": lambda self: "UNSET"})()


class Advanced(str):
    """The group of options that only `--help-all` shows, in the panel of this name."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of a field of a configuration.

    Attributes:
        help: what it does, in sentences that end with a point; the default is not among them.
        group: the panel of the help it stands in.
        default: MISSING where a value has to be given.
        default_words: the default as the help says it, "" where it is not said; None: as it is typed.
        depends: of a default of `UNSET`, computes it from a configuration that has all fields before this one.
        called: the name that users know it by, where it is not the field's: of the flag and of the entry in TOML files.
        flag: how it is typed; "" for an entry of files only; None: as it is called.
        also: further flags, each with the value that it stands for.
        fills: the fields that a flag for several fields sets.
        name: the field's.
    """

    domain: Domain
    help: str
    group: str
    default: Any = field(default_factory=lambda: MISSING)
    default_words: Any = None
    depends: Callable[[Any], Any] | None = None
    called: str = ""
    flag: Any = None
    also: Mapping[str, Any] = field(default_factory=dict)
    fills: tuple[str, ...] = ()
    name: str = ""

    def of_field(self, name: str) -> Option:
        """The declaration with all that follows from the field's name and the default."""
        words, is_said = self.default_words, not any(self.default is value for value in (MISSING, None, False))
        called = self.called or name.replace("_", "-")
        return replace(
            self,
            name=name,
            called=called,
            flag="--" + called if self.flag is None else self.flag,
            default_words=(in_words(self.default) if is_said else "") if words is None else words,
        )

    @property
    def is_required(self) -> bool:
        """True if the option has no default."""
        return self.default is MISSING

    def check(self, value: Any) -> None:
        """Raises UsageError where `value` is not what it may be."""
        if not (value is None is self.default) and not self.domain.holds(value):
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
        return self.flag or self.called

    @property
    def hint(self) -> str:
        """A hint with an example, or with how to get help."""
        return f"for example {self.spelled} {self.domain.example}" if self.domain.example else HELP_HINT


def option(domain: Domain, help: str, **declared: Any) -> Any:
    """A field of a configuration; `declared` are further attributes of its `Option`."""
    return _field(Option(domain=domain, help=help, **declared))


def same(config: type[Options], name: str, **changed: Any) -> Any:
    """A field that is declared as that of another configuration, but for what is `changed`."""
    [declared] = [entry.metadata["option"] for entry in fields(config) if entry.name == name]
    return _field(replace(declared, **changed))


def _field(declared: Option) -> Any:
    default = UNSET if declared.depends else declared.default
    metadata = {"option": replace(declared, default=default)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


Config = TypeVar("Config", bound="Options")


#: What `options_of` has found, by class.
_found: dict[type[Options], dict[str, Option]] = {}


def options_of(config: type[Options]) -> dict[str, Option]:
    """The options of a configuration by name, in the order of its fields."""
    if config not in _found:
        declared = {entry.name: entry.metadata["option"] for entry in fields(config) if entry.metadata}
        _found[config] = {name: one.of_field(name) for name, one in declared.items()}
    return _found[config]


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

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Options._shown  # type: ignore[assignment]  # which a dataclass would make anew

    def _shown(self) -> str:
        """The configuration as it is made, of what differs from the defaults."""
        given = {
            name: getattr(self, name)
            for name, one in options_of(type(self)).items()
            if getattr(self, name) != one.default
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def __post_init__(self) -> None:
        for name, declared in options_of(type(self)).items():
            value = getattr(self, name)
            if value is UNSET and declared.depends is not None:
                value = declared.depends(self)
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
            value = one.depends(config) if value is UNSET and one.depends else one.domain.load(value)
            object.__setattr__(config, name, value)
        return config


def entries_of(config: type[Options]) -> dict[str, Domain]:
    """Domains of the entries of a configuration in a manifest, by name."""
    return {
        name: or_null(one.domain) if one.default is None else one.domain for name, one in options_of(config).items()
    }


def read_entries(path: Path, section: str = "", example: str = "name = value") -> Mapping[str, Any]:
    """The entries of a TOML file, or of a YAML file by its name; where it has a `section` those in it.

    Raises:
        UsageError: the file cannot be read or is neither; `example` is a line that it may have.
    """
    kind = "YAML" if _is_yaml(path) else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        entries = _load_yaml(text) if kind == "YAML" else tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(path), hint=f"give a {kind} file") from error
    except ValueError as error:
        hint = f"lines such as {example.replace(' =', ':') if kind == 'YAML' else example}"
        raise UsageError(f"not {kind}: {error}", where=str(path), hint=hint) from error
    found = entries.get(section)
    return found if isinstance(found, Mapping) else entries


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def _load_yaml(text: str) -> Mapping[str, Any]:
    import yaml

    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    if not isinstance(entries, dict):
        raise ValueError("there are no names with values")
    return {str(name): value for name, value in entries.items()}


def read_settings(path: Path, *configs: type[Options], section: str = "") -> dict[str, Any]:
    """Values by field, of a file (see `read_entries`) whose entries are called as the options of configurations are.

    What no flag says is no entry either; where a flag says several fields, each of these is one. In YAML, where 1e-5
    and 8K are text and off is false, a value may be as it is typed.

    Raises:
        UsageError: the file cannot be read, or an entry is unknown or not what it may be.
    """
    options = [one for config in configs for one in options_of(config).values()]
    typed = {name for one in options if one.flag for name in one.fills or (one.name,)}
    declared = {one.called: one for one in options if one.name in typed}
    values = {}
    for entry, value in read_entries(path, section, _example(declared)).items():
        name = entry.replace("_", "-")
        if name not in declared:
            hint = f"it is one of {', '.join(declared)}; what else there is is given in the command, not in a file"
            if close := get_close_matches(name, declared, 1):
                hint = f"is {close[0]} meant? `--help-all` lists all that a file may have"
            for one in options:
                if one.flag == f"--{name}":  # which stands for other fields
                    named = " or ".join(one.fills or (one.name,)).replace("_", "-")
                    hint = f"what {one.flag} says is {named} in a file"
            raise UsageError(f"unknown entry `{entry}`", where=str(path), hint=hint)
        domain = declared[name].domain
        loaded = domain.load(value)
        words = ("off", "on")[value] if isinstance(value, bool) else value
        if isinstance(words, str) and (domain.is_written_too or (_is_yaml(path) and not domain.holds(loaded))):
            with suppress(UsageError):
                loaded = declared[name].read(words)
        if not domain.holds(loaded):
            entry, wrong = _wrong_entry(domain, entry, value)
            shown = shorten(json.dumps(wrong, default=str, ensure_ascii=False), _MAX_SHOWN, placeholder=" ...")
            found = f"`{entry}` is {shown}, expected {domain.expected}"
            raise UsageError(found, where=str(path), hint="fix this entry")
        values[declared[name].name] = loaded
    return values


def _example(declared: Mapping[str, Option]) -> str:
    """A line that a file of these entries may have."""
    for name, one in declared.items():
        value = one.domain.completed[0] if one.domain.completed else one.default
        if type(value) in (int, str):
            return f"{name} = {json.dumps(value)}"
    return ", ".join(declared)


def _wrong_entry(domain: Domain, entry: str, value: Any) -> tuple[str, Any]:
    """The name of what is wrong in an entry, and its value: of tables what would be wrong if it stood there alone."""
    keys, wrong = [entry], value

    def is_wrong(key: str, one: Any) -> bool:
        for outer in reversed([*keys[1:], key]):
            one = {outer: one}
        return not domain.holds(domain.load(one))

    while isinstance(wrong, Mapping):
        bad = next((key for key, one in wrong.items() if is_wrong(key, one)), "")
        if not bad:
            break
        keys, wrong = [*keys, bad], wrong[bad]
    return toml_name(*keys), wrong


def toml_name(*keys: str) -> str:
    """The name of an entry in tables of TOML: columns."a.jsonl".text."""
    return ".".join(key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key) for key in keys)
