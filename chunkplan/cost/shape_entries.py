"""Entries of JSON and TOML: the shape of a model, and what entries of shapes and of profiles may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from chunkplan.cost.shape import Layer, ModelShape, plain_layer
from chunkplan.domains import FLAG, TEXT, Domain, Expected, find_mismatch, or_null, whole
from chunkplan.errors import DataError

# What the entries of a model's shape and of a hardware profile may be, wherever they are read from.


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


_COUNT = whole(0, 10**18)
_MOST_LAYERS = 100_000
#: Entries of a layer that are there only where they say something: earlier versions did not have them.
_IF_SET = ("normed_width", "wide_norms", "router_width")
_LAYER: dict[str, Expected] = {
    field.name + "?" * (field.name in _IF_SET): {"int": _COUNT, "bool": FLAG}.get(
        str(field.type), or_null(whole(1, 10**18))
    )
    for field in fields(Layer)
}
_OF_KIND = {name.removesuffix("?") for name in _LAYER}
_AROUND: dict[str, Domain] = {
    "name": TEXT,
    "num_layers": whole(1, _MOST_LAYERS),
    "hidden_size": whole(1, 10**18),
    "vocab_size": whole(1, 10**18),
    "tied_embeddings": FLAG,
    "max_positions": or_null(whole(1)),
}
_DIFFERING: dict[str, Expected] = {
    **_AROUND,
    "kinds": [_LAYER],
    "order": Domain(
        lambda value: isinstance(value, list) and all(type(place) is int for place in value), "a list of whole numbers"
    ),
}


@dataclass(frozen=True, kw_only=True)
class _PlainShape:
    """The entries of a shape whose layers are all alike, and each one of `plain_layer`."""

    name: str
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    query_width: int
    kv_width: int
    mlp_width: int
    all_mlp_width: int
    vocab_size: int
    experts_per_token: int
    tied_embeddings: bool
    max_positions: int | None


#: What `plain_layer` is told of a layer.
_OF_LAYER = ("num_query_heads", "num_kv_heads", "query_width", "mlp_width", "all_mlp_width", "experts_per_token")


def entries_of_shape(shape: ModelShape) -> Mapping[str, Any]:
    """The entries from which `shape_of_entries` makes the same shape.

    Of layers that are alike, as `plain_layer` makes them, they have the widths; of others `kinds` and `order`.
    """
    around = {name: getattr(shape, name) for name in _AROUND}
    if len(shape.kinds) == 1:
        [kind] = shape.kinds
        widths = {name: getattr(kind, name) for name in _OF_LAYER} | {"kv_width": kind.key_width}
        if kind == plain_layer(shape.hidden_size, **widths):
            values = around | widths
            return {field.name: values[field.name] for field in fields(_PlainShape)}
    kinds = [
        {name: value for name, value in asdict(kind).items() if value or name not in _IF_SET} for kind in shape.kinds
    ]
    return {**around, "kinds": kinds, "order": list(shape.order)}


def shape_of_entries(values: Any, *, where: str, hint: str) -> ModelShape:
    """The shape that `entries_of_shape` wrote.

    Raises:
        DataError: an entry is missing, unknown, or not what it should be.
    """
    if isinstance(values, Mapping) and "kinds" in values:
        return _of_differing(values, where, hint)
    tests = {"experts_per_token": whole(), "max_positions": or_null(whole(1)), "num_layers": _AROUND["num_layers"]}
    plain = from_entries(_PlainShape, values, path="shape", where=where, hint=hint, also=tests)
    widths = {name: getattr(plain, name) for name in (*_OF_LAYER, "kv_width")}
    return ModelShape(
        **{name: getattr(plain, name) for name in _AROUND if name != "num_layers"},
        kinds=(plain_layer(plain.hidden_size, **widths),),
        order=(0,) * plain.num_layers,
    )


def _of_differing(values: Mapping[str, Any], where: str, hint: str) -> ModelShape:
    found = find_mismatch(values, _DIFFERING, "shape")
    unknown = sorted(set(values) - set(_DIFFERING))
    unknown += sorted({name for kind in values["kinds"] for name in kind} - _OF_KIND) if not found else []
    order = values["order"] if not found else []
    if not found and (len(order) != values["num_layers"] or set(order) != set(range(len(values["kinds"])))):
        found = "`shape.order` has to have a place in `shape.kinds` for each of the layers, and all of them"
    if found or unknown:
        raise DataError(found or f"`{unknown[0]}` is unknown in `shape`", where=where, hint=hint)
    return ModelShape(
        **{name: values[name] for name in _AROUND if name != "num_layers"},
        kinds=tuple(Layer(**kind) for kind in values["kinds"]),
        order=tuple(order),
    )
