"""A plan's tables as rows, changed on purpose and written again with hashes that fit; how to find a place there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from chunkplan import load_plan, validate
from chunkplan.planfile.load import load_analysis
from chunkplan.planfile.manifest import config_of
from chunkplan.planfile.plan_writer import PlanWriter
from chunkplan.planfile.schema import CHUNKS, SCHEDULE, STEPS, plan_schemas
from chunkplan.planning.selection import describe_selection

SCHEMAS = {"steps": STEPS, "chunks": CHUNKS, "schedule": SCHEDULE}
Rows = dict[str, list[dict[str, Any]]]

#: The invariant, the change that breaks it, and at which step, rank and chunk; None where that is not known.
Case = tuple[str, Callable[[Rows], None], tuple[int | None, int | None, int | None] | None]


def tamper(plan: Path, change: Callable[[Rows], None], **config: Any) -> None:
    """Change rows and write the plan again with hashes that fit, so that only the invariant itself is broken."""
    rows = {name: pq.read_table(plan / f"{name}.parquet").to_pylist() for name in SCHEMAS}
    manifest = json.loads((plan / "manifest.json").read_text())
    manifest["config"].update(config)
    stated = [step["peak_retained_tokens"] for step in rows["steps"]]
    change(rows)
    if stated == [step["peak_retained_tokens"] for step in rows["steps"]]:
        restate_memory(rows, manifest["config"]["virtual_stages"])
    schemas = plan_schemas(manifest["config"])
    tables = {name: pa.Table.from_pylist(rows[name], schema) for name, schema in schemas.items()}
    if "mix" in config:
        manifest["selection"] = describe_selection(load_analysis(load_plan(plan).analysis_path), config_of(manifest))
    manifest |= {name: manifest["config"][name] for name in ("seed", "epochs")}
    write(plan, tables, manifest)


def restate_memory(rows: Rows, num_virtual: int) -> None:
    """Let steps state the memory that their stages take with what was changed."""
    for step in rows["steps"]:
        step["peak_retained_tokens"] = -(-most_tokens_held(rows, step["step"]) // num_virtual)


def most_tokens_held(rows: Rows, step: int) -> int:
    """The most that a stage holds activations of at once in a step, whatever else is wrong with it."""
    tokens = {(row["step"], row["dp_rank"], row["chunk_id"]): row["num_tokens"] for row in rows["chunks"]}
    most = 0
    for row in rows["schedule"]:
        held = 0
        for action in row["actions"] if row["step"] == step else ():
            sign = {"forward": 1, "recompute": 1, "backward": -1, "backward_weight": -1}.get(action["op"], 0)
            held += sign * tokens.get((step, row["dp_rank"], action["chunk_id"]), 0)
            most = max(most, held)
    return most


def write(plan: Path, tables: dict[str, pa.Table], manifest: dict[str, Any]) -> None:
    """Write tables as a plan with the config of `manifest` and what else it says; hashes are computed anew."""
    writer = PlanWriter(plan, plan_schemas(manifest["config"]))
    writer.add(tables)
    hashed = ("kind", "schema_version", "tool_version", "content_hash", "content_hashes")
    writer.finish(**{name: value for name, value in manifest.items() if name not in hashed})


def find(rows: Rows, **wanted: Any) -> dict[str, Any]:
    """The first chunk with these values."""
    return next(row for row in rows["chunks"] if all(row[name] == value for name, value in wanted.items()))


def long_group(rows: Rows) -> list[dict[str, Any]]:
    """The chunks of the 50-token sequence."""
    first = next(row for row in rows["chunks"] if row["group_size"] == 4)
    place = {name: first[name] for name in ("step", "dp_rank", "group_id")}
    return [row for row in rows["chunks"] if all(row[name] == value for name, value in place.items())]


def actions_of(rows: Rows, chunk: dict[str, Any], stage: int = 0) -> list[dict[str, Any]]:
    return next(
        row["actions"]
        for row in rows["schedule"]
        if (row["step"], row["dp_rank"], row["stage"]) == (chunk["step"], chunk["dp_rank"], stage)
    )


def position(actions: list[dict[str, Any]], op: str, chunk_id: int) -> int:
    return next(i for i, action in enumerate(actions) if (action["op"], action["chunk_id"]) == (op, chunk_id))


def groups_of(rows: Rows, sequence_id: int) -> list[list[dict[str, Any]]]:
    """The chunks of each group of a split sequence."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows["chunks"]:
        if row["group_id"] is not None and any(piece["sequence_id"] == sequence_id for piece in row["segments"]):
            found.setdefault((row["step"], row["dp_rank"], row["group_id"]), []).append(row)
    return list(found.values())


def whole(rows: Rows, sequence_id: int) -> list[dict[str, Any]]:
    """The segments of a sequence that is not split."""
    return [piece for row in rows["chunks"] for piece in row["segments"] if piece["sequence_id"] == sequence_id]


def part_of(chunk: dict[str, Any], sequence_id: int) -> dict[str, Any]:
    return next(piece for piece in chunk["segments"] if piece["sequence_id"] == sequence_id)


def assert_named(plan: Path, case: Case) -> None:
    """`validate` finds what a case breaks, once, under the name of its invariant and at its place."""
    invariant, change, place = case
    tamper(plan, change)
    result = validate(plan)
    assert not result.ok
    [violation] = [found for found in result.violations if found.invariant == invariant]
    if place is None:
        assert invariant in ("tokens-once", "schedule-rows") or violation.chunk_id is not None
    else:
        expected = [name for name in place if name is not None]
        assert [violation.step, violation.dp_rank, violation.chunk_id][: len(expected)] == expected
