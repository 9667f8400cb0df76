"""Writes the files of a plan."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.planfile.hashing import combine_hashes, content_hash
from chunkplan.planfile.manifest import write_manifest
from chunkplan.planfile.schema import CHUNKS, SCHEDULE, SCHEMA_VERSION, STEPS
from chunkplan.version import __version__

_SCHEMAS = {"steps": STEPS, "chunks": CHUNKS, "schedule": SCHEDULE}

#: Small enough that a reader that streams steps holds little, large enough to compress well.
_ROW_GROUP = 64 << 10


def describe_plan(tables: dict[str, pa.Table], *, config: dict[str, Any], **described: Any) -> dict[str, Any]:
    """The manifest of a plan of `tables` (steps, chunks, schedule) with its `config` and the entries `described`."""
    hashes = hash_plan(tables, config)
    return {
        "kind": "plan",
        "schema_version": SCHEMA_VERSION,
        "tool_version": __version__,
        "content_hash": combine_hashes(hashes),
        "content_hashes": hashes,
        "config": config,
        **described,
    }


def hash_plan(tables: dict[str, pa.Table], config: dict[str, Any]) -> dict[str, str]:
    """The content hashes of a plan's tables and of its configuration, as JSON with sorted keys."""
    hashes = {name: content_hash(tables[name], schema) for name, schema in _SCHEMAS.items()}
    hashes["config"] = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return hashes


def write_plan(folder: Path, tables: dict[str, pa.Table], manifest: dict[str, Any]) -> None:
    """Write `tables` and `manifest` into `folder` (see `folder.replace_folder`)."""
    for name in _SCHEMAS:
        pq.write_table(tables[name], folder / f"{name}.parquet", compression="zstd", row_group_size=_ROW_GROUP)
    write_manifest(folder, manifest)
