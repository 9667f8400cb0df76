"""Each invariant, broken on purpose, is found under its name and at its place."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkplan import PlanConfig, build, load_plan, validate
from chunkplan.errors import DataError, UsageError
from chunkplan.planfile import token_file
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan.planfile.load import load_analysis
from chunkplan.planfile.manifest import config_of
from chunkplan.planfile.plan_writer import PlanWriter
from chunkplan.planfile.schema import CHUNKS, SCHEDULE, STEPS
from chunkplan.planning.selection import describe_selection
from chunkplan.validation import schedule_columns
from chunkplan.validation.order import BACKWARDS, FORWARDS, run_rows
from chunkplan.validation.validate import PLAN_INVARIANTS

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
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, dp=2, pp=2, tail_sharing=True)
    return build(analysis, tmp_path / "plan", config).path


def tamper(plan: Path, change: Callable[[Rows], None], **config: Any) -> None:
    """Change rows and write the plan again with hashes that fit, so that only the invariant itself is broken."""
    rows = {name: pq.read_table(plan / f"{name}.parquet").to_pylist() for name in SCHEMAS}
    manifest = json.loads((plan / "manifest.json").read_text())
    manifest["config"].update(config)
    stated = [step["peak_retained_tokens"] for step in rows["steps"]]
    change(rows)
    if stated == [step["peak_retained_tokens"] for step in rows["steps"]]:
        restate_memory(rows, manifest["config"]["virtual_stages"])
    tables = {name: pa.Table.from_pylist(rows[name], schema) for name, schema in SCHEMAS.items()}
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
    writer = PlanWriter(plan)
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


def recompute_of_another_chunk(rows: Rows) -> None:
    first, second = (chunk["chunk_id"] for chunk in long_group(rows)[:2])
    for stage in (0, 1):
        for action in actions_of(rows, long_group(rows)[0], stage):
            if action["op"] == "recompute":
                action["chunk_id"] = first + second - action["chunk_id"]


def recompute_at_the_end(rows: Rows) -> None:
    chunk = long_group(rows)[0]
    for stage in (0, 1):
        actions_of(rows, chunk, stage).append({"op": "recompute", "chunk_id": chunk["chunk_id"], "virtual_stage": 0})


def gradients_crossed(rows: Rows) -> None:
    """The last stage forwards all first, then gives gradients back in another order than the first stage takes them."""
    for stage, order in ((0, (0, 1)), (1, (1, 0))):
        actions = actions_of(rows, find(rows, group_id=None), stage)
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


def stage_too_many(rows: Rows) -> None:
    """Nothing is missing, but the last rank has a third stage."""
    rows["schedule"].append({**rows["schedule"][-1], "stage": 2})


def stage_twice(rows: Rows) -> None:
    rows["schedule"].append(rows["schedule"][-1])


def step_too_many_in_schedule(rows: Rows) -> None:
    rows["schedule"].append({**rows["schedule"][-1], "step": 2})


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
    actions = actions_of(rows, find(rows, group_id=None), stage=1)
    one, other = (action for action in actions if action["op"] == "forward" and action["chunk_id"] in (0, 1))
    one["chunk_id"], other["chunk_id"] = other["chunk_id"], one["chunk_id"]
    one, other = (action for action in actions if action["op"] == "backward" and action["chunk_id"] in (0, 1))
    one["chunk_id"], other["chunk_id"] = other["chunk_id"], one["chunk_id"]


def deadlock(rows: Rows) -> None:
    """Stage 0 wants chunk 0 back before it forwards chunk 1; stage 1 wants chunk 1 before it gives chunk 0 back."""
    first, last = (actions_of(rows, find(rows, group_id=None), stage) for stage in (0, 1))
    first.insert(1, first.pop(position(first, "backward", 0)))
    last.insert(position(last, "forward", 1), last.pop(position(last, "backward", 0)))


CASES: dict[str, tuple[str, Callable[[Rows], None], tuple[int | None, int | None, int | None] | None]] = {
    "rows unsorted": ("chunk-ids", rows_unsorted, (0, 1, 0)),
    "sequences misstated": ("batch-sizes", sequences_misstated, (1, None, None)),
    "an empty segment": ("chunk-size", empty_segment, (0, 1, 0)),
    "last tokens missing": ("tokens-once", last_tokens_missing, None),
    "a recompute too early": ("recompute", recompute_too_early, (0, 0, 1)),
    "a recompute at the end": ("recompute", recompute_at_the_end, None),
    "gradients in different orders": ("links", gradients_crossed, (0, 1, None)),
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
    "a standalone chunk that keeps nothing": ("groups", standalone_without_activations, (0, 1, 0)),
    "a wrong prefix": ("prefix", wrong_prefix, None),
    "targets miscounted": ("targets", wrong_targets, None),
    "totals miscounted": ("totals", wrong_totals, (1, None, None)),
    "a stage without actions": ("schedule-rows", stage_missing, (1, 1, None)),
    "actions of a rank that cannot be": ("schedule-rows", stage_of_no_rank, (1, -1, None)),
    "a stage too many": ("schedule-rows", stage_too_many, (1, 1, None)),
    "a stage twice": ("schedule-rows", stage_twice, None),
    "actions of a step that is not there": ("schedule-rows", step_too_many_in_schedule, None),
    "a recompute of another chunk": ("recompute", recompute_of_another_chunk, (0, 0, 1)),
    "a step without actions": ("schedule-rows", step_missing_in_schedule, None),
    "a backward missing": ("actions", backward_missing, (0, 0, 0)),
    "a recompute missing": ("recompute", recompute_missing, None),
    "recompute ascending": ("part-order", ascending_recompute, None),
    "links in different orders": ("links", links_crossed, (0, 1, None)),
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
    assert (violation.invariant, violation.step, violation.dp_rank) == ("acyclic", 0, 1)


def test_halves_of_a_backward_come_input_first(plan: Path) -> None:
    def halve(rows: Rows, order: tuple[str, str]) -> None:
        for row in rows["schedule"]:
            row["actions"] = [
                {**action, "op": op}
                for action in row["actions"]
                for op in (order if action["op"] == "backward" else (action["op"],))
            ]

    saved = {path: path.read_bytes() for path in plan.iterdir()}
    tamper(plan, lambda rows: halve(rows, ("backward_input", "backward_weight")))
    assert validate(plan).ok
    for path, content in saved.items():
        path.write_bytes(content)
    tamper(plan, lambda rows: halve(rows, ("backward_weight", "backward_input")))
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.step, violation.dp_rank, violation.chunk_id) == ("actions", 0, 0, 0)


def test_a_memory_bound_is_held(plan: Path) -> None:
    """To the token."""
    rows = {name: pq.read_table(plan / f"{name}.parquet").to_pylist() for name in SCHEMAS}
    most = max(most_tokens_held(rows, step["step"]) for step in rows["steps"])
    tamper(plan, lambda rows: None, memory_tokens=most - 1)
    [violation] = validate(plan).violations
    assert violation.invariant == "memory"
    assert f"holds {most} tokens" in violation.message
    tamper(plan, lambda rows: None, memory_tokens=most)
    assert validate(plan).ok


#: (table, path of names) of every column of whole numbers.
NUMBERS = [
    *((name, (field.name,)) for name, schema in SCHEMAS.items() for field in schema if pa.types.is_integer(field.type)),
    *(("chunks", ("segments", name)) for name in ("sequence_id", "start", "end")),
    *(("schedule", ("actions", name)) for name in ("chunk_id", "virtual_stage")),
]


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
def test_no_number_in_a_table_makes_a_plan_valid_or_a_check_crash(plan: Path, value: int) -> None:
    saved = {name: (plan / name).read_bytes() for name in [f"{name}.parquet" for name in SCHEMAS] + ["manifest.json"]}
    for table, path in NUMBERS:

        def change(rows: Rows, table: str = table, path: tuple[str, ...] = path) -> None:
            row = rows[table][-1]
            place = row if len(path) == 1 else row[path[0]][-1]
            place[path[-1]] = value

        tamper(plan, change)
        assert validate(plan).violations, (table, path)
        for name, content in saved.items():
            (plan / name).write_bytes(content)


@pytest.mark.parametrize("name", ["epochs", "global_batch", "dp", "pp", "k"])
def test_no_number_in_the_config_makes_a_check_crash(plan: Path, name: str) -> None:
    """`k` alone may be as large as any number of chunks."""
    tamper(plan, lambda rows: None, **{name: {"dp": 1 << 16, "pp": 1 << 10}.get(name, 2**31 - 1)})
    assert bool(validate(plan).violations) == (name != "k")
    tamper(plan, lambda rows: None, **{name: 2**63 - 1})
    with pytest.raises(DataError, match=f"`config.{name}` is {2**63 - 1}, expected a whole number from 1 to"):
        validate(plan)


def test_every_rank_is_checked_whatever_block_it_falls_in(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one rank, and of a few; two ranks are broken, each in its own way."""

    def change(rows: Rows) -> None:
        last = rows["chunks"][-1]
        for stage in (0, 1):
            actions_of(rows, last, stage).reverse()
        recompute_missing(rows)

    tamper(plan, change)
    expected = validate(plan).violations
    assert (expected[0].invariant, expected[0].step, expected[0].dp_rank) == ("actions", 1, 1)
    assert "recompute" in {found.invariant for found in expected}
    for rows in (1, 50):
        monkeypatch.setattr(schedule_columns, "_BLOCK_ROWS", rows)
        assert validate(plan).violations == expected


# several occurrences of a sequence in an epoch


@pytest.fixture
def twice(tmp_path: Path, analysis: Path) -> Path:
    """One step of one rank with every sequence twice: the steps of two epochs, one after the other."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=20, pp=2, epochs=2, tail_sharing=True)
    plan = build(analysis, tmp_path / "twice", config).path

    def merge(rows: Rows) -> None:
        first, second = rows["steps"]
        for name in ("num_sequences", "num_tokens", "num_target_tokens", "num_chunks"):
            first[name] += second[name]
        rows["steps"] = [{**first, "optimal": False}]
        num_chunks = sum(row["step"] == 0 for row in rows["chunks"])
        num_groups = 1 + max(row["group_id"] or 0 for row in rows["chunks"])
        for row in rows["chunks"][num_chunks:]:
            row["step"] = 0
            row["chunk_id"] += num_chunks
            row["group_id"] = None if row["group_id"] is None else row["group_id"] + num_groups
        for earlier, later in zip(rows["schedule"][:2], rows["schedule"][2:], strict=True):
            moved = [{**action, "chunk_id": action["chunk_id"] + num_chunks} for action in later["actions"]]
            earlier["actions"] += moved
        del rows["schedule"][2:]

    tamper(plan, merge, epochs=1, global_batch=40, mix={"d.jsonl": 2})
    manifest = json.loads((plan / "manifest.json").read_text())
    step = pq.read_table(plan / "steps.parquet").to_pylist()[0]
    manifest["totals"]["num_steps"] = 1
    manifest["predictions"] |= {name: step[name] for name in ("predicted_us", "lower_bound_us")}
    (plan / "manifest.json").write_text(json.dumps(manifest))
    return plan


def whole(rows: Rows, sequence_id: int) -> list[dict[str, Any]]:
    """The segments of a sequence that is not split."""
    return [piece for row in rows["chunks"] for piece in row["segments"] if piece["sequence_id"] == sequence_id]


def groups_of(rows: Rows, sequence_id: int) -> list[list[dict[str, Any]]]:
    """The chunks of each group of a split sequence."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in rows["chunks"]:
        if row["group_id"] is not None and any(piece["sequence_id"] == sequence_id for piece in row["segments"]):
            found.setdefault((row["step"], row["dp_rank"], row["group_id"]), []).append(row)
    return list(found.values())


def part_of(chunk: dict[str, Any], sequence_id: int) -> dict[str, Any]:
    return next(piece for piece in chunk["segments"] if piece["sequence_id"] == sequence_id)


def test_a_sequence_may_occur_twice_in_an_epoch_even_in_one_rank(twice: Path) -> None:
    assert validate(twice).violations == ()
    tamper(twice, lambda rows: None, mix={"d.jsonl": 3})
    assert [found.invariant for found in validate(twice).violations] == ["batch-sizes"]


def test_an_occurrence_too_many_is_found_where_it_is(twice: Path) -> None:
    """Sequences 4 and 5 both have 7 tokens: one occurs three times, the other once, and all counts are right."""

    def change(rows: Rows) -> None:
        whole(rows, 4)[1]["sequence_id"] = 5

    tamper(twice, change)
    [violation] = validate(twice).violations
    assert violation.invariant == "tokens-once"
    rows = pq.read_table(twice / "chunks.parquet").to_pylist()
    places = [
        (row["dp_rank"], row["chunk_id"]) for row in rows if any(piece["sequence_id"] == 5 for piece in row["segments"])
    ]
    assert (violation.dp_rank, violation.chunk_id) == places[-1]


def test_copies_may_be_cut_at_different_tokens_but_not_strung_together_wrongly(twice: Path, analysis: Path) -> None:
    """The last parts of two groups of the 40-token sequence: [32, 40) in one, [31, 40) in the other."""
    target = load_analysis(analysis).tokens()(3)[1]

    def cut_earlier(rows: Rows) -> None:
        *_, before, last = groups_of(rows, 3)[1]
        part_of(before, 3)["end"] = part_of(last, 3)["start"] = last["prefix_tokens"] = 31
        for row, more in ((before, -1), (last, 1)):
            row["num_tokens"] += more
            row["num_target_tokens"] += more * int(target[32])

    tamper(twice, cut_earlier, chunk_size=17)
    assert validate(twice).violations == ()

    def swap_tails(rows: Rows) -> None:
        one, other = (group[-1] for group in groups_of(rows, 3))
        for name in ("segments", "num_tokens", "num_target_tokens", "prefix_tokens"):
            one[name], other[name] = other[name], one[name]

    tamper(twice, swap_tails)
    assert [found.invariant for found in validate(twice).violations] == ["groups"]


def test_an_occurrence_that_lacks_its_end_is_found_beside_a_complete_one(twice: Path) -> None:
    def shorten(rows: Rows) -> None:
        last = groups_of(rows, 8)[1][-1]
        part_of(last, 8)["end"] -= 1
        last["num_tokens"] -= 1

    tamper(twice, shorten)
    [violation] = validate(twice).violations
    last = groups_of({"chunks": pq.read_table(twice / "chunks.parquet").to_pylist()}, 8)[1][-1]
    assert (violation.invariant, violation.chunk_id) == ("tokens-once", last["chunk_id"])


def test_every_epoch_has_its_own_occurrences(tmp_path: Path, analysis: Path) -> None:
    """Sequence 5 twice in the first epoch and 4 not at all, the other way round in the second."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, epochs=2)
    plan = build(analysis, tmp_path / "epochs", config).path
    assert validate(plan).ok

    def change(rows: Rows) -> None:
        one, other = whole(rows, 4)[0], whole(rows, 5)[1]
        one["sequence_id"], other["sequence_id"] = 5, 4

    tamper(plan, change)
    [violation] = [found for found in validate(plan).violations if found.invariant == "tokens-once"]
    assert violation.count == 2
    assert violation.step in (0, 1)


def test_an_epoch_does_not_lend_a_part_to_another(tmp_path: Path, analysis: Path) -> None:
    """The last part of a sequence comes twice in the first epoch and not in the second."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=10, epochs=2)
    plan = build(analysis, tmp_path / "epochs", config).path

    def change(rows: Rows) -> None:
        first, second = (group[-1] for group in groups_of(rows, 8))
        first["segments"].append(part_of(second, 8))
        second["segments"].remove(part_of(second, 8))

    tamper(plan, change)
    assert "tokens-once" in {found.invariant for found in validate(plan).violations}


def test_a_short_last_batch_is_valid_at_the_end_of_an_epoch_only(tmp_path: Path, analysis: Path) -> None:
    plan = build(analysis, tmp_path / "short", PlanConfig(chunk_size=16, k=2, global_batch=9, epochs=2)).path
    assert validate(plan).ok
    sizes = pq.read_table(plan / "steps.parquet").column("num_sequences").to_pylist()
    assert sizes == [9, 9, 2, 9, 9, 2]

    def change(rows: Rows) -> None:
        rows["steps"][3]["epoch"] = 0

    tamper(plan, change)
    [violation] = validate(plan).violations
    assert (violation.invariant, violation.step) == ("batch-sizes", 3)


def test_a_dropped_last_batch_is_counted(tmp_path: Path, analysis: Path) -> None:
    """Two batches of nine; a sequence of the third, which is dropped, may not come instead of one of them twice."""
    config = PlanConfig(chunk_size=16, k=2, global_batch=9, last_batch="drop")
    plan = build(analysis, tmp_path / "dropped", config).path
    assert validate(plan).ok
    manifest = json.loads((plan / "manifest.json").read_text())
    assert manifest["totals"]["num_dropped_sequences"] == 2
    manifest["totals"]["num_dropped_sequences"] = 3
    (plan / "manifest.json").write_text(json.dumps(manifest))
    [violation] = validate(plan).violations
    assert violation.invariant == "totals"
    assert "num_dropped_sequences = 3, counted 2" in violation.message
    tamper(plan, sequence_twice_in_a_step)
    assert "tokens-once" in {found.invariant for found in validate(plan).violations}


def test_the_longest_sequence_is_that_of_the_plan_not_of_the_analysis(tmp_path: Path) -> None:
    """The longest one is of a source that the mix leaves out."""
    folder = tmp_path / "analysis"
    folder.mkdir()
    writer = AnalysisWriter(folder)
    for source, length in ((0, 5), (1, 9)):
        writer.add(source, 0, np.zeros(length, np.int32), np.arange(length) > 0)
    sources = [{"path": path, "schema": None, "records": 1} for path in ("a", "b")]
    writer.finish(exact=True, sources=sources, rejected={}, max_token_id=0)
    plan = build(folder, tmp_path / "plan", PlanConfig(chunk_size=16, k=1, mix={"b": 0}))
    assert plan.manifest["totals"]["longest_sequence"] == 5
    assert validate(plan.path).ok
    manifest = json.loads((plan.path / "manifest.json").read_text())
    manifest["totals"]["longest_sequence"] = 9
    (plan.path / "manifest.json").write_text(json.dumps(manifest))
    assert [found.invariant for found in validate(plan.path).violations] == ["totals"]


def sequence_twice_in_a_step(rows: Rows) -> None:
    wholes = [piece for row in rows["chunks"] for piece in row["segments"] if row["group_id"] is None]
    wholes[0].update(wholes[1])


def test_a_selection_that_the_analysis_does_not_have_is_named(plan: Path) -> None:
    tamper(plan, lambda rows: None, mix={"elsewhere.jsonl": 2})
    [violation] = validate(plan).violations
    assert violation.invariant == "batch-sizes"
    assert "elsewhere.jsonl" in violation.message


# what only hand-written plans have


def test_mixed_chunks_are_valid_and_hold_one_part_each(
    handmade_plan: Callable[..., tuple[Path, Path]], random_sequences: Callable[..., Any]
) -> None:
    sequences = random_sequences([20, 5, 6, 20])
    chunks = [[(0, 0, 16), (1, 0, 5)], [(0, 16, 20), (2, 0, 6)], [(3, 0, 16)], [(3, 16, 20)]]
    plan, _ = handmade_plan(sequences, [{0: chunks}])
    tamper(plan, lambda rows: None)
    assert validate(plan).ok

    def swap_tails(rows: Rows) -> None:
        """The last parts of both sequences, each in the group of the other."""
        one, other = (rows["chunks"][chunk]["segments"][0] for chunk in (1, 3))
        one["sequence_id"], other["sequence_id"] = other["sequence_id"], one["sequence_id"]

    tamper(plan, swap_tails)
    assert "groups" in {found.invariant for found in validate(plan).violations}
    tamper(plan, swap_tails)

    def join_tails(rows: Rows) -> None:
        """The last parts of both sequences in one chunk."""
        last, other = rows["chunks"][1], rows["chunks"][3]
        last["segments"][1], other["segments"][0] = other["segments"][0], last["segments"][1]

    tamper(plan, join_tails)
    violation = next(found for found in validate(plan).violations if found.invariant == "groups")
    assert (violation.step, violation.dp_rank, violation.chunk_id) == (0, 0, 1)
    assert "2 parts" in violation.message


def test_equal_chunks_are_checked_where_the_plan_promises_them(
    handmade_plan: Callable[..., tuple[Path, Path]], random_sequences: Callable[..., Any]
) -> None:
    """The second rank has a chunk less, unless one without loss fills up."""
    sequences = random_sequences([9, 8, 7])
    for fill, valid in (([], False), ([[]], True)):
        plan, _ = handmade_plan(sequences, [{0: [[(0, 0, 9)], [(1, 0, 8)]], 1: [[(2, 0, 7)], *fill]}], dp=2)
        tamper(plan, lambda rows: None, equal_chunks=False)
        assert validate(plan).ok
        tamper(plan, lambda rows: None, equal_chunks=True)
        result = validate(plan)
        assert result.ok == valid
        if not valid:
            [violation] = result.violations
            assert (violation.invariant, violation.step, violation.dp_rank) == ("equal-chunks", 0, 1)


@pytest.mark.parametrize(
    ("chunks_bound", "packing_bound", "valid"),
    [(1, 1, True), (1, 2, True), (-1, 1, False), (2, 1, False), (1, 3, False)],
)
def test_lower_bounds_that_contradict_each_other_are_found(
    handmade_plan: Callable[..., tuple[Path, Path]],
    random_sequences: Callable[..., Any],
    chunks_bound: int,
    packing_bound: int,
    valid: bool,
) -> None:
    """Of a step of two chunks."""
    plan, _ = handmade_plan(random_sequences([9, 8]), [{0: [[(0, 0, 9)], [(1, 0, 8)]]}])

    def change(rows: Rows) -> None:
        [step] = rows["steps"]
        step["chunks_lower_bound"], step["packing_lower_bound"] = chunks_bound, packing_bound
        step["optimal"] = chunks_bound == 2

    tamper(plan, change)
    result = validate(plan)
    assert result.ok == valid
    assert [(found.invariant, found.step) for found in result.violations] == ([] if valid else [("totals", 0)])


def test_targets_of_parts_are_counted_over_record_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third sequence starts a new batch; masks do not start at whole bytes."""
    monkeypatch.setattr(token_file, "_BATCH_ROWS", 3)
    folder = tmp_path / "analysis"
    folder.mkdir()
    writer = AnalysisWriter(folder)
    random = np.random.default_rng(1)
    for record in range(14):
        length = int(random.integers(17, 60))
        writer.add(0, record, np.zeros(length, np.int32), (np.arange(length) > 0) & (random.random(length) < 0.5))
    writer.finish(exact=True, sources=[{"path": "d", "schema": None, "records": 14}], rejected={}, max_token_id=0)
    plan = build(folder, tmp_path / "plan", PlanConfig(chunk_size=16, k=1, global_batch=7)).path
    assert validate(plan).ok
    for position in (0, -1):

        def move(rows: Rows, position: int = position) -> None:
            first, second = rows["chunks"][position], rows["chunks"][position // 2 + 1]
            first["num_target_tokens"] += 1
            second["num_target_tokens"] -= 1

        tamper(plan, move)
        assert "targets" in {found.invariant for found in validate(plan).violations}


# several model parts on a stage


def interleave(rows: Rows, pp: int) -> None:
    """The same actions on `pp` stages, each with as many virtual stages as that takes."""
    stages: dict[tuple[int, int], list[list[tuple[str, int, int]]]] = {}
    for row in rows["schedule"]:
        actions = [(action["op"], action["chunk_id"], 0) for action in row["actions"]]
        stages.setdefault((row["step"], row["dp_rank"]), []).append(actions)
    rows["schedule"] = []
    for (step, dp_rank), parts in stages.items():
        merged: list[list[dict[str, Any]]] = [[] for _ in range(pp)]
        for part, position in execution_order(parts):
            op, chunk_id, _ = parts[part][position]
            merged[part % pp].append({"op": op, "chunk_id": chunk_id, "virtual_stage": part // pp})
        rows["schedule"] += [
            {"step": step, "dp_rank": dp_rank, "stage": stage, "actions": actions, "predicted_us": 1.0}
            for stage, actions in enumerate(merged)
        ]


@pytest.fixture
def interleaved(tmp_path: Path, analysis: Path) -> Path:
    """Two steps on two stages of two model parts each."""
    plan = build(
        analysis, tmp_path / "interleaved", PlanConfig(chunk_size=16, k=2, global_batch=10, pp=4, tail_sharing=True)
    ).path
    tamper(plan, lambda rows: interleave(rows, 2), pp=2, virtual_stages=2)
    return plan


def of_part(actions: list[dict[str, Any]], virtual_stage: int, op: str) -> list[int]:
    """Where a stage does `op` on one of its model parts."""
    return [i for i, each in enumerate(actions) if (each["virtual_stage"], each["op"]) == (virtual_stage, op)]


def swap_chunks(actions: list[dict[str, Any]], one: int, other: int) -> None:
    actions[one]["chunk_id"], actions[other]["chunk_id"] = actions[other]["chunk_id"], actions[one]["chunk_id"]


def backward_missing_on_a_part(rows: Rows) -> None:
    del rows["schedule"][-1]["actions"][of_part(rows["schedule"][-1]["actions"], 1, "backward")[0]]


def part_that_is_not_there(rows: Rows) -> None:
    for action in rows["schedule"][-1]["actions"]:
        action["virtual_stage"] *= 2


def recompute_missing_on_a_part(rows: Rows) -> None:
    row = next(row for row in rows["schedule"] if of_part(row["actions"], 1, "recompute"))
    del row["actions"][of_part(row["actions"], 1, "recompute")[0]]


def gradients_crossed_on_a_part(rows: Rows) -> None:
    """The last model part gives two standalone chunks back in the other order, and forwards them so."""
    last = rows["schedule"][-1]
    standalone = {row["chunk_id"] for row in rows["chunks"] if row["step"] == 1 and row["group_id"] is None}
    one, other = sorted(standalone)[:2]
    for action in last["actions"]:
        if action["virtual_stage"] == 1 and action["chunk_id"] in (one, other):
            action["chunk_id"] = one + other - action["chunk_id"]


def first_part_waits_for_itself(rows: Rows) -> None:
    """The first stage wants to forward a chunk on its second model part before it does on its first."""
    actions = rows["schedule"][-2]["actions"]
    forward = next(i for i, action in enumerate(actions) if action["virtual_stage"] == 1)
    before = next(i for i, action in enumerate(actions) if action["chunk_id"] == actions[forward]["chunk_id"])
    actions.insert(before, actions.pop(forward))


INTERLEAVED: dict[str, tuple[str, Callable[[Rows], None], str]] = {
    "a backward missing": ("actions", backward_missing_on_a_part, "model part (1, 1)"),
    "a part that is not there": ("actions", part_that_is_not_there, "names virtual stage 2"),
    "a recompute missing": ("recompute", recompute_missing_on_a_part, "a recompute directly before"),
    "chunks in different orders": ("links", gradients_crossed_on_a_part, "stages 0 and 1"),
    "a deadlock": ("acyclic", first_part_waits_for_itself, "stage 0 waits for ever"),
}


@pytest.mark.parametrize("case", INTERLEAVED)
def test_a_broken_schedule_of_virtual_stages_is_named(interleaved: Path, case: str) -> None:
    assert validate(interleaved).ok
    invariant, change, words = INTERLEAVED[case]
    tamper(interleaved, change)
    [violation] = validate(interleaved).violations
    assert (violation.invariant, violation.dp_rank) == (invariant, 0)
    assert violation.step is not None
    assert violation.chunk_id is not None
    assert words in violation.message


def test_all_model_parts_on_one_stage_are_valid(plan: Path) -> None:
    tamper(plan, lambda rows: interleave(rows, 1), pp=1, virtual_stages=2)
    assert validate(plan).ok


@given(st.data(), st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
def test_ranks_side_by_side_end_where_one_after_another_they_do(
    data: st.DataObject, pp: int, num_virtual: int, num_ranks: int
) -> None:
    """Two chunks forwarded and backwarded on every model part, in any order that each stage may come up with."""
    everything = [
        (op, chunk, virtual) for op in ("forward", "backward") for chunk in (0, 1) for virtual in range(num_virtual)
    ]
    ranks = [[data.draw(st.permutations(everything)) for _ in range(pp)] for _ in range(num_ranks)]
    expected: list[int] = []
    waits_for: list[int] = []
    for rank, stages in enumerate(ranks):
        reached = [0] * pp
        with suppress(StuckError):
            for stage, position in execution_order(stages):
                reached[stage] = position + 1
        first = [(rank * pp + stage) * len(everything) for stage in range(pp)]
        expected += [start + position for start, position in zip(first, reached, strict=True)]
        for stage, actions in enumerate(stages):
            for op, chunk, virtual in actions:
                part = virtual * pp + stage + (-1 if op == "forward" else 1)
                there, other = part % pp, (op, chunk, part // pp)
                waits_for.append(first[there] + stages[there].index(other) if other in everything else -1)
    rows = np.arange(num_ranks * pp + 1) * len(everything)
    assert run_rows(rows, pp, np.array(waits_for)).tolist() == expected


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
    assert [violation.invariant for violation in result.violations] == ["content-hash"]
    assert not result.ok and not result.is_own_analysis
    assert result.passed == ("chunk-ids", "equal-chunks", "chunk-size"), "what the plan alone says is checked"
    assert {*result.passed, *result.unchecked, "content-hash"} == {*PLAN_INVARIANTS}
    tamper(plan, lambda rows: rows["chunks"][3].update(num_tokens=17))
    result = validate(plan, analysis=other)
    assert [violation.invariant for violation in result.violations] == ["content-hash", "chunk-size"]
    tamper(plan, lambda rows: rows["chunks"][0].update(chunk_id=5))
    result = validate(plan, analysis=other)
    assert [violation.invariant for violation in result.violations] == ["content-hash", "chunk-ids"]
    assert result.passed == ()


def test_an_analysis_that_moved_is_found_where_it_is_said_to_be(plan: Path, analysis: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("values_each", [1, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["plan", "analysis"])
def test_a_damaged_manifest_is_refused_or_found_and_never_crashes(
    plan: Path,
    analysis: Path,
    kind: str,
    values_each: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever entry is missing or of another type: `inspect` and `validate` say so, with their exit codes.

    Each entry is damaged in one of four ways, in turn, or in all of them.
    """
    from chunkplan_cli.main import main

    file = {"plan": plan, "analysis": analysis}[kind] / "manifest.json"
    whole = file.read_text()
    accepted = []
    ways = cycle([..., "x", 2**70, []])
    for path in entries(json.loads(whole)):
        if path[:2] == ("predictions", "cost_model") and len(path) > 3 and path[3] not in ("name", "num_layers"):
            continue  # read by `simulate` alone: tests/cost/test_model.py damages these
        for value in islice(ways, values_each):
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
    described = {
        "tool_version",
        "seed",
        "epochs",
        "sources",
        "predictions",
        "totals",
        "truncated",
        "analysis",
        "selection",
    }
    assert set(accepted) <= described | {"exact", "max_token_id", "tokens", "rejected"}


#: (op, chunk_id, virtual_stage)
StageAction = tuple[str, int, int]


class StuckError(ValueError):
    """No stage can go on. `stage` and `position` name the first action that waits for ever."""

    def __init__(self, stage: int, position: int) -> None:
        super().__init__(f"stage {stage} waits for ever at action {position}")
        self.stage = stage
        self.position = position


def execution_order(stages: Sequence[Sequence[StageAction]]) -> Iterator[tuple[int, int]]:
    """Yield (stage, position) of every action in an order that respects every link: one after another, as written.

    Raises:
        StuckError: the graph has a cycle, or an action waits for one that does not exist.
    """
    pp = len(stages)
    last_part = pp * (1 + max((action[2] for stage in stages for action in stage), default=0)) - 1
    done: set[tuple[str, int, int]] = set()  # (direction, chunk_id, model part)
    position = [0] * pp
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(stages):
            while position[stage] < len(actions):
                op, chunk_id, virtual_stage = actions[position[stage]]
                part = virtual_stage * pp + stage
                if op in FORWARDS:
                    if part > 0 and ("forward", chunk_id, part - 1) not in done:
                        break
                    done.add(("forward", chunk_id, part))
                elif op in BACKWARDS:
                    if part < last_part and ("backward", chunk_id, part + 1) not in done:
                        break
                    done.add(("backward", chunk_id, part))
                yield stage, position[stage]
                position[stage] += 1
                progress = True
    for stage, actions in enumerate(stages):
        if position[stage] < len(actions):
            raise StuckError(stage, position[stage])
