"""One model, its optimizer and what an optimizer step does: gradients, then an update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from chunkplan.planfile.plan import PlanStep
from chunkplan_runtime.executor import Executor, SequenceLoss
from chunkplan_runtime.models import CausalLM
from chunkplan_runtime.stream import StepWork
from chunkplan_runtime.training.checkpoint import read_optimizer, read_weights
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.master_weights import TrainedWeights
from chunkplan_runtime.training.optimizer import make_optimizer, optimizer_state, restore_optimizer
from chunkplan_runtime.training.schedules import learning_rate_factor


@dataclass(frozen=True)
class Gradients:
    """What a step's gradients came with: the mean loss of a target token, the norm before clipping, all losses."""

    loss: float
    norm: float
    sequences: list[SequenceLoss]

    @property
    def is_finite(self) -> bool:
        """Whether an update with them could be one."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Learner:
    """A model that learns step by step."""

    def __init__(self, model: CausalLM, config: TrainConfig, num_steps: int) -> None:
        self.model = model
        self.executor = Executor(model, seed=config.seed, kv_offload=bool(config.kv_offload))
        self._config = config
        self._num_steps = num_steps
        self._weights = TrainedWeights(model.model, masters=config.precision == "bf16")
        self._optimizer = make_optimizer(self._weights.tensors, config)

    def compute_gradients(self, work: StepWork) -> Gradients:
        """Run a step, rank by rank, and clip."""
        losses = [self.executor.run(rank, work.step.num_target_tokens) for rank in work.ranks]
        norm = torch.nn.utils.clip_grad_norm_(self._weights.tensors.values(), self._config.clip or math.inf)
        return Gradients(
            loss=sum(rank.loss for rank in losses),
            norm=norm.item(),
            sequences=[sequence for rank in losses for sequence in rank.sequences],
        )

    def update(self, step: PlanStep) -> float:
        """Change the weights by the gradients, and forget these; returns the learning rate."""
        config = self._config
        rate = config.lr * learning_rate_factor(
            config.schedule, step.step, self._num_steps, warmup=config.warmup, lowest=config.min_lr
        )
        if step.num_target_tokens:  # without targets there is nothing to learn: no decay, no momentum either
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._weights.publish()
        self._optimizer.zero_grad(set_to_none=True)
        return rate

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """For a checkpoint: `weights` and `optimizer`."""
        weights = self._weights.tensors
        return {"weights": weights, "optimizer": optimizer_state(self._optimizer, weights)}

    def restore(self, checkpoint: Path) -> None:
        """Be as when that checkpoint was written.

        Raises:
            DataError: it cannot be read, or is of another model.
        """
        weights = self._weights.tensors
        read_weights(checkpoint, weights)
        restore_optimizer(self._optimizer, weights, read_optimizer(checkpoint), str(checkpoint))
        self._weights.publish()
