"""Random plans of any kind on two and four processes, which share anything: no deadlock, all is exact."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from dataclasses import replace

import pytest

from chunkplan import PlanConfig, build
from chunkplan.cost.model import CostModel
from chunkplan.cost.shape import QWEN2_5_7B
from tests.runtime.distributed.test_gradients import check
from tests.runtime.distributed.test_sharing import random_blocks
from tests.support.analyses import write_analysis
from tests.support.distributed_cases import four_layers
from tests.support.shared_plans import given_blocks

#: Schedules of pipelines, the first ones with groups of ranks too.
FOR_GROUPS = ("auto", "1f1b", "zero-bubble")
SCHEDULES = (*FOR_GROUPS, "interleaved", "zero-bubble-v")

#: How many plans, and those that `make test` has; in 9 ranks of a block do weight halves at different times.
PLANS, FEW = 100, (0, 4, 9)


def random_plan(seed):
    """So many processes, the settings of a plan for them, lengths of sequences, and whether ranks share some of these.

    There may be more ranks than processes, and a rank without a chunk.
    """
    chance = random.Random(seed)
    world_size = chance.choice([2, 4, 4])
    pp = chance.choice([1, 1, 2]) if world_size == 4 else 1
    dp = world_size // pp * chance.choice([1, 1, 2])
    shares = chance.random() < 0.4
    lengths = chance.sample(range(2, 60), chance.randint(2, 9))
    plan = {"dp": dp, "pp": pp, "k": chance.choice([1, 2, 3, 9]), "chunk_size": chance.randint(5, 16)}
    plan |= {"global_batch": chance.randint(2, len(lengths)), "tail_sharing": chance.random() < 0.3}
    if pp > 1:
        plan["schedule"] = chance.choice(FOR_GROUPS if shares else SCHEDULES)
    if shares:
        plan |= {"dp": world_size // pp, "cp": "auto"}
    return world_size, plan, lengths, shares


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed in FEW else pytest.mark.soak) for seed in range(PLANS)]
)
def test_any_plan_is_exact_whatever_is_shared(seed, pool, tmp_path, tiny_config, random_sequences):
    """In float64, the last step of the plan too, which may be short of sequences."""
    world_size, plan, lengths, shares = random_plan(seed)
    chance = random.Random(f"{seed} how")
    write_analysis(tmp_path / "analysis", random_sequences(lengths, seed))
    blocks = random_blocks(chance, lengths, plan["dp"]) if shares else {}
    cost = CostModel(shape=replace(QWEN2_5_7B, kinds=(replace(QWEN2_5_7B.kinds[0], num_kv_heads=8),)))
    with given_blocks(blocks) if shares else nullcontext():
        built = build(tmp_path / "analysis", tmp_path / "plan", PlanConfig(**{"cp": "off", **plan}), cost=cost)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = tiny_config(**four_layers({"model_type": "qwen2", "tie_word_embeddings": chance.random() < 0.3, **heads}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(
        pool,
        world_size,
        {"plan": tmp_path / "plan", "config": tmp_path / "config.json"},
        sharding=("optimizer", "gradients", "weights")[seed % 3],
        checkpointing=chance.random() < 0.3,
        evaluates=chance.random() < 0.5,
        steps=sorted({0, len(list(built.iter_steps())) - 1}),
    )
