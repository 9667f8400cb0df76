"""What a schema is, and in which keys of a source it is laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chunkplan.intake.records import JsonObject, Record


@dataclass(frozen=True)
class RecordLayout:
    """How a source's records are laid out: a schema, and for each of its roles the key that has it.

    `evidence` is a line for people that says why.
    """

    schema: str
    columns: dict[str, str]
    evidence: str


@dataclass(frozen=True)
class Schema:
    """The roles that a record is made of, and how it is parsed.

    `required` and `optional` are roles, each with the keys that usually have it, the first being the role's own name;
    `parse(record, columns)` gives a record's neutral form or raises RecordError.
    """

    required: Mapping[str, tuple[str, ...]]
    parse: Callable[[JsonObject, dict[str, str]], Record]
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """The required and the optional roles, with their usual keys."""
        return {**self.required, **self.optional}

    def keys_of(self, record: JsonObject, columns: dict[str, str]) -> dict[str, str]:
        """The keys that `record` itself has for the roles: those of `columns`, or others that are usual as well."""
        return {
            role: key
            if record.get(key) is not None
            else next((usual for usual in self._usual(role, key) if record.get(usual) is not None), key)
            for role, key in columns.items()
        }

    def all_keys(self, columns: dict[str, str]) -> set[str]:
        """The keys that records of this layout may have for their roles."""
        return {other for role, key in columns.items() for other in (key, *self._usual(role, key))}

    def _usual(self, role: str, key: str) -> tuple[str, ...]:
        """The keys that a role usually has; none where the user has named another."""
        return self.roles[role] if key in self.roles[role] else ()
