"""Distillation on a teacher's most likely tokens has, chunk by chunk, the loss and gradients of whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chunkplan import PlanConfig, build
from chunkplan.errors import UsageError
from chunkplan_runtime import Distillation, Executor
from chunkplan_runtime.parity import TOLERANCE
from tests.runtime.training.test_losses import LAYOUTS
from tests.support.analyses import write_analysis
from tests.support.distillation_cases import distil


@pytest.mark.parametrize(("top", "share"), [(97, 0.0), (5, 0.3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_whole_sequences(pool, folder_of, layout, top, share):
    how = LAYOUTS[layout]
    arguments = {**folder_of(**how), "top": top, "share": share}
    for value, expected, error in pool.run(how.get("dp", 1) * how.get("pp", 1), distil, **arguments):
        assert value == pytest.approx(expected, rel=1e-12)
        assert error <= TOLERANCE


@pytest.mark.parametrize(
    "answer",
    [
        lambda size: (np.zeros((size + 1, 2), int), np.zeros((size + 1, 2))),
        lambda size: (np.zeros((size, 2), int), np.zeros((size, 3))),
        lambda size: (np.full((size, 1), 97), np.zeros((size, 1))),
        lambda size: (np.zeros(size, int), np.zeros(size)),
    ],
)
def test_a_teacher_that_says_something_else_is_refused(folder_of, answer, tiny_config):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config()), dtype=torch.float64)
    executor = Executor.from_model(model)
    work = next(iter(executor.stream(folder_of()["plan"])))
    with pytest.raises(UsageError, match="the teacher gave"):
        executor.step(work, Distillation(lambda sequence_id, start, stop: answer(stop - start)))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory, tiny_config, random_sequences):
    import json

    def make(**how):
        folder = tmp_path_factory.mktemp("distillation")
        write_analysis(folder / "analysis", random_sequences([23, 9, 30, 4], seed=3))
        settings = {"chunk_size": 8, "global_batch": 4, "k": 1, "cp": "off", **how}
        build(folder / "analysis", folder / "plan", PlanConfig(**settings))
        (folder / "config.json").write_text(json.dumps(tiny_config("llama", num_hidden_layers=2)))
        return {"plan": folder / "plan", "config": folder / "config.json"}

    return make
