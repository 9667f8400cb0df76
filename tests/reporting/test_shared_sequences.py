"""What reports say of sequences that ranks share, against the rows of the plan; and how it is shown."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import chunkplan
from chunkplan.cost.durations import attention_pairs_of, work_ns
from chunkplan.planfile.plan import Chunk, Plan
from chunkplan.reporting.page.gantt import DrawnStep, drawn_steps, gantt_figure, gantt_table
from chunkplan.reporting.per_step import per_step
from chunkplan.reporting.plan_report import plan_report
from chunkplan.reporting.shared_sequences import step_shares
from chunkplan.simulation import simulate_ranks
from chunkplan.summary import summarize_plan
from chunkplan_cli.gantt import print_gantt
from chunkplan_cli.simulate import print_simulation
from tests.support.command_line import Run
from tests.support.places import ROOT
from tests.support.small_plans import built, with_late_rank

TOKENIZER = ROOT / "sample_data" / "tokenizer"
LENGTHS = [9000, 2900, 2800, 30, 12_000, 5000, 40, 7, 1, 200, 300, 100]
CONFIG = {"chunk_size": 1000, "k": 1, "dp": 4, "global_batch": 4, "epochs": 1}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return built(tmp_path, LENGTHS, cp="auto", **CONFIG)


def shared_of(plan: Plan) -> dict[tuple[int, int], list[tuple[int, Chunk]]]:
    """By step and sequence the chunks of all ranks that share it, each with its rank."""
    found: dict[tuple[int, int], list[tuple[int, Chunk]]] = {}
    for step in plan.iter_steps():
        for rank, chunks in step.chunks.items():
            for chunk in chunks:
                if chunk.cp_size > 1:
                    found.setdefault((step.step, chunk.segments[0].sequence_id), []).append((rank, chunk))
    return found


def test_every_shared_sequence_is_told_once_with_its_ranks_its_tokens_and_its_time(plan: Plan) -> None:
    rows = shared_of(plan)
    told = {
        (step.step, each.sequence_id): each for step in plan.iter_steps() for each in step_shares(plan, step).sequences
    }
    assert told.keys() == rows.keys() and len(told) > 1
    for place, each in told.items():
        ranks = {rank for rank, _ in rows[place]}
        assert ranks == set(range(each.first_rank, each.first_rank + each.num_ranks))
        assert each.num_tokens == LENGTHS[each.sequence_id] == sum(chunk.num_tokens for _, chunk in rows[place])
        costs = [sum(chunk.cost for own, chunk in rows[place] if own == rank) for rank in ranks]
        assert each.predicted_us == pytest.approx(max(costs))
        assert each.num_chunks == len(rows[place]) // each.num_ranks
        assert each.exchange_us is not None and 0 < each.exchange_us < each.predicted_us


def test_of_a_rank_those_are_told_that_it_shares_and_the_bound_of_the_step(command: Run, plan: Plan) -> None:
    for step in plan.iter_steps():
        for rank in range(4):
            shown = json.loads(command("inspect", plan.path, "--step", step.step, "--rank", rank, "--json").out)
            own = {chunk.segments[0].sequence_id for chunk in step.chunks[rank] if chunk.cp_size > 1}
            assert {each["sequence_id"] for each in shown["shared_sequences"]} == own
            assert shown["unshared_lower_bound_us"] == step_shares(plan, step).unshared_lower_bound_us
            for chunk in shown["chunks"]:
                assert ("cp_size" in chunk) == (
                    len({segment["sequence_id"] for segment in chunk["segments"]} & own) > 0
                )


def test_the_plan_counts_shared_sequences_once_and_says_what_it_takes_without(plan: Plan) -> None:
    rows, report = shared_of(plan), plan_report(plan)
    summary = report.summary
    assert summary.num_shared_sequences == len(rows) == sum(row.num_sequences for row in report.shared)
    assert sum(row.num_tokens for row in report.shared) == sum(LENGTHS[sequence] for _, sequence in rows)
    assert summary.shared_work_share == pytest.approx(sum(row.work_share for row in report.shared))
    assert summary == summarize_plan(plan.steps(), plan.chunks(), plan.manifest)
    split = {
        (step.step, rank, chunk.group_id)
        for step in plan.iter_steps()
        for rank, chunks in step.chunks.items()
        for chunk in chunks
        if chunk.group_id is not None and chunk.cp_size == 1
    }
    assert summary.num_groups == len(rows) + len(split) == per_step(plan)["num_groups"].sum()

    bounds = []
    for step in plan.iter_steps():
        tokens = np.array([LENGTHS[sequence] for number, sequence in rows if number == step.step] or [0])
        cost = plan.cost
        alone = work_ns(cost, tokens, attention_pairs_of(tokens, 0 * tokens)).max() / 1e3
        bounds.append(max(step.lower_bound_us, alone + cost.chunk_ns / 1e3 if tokens.any() else 0))
    assert summary.unshared_lower_bound_us == pytest.approx(sum(bounds))


def test_without_shared_sequences_no_plan_is_faster_than_the_bound(plan: Plan, tmp_path: Path) -> None:
    bound = plan_report(plan).summary.unshared_lower_bound_us
    assert bound is not None and plan.manifest["predictions"]["predicted_us"] < bound
    (tmp_path / "off").mkdir()
    off = built(tmp_path / "off", LENGTHS, **CONFIG)
    assert bound <= off.manifest["predictions"]["predicted_us"]
    report = plan_report(off)
    assert (report.shared, report.summary.num_shared_sequences, report.summary.unshared_lower_bound_us) == ((), 0, None)


def test_the_page_draws_shared_chunks_apart_and_lists_exchange(plan: Plan) -> None:
    [drawn, *_] = drawn_steps(plan, per_step(plan), 0, 1)
    shared = [bar for bar in gantt_figure(drawn).data if "shared by ranks" in (bar.hovertemplate or "")]
    chunks = [chunk for (step, _), rows in shared_of(plan).items() if step == drawn.step.step for _, chunk in rows]
    assert sum(len(bar.y) for bar in shared) == sum(2 if chunk.keeps_activations else 3 for chunk in chunks) > 0
    assert {bar.marker.pattern.shape for bar in shared} == {"x"}
    assert all(bar.customdata.shape[1] == 11 and (bar.customdata[:, 10] > 0).all() for bar in shared)
    assert gantt_table([drawn]).head[-2:] == ("exchange", "waiting for ranks")


def test_waiting_for_ranks_is_drawn_before_what_waits(tmp_path: Path) -> None:
    plan = built(tmp_path, [9000, 900, 900], chunk_size=2000, k=1, dp=2, epochs=1, cp="auto")
    step = with_late_rank(plan)
    found = simulate_ranks(plan, step, [0, 1])
    [waits] = [bar for bar in gantt_figure(DrawnStep(step, "", found)).data if bar.name.startswith("waiting")]
    assert (waits.y.tolist(), waits.base.tolist()) == ([0], [0])
    assert waits.x[0] == pytest.approx(found[0].waits[0] / 1e9)
    console = Console(file=io.StringIO(), width=100)
    print_gantt(console, found[0], str)
    drawn = console.file.getvalue().splitlines()[0]
    assert re.match(r"stage 0 :{3,}f0x2", drawn)
    share = found[0].waiting_for_ranks_per_stage[0] / found[0].makespan
    assert drawn.count(":") / (len(drawn) - len("stage 0 ")) == pytest.approx(share, abs=0.02)


def test_the_critical_path_goes_on_in_the_rows_of_other_ranks(tmp_path: Path) -> None:
    """On the page, and on the screen, which says how much of it is on which rank."""
    plan = built(tmp_path, [9000, 900, 900], chunk_size=2000, k=1, dp=2, epochs=1, cp="auto")
    step = with_late_rank(plan)
    found = simulate_ranks(plan, step, [0, 1])
    drawn = {
        ranks: next(bar for bar in gantt_figure(DrawnStep(step, "", ranks_of)).data if bar.name == "critical path")
        for ranks, ranks_of in (("both", found), ("first", {0: found[0]}))
    }
    last = max(found.values(), key=lambda each: each.ends.max())
    assert float(drawn["both"].x.sum()) == pytest.approx(last.makespan / 1e6)
    assert set(drawn["both"].y.tolist()) == {0, 1}
    assert float(drawn["first"].x.sum()) == pytest.approx(found[0].critical_ranks[0] / 1e6)
    console = Console(file=io.StringIO(), width=120)
    print_simulation(console, found[0])
    shares = re.search(r"actions, ([\d.]+)% on rank 0, ([\d.]+)% on rank 1", console.file.getvalue())
    assert shares is not None and sum(map(float, shares.groups())) == pytest.approx(100, abs=0.11)
    assert "other ranks" not in console.file.getvalue()
    console = Console(file=io.StringIO(), width=120)
    print_simulation(console, found[1])
    assert "on rank" not in console.file.getvalue(), "all of it is on the rank that is shown"


def test_a_trace_of_a_step_with_shared_sequences_has_all_its_ranks(command: Run, plan: Plan, tmp_path: Path) -> None:
    for words, ranks in (((), [0, 1, 2, 3]), (("--rank", 2), [2])):
        command("simulate", plan.path, "--step", 1, *words, "--trace", tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert [int(re.search(r"rank (\d+)", name)[1]) for name in names] == ranks  # type: ignore[index]


def test_what_is_asked_of_tune_where_a_plan_does_not_fit_keeps_the_batch_and_the_groups(
    command: Run, tmp_path: Path
) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    options = ("--chunk-size", 1000, "--k", 1, "--dp", 2, "--global-batch", 4, "--cp", "auto", "--hardware", "a100")
    ran = command("build", "lengths.npy", *options, "--output", "plan", "--checkpointing", "none")
    told = re.search(r"`(chunkplan tune [^`]*)`", " ".join(ran.err.split()))
    assert told is not None
    assert "--global-batch 4" in told[1] and "--cp auto" in told[1]


def test_a_shared_chunk_is_shown_with_its_slices_and_the_whole(command: Run, plan: Plan) -> None:
    (step, sequence), rows = next(iter(shared_of(plan).items()))
    rank, chunk = rows[-1]
    where = ("--step", step, "--rank", rank, "--chunk", chunk.chunk_id)
    shown = command("inspect", plan.path, *where, width=120)
    assert shown.code == 0
    whole = f"[{chunk.prefix_tokens:,}, {chunk.prefix_tokens + chunk.cp_tokens:,}) of the sequence"
    ranks = f"ranks {chunk.cp_first_rank} to {chunk.cp_first_rank + chunk.cp_size - 1}"
    assert whole in shown.out and ranks in shown.out and "of it exchange" in shown.out
    for segment in chunk.segments:
        assert f"[{segment.start:,}, {segment.end:,})" in shown.out
    document = json.loads(command("inspect", plan.path, *where, "--json").out)
    assert document["cp_size"] == chunk.cp_size and document["exchange_us"] > 0
    assert [each["sequence_id"] for each in document["segments"]] == [sequence] * len(chunk.segments)


def test_the_slices_of_a_rank_are_decoded(command: Run, tmp_path: Path) -> None:
    """All that ranks print of a shared sequence, in order of the tokens, is its text."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "".join(map(str, range(3000)))}) + "\n", encoding="utf-8")
    analysis = chunkplan.analyze(tmp_path / "data.jsonl", tmp_path / "analysis", tokenizer=TOKENIZER, workers=1)
    config = chunkplan.PlanConfig(chunk_size=2000, k=1, dp=2, cp="auto")
    plan = chunkplan.build(analysis, tmp_path / "plan", config, workers=1)
    segments = sorted(
        (segment.start, segment.end, rank, chunk.chunk_id)
        for rows in shared_of(plan).values()
        for rank, chunk in rows
        for segment in chunk.segments
    )
    assert len(segments) >= 4 and all(before[1] == after[0] for before, after in pairwise(segments))
    text = ""
    for start, end, rank, chunk_id in segments:
        where = ("--step", 0, "--rank", rank, "--chunk", chunk_id, "--text")
        shown = json.loads(command("inspect", plan.path, *where, "--json").out)
        [own] = [each for each in shown["segments"] if (each["start"], each["end"]) == (start, end)]
        text += "".join(piece["text"] for piece in own["text"]["first"])
    assert "".join(map(str, range(3000))) in text


def test_a_step_with_too_long_a_sequence_hints_at_sharing_where_that_is_possible(command: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", [9000, 30, 40, 7])
    ways = {"--dp 2": True, "--dp 2 --pp 2": True, "--dp 2 --pp 2 --schedule search": False}
    for number, (words, hints) in enumerate(ways.items()):
        options = [
            "--chunk-size",
            1000,
            "--k",
            1,
            "--global-batch",
            4,
            "--cp",
            "off",
            *words.split(),
            "--output",
            f"plan{number}",
        ]
        ran = command("build", "lengths.npy", *options, width=120)
        said = " ".join(ran.out.replace("│", " ").split())
        assert ran.code == 0 and "which no assignment can balance" in said
        assert ("--cp auto shares it among ranks" in said) == hints
