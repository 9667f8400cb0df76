"""Losses of chunks, and what a rank lost in a step, by sequence.

Cross-entropy, with or without label smoothing, is a `ChunkLoss`, and the load-balancing loss of routers
(`models.router_loss`) another. A `LogitLoss` never holds the logits of a chunk: loss and gradient are computed
together, a block of positions at a time, when the chunk runs backward, so that what a chunk in flight keeps of its loss
is its final hidden states. How many positions a block has is for `chunkplan.cost.optimizers` to say, which counts their
logits: the gradient of all of the head is made, and added to its sum, for every block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chunkplan.cost.optimizers import LOGIT_BYTES, tokens_at_once
from chunkplan_runtime.devices import wide
from chunkplan_runtime.feed.stream import NO_TARGET, RankWork
from chunkplan_runtime.models.compiled import Refusable
from chunkplan_runtime.models.model import Head

#: `loss(head, hidden, labels, weights)` -> the losses [num_tokens] of a chunk, and the gradient of their sum, each by
#: its weight, for `hidden`; zero where gradients are switched off. `head` makes of hidden states [num_tokens, ...] what
#: the loss is of; gradients of its parameters are added to their `.grad`. `labels` and `weights` [num_tokens] say what
#: each token is to be, and how much its loss counts.
ChunkLoss = Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

#: Of logits [rows, vocab_size], targets [rows] and weights [rows, ...] the losses [rows, ...] in at least float32, and
#: the gradient of their weighted sum for the logits.
_OfLogits = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LogitLoss:
    """A loss of the logits of target tokens, whose labels lie on the CPU, so that nobody waits for a GPU to count them.

    `compiled`: gives the same as `with_gradient`, made by a compiler as one kernel that reads logits three times, or
    None where there is no compiler.
    """

    with_gradient: _OfLogits
    compiled: Callable[[], _OfLogits | None] | None = None

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Implements `ChunkLoss`; a position without a target has no loss.

        With `labels` [num_tokens, n], the first column of targets, losses are of all n, as `weights` are.
        """
        losses = torch.zeros_like(weights)  # [num_tokens, ...]
        gradient = torch.zeros_like(hidden)  # [num_tokens, hidden_size]
        compiled = self.compiled() if self.compiled and head.compiles and torch.is_grad_enabled() else None
        logit_bytes = weights.ndim * LOGIT_BYTES if compiled is None else 2 * hidden.itemsize
        all_rows = torch.nonzero(labels.view(len(labels), -1)[:, 0] != NO_TARGET).flatten()  # [num_target_tokens]
        at_once = tokens_at_once(head.vocab_size, logit_bytes)
        for on_host in torch.split(all_rows, at_once) if len(all_rows) else ():
            rows = on_host.to(hidden.device, non_blocking=True)
            targets = labels[on_host].long().to(hidden.device, non_blocking=True)
            block = hidden[rows].detach().requires_grad_(torch.is_grad_enabled())  # [rows, hidden_size]
            logits = head(block)  # [rows, vocab_size]
            compute = self.with_gradient if compiled is None or len(targets) == 1 else compiled
            losses[rows], of_logits = compute(logits.detach(), targets, weights[rows])
            if block.requires_grad:
                torch.autograd.backward(logits, of_logits)
                assert block.grad is not None
                gradient[rows] = block.grad
            del logits, of_logits  # before there are others
        return losses, gradient


def cross_entropy(label_smoothing: float = 0.0) -> LogitLoss:
    """Cross-entropy; `label_smoothing`: the share of a target that is spread over all entries of the vocabulary."""
    return LogitLoss(partial(_entropy, label_smoothing), partial(_compiled_entropy, label_smoothing))


def entropies(head: Head, hidden: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A `ChunkLoss` of two numbers a token: cross-entropy and entropy; `weights` [num_tokens, 2], or of both alike."""
    of_both = weights if weights.ndim == 2 else weights[:, None].expand(-1, 2).contiguous()
    return LogitLoss(_with_entropies)(head, hidden, labels, of_both)


def _with_entropies(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies and entropies [rows, 2], and the gradient of their sum weighted by `weights` [rows, 2]."""
    log_probs = torch.log_softmax(logits.to(wide(logits.dtype)), 1)
    probs = log_probs.exp()
    losses = torch.stack([-log_probs.gather(1, targets[:, None])[:, 0], -(probs * log_probs).sum(1)], 1)
    if not torch.is_grad_enabled():
        return losses, probs
    of_loss, of_entropy = weights[:, :1], weights[:, 1:]
    gradient = log_probs.add_(losses[:, 1:]).mul_(-of_entropy).add_(of_loss).mul_(probs)
    gradient[torch.arange(len(targets), device=targets.device), targets] -= of_loss[:, 0]
    return losses, gradient.to(logits.dtype)


def readings(head: Head, hidden: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A `ChunkLoss` of five numbers a token, by forwards alone: see `TokenLogProbs`; the first is a cross-entropy."""
    return LogitLoss(_readings)(head, hidden, labels, weights[:, None].expand(-1, 5).contiguous())


def _readings(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    values = logits.to(wide(logits.dtype))
    log_probs = values.log_softmax(1)
    of_target = log_probs.gather(1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(1)
    is_top = (of_target >= log_probs.amax(1)).to(values.dtype)
    return torch.stack([-of_target, entropy, (2 * log_probs).logsumexp(1), values.mean(1), is_top], 1), logits


def of_several(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropies of `targets` [rows, n], and the gradient of their sum weighted by `weights` [rows, n]."""
    log_probs = torch.log_softmax(logits.to(wide(logits.dtype)), 1)
    losses = -log_probs.gather(1, targets)
    if not torch.is_grad_enabled():
        return losses, log_probs
    gradient = log_probs.exp_().mul_(weights.sum(1, keepdim=True)).scatter_add_(1, targets, -weights)
    return losses, gradient.to(logits.dtype)


def use_head(loss: ChunkLoss, head: Head, hidden: Tensor) -> None:
    """Give the head's parameters a gradient of zero, where no chunk of a step has a target that would give them one.

    A weight without a gradient is left out of its process's reduction, which then is not that of the others.
    """
    row = torch.zeros_like(hidden[:1])
    loss(head, row, torch.zeros(1, dtype=torch.int32), row.new_zeros(1, dtype=wide(row.dtype)))


def _entropy(smoothing: float, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [rows], and the gradient of their weighted sum: the softmax less each entry's share of the target.

    It is made in the place of the exponentials, as autograd would not do. These are over the largest of a row, and so
    finite.
    """
    values = logits.to(wide(logits.dtype), copy=True)
    values -= values.amax(1, keepdim=True)
    aims = values.gather(1, targets[:, None])[:, 0]
    if smoothing:
        aims = (1 - smoothing) * aims + smoothing * values.mean(1)
    totals = values.exp_().sum(1)
    losses = totals.log() - aims
    if not torch.is_grad_enabled():
        return losses, values
    values *= (weights / totals)[:, None]
    if smoothing:
        values -= (weights * (smoothing / logits.shape[1]))[:, None]
    at_targets = torch.arange(len(targets), device=targets.device), targets
    of_targets = values[at_targets] - weights * (1 - smoothing)  # before they are rounded
    gradient = values.to(logits.dtype)
    gradient[at_targets] = of_targets.to(logits.dtype)
    return losses, gradient


def _compiled_entropy(smoothing: float) -> _OfLogits | None:
    refusable, compiled = _compiled()
    return partial(compiled, smoothing) if refusable.why_not is None else None


@cache
def _compiled() -> tuple[Refusable, Callable[..., tuple[Tensor, Tensor]]]:
    """`_as_formula` of any number of rows but one, which a compiler takes for another kind of tensor."""
    losses = Refusable("losses are made")
    return losses, partial(losses.run, torch.compile(_as_formula, dynamic=True), _entropy)


def _as_formula(smoothing: float, logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`_entropy`, without any place in memory: for a compiler, that makes none but for what is returned."""
    values = logits.to(wide(logits.dtype))
    values = values - values.amax(1, keepdim=True)
    exponentials = values.exp()
    totals = exponentials.sum(1, keepdim=True)
    aims = values.gather(1, targets[:, None])
    if smoothing:
        aims = (1 - smoothing) * aims + smoothing * values.mean(1, keepdim=True)
    hits = (torch.arange(logits.shape[1], device=logits.device) == targets[:, None]).to(values.dtype)
    shares = exponentials / totals - hits * (1 - smoothing) - smoothing / logits.shape[1]
    return (totals.log() - aims)[:, 0], (shares * weights[:, None]).to(logits.dtype)


@dataclass(frozen=True)
class SequenceLoss:
    """The loss of one sequence in a step: summed over its `num_target_tokens`.

    More than one rank may have it: because it occurs more than once, or because they share it.
    """

    sequence_id: int
    loss: float
    num_target_tokens: int


@dataclass(frozen=True)
class RankLoss:
    """The loss of a rank in a step: `loss` is its share of the mean over the step's target tokens."""

    loss: float
    sequences: list[SequenceLoss]


def rank_loss(work: RankWork, losses: dict[int, Tensor], num_target_tokens: int) -> RankLoss:
    """Sum losses of tokens, [num_tokens] by chunk_id, by sequence; they come from the device at once."""
    order = [chunk_id for chunk_id in sorted(losses) if work.chunks[chunk_id].segments]
    if not order:
        return RankLoss(0.0, [])
    by_token = torch.cat([losses[chunk_id] for chunk_id in order]).double().cpu().numpy()
    tensors = [work.tensors[chunk_id] for chunk_id in order]
    is_target = torch.cat([each.labels for each in tensors]).numpy() != NO_TARGET
    if any(each.begun for each in tensors):
        firsts = accumulate((len(each.labels) for each in tensors), initial=0)
        rows = torch.cat([each.rows + first for each, first in zip(tensors, firsts, strict=False)]).numpy()
        by_token, is_target = by_token[rows], is_target[rows]
    spans = [span for each in tensors for span in each.of_sequences]
    lengths = np.array([span.stop - span.start for span in spans])  # [num_spans]
    starts = np.cumsum(lengths) - lengths
    sequence_ids, which = np.unique([span.sequence_id for span in spans], return_inverse=True)
    sums = np.bincount(which, np.add.reduceat(by_token, starts))
    counts = np.bincount(which, np.add.reduceat(is_target.astype(np.int64), starts)).astype(np.int64)
    sequences = [*map(SequenceLoss, sequence_ids.tolist(), sums.tolist(), counts.tolist())]
    return RankLoss(float(by_token.sum()) / max(num_target_tokens, 1), sequences)
