"""Evaluation: the loss on held-out sequences, by forwards alone."""

from __future__ import annotations

import time
from typing import Any

from chunkplan.planfile.analysis import Analysis
from chunkplan_runtime.stream import PlanStream
from chunkplan_runtime.training.learner import Learner
from chunkplan_runtime.training.losses import source_losses


def evaluate(learner: Learner, stream: PlanStream, analysis: Analysis) -> dict[str, Any]:
    """The mean loss of a target token over all steps of `stream`, in total and by source, and how long it took."""
    started = time.perf_counter()
    losses = learner.evaluate(stream)
    num_target_tokens = sum(loss.num_target_tokens for loss in losses)
    return {
        "eval_loss": sum(loss.loss for loss in losses) / num_target_tokens if num_target_tokens else None,
        "target_tokens": num_target_tokens,
        "seconds": time.perf_counter() - started,
        "source_losses": source_losses(losses, analysis),
    }
