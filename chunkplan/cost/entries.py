"""What the entries of a model's shape and of a hardware profile may be, wherever they are read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from chunkplan.domains import FLAG, TEXT, Domain, find_mismatch, whole
from chunkplan.errors import DataError

#: Beyond any model and any machine, and near enough that products and quotients of a few stay finite.
_LEAST, _MOST = 1e-6, 10**18

_POSITIVE = Domain(
    lambda value: type(value) in (int, float) and _LEAST <= value <= _MOST,
    f"a positive number, at most {_MOST:.0e}",
)
_TESTS: dict[str, Domain] = {"str": TEXT, "bool": FLAG, "float": _POSITIVE, "int": whole(1, _MOST)}

Entries = TypeVar("Entries")


def from_entries(
    kind: type[Entries],
    values: Any,
    *,
    path: str,
    where: str,
    hint: str,
    optional: Collection[str] = (),
    also: Mapping[str, Domain] | None = None,
) -> Entries:
    """A dataclass of strings, flags and numbers from a dict that has an entry for each of its fields and no other.

    `path` names the dict in errors, "" where it is all there is; `optional` entries may be missing; `also` gives tests
    for fields whose type says too little.

    Raises:
        DataError: an entry is missing, unknown, or not what it should be.
    """
    expected = {field.name: (also or {}).get(field.name) or _TESTS[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    tests = {f"{name}?" if name in optional else name: test for name, test in expected.items()}
    if found := find_mismatch(values, tests, path):
        raise DataError(found, where=where, hint=hint)
    if unknown := sorted(set(values) - set(expected)):
        raise DataError(f"`{unknown[0]}` is unknown, expected {', '.join(expected)}", where=where, hint=hint)
    return kind(**values)
