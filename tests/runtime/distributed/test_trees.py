"""Trees on pipelines and data-parallel processes are exact, as the planner cuts and orders them."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from chunkplan import PlanConfig, build
from tests.runtime.distributed.test_gradients import check
from tests.runtime.test_parity import MODELS
from tests.support.analyses import write_analysis
from tests.support.distributed_cases import four_layers
from tests.support.tree_cases import random_samples

#: Processes, the settings of a plan for them, a model, and options of `compare_steps`.
CASES = {
    "K of 1": (1, {"k": 1}, "qwen2", {}),
    "1f1b": (2, {"pp": 2, "k": 2}, "qwen2", {"checkpointing": True}),
    "interleaved": (2, {"pp": 2, "k": 1, "schedule": "interleaved"}, "gemma2, softcaps and sliding window", {}),
    "1f1b, pages on the host": (2, {"pp": 2, "k": 1}, "deepseek_v3, latents", {"kv_offload": True}),
    "two ranks, sharded weights": (2, {"dp": 2, "k": 2}, "qwen3_moe", {"sharding": "weights"}),
    "both, kept attention": (4, {"dp": 2, "pp": 2, "k": 1}, "gpt_oss, sinks", {"keep_attention": True}),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
@pytest.mark.parametrize("case", CASES)
def test_planned_trees_are_exact_on_any_processes(case, seed, pool, tmp_path, tiny_config):
    """A long tree that is cut, small ones, and sequences that share with none; an evaluation too."""
    world_size, settings, model, how = CASES[case]
    chance = random.Random(f"{case} {seed}")
    while True:  # ranks may have trees cut apart, and a step that would take longer shares nothing
        samples = random_samples(chance, 2, 3, 33, 45)
        samples += random_samples(chance, 1, 3, 33, 40) + random_samples(chance, 0, 1)
        write_analysis(tmp_path / "analysis", chance.sample(samples, len(samples)))
        own = {"global_batch": len(samples), "chunk_size": chance.choice([24, 40, 120]), **settings}
        plan = build(tmp_path / "analysis", tmp_path / "plan", PlanConfig(share_prefixes=True, **own))
        if next(plan.iter_steps()).prefixes:
            break
        shutil.rmtree(tmp_path / "analysis")
    config = tiny_config(**four_layers({**MODELS[model], "max_position_embeddings": 256}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(pool, world_size, {"plan": plan.path, "config": tmp_path / "config.json"}, evaluates=True, **how)
