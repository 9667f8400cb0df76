"""Entries of JSON and TOML: the shape of a model, and what entries of shapes and of profiles may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from chunkplan.cost.shape import Layer, ModelShape, plain_layer
from chunkplan.domains import FLAG, TEXT, Domain, Expected, find_mismatch, or_null, whole
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


_COUNT, _SIZE = whole(0, _MOST), whole(1, _MOST)

#: Entries of a layer that are there only where they say something.
_IF_SET = ("normed_width", "wide_norms", "router_width")
_LAYER: dict[str, Expected] = {
    field.name + "?" * (field.name in _IF_SET): {"int": _COUNT, "bool": FLAG}.get(str(field.type), or_null(_SIZE))
    for field in fields(Layer)
}
_AROUND: dict[str, Domain] = {
    "name": TEXT,
    "num_layers": whole(1, 100_000),
    "hidden_size": _SIZE,
    "vocab_size": _SIZE,
    "tied_embeddings": FLAG,
    "max_positions": or_null(whole(1)),
}
_ORDER = Domain(
    lambda value: isinstance(value, list) and all(type(place) is int for place in value), "a list of whole numbers"
)

#: The entries of a shape of several kinds of layers, and of one whose layers are alike, as `plain_layer` makes them.
_DIFFERING: dict[str, Expected] = {**_AROUND, "kinds": [_LAYER], "order": _ORDER}
_WIDTHS = ("num_query_heads", "num_kv_heads", "query_width", "kv_width", "mlp_width", "all_mlp_width")
_PLAIN: dict[str, Expected] = {
    **{name: _AROUND[name] for name in ("name", "num_layers", "hidden_size")},
    **dict.fromkeys(_WIDTHS, _SIZE),
    "vocab_size": _SIZE,
    "experts_per_token": whole(),
    **{name: _AROUND[name] for name in ("tied_embeddings", "max_positions")},
}


def entries_of_shape(shape: ModelShape) -> Mapping[str, Any]:
    """The entries from which `shape_of_entries` makes the same shape.

    Of layers that are alike, as `plain_layer` makes them, they have the widths; of others `kinds` and `order`.
    """
    around = {name: getattr(shape, name) for name in _AROUND}
    first = shape.kinds[0]
    widths = {"kv_width": first.key_width} | {
        name: getattr(first, name) for name in (*_WIDTHS, "experts_per_token") if name != "kv_width"
    }
    if shape.kinds == (plain_layer(shape.hidden_size, **widths),):
        values = around | widths
        return {name: values[name] for name in _PLAIN}
    kinds = [
        {name: value for name, value in asdict(kind).items() if value or name not in _IF_SET} for kind in shape.kinds
    ]
    return {**around, "kinds": kinds, "order": list(shape.order)}


def shape_of_entries(values: Any, *, where: str, hint: str) -> ModelShape:
    """The shape that `entries_of_shape` wrote.

    Raises:
        DataError: an entry is missing, unknown, or not what it should be.
    """
    differs = isinstance(values, Mapping) and "kinds" in values
    expected = _DIFFERING if differs else _PLAIN
    if found := find_mismatch(values, expected, "shape"):
        raise DataError(found, where=where, hint=hint)
    unknown = sorted(set(values) - set(expected))
    if differs:
        unknown += sorted({name for kind in values["kinds"] for name in kind} - {field.name for field in fields(Layer)})
    if unknown:
        raise DataError(f"`{unknown[0]}` is unknown in `shape`", where=where, hint=hint)
    around = {name: values[name] for name in _AROUND if name != "num_layers"}
    if not differs:
        widths = {name: values[name] for name in (*_WIDTHS, "experts_per_token")}
        kind = plain_layer(values["hidden_size"], **widths)
        return ModelShape(**around, kinds=(kind,), order=(0,) * values["num_layers"])
    order = values["order"]
    if len(order) != values["num_layers"] or set(order) != set(range(len(values["kinds"]))):
        what = "`shape.order` has to have a place in `shape.kinds` for each of the layers, and all of them"
        raise DataError(what, where=where, hint=hint)
    return ModelShape(**around, kinds=tuple(Layer(**kind) for kind in values["kinds"]), order=tuple(order))
