"""A plan's tables as rows, changed on purpose and written again with hashes that fit; how to find a place there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
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
    manifest = json.loads((plan / "manifest.json").read_text())
    rows = {name: pq.read_table(plan / f"{name}.parquet").to_pylist() for name in plan_schemas(manifest["config"])}
    manifest["config"].update(config)
    stated = [step["peak_retained_tokens"] for step in rows["steps"]]
    before = deepcopy(rows["schedule"])
    change(rows)
    untouched = [row.get("slots") for row in rows["schedule"]] == [row["slots"] for row in before if "slots" in row]
    if rows["schedule"] != before and (untouched or len(rows["schedule"]) != len(before)):
        restate_slots(rows, manifest["config"])
    if stated == [step["peak_retained_tokens"] for step in rows["steps"]]:
        restate_memory(rows, manifest["config"]["virtual_stages"])
    schemas = plan_schemas(manifest["config"])
    tables = {name: pa.Table.from_pylist(rows[name], schema) for name, schema in schemas.items()}
    if "mix" in config:
        manifest["selection"] = describe_selection(load_analysis(load_plan(plan).analysis_path), config_of(manifest))
    manifest |= {name: manifest["config"][name] for name in ("seed", "epochs")}
    write(plan, tables, manifest)


@contextmanager
def changed_rows(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Rows of a file of a plan, which are written as they are left, whatever the hashes."""
    table = pq.read_table(path)
    rows = table.to_pylist()
    yield rows
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)


def restate_memory(rows: Rows, num_virtual: int) -> None:
    """Let steps state the memory that their stages take with what was changed."""
    for step in rows["steps"]:
        step["peak_retained_tokens"] = -(-most_tokens_held(rows, step["step"]) // num_virtual)


def restate_slots(rows: Rows, config: dict[str, Any]) -> None:
    """Give the actions of rows slots in an order in which they can be done, each its own or that of whom it meets."""
    last = config["virtual_stages"] * config["pp"] - 1
    shares = {
        (row["step"], row["dp_rank"], row["chunk_id"]): (row["cp_first_rank"], row["cp_size"])
        for row in rows["chunks"]
        if row.get("cp_size", 1) > 1
    }
    queues = {(row["step"], row["stage"], row["dp_rank"]): row for row in rows["schedule"]}
    for row in queues.values():
        row["slots"] = []
    counts: dict[tuple[int, int], int] = {}
    sent: set[tuple[object, ...]] = set()

    def head(place: tuple[int, int, int]) -> tuple[str, int, int] | None:
        """The next action of a row, if what it waits for from another stage is there."""
        row = queues.get(place)
        if row is None or len(row["slots"]) == len(row["actions"]):
            return None
        op, chunk, virtual_stage = row["actions"][len(row["slots"])].values()
        way = {"forward": -1, "forward_kv": -1, "backward": 1, "backward_input": 1}.get(op, 0)
        needed = _model_stage(config, place[1], virtual_stage) + way
        is_ready = not way or not 0 <= needed <= last or (place[0], place[2], way, needed, chunk) in sent
        return (op, chunk, virtual_stage) if is_ready else None

    moving = True
    while moving:
        moving = False
        for step, stage, rank in queues:
            while (action := head((step, stage, rank))) is not None:
                first, size = shares.get((step, rank, action[1]), (rank, 1))
                members = range(first, first + size) if action[0] != "backward_weight" else [rank]
                if any(head((step, stage, each)) != action for each in members):
                    break
                for each in members:
                    queues[step, stage, each]["slots"].append(counts.get((step, stage), 0))
                    way = -1 if action[0] in ("forward", "forward_kv") else 1
                    sent.add((step, each, way, _model_stage(config, stage, action[2]), action[1]))
                counts[step, stage] = counts.get((step, stage), 0) + 1
                moving = True
    for (step, stage, _), row in queues.items():  # of what is never done
        missing = len(row["actions"]) - len(row["slots"])
        start = counts.get((step, stage), 0)
        row["slots"] += range(start, start + missing)
        counts[step, stage] = start + missing


def _model_stage(config: dict[str, Any], stage: int, virtual_stage: int) -> int:
    pp = config["pp"]
    is_mirrored = config["schedule"] == "zero-bubble-v" and virtual_stage == 1
    return int(virtual_stage * pp + (pp - 1 - stage if is_mirrored else stage))


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
