"""Losses over the log-probabilities of a step, and their gradients on whole sequences and on several processes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import logsigmoid

from chunkplan.cost.model import Sharding
from chunkplan_runtime import TargetTokens
from chunkplan_runtime.distributed.job import Job
from chunkplan_runtime.execution.step_loss import StepLoss
from chunkplan_runtime.models.model import new_model, read_config
from chunkplan_runtime.models.parts import evaluate_in_float64
from chunkplan_runtime.proof.prove import relative_errors, vanishing_gradients
from chunkplan_runtime.training.train_step import StepExecutor
from tests.support.distributed_cases import make_stage, open_for_its_stages


def preference(tokens):
    """DPO of the first sequence over the second, the third over the fourth and so on, against no reference."""
    sums = tokens.sums(tokens.log_probs - (0 if tokens.reference is None else tokens.reference))
    pairs = sums[: len(sums) // 2 * 2].view(-1, 2)
    return -logsigmoid(0.3 * (pairs[:, 0] - pairs[:, 1])).mean()


def clipped_policy(tokens):
    """PPO's clipped ratio to older log-probabilities, with an advantage a sequence, averaged over tokens."""
    advantages = torch.linspace(-1, 2, len(tokens.sequence_ids), dtype=tokens.log_probs.dtype)[tokens.which]
    ratio = (tokens.log_probs - tokens.log_probs.detach() + 0.4 * torch.sin(tokens.positions.double())).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def with_entropy_bonus(tokens):
    return clipped_policy(tokens) - 0.1 * tokens.entropies.mean() + tokens.sums(tokens.entropies).square().mean()


def entropies_alone(tokens):
    return -tokens.entropies.sum()


def log_probs_of(model, sequences):
    """Log-probabilities and entropies of all target tokens, of sequences that run whole, one after another."""
    log_probs, entropies, ids, positions = [], [], [], []
    for number, (tokens, target) in enumerate(sequences):
        at = torch.from_numpy(target[1:].nonzero()[0])
        log_softmax = model(torch.from_numpy(tokens).long()[None]).logits[0, :-1][at].log_softmax(1)
        log_probs.append(log_softmax.gather(1, torch.from_numpy(tokens[1:]).long()[at][:, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(1))
        ids += [number] * len(at)
        positions.append(at + 1)
    return torch.cat(log_probs), torch.cat(entropies), torch.tensor(ids), torch.cat(positions)


def on_whole_sequences(model, sequences, loss, reference=None):
    """The loss of one plain step, and its gradients by name."""
    log_probs, entropies, ids, positions = log_probs_of(model, sequences)
    present, which = ids.unique(return_inverse=True)
    value = loss(TargetTokens(log_probs, entropies, present, which, positions, reference))
    value.backward()
    return value.item(), gradients_of(model)


def gradients_of(model):
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def compare_step_loss(
    rank: int, *, plan: Path, config: Path, loss: StepLoss, kv_offload: bool = False, sharding: Sharding = "optimizer"
) -> tuple[float, float, float]:
    """The loss of the first step of `plan` on all processes, on one with whole sequences, and the worst error of a
    gradient of this process."""
    opened, analysis = open_for_its_stages(plan)
    model = new_model(read_config(config), torch.float64, seed=1)
    with evaluate_in_float64(model.model):
        sequences = [analysis.tokens()(number) for number in range(analysis.num_sequences)]
        attention = model.config._attn_implementation
        model.model.set_attn_implementation("eager")
        expected, reference = on_whole_sequences(model.model, sequences, loss)
        model.model.set_attn_implementation(attention)
        stage = make_stage(rank, opened, analysis, model, kv_offload=kv_offload, sharding=sharding)
        steps = StepExecutor(stage.executor, stage.shards, Job(stage.groups.layout, stage.groups))
        work = stage.work(0)
        value, weights, _ = steps.weigh(work, loss)
        steps.run(work, weights=weights)
        if stage.shards:
            stage.shards.reduce_gradients()
        gradients, _ = stage.finish_gradients(stage.weights)
    own = {name: reference[name] for name in gradients}
    return value, expected, max([0.0, *relative_errors(gradients, own, vanishing_gradients(own)).values()])
