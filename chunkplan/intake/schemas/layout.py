"""What a schema is, and in which keys of a source it is laid out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from chunkplan.intake.records import JsonObject, Record


def has_all(record: JsonObject, keys: Mapping[str, str]) -> bool:
    """Whether `record` says something for every role of `keys`, role -> key."""
    return all(record.get(key) is not None for key in keys.values())


@dataclass(frozen=True)
class RecordLayout:
    """How a source's records are laid out: a schema, and for each of its roles the key that has it.

    `evidence` is a line for people that says why. `ignored` are the keys that are as if they were not there. `marks`
    are the keys that say something of tokens, in all records of the source; None where that is not known.
    """

    schema: str
    columns: dict[str, str]
    evidence: str
    ignored: tuple[str, ...] = ()
    marks: tuple[str, ...] | None = None

    @cached_property
    def keys(self) -> frozenset[str]:
        """The keys that have a role."""
        return frozenset(self.columns.values())


@dataclass(frozen=True)
class Schema:
    """The roles that a record is made of, and how it is parsed.

    `required` and `optional` are roles, each with the keys that usually have it, the first being the role's own name;
    `parse(record, columns)` gives a record's neutral form or raises RecordError.

    `reads(record, columns)` are the keys that are read beside those of the required roles; without it, one of each role
    is. Where `is_paired`, the usual keys of the required roles belong together, in their order: a `problem` has a
    `solution`, and no `answer`.
    """

    required: Mapping[str, tuple[str, ...]]
    parse: Callable[[JsonObject, dict[str, str]], Record]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_paired: bool = False
    reads: Callable[[JsonObject, dict[str, str]], Collection[str]] | None = None

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """The required and the optional roles, with their usual keys."""
        return {**self.required, **self.optional}

    def keys_of(self, record: JsonObject, columns: dict[str, str]) -> dict[str, str]:
        """The keys that `record` itself has for the roles: those of `columns`, or others that are usual as well."""
        keys = {
            role: key
            if record.get(key) is not None
            else next((usual for usual in self._usual(role, key) if record.get(usual) is not None), key)
            for role, key in columns.items()
        }
        if self.is_paired:
            own = {role: columns[role] for role in self.required}
            pairs = [] if has_all(record, own) else self.choices({})
            others = pairs if own in pairs else []  # the user has not named another
            keys |= next((pair for pair in others if has_all(record, pair)), own)
        return keys

    def choices(self, named: Mapping[str, str]) -> list[dict[str, str]]:
        """The keys that the required roles may have together: role -> key, where the user has `named` some."""
        usual = [[named[role]] if role in named else dict.fromkeys(keys) for role, keys in self.required.items()]
        if self.is_paired and named.keys().isdisjoint(self.required):
            return [dict(zip(self.required, keys, strict=True)) for keys in zip(*self.required.values(), strict=True)]
        return [dict(zip(self.required, keys, strict=True)) for keys in product(*usual)]

    def all_keys(self, columns: dict[str, str]) -> set[str]:
        """The keys that records of this layout may have for their roles."""
        others = {key for keys in self.optional.values() for key in keys} if self.reads else set[str]()
        return others | {other for role, key in columns.items() for other in (key, *self._usual(role, key))}

    def _usual(self, role: str, key: str) -> tuple[str, ...]:
        """The keys that a role usually has; none where the user has named another."""
        return self.roles[role] if key in self.roles[role] else ()
