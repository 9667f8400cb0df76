"""Each invariant, broken on purpose, is found under its name and at its place."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, build, load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.plan_writer import describe_plan, write_plan
from chunkplan.planfile.schema import CHUNKS, SCHEDULE, STEPS
from chunkplan.validation import PLAN_INVARIANTS

SCHEMAS = {"steps": STEPS, "chunks": CHUNKS, "schedule": SCHEDULE}
LENGTHS = [5, 9, 3, 40, 7, 7, 2, 12, 50, 6, 4, 11, 13, 9, 10, 8, 12, 9, 14, 10]
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
def analysis(tmp_path: Path) -> Path:
    """20 sequences, two of them split by a ChunkSize of 16: one of 40 tokens, one of 50."""
    folder = tmp_path / "analysis"
    folder.mkdir()
    writer = AnalysisWriter(folder)
    random = np.random.default_rng(0)
    for record, length in enumerate(LENGTHS):
        target = random.random(length) < 0.7
        target[0] = False
        writer.add(0, record, random.integers(0, 50, length, dtype=np.int32), target)
    writer.finish(
        exact=True,
        sources=[{"path": "d.jsonl", "schema": "text", "records": len(LENGTHS)}],
        rejected={},
        max_token_id=49,
    )
    return folder


@pytest.fixture
def plan(tmp_path: Path, analysis: Path) -> Path:
    """Two steps of ten sequences on two ranks of two stages; K = 2, so the split sequences recompute."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, dp=2, pp=2)
    return build(analysis, tmp_path / "plan", config).path


def tamper(plan: Path, change: Callable[[Rows], None], **config: Any) -> None:
    """Change rows and write the plan again with hashes that fit, so that only the invariant itself is broken."""
    rows = {name: pq.read_table(plan / f"{name}.parquet").to_pylist() for name in SCHEMAS}
    change(rows)
    tables = {name: pa.Table.from_pylist(rows[name], schema) for name, schema in SCHEMAS.items()}
    manifest = json.loads((plan / "manifest.json").read_text())
    manifest["config"].update(config)
    write_plan(plan, tables, {**manifest, **describe_plan(tables, config=manifest["config"])})


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


def wrong_hash(rows: Rows) -> None:
    rows["steps"][0]["predicted_us"] += 1


def gap_in_chunk_ids(rows: Rows) -> None:
    rows["chunks"][1]["chunk_id"] += 1


def rank_without_chunks(rows: Rows) -> None:
    rows["chunks"] = [row for row in rows["chunks"] if (row["step"], row["dp_rank"]) != (1, 0)]


def sequence_in_another_step(rows: Rows) -> None:
    one, other = find(rows, step=0, group_id=None), find(rows, step=1, group_id=None)
    other["segments"].append(one["segments"].pop())


def token_count_wrong(rows: Rows) -> None:
    rows["chunks"][0]["num_tokens"] += 1


def token_twice(rows: Rows) -> None:
    chunk = long_group(rows)[1]
    chunk["segments"][0]["start"] -= 1
    chunk["segments"][0]["end"] -= 1
    chunk["prefix_tokens"] -= 1


def part_on_another_rank(rows: Rows) -> None:
    chunk = long_group(rows)[-1]
    other = find(rows, step=chunk["step"], dp_rank=1 - chunk["dp_rank"], group_id=None)
    other["segments"], chunk["segments"] = chunk["segments"], other["segments"]
    for row in (chunk, other):
        row["num_tokens"] = sum(segment["end"] - segment["start"] for segment in row["segments"])


def parts_out_of_order(rows: Rows) -> None:
    chunk, later = long_group(rows)[:2]
    chunk["group_index"], later["group_index"] = later["group_index"], chunk["group_index"]


def standalone_without_activations(rows: Rows) -> None:
    find(rows, group_id=None)["keeps_activations"] = False


def wrong_prefix(rows: Rows) -> None:
    long_group(rows)[2]["prefix_tokens"] = 0


def rows_unsorted(rows: Rows) -> None:
    """Whole ranks change places; within each, ids still run from 0."""
    rows["chunks"].sort(key=lambda row: (row["step"], -row["dp_rank"], row["chunk_id"]))


def sequences_misstated(rows: Rows) -> None:
    rows["steps"][1]["num_sequences"] += 1


def empty_segment(rows: Rows) -> None:
    chunk = find(rows, group_id=None)
    chunk["segments"].append({**chunk["segments"][0], "end": chunk["segments"][0]["start"]})


def last_tokens_missing(rows: Rows) -> None:
    chunk = long_group(rows)[-1]
    chunk["segments"][0]["end"] -= 1
    chunk["num_tokens"] -= 1


def recompute_too_early(rows: Rows) -> None:
    """The recompute comes before the backward that is due before it: activations would lie about for longer."""
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions = actions_of(rows, chunk, stage)
        place = position(actions, "recompute", chunk["chunk_id"])
        actions.insert(place - 1, actions.pop(place))


def recompute_at_the_end(rows: Rows) -> None:
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions_of(rows, chunk, stage).append({"op": "recompute", "chunk_id": chunk["chunk_id"], "virtual_stage": 0})


def gradients_crossed(rows: Rows) -> None:
    """The last stage forwards all first, then gives gradients back in another order than the first stage takes them."""
    for stage, order in ((0, (0, 1)), (1, (1, 0))):
        actions = actions_of(rows, rows["chunks"][0], stage)
        backwards = [action for action in actions if action["op"] == "backward" and action["chunk_id"] in (0, 1)]
        for action in backwards:
            actions.remove(action)
        place = 1 + max(position(actions, "forward", chunk_id) for chunk_id in (0, 1))
        actions[place:place] = [next(a for a in backwards if a["chunk_id"] == chunk_id) for chunk_id in order]


def unknown_op(rows: Rows) -> None:
    actions_of(rows, rows["chunks"][0])[0]["op"] = "fly"


def virtual_stage_beyond_reason(rows: Rows) -> None:
    actions_of(rows, rows["chunks"][0])[0]["virtual_stage"] = 10**9


def optimal_denied(rows: Rows) -> None:
    for row in rows["steps"]:
        row["optimal"] = not row["optimal"]


def negative_cost(rows: Rows) -> None:
    rows["chunks"][2]["cost"] = -1.0


def wrong_targets(rows: Rows) -> None:
    long_group(rows)[1]["num_target_tokens"] += 1


def wrong_totals(rows: Rows) -> None:
    rows["steps"][1]["num_tokens"] += 1


def stage_missing(rows: Rows) -> None:
    rows["schedule"] = [row for row in rows["schedule"] if (row["step"], row["dp_rank"], row["stage"]) != (1, 1, 0)]


def stage_of_no_rank(rows: Rows) -> None:
    """One row too few for rank 1 and one for a rank that cannot be: the number of rows is right."""
    row = next(row for row in rows["schedule"] if (row["step"], row["dp_rank"], row["stage"]) == (1, 1, 0))
    row["dp_rank"] = -1


def step_missing_in_schedule(rows: Rows) -> None:
    rows["schedule"] = [row for row in rows["schedule"] if row["step"] != 1]


def backward_missing(rows: Rows) -> None:
    actions = actions_of(rows, rows["chunks"][0])
    del actions[position(actions, "backward", 0)]


def recompute_missing(rows: Rows) -> None:
    """The first erratum of the pseudocode in circulation: other chunks than the last K keep their activations."""
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions = actions_of(rows, chunk, stage)
        del actions[position(actions, "recompute", chunk["chunk_id"])]


def ascending_recompute(rows: Rows) -> None:
    """The second erratum: recompute, and so backward, in ascending order."""
    first, second = (chunk["chunk_id"] for chunk in long_group(rows)[:2])
    for stage in (0, 1):
        for action in actions_of(rows, long_group(rows)[0], stage):
            if action["op"] in ("recompute", "backward") and action["chunk_id"] in (first, second):
                action["chunk_id"] = first + second - action["chunk_id"]


def links_crossed(rows: Rows) -> None:
    actions = actions_of(rows, rows["chunks"][0], stage=1)
    one, other = (action for action in actions if action["op"] == "forward" and action["chunk_id"] in (0, 1))
    one["chunk_id"], other["chunk_id"] = other["chunk_id"], one["chunk_id"]
    one, other = (action for action in actions if action["op"] == "backward" and action["chunk_id"] in (0, 1))
    one["chunk_id"], other["chunk_id"] = other["chunk_id"], one["chunk_id"]


def deadlock(rows: Rows) -> None:
    """Stage 0 wants chunk 0 back before it forwards chunk 1; stage 1 wants chunk 1 before it gives chunk 0 back."""
    first, last = (actions_of(rows, rows["chunks"][0], stage) for stage in (0, 1))
    first.insert(1, first.pop(position(first, "backward", 0)))
    last.insert(position(last, "forward", 1), last.pop(position(last, "backward", 0)))


CASES: dict[str, tuple[str, Callable[[Rows], None], tuple[int | None, int | None, int | None] | None]] = {
    "rows unsorted": ("chunk-ids", rows_unsorted, (0, 1, 0)),
    "sequences misstated": ("batch-sizes", sequences_misstated, (1, None, None)),
    "an empty segment": ("chunk-size", empty_segment, (0, 0, 0)),
    "last tokens missing": ("tokens-once", last_tokens_missing, None),
    "a recompute too early": ("recompute", recompute_too_early, None),
    "a recompute at the end": ("recompute", recompute_at_the_end, None),
    "gradients in different orders": ("links", gradients_crossed, (0, 0, None)),
    "an unknown op": ("actions", unknown_op, (0, 0, 0)),
    "a virtual stage beyond reason": ("actions", virtual_stage_beyond_reason, (0, 0, 0)),
    "optimality misstated": ("totals", optimal_denied, (0, None, None)),
    "a negative cost": ("totals", negative_cost, (0, 0, 2)),
    "a gap in chunk ids": ("chunk-ids", gap_in_chunk_ids, (0, 0, 2)),
    "a rank without chunks": ("chunk-ids", rank_without_chunks, (1, 0, None)),
    "a sequence in another step": ("batch-sizes", sequence_in_another_step, (0, None, None)),
    "tokens miscounted": ("chunk-size", token_count_wrong, (0, 0, 0)),
    "a token twice": ("tokens-once", token_twice, None),
    "a part on another rank": ("one-step-one-rank", part_on_another_rank, None),
    "parts out of order": ("groups", parts_out_of_order, None),
    "a standalone chunk that keeps nothing": ("groups", standalone_without_activations, (0, 0, 0)),
    "a wrong prefix": ("prefix", wrong_prefix, None),
    "targets miscounted": ("targets", wrong_targets, None),
    "totals miscounted": ("totals", wrong_totals, (1, None, None)),
    "a stage without actions": ("schedule-rows", stage_missing, (1, 1, None)),
    "actions of a rank that cannot be": ("schedule-rows", stage_of_no_rank, (1, -1, None)),
    "a step without actions": ("schedule-rows", step_missing_in_schedule, None),
    "a backward missing": ("actions", backward_missing, (0, 0, 0)),
    "a recompute missing": ("recompute", recompute_missing, None),
    "recompute ascending": ("part-order", ascending_recompute, None),
    "links in different orders": ("links", links_crossed, (0, 0, None)),
}


def test_an_unbroken_plan_passes_every_invariant_by_name(plan: Path, analysis: Path) -> None:
    result = validate(plan)
    assert result.ok
    assert result.passed == PLAN_INVARIANTS
    assert validate(analysis).ok


@pytest.mark.parametrize("case", CASES)
def test_a_broken_invariant_is_named(plan: Path, case: str) -> None:
    invariant, change, place = CASES[case]
    tamper(plan, change)
    result = validate(plan)
    assert not result.ok
    [violation] = [found for found in result.violations if found.invariant == invariant]
    if place is None:
        assert invariant in ("tokens-once", "schedule-rows") or violation.chunk_id is not None
    else:
        expected = [name for name in place if name is not None]
        assert [violation.step, violation.dp_rank, violation.chunk_id][: len(expected)] == expected


def test_more_than_k_holders_are_found(plan: Path) -> None:
    """The chunks kept are those of K = 2; a plan that says K = 1 holds too many."""
    tamper(plan, lambda rows: None, k=1)
    assert [violation.invariant for violation in validate(plan).violations] == ["holders"]


def test_a_deadlock_is_found(plan: Path) -> None:
    tamper(plan, deadlock)
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.step, violation.dp_rank) == ("acyclic", 0, 0)


def test_a_memory_bound_is_held(plan: Path) -> None:
    """Warm-up holds two chunks on the first stage, which 20 tokens are too few for; 64 tokens are room enough."""
    tamper(plan, lambda rows: None, memory_tokens=20)
    assert [violation.invariant for violation in validate(plan).violations] == ["memory"]
    tamper(plan, lambda rows: None, memory_tokens=64)
    assert validate(plan).ok


@pytest.mark.parametrize("name", ["steps", "chunks", "schedule"])
def test_a_changed_file_does_not_have_the_manifests_hash(plan: Path, name: str) -> None:
    table = pq.read_table(plan / f"{name}.parquet")
    column = {"steps": "predicted_us", "chunks": "cost", "schedule": "predicted_us"}[name]
    index = table.column_names.index(column)
    values = table.column(column).to_numpy() + np.float32(1)
    pq.write_table(table.set_column(index, table.schema.field(index), pa.array(values)), plan / f"{name}.parquet")
    violation = validate(plan).violations[0]
    assert violation.invariant == "content-hash"
    assert name in violation.message


def test_rewriting_a_file_with_another_layout_changes_nothing(plan: Path) -> None:
    """The hash is over content: other row groups, compression and writer metadata are the same plan."""
    for name in SCHEMAS:
        table = pq.read_table(plan / f"{name}.parquet")
        pq.write_table(table, plan / f"{name}.parquet", row_group_size=3, compression="none")
    assert validate(plan).ok
    assert [step.step for step in load_plan(plan).iter_steps(1)] == [1]


def test_another_analysis_is_not_the_plans(plan: Path, analysis: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    np.save(other, np.array([*LENGTHS[:-1], 12]))
    result = validate(plan, analysis=other)
    assert "content-hash" in {violation.invariant for violation in result.violations}
    moved = tmp_path / "moved"
    shutil.move(analysis, moved)
    with pytest.raises(UsageError, match=r"the analysis of the plan .* is not at"):
        validate(plan)
    assert validate(plan, analysis=moved).ok


def test_a_plan_moved_together_with_its_analysis_still_finds_it(plan: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "analysis", tmp_path / "away" / "analysis")
    shutil.copytree(plan, tmp_path / "away" / "plan")
    shutil.rmtree(tmp_path / "analysis")
    assert validate(tmp_path / "away" / "plan").ok


def test_a_changed_token_is_found(analysis: Path) -> None:
    """One bit of one token id: the lengths still fit, the content hash does not."""
    part = analysis / "tokens" / "part-00000.arrow"
    content = bytearray(part.read_bytes())
    ids = pa.ipc.open_file(part).get_batch(0).column("input_ids").flatten().to_numpy().tobytes()
    content[content.find(ids)] ^= 1
    part.write_bytes(content)
    assert "content-hash" in {violation.invariant for violation in validate(analysis).violations}


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        ({"totals": {"num_sequences": 20, "num_tokens": 1, "num_target_tokens": 1}}, "totals"),
        ({"rejected": {"empty": 1}}, "records"),
        ({"max_token_id": 3}, "tokens"),
        ({"content_hash": "0" * 64}, "content-hash"),
    ],
)
def test_a_broken_analysis_is_named(analysis: Path, change: dict[str, Any], invariant: str) -> None:
    manifest = json.loads((analysis / "manifest.json").read_text())
    (analysis / "manifest.json").write_text(json.dumps({**manifest, **change}))
    assert [violation.invariant for violation in validate(analysis).violations] == [invariant]


def test_a_plan_of_a_newer_schema_is_refused_by_name(plan: Path) -> None:
    manifest = json.loads((plan / "manifest.json").read_text())
    (plan / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(DataError, match="written by schema version 99") as refused:
        load_plan(plan)
    assert refused.value.hint is not None
    assert "upgrade" in refused.value.hint


@pytest.mark.parametrize("content", ["", "[]", "{", '{"kind": "plan"}', '{"kind": "analysis", "schema_version": 1}'])
def test_a_manifest_that_is_none_is_refused(plan: Path, content: str) -> None:
    (plan / "manifest.json").write_text(content)
    with pytest.raises(DataError):
        load_plan(plan)


def test_a_torn_file_is_refused(plan: Path) -> None:
    path = plan / "chunks.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"chunks\.parquet"):
        validate(plan)


def entries(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else []
    )
    return [below for key, value in items for below in [(*path, key), *entries(value, (*path, key))]]


def damage(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    if value is Ellipsis:
        del document[path[-1]]
    else:
        document[path[-1]] = value


@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_damaged_manifest_is_refused_or_found_and_never_crashes(
    plan: Path, analysis: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever entry is missing or of another type: `inspect` and `validate` say so, with their exit codes."""
    from chunkplan_cli.main import main

    file = {"plan": plan, "analysis": analysis}[kind] / "manifest.json"
    whole = file.read_text()
    accepted = []
    for path in entries(json.loads(whole)):
        for value in (..., "x", 0, 2**70, []):
            document = json.loads(whole)
            damage(document, path, value)
            if document == json.loads(whole):
                continue
            file.write_text(json.dumps(document))
            for command in ("inspect", "validate"):
                monkeypatch.setattr(sys, "argv", ["chunkplan", command, str(file.parent)])
                with pytest.raises(SystemExit) as end:
                    main()
                    raise SystemExit(0)
                assert end.value.code in (0, None, 2, 3, 4), (command, path, value, capsys.readouterr().err)
                if command == "validate" and not end.value.code:
                    accepted.append(path[0])
            capsys.readouterr()
    described = {"tool_version", "seed", "epochs", "sources", "predictions", "totals", "truncated", "analysis"}
    assert set(accepted) <= described | {"exact", "max_token_id", "tokens", "rejected"}
