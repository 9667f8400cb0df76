"""Manifests changed on purpose, entry by entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chunkplan.files.folder import MANIFEST


def entries(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else []
    )
    return [below for key, value in items for below in [(*path, key), *entries(value, (*path, key))]]


def damage(document: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set the value at a path of a JSON document; Ellipsis removes it."""
    for key in path[:-1]:
        document = document[key]
    if value is Ellipsis:
        del document[path[-1]]
    else:
        document[path[-1]] = value


def change_manifest(folder: Path, *path: Any, value: Any) -> None:
    """Set one entry of the manifest in a folder; Ellipsis removes it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    damage(manifest, path, value)
    (folder / MANIFEST).write_text(json.dumps(manifest))
