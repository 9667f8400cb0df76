"""Which chunks keep attention for their recompute, and where: it fits, it never takes longer, and it is predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkplan import PlanConfig, load_plan, validate
from chunkplan.cost.activations import activation_bytes_per_token
from chunkplan.cost.durations import durations
from chunkplan.cost.model import CostModel
from chunkplan.operations import NOT_KEPT, ON_GPU, ON_HOST, OPS
from chunkplan.planning.batches import StepBlock
from chunkplan.planning.memory import memory_of_stages
from chunkplan.planning.method import Dataset, Planned, chunk_block, plan_block, schedule_block
from chunkplan.reporting.plan_report import plan_report
from chunkplan.tuning.document import read_tuning, tuned, write_tuning
from chunkplan.tuning.tune import tune
from tests.support.command_line import run_here
from tests.support.plain import PLAIN
from tests.support.shared_plans import FAST, build_blocks
from tests.support.small_plans import built
from tests.support.tuning_cases import long_tail, options_with

#: A model whose weights, frozen, leave room on a GPU, and launches that hide nothing.
COST = CostModel(hardware=PLAIN, lora_rank=16)

#: Bytes of a token in one layer: the output of attention in bf16, and a float32 a head.
LAYER_BYTES = 3584 * 2 + 28 * 4


def step_of(lengths: list[int]) -> tuple[StepBlock, Dataset]:
    tokens = np.sort(np.array(lengths, np.int32))[::-1]
    return StepBlock(0, 0, np.arange(tokens.size, dtype=np.int32), np.array([tokens.size])), Dataset(
        tokens, np.maximum(tokens - 1, 0), None
    )


def config_with(**changes: Any) -> PlanConfig:
    return PlanConfig(**({"chunk_size": 8192, "k": 1, "cp": "off"} | changes))


def planned(lengths: list[int], config: PlanConfig, cost: CostModel) -> Planned:
    return plan_block(*step_of(lengths), config, cost, lambda: False)


def kept_in(found: Planned) -> list[str]:
    """Where each chunk keeps attention, in the words of the table."""
    words: list[str] = found.tables["chunks"].column("kept_attention").to_pylist()
    return words


def with_memory(cost: CostModel, num_bytes: int) -> CostModel:
    return replace(cost, hardware=replace(cost.hardware, memory_bytes=num_bytes))


def total(found: Planned, config: PlanConfig, cost: CostModel) -> int:
    return max(stage.total for stage in memory_of_stages(config, cost, found.peaks))


LENGTHS = st.lists(st.integers(1, 150_000), min_size=1, max_size=4)
LAYOUTS = st.sampled_from([(1, None), (2, "1f1b"), (4, "auto"), (2, "zero-bubble"), (2, "zero-bubble-v")])


@settings(deadline=None, max_examples=30)
@given(
    lengths=LENGTHS,
    chunk_size=st.sampled_from([2048, 8192]),
    k=st.integers(1, 3),
    layout=LAYOUTS,
    host_gigabytes=st.sampled_from([1e-3, 2.0, 8.0, 55.0]),
    kv_offload=st.booleans(),
    level=st.sampled_from(["none", "full", "offload", "keep-attention"]),
)
def test_no_stage_is_done_later_than_without_in_the_same_order(
    lengths: list[int],
    chunk_size: int,
    k: int,
    layout: tuple[int, str | None],
    host_gigabytes: float,
    kv_offload: bool,
    level: str,
) -> None:
    hardware = replace(PLAIN, host_bytes=host_gigabytes * 1e9)
    cost = CostModel(hardware=hardware, lora_rank=16, kv_offload=kv_offload, checkpointing=level)
    pp, schedule = layout
    given_schedule = {} if schedule is None else {"schedule": schedule}
    config = config_with(chunk_size=chunk_size, k=k, pp=pp, **given_schedule)
    block, dataset = step_of(lengths)
    with_kept = chunk_block(block, dataset, config, cost)
    assert set(np.unique(with_kept.chunks.kept_attention)) <= {NOT_KEPT, ON_HOST}
    without = chunk_block(block, dataset, replace(config, keep_attention="off"), cost)
    assert not without.chunks.kept_attention.any()
    actions = schedule_block(block, with_kept, config, cost).actions
    ends, before = (schedule_block(block, each, config, cost, actions=actions).ends for each in (with_kept, without))
    assert (ends <= before).all()
    assert (with_kept.cost_ns <= without.cost_ns).all() and (with_kept.recompute_ns <= without.recompute_ns).all()
    found = planned(lengths, config, cost)
    is_kept = found.chunks.kept_attention != NOT_KEPT
    assert not (is_kept & found.chunks.keeps_activations).any()


@settings(deadline=None, max_examples=30)
@given(
    lengths=LENGTHS,
    k=st.integers(1, 3),
    layout=LAYOUTS,
    room=st.integers(0, 40 << 30),
    host_gigabytes=st.sampled_from([1e-3, 55.0]),
)
def test_what_fits_without_fits_with_it_and_equal_plans_are_equal(
    lengths: list[int], k: int, layout: tuple[int, str | None], room: int, host_gigabytes: float
) -> None:
    pp, schedule = layout
    given_schedule = {} if schedule is None else {"schedule": schedule}
    config = config_with(k=k, pp=pp, **given_schedule)
    cost = replace(COST, hardware=replace(PLAIN, host_bytes=host_gigabytes * 1e9))
    # Weights are what a tuning has no say in: the memory is what the plan takes without, and some room.
    needed = total(planned(lengths, replace(config, keep_attention="off"), cost), config, cost)
    cost = with_memory(cost, needed + room)
    found = planned(lengths, config, cost)
    order_is_same = host_gigabytes < 1  # nothing is kept on the host, so that the order comes from the same times
    if order_is_same:
        assert total(found, config, cost) <= needed + room
    again = planned(lengths, config, cost)
    assert all(found.tables[name].equals(again.tables[name]) for name in found.tables)


def test_of_one_sequence_all_but_k_wait_with_their_attention_and_late_parts_are_first_on_the_gpu() -> None:
    """Eight parts, K 2: six wait at once, of which four fit the GPU; the others go to the host."""
    config = config_with(k=2)
    needed = total(planned([65536], replace(config, keep_attention="off"), COST), config, COST)
    of_chunk = 8192 * 28 * LAYER_BYTES
    cost = with_memory(COST, needed + 4 * of_chunk + (of_chunk // 2))
    found = planned([65536], config, cost)
    assert kept_in(found) == ["host", "host", "gpu", "gpu", "gpu", "gpu", "", ""]
    assert total(found, config, cost) == needed + 4 * of_chunk
    assert kept_in(planned([65536], config, with_memory(COST, needed - 1))) == ["host"] * 6 + [""] * 2
    assert kept_in(planned([65536], config, replace(cost, kv_offload=True))) == ["host"] * 6 + [""] * 2
    assert kept_in(planned([65536], replace(config, keep_attention="off"), cost)) == [""] * 8


def test_over_a_slow_link_nothing_goes_to_the_host_and_what_fits_is_timed_anew() -> None:
    slow = replace(COST, hardware=replace(PLAIN, host_bytes=1e6, memory_bytes=200 << 30))
    config = config_with()
    off = planned([65536], replace(config, keep_attention="off"), slow)
    found = planned([65536], config, slow)
    assert kept_in(found) == ["gpu"] * 7 + [""]
    tight = with_memory(slow, total(off, config, slow))
    assert kept_in(planned([65536], config, tight)) == [""] * 8
    before, after = (each.tables["steps"].to_pylist()[0] for each in (off, found))
    saved = before["recompute_us"] - after["recompute_us"]
    assert saved > 0
    assert before["predicted_us"] - after["predicted_us"] == pytest.approx(saved, rel=1e-4)
    assert found.chunks.cost.sum() == pytest.approx(off.chunks.cost.sum() - saved, rel=1e-4)


def test_a_recompute_without_attention_takes_all_else_and_no_less_than_its_transfers() -> None:
    tokens, pairs = np.array([8192] * 3), np.full(3, 8192.0 * (2 * 65536 + 8192))
    kept = np.array([NOT_KEPT, ON_GPU, ON_HOST], np.int8)
    for host_bytes in (PLAIN.host_bytes, 1e9):
        cost = CostModel(hardware=replace(PLAIN, host_bytes=host_bytes))
        rates = cost.rates
        by_op = dict(zip(OPS, durations(tokens, pairs, rates, (28,), None, kept)[:, 0], strict=True))
        head, linear = rates.head * 8192, 28 * (rates.token * 8192 + rates.chunk)
        forward = linear + 28 * (rates.pair * pairs[0] + rates.mask * 8192)
        sent = 28 * 8192 * LAYER_BYTES / host_bytes * 1e9
        assert by_op["forward_kv"].tolist() == pytest.approx([forward, forward, max(forward, sent)], abs=1)
        again = [forward + head, linear + head, max(linear + head, sent + head)]
        assert by_op["recompute"].tolist() == pytest.approx(again, abs=1)
        assert len(set(by_op["forward"])) == len(set(by_op["backward"])) == 1


def test_attention_has_the_bytes_that_the_level_that_keeps_it_has_more_than_the_inputs() -> None:
    [layer] = COST.shape.kinds
    keep, full = (activation_bytes_per_token(COST, layer, level) for level in ("keep-attention", "full"))
    assert keep - full == LAYER_BYTES


def test_the_report_has_what_is_kept_on_the_gpu_and_on_the_host(tmp_path: Path) -> None:
    """One sequence of ten chunks, K 1: nine wait, of which some fit the GPU."""
    off = plan_report(built(tmp_path, [640], cost=COST, k=1, epochs=1, keep_attention="off")).memory
    assert off is not None and off.host_bytes == off.memory.kept_attention == 0
    of_chunk = 64 * 28 * LAYER_BYTES
    cost = with_memory(COST, off.memory.total + 3 * of_chunk + 1000)
    report = plan_report(built(tmp_path, [640], cost=cost, k=1, epochs=1)).memory
    assert report is not None
    # It is fullest while the last of those that wait is run again, which then has its attention no longer.
    assert (report.memory.kept_attention, report.host_bytes) == (2 * of_chunk, 6 * of_chunk)
    assert report.memory.total == off.memory.total + 2 * of_chunk


def test_ranks_that_share_a_chunk_keep_alike(tmp_path: Path) -> None:
    blocks: dict[int, tuple[int, ...]] = {300: (0, 4), 200: (0, 2), 37: (2, 2)}
    for memory, expected in ((PLAIN.memory_bytes * 1000, "gpu"), (1, "host")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.support.shared_plans.FAST", replace(FAST, memory_bytes=memory))
            plan = build_blocks(tmp_path, blocks, dp=4, k=1)
        report = validate(plan.path)
        assert report.ok
        rows = [row for row in plan.chunks().to_pylist() if row["cp_size"] > 1 and not row["keeps_activations"]]
        assert rows and {row["kept_attention"] for row in rows} == {expected}


def test_build_keeps_attention_unless_it_is_off_and_validate_accepts_it(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([40_000, 17_000, 300, 9], np.int32))
    counts = {}
    for keep in ("auto", "off"):
        flags = ["--chunk-size", "4096", "--k", "1", "--keep-attention", keep, "--output", str(tmp_path / keep)]
        assert run_here(tmp_path, "build", str(tmp_path / "lengths.npy"), *flags).returncode == 0
        assert run_here(tmp_path, "validate", str(tmp_path / keep)).returncode == 0
        plan = load_plan(tmp_path / keep)
        counts[keep] = Counter(plan.chunks().column("kept_attention").to_pylist())
        assert plan.config.keep_attention == keep
        assert ("keep_attention" in plan.manifest["config"]) == (keep == "auto")
        again = [chunk for step in plan.iter_steps() for chunk in step.chunks[0] if chunk.kept_attention]
        assert len(again) == counts[keep].total() - counts[keep][""]
    assert counts["off"].keys() == {""}
    assert counts["auto"]["host"] + counts["auto"]["gpu"] > 5


def test_a_tuning_is_no_slower_with_it_and_a_document_says_it(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, long_tail(300))
    tried = {"ks": (1,), "chunk_sizes": (8192,)}
    found = {keep: tune(lengths, options_with(keep_attention=keep, **tried)) for keep in ("off", "auto")}
    assert found["auto"].best.step_ns < found["off"].best.step_ns
    assert found["auto"].best.recompute_share < found["off"].best.recompute_share
    assert found["auto"].best.host_bytes > found["off"].best.host_bytes
    for keep, tuning in found.items():
        write_tuning(tuning, tmp_path / "tuning.json")
        of_file = read_tuning(tmp_path / "tuning.json").config.keep_attention
        assert of_file == tuned(tuning).config.keep_attention == keep
