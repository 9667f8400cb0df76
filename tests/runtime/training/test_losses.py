"""Losses by name have, chunk by chunk, the values and the gradients that TRL's trainers give whole sequences."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from chunkplan import PlanConfig, build
from chunkplan_runtime.parity import TOLERANCE
from tests.support.loss_cases import CASES, LENGTHS, compare_with_trl, write_samples

#: How the step is run; each has to have another row of the table as well.
LAYOUTS = {
    "one process": {"k": 1},
    "parts of sequences kept": {"k": 3, "chunk_size": 11},
    "two stages": {"pp": 2, "k": 2, "schedule": "1f1b"},
    "two ranks": {"dp": 2, "k": 1},
}

#: Prefixes are shared by rollouts of one prompt, and targets in them: each rollout has its own numbers there.
TREES = {"k": 1, "share_prefixes": True, "schedule": "algorithm2"}


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory, tiny_config, random_sequences):
    def make(name, **how):
        folder = tmp_path_factory.mktemp("losses")
        shared = 40 if how.get("share_prefixes") else 0
        sequences = random_sequences([shared + length for length in LENGTHS], seed=3)
        for number in (0, 1, 3, 4):
            for own, other in zip(sequences[number], sequences[number + 1], strict=True):
                other[:shared] = own[:shared]
        write_samples(folder / "analysis", name, sequences)
        settings = {"chunk_size": 8, "global_batch": len(LENGTHS), "cp": "off", **how}
        build(folder / "analysis", folder / "plan", PlanConfig(**settings))
        (folder / "config.json").write_text(json.dumps(tiny_config("llama", num_hidden_layers=2)))
        return {"plan": folder / "plan", "config": folder / "config.json"}

    return make


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (row + place) % len(LAYOUTS) == 0 else pytest.mark.soak)
        for row, name in enumerate(CASES)
        for place, layout in enumerate(LAYOUTS)
    ],
)
def test_loss_and_gradients_are_those_of_trl(pool, plan_of, name, layout):
    how = LAYOUTS[layout]
    world_size = how.get("dp", 1) * how.get("pp", 1)
    for value, expected, error in pool.run(world_size, compare_with_trl, **plan_of(name, **how), name=name):
        assert value == pytest.approx(expected, rel=1e-12)
        assert error <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("ppo", 1),
        ("grpo with a reference", 2),
        *(pytest.param(name, k, marks=pytest.mark.soak) for name in ("grpo", "dapo", "gspo") for k in (1, 2)),
    ],
)
def test_so_they_are_where_rollouts_of_a_prompt_share_it(pool, plan_of, name, k):
    plan = plan_of(name, **{**TREES, "k": k})
    assert len(pq.read_table(plan["plan"] / "prefixes.parquet")) == 4  # of three, two begin in another one
    [(value, expected, error)] = pool.run(1, compare_with_trl, **plan, name=name)
    assert value == pytest.approx(expected, rel=1e-12)
    assert error <= TOLERANCE
