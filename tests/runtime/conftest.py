"""A folder to train in, with plans for processes of all kinds, which many files share."""

from __future__ import annotations

import json

import pytest

_FOUR = {"global_batch": 4, "epochs": 6, "holdout": 2}
_TWENTY = {"chunk_size": 16, "global_batch": 2, "epochs": 20, "holdout": 2}
#: Plans of the same steps: name -> their layout. Those after are others of two ranks and of one.
RUNS = {
    "one": _FOUR,
    "four": {**_FOUR, "dp": 4},
    "both": {**_FOUR, "dp": 2, "pp": 2},
    "search": {**_FOUR, "pp": 2, "schedule": "search"},
    "split": {**_FOUR, "dp": 2, "pp": 2, "schedule": "zero-bubble"},
    "long": {**_FOUR, "pp": 2, "epochs": 40},
    "equal": {**_FOUR, "dp": 2, "k": 1, "equal_chunks": True},
    "two": {"epochs": 6, "dp": 2},
    "twenty": _TWENTY,
    "pair": {**_TWENTY, "dp": 2},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory, tiny_config, random_sequences):
    """Also `tied.json`, a model of three layers, and a plan for an uneven split of it. Nobody writes there."""
    from chunkplan import CostModel, PlanConfig, build  # tests on a GPU machine have no planner
    from chunkplan.cost.shape import QWEN2_5_7B
    from tests.support.training_checks import make_training

    folder = make_training(tmp_path_factory.mktemp("training") / "made", tiny_config, random_sequences)
    for name, changes in RUNS.items():
        settings = {"chunk_size": 8, "k": 2, "global_batch": 3, "cp": "off", **changes}
        build(folder / "analysis", folder / name, PlanConfig(**settings))
    uneven = PlanConfig(chunk_size=8, k=2, dp=2, pp=2, stage_layers=(1, 2), cp="off", **_FOUR)
    build(folder / "analysis", folder / "uneven", uneven, cost=CostModel(shape=QWEN2_5_7B.first(3)))
    tied = tiny_config("qwen2", tie_word_embeddings=True, num_hidden_layers=3)
    (folder / "tied.json").write_text(json.dumps(tied))
    return folder


@pytest.fixture(scope="session")
def base(made):
    """A saved model, to adapt."""
    from chunkplan_runtime.train import main
    from tests.support.training_checks import options

    assert main(options(made, made / "run", "--max-steps", 1)) == 0
    return (made / "run" / "final").rename(made / "base")
