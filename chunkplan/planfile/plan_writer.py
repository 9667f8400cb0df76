"""Writes the files of a plan as its steps come, in bounded memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan.planfile.hashing import ContentHasher, combine_hashes, content_hash
from chunkplan.planfile.manifest import write_manifest
from chunkplan.planfile.schema import SCHEMA_VERSION, plan_schemas
from chunkplan.version import __version__

#: Rows. Small enough that a reader that streams steps holds little, large enough to compress well.
_ROW_GROUP = 64 << 10

#: Ids that are shuffled, and numbers that go up: a dictionary of them is of no use.
_DIFFERENCES = ("segments.list.element.sequence_id", "slots.list.element")


class PlanWriter:
    """Writes a plan into `folder` (see `folder.replace_folder`); without one it only finds out the manifest.

    `schemas`: see `plan_schemas`.
    """

    def __init__(self, folder: Path | None, schemas: dict[str, pa.Schema]) -> None:
        self._folder = folder
        self._schemas = schemas
        self._hashers = {name: ContentHasher(schema) for name, schema in self._schemas.items()}
        self._waiting: dict[str, list[pa.Table]] = {name: [] for name in self._schemas}
        self._files: dict[str, pq.ParquetWriter] = {}

    def add(self, tables: dict[str, pa.Table]) -> None:
        """Append rows to `steps`, `chunks` and `schedule`."""
        for name, table in tables.items():
            self._hashers[name].update(table)
            self._waiting[name].append(table)
            if sum(waiting.num_rows for waiting in self._waiting[name]) >= _ROW_GROUP:
                self._flush(name)

    def finish(self, *, config: dict[str, Any], **described: Any) -> dict[str, Any]:
        """Write what is left and the manifest, with its `config` and the entries `described`; returns the manifest."""
        for name in self._schemas:
            self._flush(name)
        for file in self._files.values():
            file.close()
        hashes = {name: hasher.hexdigest() for name, hasher in self._hashers.items()}
        hashes["config"] = _hash_config(config)
        manifest = {
            "kind": "plan",
            "schema_version": SCHEMA_VERSION,
            "tool_version": __version__,
            "content_hash": combine_hashes(hashes),
            "content_hashes": hashes,
            "config": config,
            **described,
        }
        if self._folder is not None:
            write_manifest(self._folder, manifest)
        return manifest

    def _flush(self, name: str) -> None:
        tables, self._waiting[name] = self._waiting[name], []
        if self._folder is None or not tables:
            return
        if name not in self._files:
            self._files[name] = _open(self._folder / f"{name}.parquet", self._schemas[name])
        self._files[name].write_table(pa.concat_tables(tables), row_group_size=_ROW_GROUP)


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Takes half the time of pyarrow's defaults; readers seek by step alone."""
    leaves = [
        leaf
        for field in schema
        for leaf in (
            [f"{field.name}.list.element.{inner.name}" for inner in field.type.value_type]
            if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type)
            else [f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name]
        )
    ]
    return pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        write_statistics=["step"],
        use_dictionary=[leaf for leaf in leaves if leaf not in _DIFFERENCES],
        column_encoding={leaf: "DELTA_BINARY_PACKED" for leaf in leaves if leaf in _DIFFERENCES} or None,
    )


def hash_plan(tables: dict[str, pa.Table], config: dict[str, Any]) -> dict[str, str]:
    """The content hashes of those of a plan's `tables` that are given, and of its configuration."""
    schemas = plan_schemas(config)
    hashes = {name: content_hash(table, schemas[name]) for name, table in tables.items()}
    return {**hashes, "config": _hash_config(config)}


def _hash_config(config: dict[str, Any]) -> str:
    """SHA-256 of the configuration as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
