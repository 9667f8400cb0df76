"""The memory that is reported of a plan, against every action of it played one after another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from chunkplan.cost.memory import stage_memory
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import QWEN2_5_7B, plain_layer
from chunkplan.cost.token_bytes import ResidentTokens
from chunkplan.layers import split_layers
from chunkplan.planfile.plan import Plan, PlanStep
from chunkplan.planning.memory import memory_of_stages
from chunkplan.reporting.plan_memory import memory_over_step
from chunkplan.reporting.plan_report import plan_report
from tests.support.small_plans import CONFIGS, LENGTHS, built

#: With as many heads of keys as of queries, and an MLP so narrow that attention needs most in a backward.
WIDTHS = {"query_width": 3584, "kv_width": 3584, "mlp_width": 4096, "all_mlp_width": 4096}
NARROW = replace(QWEN2_5_7B, kinds=(plain_layer(3584, num_query_heads=28, num_kv_heads=28, **WIDTHS),))
COSTS = {
    "as they come": CostModel(),
    "keys in host memory": CostModel(shape=NARROW, lora_rank=16, kv_offload=True),
    "narrow": CostModel(shape=NARROW, lora_rank=16, checkpointing="full"),
}


@pytest.fixture(params=product(CONFIGS, COSTS), ids="-".join)
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Plan:
    """Some of its steps have a split sequence and chunks that are full without one."""
    config, cost = request.param
    return built(tmp_path, LENGTHS, COSTS[cost], **CONFIGS[config])


def test_memory_is_that_of_the_fullest_stage_with_what_it_holds(tmp_path: Path) -> None:
    """One stage, one sequence of ten chunks, K 1: activations of a chunk, keys and values of all of them."""
    plan = built(tmp_path, [640], k=1, epochs=1)
    cost = CostModel()
    memory = plan_report(plan).memory
    assert memory is not None
    [expected] = stage_memory(
        cost,
        dp=1,
        layers=split_layers(cost.shape.num_layers, 1),
        held=[ResidentTokens(64, kv=640, kv_gradients=640)],
        chunk_size=64,
    )
    assert memory.memory == expected
    assert (memory.step, memory.dp_rank, memory.stage, memory.gpu_bytes) == (0, 0, 0, cost.hardware.memory_bytes)


def test_memory_is_the_most_at_any_moment_of_any_stage(plan: Plan) -> None:
    """Every action of every step, played one after another."""
    report = plan_report(plan).memory
    assert report is not None
    totals = {
        (step.step, rank, stage): max(totals_of(plan, step, rank, stage))
        for step in plan.iter_steps()
        for rank, stage in step.actions
    }
    assert report.memory.total == max(totals.values()) == totals[report.step, report.dp_rank, report.stage]


def totals_of(plan: Plan, step: PlanStep, rank: int, stage: int) -> Iterator[int]:
    """Bytes that a stage holds after each of its forwards, and around the first backward of each group."""
    pp, cost = plan.config.pp, plan.cost
    held: Counter[str] = Counter()
    begun: list[int] = []

    def total(last_layer: int) -> int:
        moment = ResidentTokens(**held, last_layer=last_layer)
        return memory_of_stages(plan.config, cost, np.array([moment] * pp))[stage].total

    for action in step.actions[rank, stage]:
        chunk = step.chunks[rank][action.chunk_id]
        is_first_part = action.virtual_stage == 0
        held["activations"] += chunk.num_tokens * (action.op in ("forward", "recompute"))
        saves = stage > 0 or not is_first_part
        waits = chunk.num_tokens * ((action.op == "forward_kv") - (action.op == "recompute"))
        held["inputs"] += saves * waits
        held["attention"] += (chunk.kept_attention == "gpu") * waits
        if action.op in ("forward", "forward_kv") and is_first_part and chunk.group_id is not None:
            held["kv"] += chunk.num_tokens
        held["pending"] += chunk.num_tokens * (action.op == "backward_input")
        yield total(0)
        if action.op in ("backward", "backward_input") and chunk.group_id not in (None, *begun):
            begun.append(chunk.group_id)
            held["kv_gradients"] += sum(
                other.num_tokens for other in step.chunks[rank] if other.group_id == chunk.group_id
            )
            left = chunk.num_tokens if action.op == "backward" else 0
            held["activations"] -= left
            yield total(left)
            held["activations"] += left
        held["activations"] -= chunk.num_tokens * (action.op in ("backward", "backward_weight"))
        held["pending"] -= chunk.num_tokens * (action.op == "backward_weight")
        if action.op in ("backward", "backward_input") and is_first_part and chunk.group_index == 0:
            group = [other for other in step.chunks[rank] if other.group_id == chunk.group_id is not None]
            held["kv"] -= sum(other.num_tokens for other in group)
            held["kv_gradients"] -= sum(other.num_tokens for other in group)


def test_a_plan_that_describes_no_gpu_has_no_memory(tmp_path: Path) -> None:
    plan = built(tmp_path, [640, 3], k=1)
    manifest = json.loads((plan.path / "manifest.json").read_text())
    del manifest["predictions"]["cost_model"]["hardware"]["memory_bytes"]
    (plan.path / "manifest.json").write_text(json.dumps(manifest))
    assert plan_report(plan.path).memory is None
    assert plan_report(plan.path).to_dict()["memory"] is None


def test_memory_over_the_fullest_step_comes_to_its_peak(plan: Plan) -> None:
    """In order of time, to no more than the peak; least is there at the end of the step."""
    peak = plan_report(plan).memory
    assert peak is not None
    times, held = memory_over_step(plan, peak)
    assert len(times) == len(held) and (np.diff(times) >= 0).all()
    assert max(each.total for each in held) == peak.memory.total
    assert held[-1].total == min(each.total for each in held) and held[-1].weights == peak.memory.weights
