"""A plan, a model and a `ChunkTrainer` of both, for its tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

from chunkplan import PlanConfig, build
from chunkplan.planfile.analysis_writer import AnalysisWriter
from chunkplan_runtime import ChunkTrainer


@pytest.fixture
def one_thread():
    """Models this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plans(tmp_path_factory, random_sequences):
    """A folder with the analysis of eleven sequences, a plan of nine of them over two epochs, and one of the others."""
    folder = tmp_path_factory.mktemp("chunk_trainer")
    (folder / "analysis").mkdir()
    writer = AnalysisWriter(folder / "analysis")
    for record, (ids, target) in enumerate(random_sequences([25, 6, 14, 40, 5, 9, 17, 4, 33, 8, 12], seed=4)):
        writer.add(0, record, ids.astype(np.int32), target)
    writer.finish(exact=True, sources=[])
    build(folder / "analysis", folder / "plan", PlanConfig(chunk_size=8, k=2, global_batch=3, epochs=2, holdout=2))
    return folder


@pytest.fixture
def new_model(tiny_config):
    def make(model_type="llama", dtype=torch.float64, **changes):
        torch.manual_seed(1)
        config = AutoConfig.for_model(**tiny_config(model_type, **changes))
        return AutoModelForCausalLM.from_config(config, dtype=dtype)

    return make


@pytest.fixture
def new_trainer(plans, new_model, tmp_path):
    """`make(**settings)` -> a ChunkTrainer of the plan of `made` and a Llama; some settings are its own arguments."""

    def make(model=None, kind=ChunkTrainer, callbacks=(), plan=None, eval_plan=None, **settings):
        data = {"plan": plan or plans / "plan", "eval_plan": eval_plan} if issubclass(kind, ChunkTrainer) else {}
        for name in ("train_dataset", "eval_dataset", "data_collator", "compute_loss_func", "fused_kernels"):
            data |= {name: settings.pop(name)} if name in settings else {}
        settings = {"output_dir": str(tmp_path / "run"), "save_strategy": "no", "logging_steps": 1, **settings}
        args = TrainingArguments(report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2, **settings)
        return kind(model or new_model(), args=args, callbacks=list(callbacks), **data)

    return make
