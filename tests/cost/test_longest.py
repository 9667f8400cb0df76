"""The longest sequence that fits, by how many ranks share it, against plans of sequences that long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chunkplan
from chunkplan.cost.memory import StageMemory, exchange_bytes, stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.planning.memory import longest_sequences
from chunkplan.reporting.plan_memory import PlanMemory
from tests.support.places import ROOT

GIB = 1 << 30


def memory_of(folder: Path, longest: int, cost: CostModel, **config: Any) -> PlanMemory:
    """Of a plan of one step with a sequence of `longest` tokens and 63 of 1,000."""
    np.save(folder / "lengths.npy", np.array([longest, *[1000] * 63], np.int32))
    given = {"chunk_size": 4096, "k": 1, "global_batch": 64, "keep_attention": "off", **config}
    plan = chunkplan.build(folder / "lengths.npy", folder / "plan", chunkplan.PlanConfig(**given), cost=cost)
    memory = chunkplan.plan_report(plan).memory
    assert memory is not None
    return memory


@pytest.mark.parametrize(
    ("cost", "config"),
    [
        (CostModel(sharding="weights"), {"dp": 8, "cp": "auto", "equal_chunks": True}),
        (CostModel(sharding="gradients"), {"dp": 8, "cp": "auto", "equal_chunks": True, "k": 2, "chunk_size": 1024}),
        (CostModel(checkpointing="full", sharding="weights"), {"dp": 8, "cp": "auto", "k": 3}),
        (CostModel(tp=4), {"chunk_size": 8192}),
    ],
)
def test_a_plan_with_the_longest_sequence_fits_and_with_a_longer_one_does_not(
    cost: CostModel, config: dict[str, Any], tmp_path: Path
) -> None:
    """To one part in fifty: ranks share in whole slices, and schedules hold other chunks besides."""
    longest = memory_of(tmp_path, 500_000, cost, **config).longest[-1]
    assert longest.num_tokens is not None and longest.num_ranks == config.get("dp", 1)
    assert memory_of(tmp_path, int(longest.num_tokens * 0.98), cost, **config).fits
    assert not memory_of(tmp_path, int(longest.num_tokens * 1.02), cost, **config).fits


@pytest.mark.parametrize("config", [{"pp": 4}, {"pp": 2, "schedule": "interleaved"}, {"split": "cost"}])
def test_where_what_else_is_in_a_step_decides_no_length_is_promised(config: dict[str, Any], tmp_path: Path) -> None:
    """Pipelines have several sequences under way, and parts of equal time leave room for many short ones."""
    assert memory_of(tmp_path, 50_000, CostModel(checkpointing="full"), **config).longest == ()


def test_a_sequence_of_just_the_length_that_fits_shared_does_fit(tmp_path: Path) -> None:
    """Slices are cut in whole tokens, so that a rank may have some more than its part."""
    config: dict[str, Any] = {"dp": 8, "cp": "auto", "chunk_size": 2048}
    cost = CostModel(checkpointing="full")
    longest = memory_of(tmp_path, 1 << 20, cost, **config).longest[-1].num_tokens
    assert longest is not None and longest > 1_000_000
    assert memory_of(tmp_path, longest, cost, **config).fits


def test_a_million_tokens_fit_eight_gpus_that_share_them_and_all_states(tmp_path: Path) -> None:
    """Qwen2.5-7B on H100s without offload: neither ZeRO-1 nor one rank has room for it, at a ChunkSize of 4K."""
    million = 1 << 20
    shared = memory_of(tmp_path, million, CostModel(sharding="weights"), dp=8, cp="auto", equal_chunks=True)
    assert shared.fits and shared.memory.total < 75 * GIB
    assert shared.memory.kv == 7 * GIB and shared.memory.kv_gradients == 14 * GIB
    longest = {each.num_ranks: each.num_tokens or 0 for each in shared.longest}
    assert longest[8] > million > longest[4] > longest[2] > longest[1]
    assert not memory_of(tmp_path, million, CostModel(), dp=8, cp="auto").fits
    checkpointing = CostModel(sharding="gradients", checkpointing="full")
    assert memory_of(tmp_path, million, checkpointing, dp=8, cp="auto", chunk_size=2048).fits
    assert not memory_of(tmp_path, million, CostModel(sharding="weights"), dp=8, cp="off", equal_chunks=True).fits


def test_the_document_says_what_a_million_tokens_take_and_how_long_one_may_be(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| shared \| ranks \|.*?\n\n", page, re.M | re.S)
    ways: list[tuple[CostModel, dict[str, Any]]] = [
        (CostModel(sharding="weights"), {"cp": "auto", "equal_chunks": True}),
        (CostModel(), {"cp": "auto"}),
        (CostModel(sharding="gradients", checkpointing="full"), {"cp": "auto", "chunk_size": 2048}),
        (CostModel(sharding="weights"), {"cp": "off", "equal_chunks": True}),
    ]
    plans = [memory_of(tmp_path, 1 << 20, cost, dp=8, **config) for cost, config in ways]
    for plan, row in zip(plans, table.strip().splitlines()[2:], strict=True):
        memory = plan.memory
        states = memory.weights + memory.gradients + memory.optimizer
        found = [f"{part / GIB:.1f}" for part in (memory.total, memory.kv + memory.kv_gradients, states)]
        assert row.strip("| ").split(" | ")[2:] == found
    [said] = re.findall(r"a sequence of up to (\S+) tokens fits if 8 ranks\s+share it, (.*?):", page, re.S)
    longest = [f"{each.num_tokens:,}" for each in reversed(plans[0].longest)]
    assert [said[0], *re.findall(r"[\d,]{5,}\d", said[1])] == longest


def test_ranks_that_share_sequences_have_room_for_the_pages_of_a_layer_with_their_gradients() -> None:
    """Keys and values in bf16, their gradients in float32; no more than there is."""

    def stage(kv_tokens: int, **options: Any) -> StageMemory:
        [found] = stage_memory(
            CostModel(),
            dp=8,
            layers=(28,),
            held=[ResidentTokens(4096, kv=kv_tokens, kv_gradients=kv_tokens)],
            chunk_size=4096,
            **options,
        )
        return found

    at_work, coming = 2 * 512 * (4 * 2 + 9 * 4), 2 * 512 * 5 * 2  # of a token, n = 4
    assert stage(100_000, shared_by=4).exchanged == 4096 * (at_work + coming)
    assert stage(5000, shared_by=4).exchanged == 4096 * at_work + 904 * coming
    assert stage(100_000).exchanged == 0


def test_what_is_exchanged_by_heads_is_there_twice_and_does_not_grow_with_the_sequence() -> None:
    cost = CostModel()
    twice = 2 * 4096 * (3584 + 2 * 512) * 2
    assert exchange_bytes(cost, 4096, (0, 0), heads=4, pages=1) == twice
    assert exchange_bytes(cost, 4096, (4096, 4096), heads=4, pages=1) == twice
    assert exchange_bytes(cost, 4096, (4096, 4096), heads=2, pages=2) > twice  # pages take more
    assert exchange_bytes(cost, 4096, (4096, 4096), heads=1, pages=1) == 0


def test_where_keys_and_values_are_offloaded_on_one_stage_no_sequence_is_too_long() -> None:
    sizes: dict[str, Any] = {"dp": 2, "chunk_size": 2048, "k": 1, "activations": 0}
    for offload, expected in ((True, (None, None)), (False, (0, 0))):
        cost = CostModel(kv_offload=offload)
        found = longest_sequences(cost, **sizes, gpu_bytes=[150, 80][not offload] * GIB)
        assert tuple(each.num_tokens for each in found) == expected


@pytest.mark.parametrize("kv_offload", [False, True])
def test_a_sequence_that_is_not_split_fits_wherever_the_plan_does(kv_offload: bool, tmp_path: Path) -> None:
    """Also where there is no room for the keys of a longer one; if they are offloaded, no sequence needs more."""
    np.save(tmp_path / "lengths.npy", np.full(8, 4096, np.int32))
    config = chunkplan.PlanConfig(chunk_size=4096, k=1, global_batch=8)
    cost = CostModel(kv_offload=kv_offload)
    plan = chunkplan.build(tmp_path / "lengths.npy", tmp_path / "plan", config, cost=cost)
    memory = chunkplan.plan_report(plan).memory
    assert memory is not None and (memory.memory.kv > 0) == kv_offload
    sizes: dict[str, Any] = {"dp": 1, "chunk_size": 4096, "k": 1}
    [found] = longest_sequences(cost, **sizes, activations=memory.memory.activations, gpu_bytes=memory.memory.total)
    assert found.num_tokens == (None if kv_offload else 4096)
    [found] = longest_sequences(cost, **sizes, activations=memory.memory.activations, gpu_bytes=memory.memory.total - 1)
    assert found.num_tokens is not None and found.num_tokens < 4096
