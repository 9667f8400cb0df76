"""The trained model as one process would save it, whoever holds its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.learner import Learner
from chunkplan_runtime.training.master_weights import TrainedWeights
from chunkplan_runtime.training.model_setup import build_model
from chunkplan_runtime.training.save import NO_ROOM, save_files, shared_folder
from chunkplan_runtime.training.tensor_files import read_tensors, write_tensors

_PARTS = "parts"


@torch.no_grad()
def save_final(
    learner: Learner, config: TrainConfig, model_config: Any, tokenizer: list[Path], target: Path, job: Job
) -> None:
    """Save weights and config, or adapters, and a tokenizer's files in `target`, which is not there yet.

    Of several processes each writes its part; the main one puts them together, in the memory of its machine.

    Raises:
        ChunkplanError: it cannot be written.
    """
    if job.groups is None:
        with shared_folder(target, job) as folder:
            save_files(learner.model, tokenizer, folder)
        return
    with shared_folder(target, job, _PARTS) as folder:
        write_tensors(folder / _PARTS, learner.tensors()["weights"], 0, job, target)
        if job.is_main:
            whole = build_model(config, model_config, job)
            weights = TrainedWeights(whole.model, masters=config.precision == "bf16")
            parts = {name: weight.detach() for name, weight in weights.tensors.items()}
            read_tensors(folder / _PARTS, parts, Job(), hint=NO_ROOM)
            weights.publish()
            shutil.rmtree(folder / _PARTS)
            save_files(whole, tokenizer, folder)
