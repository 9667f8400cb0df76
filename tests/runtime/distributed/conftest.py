"""Plans and models for processes that share a step."""

from __future__ import annotations

import json

import pytest

LENGTHS = [23, 5, 9, 3, 1, 30, 8]


@pytest.fixture(scope="session")
def plan_of(tmp_path_factory, tiny_config, random_sequences):
    """`make(model, lengths, no_targets, **settings of the plan)`; sequences in `no_targets` have none."""

    from chunkplan import PlanConfig, build  # tests on a GPU machine have no planner
    from tests.support.analyses import write_analysis
    from tests.support.distributed_cases import four_layers

    def make(model=None, lengths=LENGTHS, no_targets=(), **plan):
        folder = tmp_path_factory.mktemp("distributed")
        sequences = enumerate(random_sequences(lengths, seed=3))
        targets = ((ids, target & (record not in no_targets)) for record, (ids, target) in sequences)
        write_analysis(folder / "analysis", targets)
        settings = {"chunk_size": 8, "k": 2, "global_batch": len(lengths), "cp": "off", **plan}
        build(folder / "analysis", folder / "plan", PlanConfig(**settings))
        (folder / "config.json").write_text(json.dumps(tiny_config(**four_layers(model or {"model_type": "qwen2"}))))
        return {"plan": folder / "plan", "config": folder / "config.json"}

    return make
