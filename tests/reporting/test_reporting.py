"""What is said of a plan: numbers of steps, kinds, ranks and memory against plain loops; why a step is slow."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import chunkplan
from chunkplan.errors import ChunkplanError, DataError
from chunkplan.planfile.manifest import reduction_us_of
from chunkplan.planfile.plan import Chunk, Plan, PlanStep
from chunkplan.reporting.per_step import plan_chunks
from chunkplan.reporting.plan_report import plan_report
from chunkplan.reporting.slow_steps import FACTORS, SEQUENCE, StepTimeSummary, step_times
from tests.support.small_plans import CONFIGS, LENGTHS, built


@pytest.fixture(params=CONFIGS)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    return built(tmp_path, LENGTHS, **CONFIGS[request.param])


def chunks_of(step: PlanStep) -> list[Chunk]:
    return [chunk for chunks in step.chunks.values() for chunk in chunks]


def attention_pairs(chunk: Chunk) -> int:
    return sum((part.end - part.start) * (part.end + part.start) for part in chunk.segments)


def test_a_step_is_counted_as_a_loop_over_its_chunks_counts_it(plan: Plan) -> None:
    rows = chunkplan.per_step(plan).to_dicts()
    steps = list(plan.iter_steps())
    assert [row["step"] for row in rows] == list(range(len(steps)))
    for row, step in zip(rows, steps, strict=True):
        chunks = chunks_of(step)
        grouped = [chunk for chunk in chunks if chunk.group_id is not None]
        work = [sum(chunk.cost for chunk in step.chunks[rank]) for rank in range(plan.config.dp)]
        filled = [chunk.num_tokens for chunk in chunks if chunk.segments]
        last = {rank: max(us for (of, _), us in step.schedule_us.items() if of == rank) for rank in step.chunks}
        expected = {
            "num_standalone": len(chunks) - len(grouped),
            "num_dependent": len(grouped),
            "num_zero_loss": len(chunks) - len(filled),
            "num_groups": len([chunk for chunk in grouped if chunk.group_index == 0]),
            "fill": sum(filled) / (64 * len(filled)),
            "heaviest_over_mean": max(work) * len(work) / sum(work),
            "heaviest_rank": work.index(max(work)),
            "recompute_share": step.recompute_us / sum(work),
            "slowest_rank": max(last, key=lambda rank: (last[rank], -rank)),
        }
        for name in ("epoch", "num_sequences", "num_tokens", "num_target_tokens", "num_chunks", "predicted_us"):
            expected[name] = getattr(step, name)
        for name in ("exceeds_share", "optimal", "chunks_lower_bound", "peak_retained_tokens", "lower_bound_us"):
            expected[name] = getattr(step, name)
        expected["reduction_us"] = reduction_us_of(plan.manifest)
        expected["extra_forward_us"] = 0.0
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        assert row.keys() == {*expected, "step"}


def test_kinds_and_ranks_and_fill_add_up_to_the_plan(plan: Plan) -> None:
    report = plan_report(plan)
    chunks = [(step, chunk) for step in plan.iter_steps() for chunk in chunks_of(step)]
    kinds = {row.kind: row for row in report.kinds}
    assert sum(row.num_chunks for row in report.kinds) == len(chunks) == sum(row.num_chunks for row in report.ranks)
    assert sum(row.num_tokens for row in report.ranks) == report.summary.num_tokens
    assert plan.config.tail_sharing or "mixed" not in kinds
    assert "zero-loss" in kinds or not plan.config.equal_chunks
    for name in ("token_share", "attention_share", "cost_share"):
        assert sum(getattr(row, name) for row in report.kinds) == pytest.approx(1)
    for kind, row in kinds.items():
        of_kind = [chunk for _, chunk in chunks if kind_of(chunk) == kind]
        assert row.num_chunks == len(of_kind)
        # Over the parts of a sequence, t (2 p + t) comes to its length squared.
        assert row.attention_share * 2 * np.sum(LENGTHS**2) == pytest.approx(sum(map(attention_pairs, of_kind)))
    assert np.mean([row.over_mean for row in report.ranks]) == pytest.approx(1)
    assert sum(row.num_steps_slowest for row in report.ranks) == report.summary.num_steps
    for row in report.ranks:
        times = (row.busy_us, row.exchange_us, row.waiting_us, row.reduction_us)
        assert sum(each or 0.0 for each in times) == pytest.approx(report.summary.total_us)
    assert report.ranks[0].reduction_us == report.summary.reduction_us
    assert bool(report.summary.reduction_us) == (plan.config.dp > 1)
    for band in report.fill:
        inside = [chunk for _, chunk in chunks if band.low < round(chunk.num_tokens / 64, 9) <= band.high]
        assert band.num_chunks == len(inside)
    json.dumps(report.to_dict(), allow_nan=False)


def test_every_kind_of_chunk_is_distinguished(tmp_path: Path) -> None:
    """Three chunks of 64 hold 184 tokens only where the last 6 of a split sequence share theirs."""
    rows = plan_report(built(tmp_path, [70, 58, 56], k=1, epochs=1)).kinds
    assert [(row.kind, row.num_chunks, row.num_tokens) for row in rows] == [
        ("standalone", 1, 56),
        ("dependent", 1, 64),
        ("mixed", 1, 64),
    ]
    rows = plan_report(built(tmp_path, [70, 58], k=1, dp=4, epochs=1)).kinds
    assert [(row.kind, row.num_chunks) for row in rows] == [("standalone", 1), ("dependent", 2), ("zero-loss", 2)]


def kind_of(chunk: Chunk) -> str:
    if not chunk.segments:
        return "zero-loss"
    if chunk.group_id is None:
        return "standalone"
    return "dependent" if len(chunk.segments) == 1 else "mixed"


def test_the_factors_of_a_slow_step_explain_all_of_its_time(plan: Plan) -> None:
    times = plan_report(plan).times
    predicted = {step.step: step.predicted_us for step in plan.iter_steps()}
    assert times.median_us == predicted[times.median_step] == sorted(predicted.values())[(len(predicted) - 1) // 2]
    slowest = sorted(predicted.values(), reverse=True)[: len(times.slowest)]
    assert [step.predicted_us for step in times.slowest] == slowest
    for step in times.slowest:
        assert math.prod(step.factors.values()) == pytest.approx(step.over_median)
        largest = max(step.factors.values())
        share, exceeds = share_of_largest_sequence(next(plan.iter_steps(step.step)))
        is_of_one = share > 0 and (exceeds or largest * (1 - share) < 1)
        assert step.cause == SEQUENCE if is_of_one else step.factors[step.cause] == largest


def share_of_largest_sequence(step: PlanStep) -> tuple[float, bool]:
    """Of the cost of all chunks, those of the split sequence that costs most; and whether it exceeds its share."""
    costs: Counter[tuple[int, int]] = Counter({(0, -1): 0})
    for rank, chunks in step.chunks.items():
        for chunk in chunks:
            if chunk.group_id is not None:
                part = chunk.segments[0]
                costs[rank, chunk.group_id] += chunk.cost * (part.end - part.start) / chunk.num_tokens
    return max(costs.values()) / sum(chunk.cost for chunk in chunks_of(step)), step.exceeds_share


#: A step of two ranks with two stages each, 1000 tokens and nothing odd about it, and what a change makes of its time.
USUAL = {"num_tokens": 1000, "work": 1.0, "recomputed": 0.0, "heavy": 0.5, "waiting": 1.2}
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "tokens": ({"num_tokens": 3000}, "3,000 tokens, 3.00 times the median step's"),
    "work": ({"work": 2.5, "longest": 900}, "attention of up to 900 tokens: a token takes 2.50 times the work"),
    "recompute": ({"recomputed": 0.25}, "25% of the work is recompute"),
    "balance": ({"heavy": 0.75}, "rank 1 has 1.50 of the mean rank's work"),
    "waiting": ({"waiting": 4.0}, "stages of rank 1 wait 75% of the time"),
}


def timed(*changes: dict[str, Any]) -> StepTimeSummary:
    """Three usual steps, and one for each of `changes`."""
    steps, chunks = [], []
    for number, change in enumerate([{}, {}, {}, *changes]):
        is_it = {**USUAL, "longest": 100, "exceeds_share": False, "split": 0.1, **change}
        cost = is_it["num_tokens"] * is_it["work"] / (1 - is_it["recomputed"])
        for rank, share in enumerate((1 - is_it["heavy"], is_it["heavy"])):
            pairs = float(is_it["num_tokens"] * is_it["longest"] / 2)
            part = {"part_end": is_it["longest"], "prefix_tokens": is_it["longest"] - 10, "num_tokens": 10}
            row = {"step": number, "dp_rank": rank, "attention_pairs": pairs, "reach": is_it["longest"], **part}
            chunks.append({**row, "cost": cost * share * (1 - is_it["split"]), "group_id": None})
            chunks += [{**row, "cost": cost * share * is_it["split"] / 4, "group_id": 0} for _ in range(4)]
        steps.append(
            {
                "step": number,
                "num_tokens": is_it["num_tokens"],
                "slowest_rank": 1,
                "fill": 0.5,
                "recompute_share": is_it["recomputed"],
                "exceeds_share": is_it["exceeds_share"],
                "predicted_us": cost * is_it["heavy"] / 2 * is_it["waiting"],
                "extra_forward_us": 0.0,
            }
        )
    frame = pl.DataFrame(chunks, schema_overrides={"group_id": pl.Int32})
    return step_times(pl.DataFrame(steps), frame, dp=2, pp=2)


@pytest.mark.parametrize("cause", FACTORS)
def test_a_step_is_slow_because_of_what_is_odd_about_it(cause: str) -> None:
    change, why = CHANGES[cause]
    [slow] = timed(change).slowest
    assert (slow.cause, slow.why) == (cause, why)


@pytest.mark.parametrize("cause", FACTORS)
def test_of_two_causes_the_larger_is_named(cause: str) -> None:
    """Each of the others, a little of it, is there too."""
    little = {"num_tokens": 1100, "work": 1.1, "recomputed": 0.05, "heavy": 0.53, "waiting": 1.3}
    [slow] = timed({**little, **CHANGES[cause][0]}).slowest
    assert slow.cause == cause


def test_a_sequence_that_explains_more_than_any_factor_is_named() -> None:
    """Without it the step would have less than a ninth of its work; or no assignment can take it from its rank."""
    change = {"num_tokens": 9000, "work": 1.5, "heavy": 0.96, "split": 0.96, "longest": 8000}
    [slow] = timed(change).slowest
    assert (slow.cause, slow.why) == (SEQUENCE, "one sequence of 8,000 tokens: 92% of the work")
    assert slow.factors["tokens"] == 9
    assert timed({**change, "split": 0.9}).slowest[0].cause == "tokens"
    [slow] = timed({**change, "split": 0.6, "exceeds_share": True}).slowest
    assert slow.why == "one sequence of 8,000 tokens: over a rank's share"


def test_what_shares_the_chunks_of_a_sequence_is_not_counted_as_its_own(tmp_path: Path) -> None:
    """Two chunks of 64 for 65 tokens; the second has 60 more of others."""
    frame = plan_chunks(built(tmp_path, [65, 60], k=1, epochs=1)).frame
    assert frame["kind"].to_list() == ["dependent", "mixed"]
    assert (frame["part_end"] - frame["prefix_tokens"]).to_list() == [64, 1]


def test_half_empty_chunks_are_no_attention() -> None:
    [slow] = timed({"work": 2.0, "longest": 10}).slowest
    assert slow.why == "chunks 50% full: a token takes 2.00 times the work"


def test_steps_that_take_the_same_are_not_slow() -> None:
    assert timed().slowest == ()


def test_the_longest_sequence_makes_its_step_the_slowest(tmp_path: Path) -> None:
    lengths = np.full(64, 50)
    lengths[20] = 20_000
    plan = built(tmp_path, lengths, k=4, dp=2, global_batch=8, epochs=1)
    [slow, *_] = plan_report(plan).times.slowest
    assert any(
        part.sequence_id == 20 for chunk in chunks_of(next(plan.iter_steps(slow.step))) for part in chunk.segments
    )
    assert (slow.cause, slow.why) == (SEQUENCE, "one sequence of 20,000 tokens: over a rank's share")


def test_a_step_without_the_chunks_of_its_slowest_rank_is_damage() -> None:
    steps = pl.DataFrame({"step": [0], "num_tokens": [5], "slowest_rank": [1], "predicted_us": [1.0], "fill": [1.0]})
    steps = steps.with_columns(extra_forward_us=0.0)
    steps = steps.with_columns(recompute_share=pl.lit(0.0), exceeds_share=pl.lit(False))
    chunks = pl.DataFrame(
        {"step": [0], "dp_rank": [0], "num_tokens": [5], "cost": [1.0], "attention_pairs": [1.0], "reach": [5]}
    )
    chunks = chunks.with_columns(group_id=pl.lit(None, pl.Int32), part_end=5, prefix_tokens=0)
    with pytest.raises(DataError, match="step 0"):
        step_times(steps, chunks, dp=2, pp=1)


@pytest.mark.parametrize("file", ["steps", "chunks", "schedule"])
def test_rows_that_are_missing_are_damage(tmp_path: Path, file: str) -> None:
    """Whatever row is gone: the report or a look at a chunk says so, or there is still enough to report."""
    plan = built(tmp_path, LENGTHS[:8], k=1, dp=2, pp=2, global_batch=3, epochs=1)
    path = plan.path / f"{file}.parquet"
    whole, found = pq.read_table(path), 0
    for row in range(whole.num_rows):
        pq.write_table(pa.concat_tables([whole.slice(0, row), whole.slice(row + 1)]), path)
        for look in (lambda: plan_report(plan), lambda: [chunkplan.view_chunk(plan, step, 0) for step in range(3)]):
            try:
                look()
            except ChunkplanError as error:
                assert error.hint
                found += 1
    assert found >= min(3, whole.num_rows)


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        ("steps", "predicted_us", -5.0),
        ("steps", "lower_bound_us", math.nan),
        ("steps", "step", 7),
        ("chunks", "cost", -1000.0),
        ("chunks", "cost", math.inf),
        ("chunks", "dp_rank", 99),
    ],
)
def test_numbers_that_cannot_be_are_damage(tmp_path: Path, file: str, column: str, value: float) -> None:
    plan = built(tmp_path, LENGTHS[:8], k=1, dp=2, global_batch=3, epochs=1)
    path = plan.path / f"{file}.parquet"
    table = pq.read_table(path)
    values = [*table.column(column).to_pylist()[:-1], value]
    field = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(field, table.schema.field(column), pa.array(values, table.schema.field(column).type)), path
    )
    with pytest.raises(DataError) as caught:
        plan_report(plan)
    assert str(path) in str(caught.value.where)


def test_steps_that_are_missing_are_damage(tmp_path: Path) -> None:
    plan = built(tmp_path, LENGTHS, k=1, epochs=1)
    path = plan.path / "steps.parquet"
    pq.write_table(pq.read_table(path).slice(0, 2), path)
    with pytest.raises(DataError, match="not those of steps 0 to 2 in order"):
        plan_report(plan)
