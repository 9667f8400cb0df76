"""A model, its optimizer and what an optimizer step does with them on all processes: gradients, then an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch

from chunkplan.cost.model import Sharding
from chunkplan.planfile.measured import Spent, StepTimeline
from chunkplan.planfile.plan import PlanStep
from chunkplan_runtime.distributed.job import Job, clip, gradient_norm, tied_weight
from chunkplan_runtime.distributed.sharding import Shards
from chunkplan_runtime.execution.executor import ActionClock, Around, RankExecutor, no_collectives
from chunkplan_runtime.execution.loss import RankLoss, SequenceLoss, cross_entropy, entropies
from chunkplan_runtime.execution.losses import Distillation, Found, NamedLoss
from chunkplan_runtime.execution.step_loss import AtTokens, OfChunks, StepLoss, Weighed, step_weights
from chunkplan_runtime.feed.scores import Scores
from chunkplan_runtime.feed.stream import PlanStream, StepWork
from chunkplan_runtime.models.model import CausalLM
from chunkplan_runtime.models.parts import without_adapters
from chunkplan_runtime.models.router_loss import router_loss_scope
from chunkplan_runtime.training.checkpoint import read_tensors
from chunkplan_runtime.training.config import TrainConfig
from chunkplan_runtime.training.metrics import add_up, mean_of_steps
from chunkplan_runtime.training.optimizer import TrainedWeights, begin_state, make_optimizer, optimizer_state

T = TypeVar("T")


@dataclass(frozen=True)
class Gradients:
    """The losses and the norm that come with a step's gradients.

    `loss`: the mean of a target token, or that of `--loss`, without the load-balancing loss of routers, which is
    `router_loss` with its weight. `norm`: of all gradients, before clipping. `spent`: the seconds of each process, in
    their order. `times`: of this process, action by action. `metrics`: of the loss, by name.
    """

    loss: float
    norm: float
    sequences: list[SequenceLoss]
    spent: list[Spent]
    times: StepTimeline
    router_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """True if loss and norm are finite, so that an update with these gradients makes sense."""
        return all(map(math.isfinite, (self.loss, self.norm, self.router_loss or 0.0)))


class Evaluated(NamedTuple):
    """The `loss` of an evaluation, None without targets: the mean of a target token, or the mean of `--loss`.

    The latter is over steps, by their numbers of sequences, as are its `metrics`; then there are no `sequences`.
    """

    loss: float | None
    num_target_tokens: int
    sequences: list[SequenceLoss]
    metrics: dict[str, float]


class StepExecutor:
    """Runs steps of a plan, of all ranks that a process has; with `shards` all replicas have to make the same calls."""

    def __init__(self, ranks: RankExecutor, shards: Shards | None = None, job: Job | None = None) -> None:
        self.ranks = ranks
        self._shards, self._job = shards, job or Job()

    @property
    def router_loss(self) -> float | None:
        """The load-balancing loss of the last step, of this process's chunks; None where there is none."""
        return None if self.ranks.router_loss.scope == "none" else self.ranks.router_loss.value

    def run(
        self,
        work: StepWork,
        timed: Callable[[int], Around] = lambda dp_rank: nullcontext,
        weights: Sequence[OfChunks | None] = (),
        loss: Distillation | None = None,
    ) -> list[RankLoss]:
        """Add the gradients of a step; `timed` gives what is entered around each action of a data-parallel rank.

        `weights`: those of each rank in another loss than the mean over target tokens, see `weigh`; `loss`: of which
        that mean is, in place of cross-entropy.
        """
        shards, losses = self._shards, []
        if shards:
            shards.begin_step()
        count = partial(self._run_forwards, work, partial(self.ranks.evaluate, what="counting"))
        self.ranks.router_loss.begin_step(work.step.num_tokens, count, self._job.all_gather_object)
        collectives = shards.collectives_of(work, self._job.layout) if shards else no_collectives
        for rank, of_rank in zip(work.ranks, weights or [None] * len(work.ranks), strict=True):
            around, reduce = timed(rank.dp_rank), None
            if shards:
                around = shards.around(around)
                reduce = shards.reduce_in_backward if rank is work.last else None
            num_target_tokens = work.step.num_target_tokens
            how = (loss.of_chunks(rank),) if loss else ()
            losses.append(self.ranks.run(rank, num_target_tokens, around, reduce, collectives, of_rank, *how))
        collectives(None)
        return losses

    def run_by(
        self,
        work: StepWork,
        loss: Found,
        timed: Callable[[int], Around] = lambda dp_rank: nullcontext,
        *,
        with_reference: bool = False,
        reference: Scores | None = None,
    ) -> tuple[list[RankLoss], Weighed | None]:
        """Add the gradients of a step by `loss`, None: cross-entropy; see `run` and `weigh_by`."""
        if isinstance(loss, Distillation):
            return self.run(work, timed, loss=loss), None
        weighed = self.weigh_by(work, loss, with_reference=with_reference, reference=reference)
        return self.run(work, timed, weighed.weights if weighed else ()), weighed

    def weigh_by(
        self, work: StepWork, loss: Found, *, with_reference: bool = False, reference: Scores | None = None
    ) -> Weighed | None:
        """The value of `loss` in a step, by forwards alone; None of cross-entropy and where there are no targets.

        A reference that the loss needs, and neither `reference` nor the data gives, is the model without its adapters.
        """
        if not isinstance(loss, NamedLoss) or not work.step.num_target_tokens:
            return None
        is_given = reference is not None or (work.samples is not None and "reference" in work.samples.of_tokens)
        without = with_reference or (loss.needs_reference and not is_given)
        at_tokens = None if reference is None else reference.at_tokens
        return self.weigh(work, loss.call, with_reference=without, reference=at_tokens)

    def score(self, work: StepWork) -> list[OfChunks]:
        """The cross-entropies of tokens by forwards alone, by rank and chunk; none before the last stage."""
        return self._run_forwards(work, partial(self.ranks.token_losses, loss=cross_entropy(), what="scores"))

    def free(self) -> None:
        """Give back what evaluations hold of weights that are shared."""
        if self._shards:
            self._shards.free()

    def weigh(
        self, work: StepWork, loss: StepLoss, *, with_reference: bool = False, reference: AtTokens | None = None
    ) -> Weighed:
        """The value of a loss of the whole step, and the weights of each rank for `run`; see `step_weights`.

        `with_reference`: log-probabilities of the model without its adapters are made. `reference` gives others.
        """
        run = partial(self.ranks.token_losses, what="log-probabilities")
        losses = self._run_forwards(work, partial(run, loss=entropies))
        if with_reference:
            with without_adapters(self.ranks.model.model):
                others = self._run_forwards(work, partial(run, loss=cross_entropy()))
            losses = [
                {chunk_id: torch.column_stack([of_rank[chunk_id], of_other[chunk_id]]) for chunk_id in of_rank}
                for of_rank, of_other in zip(losses, others, strict=True)
            ]
        gather, process = self._job.all_gather_object, self._job.layout.process
        return step_weights(loss, work.ranks, losses, gather, process, work.samples, reference)

    def evaluate(self, work: StepWork) -> list[RankLoss]:
        """The losses of a step by forwards alone."""
        return self._run_forwards(work, partial(self.ranks.evaluate, num_target_tokens=work.step.num_target_tokens))

    def _run_forwards(self, work: StepWork, run: Callable[..., T]) -> list[T]:
        """Run all forwards of this process in a step, and gather weights with the processes that have others."""
        shards = self._shards
        if shards is None:
            return [run(rank) for rank in work.ranks]
        shards.begin_forwards()
        collectives = shards.collectives_of(work, self._job.layout, only_forwards=True)
        found = [run(rank, collectives=collectives) for rank in work.ranks]
        collectives(None)
        shards.end_forwards()
        return found


def make_executor(
    model: CausalLM, config: TrainConfig, job: Job, *, master_weights: bool = False, router_loss: str = "none"
) -> tuple[StepExecutor, Shards | None]:
    """An executor of this process's part of a model, whose `model` it runs, and what is shared of its weights."""
    groups, shards = job.groups, None
    if groups and groups.replicas:
        sharding = cast(Sharding, config.sharding or "optimizer")
        shards = Shards(model, groups.replicas, master_weights=master_weights, sharding=sharding)
        model = shards.model
    ranks = RankExecutor(
        model,
        seed=config.seed,
        kv_offload=bool(config.kv_offload),
        links=groups.links(model.config.hidden_size, model.dtype) if groups else None,
        exchanges=groups.exchanges if groups else None,
        router_loss=router_loss,
        loss=cross_entropy(config.label_smoothing),
    )
    return StepExecutor(ranks, shards, job), shards


class TrainStep:
    """An optimizer step of a model, or of this process's stage of it; on several processes all do the same calls."""

    def __init__(
        self,
        model: CausalLM,
        config: TrainConfig,
        num_steps: int,
        job: Job,
        loss: Found = None,
        reference: Scores | None = None,
    ) -> None:
        """`loss`: of steps, None: cross-entropy; `reference`: scores of a reference model that it needs."""
        master_weights = config.precision == "bf16"
        scope = router_loss_scope(model.config, config.router_loss, str(config.model or config.model_config))
        self._steps, shards = make_executor(model, config, job, master_weights=master_weights, router_loss=scope)
        self.executor = self._steps.ranks
        self.model = self.executor.model
        self._shards, self._job, self._config, self._num_steps = shards, job, config, num_steps
        self._clock = ActionClock(self.model.device)
        # Sharded weights are fp32 master weights themselves.
        self._weights = TrainedWeights(model.model, master_weights=master_weights and shards is None)
        self._tied = tied_weight(self.model, job.groups)
        self._loss, self._reference = loss, reference
        self.optimizer = make_optimizer(self._weights.tensors, config)

    def compute_gradients(self, work: StepWork) -> Gradients:
        """Run a step, rank by rank, reduce its gradients over all processes, and clip them."""
        weights, job, clock, step = self._weights.tensors, self._job, self._clock, f"step {work.step.step}"
        with job.reporting(lambda: self.executor.activity, clock.on_device):
            self.executor.doing = f"{step}, waiting for all processes to begin it"
            job.barrier()
            clock.start(work.step.step)
            rank_losses, weighed = self._steps.run_by(work, self._loss, clock.around, reference=self._reference)
            self.executor.doing = f"{step}, reducing gradients"
            with clock.reducing():
                if self._shards:
                    self._shards.reduce_gradients()
                norm = gradient_norm(weights, self._tied, job.groups)
            clip(weights.values(), norm, self._config.max_grad_norm or math.inf)
            self.executor.doing = f"{step}, waiting for its device to finish it"
            times = clock.stop()
            self.executor.doing = f"{step}, waiting for the losses of all processes"
            gathered = job.all_gather_object((rank_losses, times.spent, self._steps.router_loss))
        losses = [rank for ranks, *_ in gathered for rank in ranks]
        router_losses = [value for *_, value in gathered if value is not None]
        return Gradients(
            loss=sum(rank.loss for rank in losses) if weighed is None else weighed.value,
            norm=norm.item(),
            sequences=add_up([sequence for rank in losses for sequence in rank.sequences]),
            spent=[spent for _, spent, _ in gathered],
            times=times,
            router_loss=sum(router_losses) if router_losses else None,
            metrics=weighed.metrics if weighed else {},
        )

    def update(self, step: PlanStep) -> float:
        """Change the weights by the gradients, and forget these; returns the learning rate."""
        rate = self._config.learning_rate(step.step, self._num_steps)
        if step.num_target_tokens:  # without targets there is nothing to learn: no decay, no momentum either
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self._weights.publish()
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    def evaluate(self, stream: PlanStream) -> Evaluated:
        """Evaluate by all steps of `stream`, without dropout and by forwards alone."""
        losses: list[SequenceLoss] = []
        weighed: list[tuple[int, Weighed]] = []
        num_target_tokens = 0
        self.model.model.eval()
        try:
            self.executor.doing = "evaluation, before its first step"
            with self._job.reporting(lambda: self.executor.activity, lambda: None):
                for work in stream:
                    num_target_tokens += work.step.num_target_tokens
                    found = self._steps.weigh_by(work, self._loss, reference=self._reference)
                    if found:
                        weighed.append((work.step.num_sequences, found))
                    elif not isinstance(self._loss, NamedLoss):
                        losses += [loss for rank in self._steps.evaluate(work) for loss in rank.sequences]
        finally:
            self.model.model.train()
        self._steps.free()
        sequences = [loss for gathered in self._job.all_gather_object(losses) for loss in gathered]
        if not weighed:
            total = sum(loss.loss for loss in sequences)
            return Evaluated(total / num_target_tokens if num_target_tokens else None, num_target_tokens, sequences, {})
        rows = [{"loss": found.value, **found.metrics} for _, found in weighed]
        means = mean_of_steps(rows, [count for count, _ in weighed])
        return Evaluated(means.pop("loss"), num_target_tokens, sequences, means)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of a checkpoint by name: `weights`, and of the `optimizer` what it remembers."""
        weights = self._weights.tensors
        return {"weights": weights, "optimizer": optimizer_state(self.optimizer, weights)}

    def restore(self, checkpoint: Path) -> None:
        """Take weights and optimizer states from a checkpoint."""
        weights = self._weights.tensors
        begin_state(self.optimizer)
        read = read_tensors(checkpoint, weights, optimizer_state(self.optimizer, weights), self._job)
        remembered = {name.rpartition(":")[0] for name in read}
        for name in weights.keys() - remembered:  # which have had no gradient
            self.optimizer.state.pop(weights[name], None)
        self._weights.publish()
